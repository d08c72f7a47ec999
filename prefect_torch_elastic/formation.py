"""Gangs on this machine for one call: formed again after a lost one, until one ends for good or none is left.

The driver forms them for a task without a pool, the host of a pool's job for a task that came from elsewhere.
Where the nodes are machines that somebody else starts (a JobSet), forming the gang again is theirs too.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from prefect_torch_elastic.attempts import Action, decide_attempt
from prefect_torch_elastic.calls import Call
from prefect_torch_elastic.evidence import parse_diagnosis
from prefect_torch_elastic.local import Launcher, launcher_environment, pool, run_gang
from prefect_torch_elastic.narration import Narrator
from prefect_torch_elastic.rankstate import StopReason
from prefect_torch_elastic.reporting import RunReporter
from prefect_torch_elastic.runfacts import GangEnd
from prefect_torch_elastic.runfolder import AttemptFolder, create_attempt
from prefect_torch_elastic.spec import Spec, render_budgets
from prefect_torch_elastic.wire import GangEnded, GangStatus, Message, RunGang

T = TypeVar("T")


def run_attempts(call: Call, conclude: Callable[[GangEnded, int], T]) -> T:
    """Form gangs until one returns, fails for a reason of its own, or the budget is spent.

    Args:
        call: What they run.
        conclude: Gets the end of the last gang and the number of its attempt while its files are there; what
            it returns is returned.

    Raises:
        GangCancelled: If the call was asked to stop; its gang is over.
    """
    call.log.info(render_budgets(call.spec, retries=call.retries))
    reporter = RunReporter(call)
    try:
        return _run_attempts(call, conclude, reporter)
    finally:  # the outcome is kept by now
        reporter.close()


def _run_attempts(call: Call, conclude: Callable[[GangEnded, int], T], reporter: RunReporter) -> T:
    used = 0
    while True:
        used += 1
        known = call.patience.wait_for(call.record.log.refresh).attempts
        folder = create_attempt(call.place.local, call.identity.folder, after=known)
        ended = _run_attempt(call, folder, reporter)
        try:
            if call.meeting or not (reason := _new_attempt(ended, used, call.spec)):
                return conclude(ended, call.count_attempt(folder.number))
            call.log.warning("%s", reason)
        finally:
            folder.tidy()


def _new_attempt(ended: GangEnded, used: int, spec: Spec) -> str:
    """Return why another gang is formed after this one, empty when none is."""
    if ended.status is not GangStatus.FAILED:
        return ""
    diagnosis = parse_diagnosis(ended.diagnosis)
    decision = decide_attempt(diagnosis, attempt=used, max_attempts=spec.max_attempts)
    if decision.action is not Action.NEW_ATTEMPT:
        return ""
    return f"{diagnosis.summary} A new gang is formed: {decision.reason}."


def _run_attempt(call: Call, folder: AttemptFolder, reporter: RunReporter) -> GangEnded:
    attempt = call.count_attempt(folder.number)
    reporter.begin(attempt=attempt, folder=str(folder.path), place=socket.gethostname())
    narrator = Narrator(call.log, call.spec, folder=folder.path)

    def listen(message: Message) -> None:
        narrator(message)
        reporter(message)

    launcher: Launcher | None = None
    clean = False
    try:
        order = write_order(call, folder)
        launcher = pool.acquire(
            launcher_environment(order.environment, nproc_per_node=call.spec.nproc_per_node),
            owner=call.owner,
            log=folder.launcher_log,
        )
        with folder.hold():
            ended = run_gang(
                launcher,
                order,
                listen=listen,
                cancelled=call.patience.cancelled,
                stop_reason=call.stop_reason,
                grace_seconds=call.spec.grace_seconds,
            )
        clean = True
        reporter(ended)
        return ended
    except BaseException as error:
        reporter.stop(_name_end(error, call))
        raise
    finally:
        # the flow's next gang starts warm on it; after an interruption nobody knows whether there is one
        if launcher is not None and call.meeting:
            call.meeting.keep(launcher)
        elif launcher is not None:
            pool.release(launcher, owner=call.owner if clean else None)
        if not clean:
            folder.tidy()


def _name_end(error: BaseException, call: Call) -> GangEnd:
    """Return how a gang ended that was interrupted; the error itself goes on."""
    if isinstance(error, TimeoutError):
        return GangEnd.TIMED_OUT
    is_preempted = call.stop_reason() is StopReason.PREEMPTED
    return GangEnd.PREEMPTED if is_preempted else GangEnd.CANCELLED


def write_order(call: Call, folder: AttemptFolder, *, parcel: Path | None = None) -> RunGang:
    """Return the order of a gang, or of this machine's part in it; its parcel is put where ranks read it.

    Args:
        call: What it runs.
        folder: Of the attempt.
        parcel: Where the parcel goes; None is the attempt's folder, which belongs to the leader.
    """
    here, meeting, parcel = os.getcwd(), call.meeting, parcel or folder.call
    attempt = call.count_attempt(folder.number)
    return RunGang(
        run_key=call.identity.run_key,
        attempt=attempt,
        folder=str(folder.path),
        call=str(parcel),
        secret=call.record.key.hex(),
        fields=asdict(call.spec),
        environment=launcher_environment({**os.environ, **call.spec.env}, nproc_per_node=1),
        directory=here,
        search_path=[entry or here for entry in sys.path if isinstance(entry, str)],  # pyright: ignore[reportUnnecessaryIsInstance]
        modules=call.payload.write(parcel, key=call.record.key),
        flow_run_id=call.flow_run_id,
        task_run_id=call.task_run_id,
        storage=call.describe_storage(attempt),
        meeting=meeting.endpoint if meeting else "",
        gang=meeting.gang if meeting else "",
        preemptions=meeting.preemptions if meeting else 0,
    )
