"""A gang in a pool's job: the same gang as on the driver's machine, whose ending goes to the run folder."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, assert_never

from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from prefect_torch_elastic.calls import Call
from prefect_torch_elastic.diagnosis import diagnose_run_timeout
from prefect_torch_elastic.dispatch.endings import Ending
from prefect_torch_elastic.errors import StoreError
from prefect_torch_elastic.evidence import Diagnosis, parse_diagnosis
from prefect_torch_elastic.explanations import render_failure
from prefect_torch_elastic.formation import run_attempts
from prefect_torch_elastic.hosting.arrival import Arrival
from prefect_torch_elastic.hosting.gangcalls import describe_call
from prefect_torch_elastic.hosting.leader import Leader
from prefect_torch_elastic.hosting.ownrun import OwnRun
from prefect_torch_elastic.hosting.persistence import persist, persist_outcome
from prefect_torch_elastic.hosting.reports import Report, report_stop
from prefect_torch_elastic.hosting.stops import StopCause
from prefect_torch_elastic.local import GangCancelled
from prefect_torch_elastic.logentries import StoredPart
from prefect_torch_elastic.parts import put_file
from prefect_torch_elastic.pod import ExitCode, Why
from prefect_torch_elastic.rankstate import StopReason
from prefect_torch_elastic.runlog import CallStatus
from prefect_torch_elastic.wire import GangEnded, GangStatus


def host_gang(arrival: Arrival, own: OwnRun, leader: Leader | None = None) -> Report:
    """Run the gang of a call that arrived, until it has ended and its result is in the run folder.

    Args:
        arrival: The call.
        own: This job's flow run: it says when to stop.
        leader: This pod, if other pods belong to the gang or whoever started it starts it again.
    """
    call = describe_call(arrival, own)
    if leader is None:
        try:
            return run_attempts(call, lambda ended, attempt: _conclude(call, ended, attempt, None))
        except GangCancelled:
            return report_stop(own)
    try:
        return _host_pods(call, own, leader)
    except GangCancelled:
        pass
    except (StoreError, OSError) as error:  # a store that is away is waited for, until the run has to stop
        if not own.stop_requested():
            raise
        own.logger.warning("The run folder is not waited for any more: %s", error)
    return _report_stopped_pod(call, own, leader)


def _host_pods(call: Call, own: OwnRun, leader: Leader) -> Report:
    if found := call.patience.wait_for(call.record.find):
        return _report_success(found[0].result, attempt=found[0].attempt, restarts=0)
    call = replace(call, meeting=leader.begin(call.record), stop_reason=lambda: _name_stop(own))
    if own.stop_requested():
        raise GangCancelled("the run was stopped before its gang was formed")
    return run_attempts(call, lambda ended, attempt: _conclude(call, ended, attempt, leader))


def _name_stop(own: OwnRun) -> StopReason:
    by_signal = own.stop is not None and own.stop.cause is StopCause.SIGNAL
    return StopReason.PREEMPTED if by_signal else StopReason.CANCELLED


def _report_stopped_pod(call: Call, own: OwnRun, leader: Leader) -> Report:
    report = leader.report_stop()
    if report.state is None and not report.is_victim:
        resumes = call.spec.resume_after_preemption
        after = "it goes on from its last checkpoint" if resumes else "one that was preempted does not go on"
        own.logger.info("This gang was stopped by Kubernetes; %s.", after)
    return report


def _report_success(part: StoredPart | None, *, attempt: int, restarts: int) -> Report:
    ending = Ending(status=GangStatus.SUCCEEDED, attempt=attempt, restarts=restarts, result=part)
    return Report(ending=ending, state=Completed(message="Rank 0 has returned."))


def _conclude(call: Call, ended: GangEnded, attempt: int, leader: Leader | None) -> Report:
    """Record how the gang ended while its files are there."""
    record, log, stopped = call.record, call.log, call.patience.cancelled

    def keep(status: CallStatus, result: Path | None = None) -> StoredPart | None:
        return persist_outcome(record, status, attempt=attempt, log=log, result=result, give_up=stopped)

    match ended.status:
        case GangStatus.SUCCEEDED:
            part = keep(CallStatus.SUCCEEDED, Path(ended.result))
            return _report_success(part, attempt=attempt, restarts=ended.restarts)
        case GangStatus.TIMED_OUT:
            keep(CallStatus.TIMED_OUT)
            diagnosis = diagnose_run_timeout(call.spec.run_timeout_seconds or 0.0)
            ending = Ending(status=ended.status, attempt=attempt, restarts=ended.restarts)
            state = Failed(name="TimedOut", message=diagnosis.summary)
            return _report_failure(ending, state, diagnosis)
        case GangStatus.FAILED:
            diagnosis = parse_diagnosis(ended.diagnosis)
            log.error("%s", render_failure(diagnosis, restarts=ended.restarts))
            error = _send_error(call, ended.error) if ended.error else None
            ending = Ending(
                status=ended.status,
                attempt=attempt,
                restarts=ended.restarts,
                diagnosis=ended.diagnosis,
                error=error,
            )
            if leader is not None and leader.starts_again(diagnosis, call.spec):
                return _report_setback(ending, diagnosis, is_victim=leader.is_victim(diagnosis))
            keep(CallStatus.FAILED)
            return _report_failure(ending, Failed(message=diagnosis.summary), diagnosis)
        case GangStatus.STOPPED:
            raise GangCancelled("the gang was stopped before it returned")
        case _:
            assert_never(ended.status)


def _report_failure(ending: Ending, state: State[Any], diagnosis: Diagnosis) -> Report:
    return Report(ending=ending, state=state, exit_code=ExitCode.FAILED, why=Why.FAILED, diagnosis=diagnosis)


def _report_setback(ending: Ending, diagnosis: Diagnosis, *, is_victim: bool) -> Report:
    """The attempt failed, and another one may not; the run goes on until the JobSet ends it."""
    return Report(
        ending=ending,
        state=None,
        exit_code=ExitCode.LOST,
        why=Why.FAILED,
        diagnosis=diagnosis,
        is_victim=is_victim,
    )


def _send_error(call: Call, path: str) -> StoredPart | None:
    record = call.record
    name = record.name_part("error")

    def put() -> StoredPart | None:
        with suppress(FileNotFoundError):  # a rank whose exception could not be pickled left none
            return put_file(record.store, record.folder, name, Path(path))
        return None

    return persist(put, log=call.log, give_up=call.patience.cancelled)
