"""One job of a work pool, from its command line to its last word: fetch a call, run it, report its end."""

from __future__ import annotations

import dataclasses
import os
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, assert_never

from prefect.client.schemas.objects import State
from prefect.settings import get_current_settings
from prefect.states import Completed, Crashed, Failed

from prefect_torch_elastic.dispatch.endings import Ending, EndingKind, name_pulse, put_ending
from prefect_torch_elastic.dispatch.order import CallKind, CallReference
from prefect_torch_elastic.dispatch.versions import render_differences
from prefect_torch_elastic.errors import ElasticError, StoreError
from prefect_torch_elastic.hosting.arrival import Arrival, open_source, receive
from prefect_torch_elastic.hosting.bodyhost import describe_error, host_body
from prefect_torch_elastic.hosting.follower import follow
from prefect_torch_elastic.hosting.gangs import host_gang
from prefect_torch_elastic.hosting.leader import Leader
from prefect_torch_elastic.hosting.output import outlive_reader
from prefect_torch_elastic.hosting.ownrun import OwnRun
from prefect_torch_elastic.hosting.persistence import persist
from prefect_torch_elastic.hosting.reports import Report, put_error, report_stop
from prefect_torch_elastic.hosting.runlines import keep_lines
from prefect_torch_elastic.hosting.signoflife import SignOfLife
from prefect_torch_elastic.hosting.workspace import open_workspace
from prefect_torch_elastic.outcomes import CallRecord
from prefect_torch_elastic.pod import ExitCode, Why, read_pod
from prefect_torch_elastic.wire import GangStatus

_MOST_CHARACTERS = 64 << 10


def carry_out(reference: CallReference) -> int:
    """Carry out the call that a driver ordered, as the flow run that this process was started for.

    Returns:
        The exit code: 0 when the API knows how the run ended, whatever that is. A pod of a gang leaves with
        one of `pod.ExitCode`.

    Raises:
        Exception: If this process has no run, no place in its gang, or an API that stays away.
    """
    outlive_reader()  # the worker
    pod = read_pod(os.environ)
    if pod is not None and not pod.is_leader:
        return follow(reference, pod)
    own = OwnRun.from_environment()
    leader = Leader(pod, own) if pod else None
    code = 0
    keep_lines(own.logger.warning)
    if own.begin():  # else it was cancelled while it waited, or is over already
        with own.watch():
            report = _try_to_run(reference, own, leader)
            if report.state is not None:
                # still watched: a signal that comes late must not end this process
                own.end(report.state, give_up=leader.must_leave if leader else lambda: False)
            own.flush()
            code = leader.leave(report) if leader else 0
    else:
        own.flush()
        code = leader.turn_back() if leader else 0
    return code if leader or own.reported else 1


def _try_to_run(reference: CallReference, own: OwnRun, leader: Leader | None) -> Report:
    try:
        return _run(reference, own, leader)
    except Exception as error:  # noqa: BLE001  (the one channel that is left is the state's message)
        _log_error(own, error)
        return _report_error(error, own, leader)


def _report_error(error: Exception, own: OwnRun, leader: Leader | None) -> Report:
    """Return what is said about an error for which there is no ending, because nobody can leave one."""
    if own.stop_requested():
        return leader.report_stop() if leader else Report(ending=None, state=own.stopped_state())
    if leader and isinstance(error, StoreError):  # another attempt may find the store again
        said = describe_error(error)
        return Report(ending=None, state=None, exit_code=ExitCode.LOST, why=Why.REFUSED, message=said)
    return Report(ending=None, state=_render_state(error), exit_code=ExitCode.CONFIGURATION, why=Why.REFUSED)


def _run(reference: CallReference, own: OwnRun, leader: Leader | None) -> Report:
    source = open_source(reference, own)
    record = source.record
    with ExitStack() as stack:
        stack.enter_context(
            SignOfLife(
                source.record.store.url,
                source.credentials,
                name_pulse(record, own.id),
                warn=own.logger.warning,
            )
        )
        folder = stack.enter_context(open_workspace(get_current_settings().home, str(own.id)))
        try:
            report = _carry_out(receive(source, folder=folder), folder, own, leader)
        except Exception as error:  # without an ending nobody would know of it
            if leader and isinstance(error, StoreError) and not own.stop_requested():
                raise  # its ending would not be found either, and the next attempt may find both
            _log_error(own, error)
            report = _report_stop(own, leader) if own.stop_requested() else _refuse(record, error)
        if report.ending is not None:
            _leave(record, own, _shorten(report.ending), is_final=report.state is not None)
        return report


def _report_stop(own: OwnRun, leader: Leader | None) -> Report:
    return leader.report_stop() if leader else report_stop(own)


def _leave(record: CallRecord, own: OwnRun, ending: Ending, *, is_final: bool) -> None:
    kind = EndingKind.FINAL if is_final else EndingKind.SETBACK
    persist(
        lambda: put_ending(record, own.id, ending, kind=kind),
        log=own.logger,
        give_up=lambda: ending.result is None and own.stop_requested(),
    )


def _shorten(ending: Ending) -> Ending:
    """Return an ending whose texts a driver can log and keep; what a traceback says stands at its end."""
    message, trace = ending.message, ending.traceback
    if len(message) > _MOST_CHARACTERS:
        message = f"{message[:_MOST_CHARACTERS]}\n(cut after {_MOST_CHARACTERS} characters)"
    if len(trace) > _MOST_CHARACTERS:
        trace = f"(the last {_MOST_CHARACTERS} characters)\n{trace[-_MOST_CHARACTERS:]}"
    return dataclasses.replace(ending, message=message, traceback=trace)


def _carry_out(arrival: Arrival, folder: Path, own: OwnRun, leader: Leader | None) -> Report:
    order = arrival.order
    own.show_on_task(order.task_run_id, order.task_run_name)
    if differences := [one for one in arrival.differences if not one.is_missing]:
        own.logger.warning("This may matter: %s", render_differences(differences))
    if order.fields["include_files"]:
        os.chdir(folder / "code")  # where they have the names that they have beside the function
    match order.kind:
        case CallKind.GANG:
            return host_gang(arrival, own, leader)
        case CallKind.BODY:
            if leader:
                leader.comes_back = False
                if leader.has_begun(arrival.record):
                    return _report_second_start(arrival.record, own)
            return host_body(arrival, own)
        case _:
            assert_never(order.kind)


def _report_second_start(record: CallRecord, own: OwnRun) -> Report:
    """Return what a pod says whose function has run before, in a pod that ended without a word."""
    if found := persist(record.find, log=own.logger, give_up=own.stop_requested):
        ending = Ending(status=GangStatus.SUCCEEDED, attempt=found[0].attempt, result=found[0].result)
        return Report(ending=ending, state=Completed(message="The function has returned before."))
    message = (
        "The pod in which the function ran is gone, and nobody knows how far it came. It is not run twice: "
        "set `retries=` on the task if it may be."
    )
    own.logger.error("%s", message)
    state = Crashed(message=message)
    return Report(ending=None, state=state, exit_code=ExitCode.FAILED, why=Why.REFUSED, message=message)


def _refuse(record: CallRecord, error: Exception) -> Report:
    """Send an error that is not the function's own: the driver raises it as it is."""
    part = None
    with suppress(StoreError, OSError):  # then its text travels, as soon as the store is back
        part = put_error(record, error)
    ending = Ending(
        status=GangStatus.FAILED,
        error=part,
        message=describe_error(error),
        traceback="" if isinstance(error, ElasticError) else "".join(traceback.format_exception(error)),
    )
    return Report(
        ending=ending, state=_render_state(error), exit_code=ExitCode.CONFIGURATION, why=Why.REFUSED
    )


def _render_state(error: Exception) -> State[Any]:
    return Failed(message=str(error) if isinstance(error, ElasticError) else describe_error(error))


def _log_error(own: OwnRun, error: Exception) -> None:
    """Say what went wrong, and where, unless the sentence is ours and says what to do."""
    if isinstance(error, ElasticError):
        own.logger.error("%s", error)
    else:
        own.logger.error("The job cannot go on: %s", describe_error(error), exc_info=error)
