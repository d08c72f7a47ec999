"""What the end of a gang means for the task: a value, or an error that says why there is none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

from prefect_torch_elastic import parcel
from prefect_torch_elastic.calls import Call
from prefect_torch_elastic.diagnosis import diagnose_run_timeout
from prefect_torch_elastic.errors import GangFailed, GangTimedOut, StoreError, Superseded, TransferError
from prefect_torch_elastic.evidence import Diagnosis, parse_diagnosis
from prefect_torch_elastic.explanations import render_failure
from prefect_torch_elastic.local import GangCancelled
from prefect_torch_elastic.runlog import CallStatus
from prefect_torch_elastic.spec import Spec
from prefect_torch_elastic.wire import GangEnded, GangStatus

OUTCOME_SECONDS = 10.0  # for the outcome of a call that has no result: nothing is lost without it


def conclude(call: Call, ended: GangEnded, attempt: int) -> Any:
    """Record how a gang on this machine ended, and return rank 0's value.

    Raises:
        GangFailed, GangTimedOut: If there is none.
        GangCancelled: If the gang was stopped.
        TransferError: If the value cannot be loaded here.
    """
    match ended.status:
        case GangStatus.SUCCEEDED:
            return _conclude_success(call, Path(ended.result), attempt)
        case GangStatus.TIMED_OUT:
            _keep(call, CallStatus.TIMED_OUT, attempt=attempt)
            raise time_out(call.spec, restarts=ended.restarts)
        case GangStatus.STOPPED:
            _keep(call, CallStatus.STOPPED, attempt=attempt)
            raise GangCancelled("the gang was stopped before it returned")
        case GangStatus.FAILED:
            return _conclude_failure(call, ended, attempt)
        case _:
            assert_never(ended.status)


def _conclude_success(call: Call, result: Path, attempt: int) -> Any:
    """Record the outcome, then return the value: a driver that dies in between finds it again."""
    try:
        value = load_result(lambda: parcel.read_parcel(result, key=call.record.key))
    except TransferError:  # another environment of the flow may load it
        _keep(call, CallStatus.SUCCEEDED, attempt=attempt, result=result)
        raise
    if is_failed_state(value):  # Prefect retries it, and a retry has to run the function
        _keep(call, CallStatus.FAILED, attempt=attempt)
    else:
        _keep(call, CallStatus.SUCCEEDED, attempt=attempt, result=result)
    return value


def _conclude_failure(call: Call, ended: GangEnded, attempt: int) -> Any:
    """Raise the failure, unless another gang was faster: then its result is this call's."""
    if parse_diagnosis(ended.diagnosis).exc_type == Superseded.__name__:
        with suppress(StoreError):
            if found := find_value(call):
                return found.value
    key = call.record.key
    load = (lambda: parcel.read_parcel(Path(ended.error), key=key)) if ended.error else None
    failure = describe_failure(parse_diagnosis(ended.diagnosis), restarts=ended.restarts, load_cause=load)
    _keep(call, CallStatus.FAILED, attempt=attempt)
    raise failure


def _keep(call: Call, status: CallStatus, *, attempt: int, result: Path | None = None) -> None:
    """Record how the call ended; the failure of one without a result does not wait long for a store."""
    try:
        call.patience.wait_for(
            lambda: call.record.keep(status, attempt=attempt, result=result),
            seconds=OUTCOME_SECONDS if result is None else None,
        )
    except StoreError as error:
        call.log.warning("The outcome (`%s`) may not be in the run folder: %s", status, error)


def is_failed_state(value: Any) -> bool:
    """Whether the function returned a Prefect state that counts as a failure."""
    from prefect.client.schemas.objects import State

    return isinstance(value, State) and not value.is_completed()


def load_result(load: Callable[[], Any]) -> Any:
    """Return what `load` unpickles.

    Raises:
        TransferError: If it cannot be loaded in this process.
    """
    try:
        return load()
    except TransferError:
        raise
    except Exception as error:  # any error: loading runs code of the user's classes
        raise TransferError(
            f"the result cannot be loaded in the flow: {type(error).__name__}: {error}. "
            "Install here what it needs, or return a path or plain data."
        ) from error


def time_out(spec: Spec, *, restarts: int) -> GangTimedOut:
    """Return the error of a gang that ran longer than it may."""
    diagnosis = diagnose_run_timeout(spec.run_timeout_seconds or 0.0)
    return GangTimedOut(render_failure(diagnosis, restarts=restarts), diagnosis)


def describe_failure(
    diagnosis: Diagnosis, *, restarts: int, load_cause: Callable[[], BaseException] | None
) -> Exception:
    """Return the error of a gang that failed, with the rank's own exception as its cause.

    Args:
        diagnosis: The verdict.
        restarts: Restarts that were spent.
        load_cause: Unpickles that exception; None where it could not travel.
    """
    cause: BaseException | None = None
    if load_cause:
        with suppress(Exception):  # an exception whose class cannot be made here: its text says it all
            cause = load_cause()
    if isinstance(cause, TransferError) and str(cause) == diagnosis.exc_message:
        return cause
    failure = GangFailed(render_failure(diagnosis, restarts=restarts), diagnosis)
    failure.__cause__ = cause
    return failure


@dataclass(frozen=True, kw_only=True)
class FoundValue:
    """What a call has returned already, which may be None."""

    value: Any


def find_value(call: Call) -> FoundValue | None:
    """Return the result of a call that has succeeded already; None if it has to run.

    Raises:
        StoreError: If the store cannot be read.
        TransferError: If the value cannot be loaded here.
    """
    found = call.patience.wait_for(call.record.find)
    if found is None:
        return None
    outcome, data = found
    value = load_result(lambda: parcel.load_verified(data, "the result"))
    if refuse_failed_state(call, value, attempt=outcome.attempt):
        return None
    call.log.info(
        "This call has succeeded already, in attempt %s of run `%s`: its result is taken from there.",
        outcome.attempt,
        call.identity.run_key,
    )
    return FoundValue(value=value)


def refuse_failed_state(call: Call, value: Any, *, attempt: int) -> bool:
    """Take back a success whose value is a failed state: Prefect retries it, and then it has to run.

    Raises:
        StoreError: If the store cannot be written.
    """
    if not is_failed_state(value):
        return False
    call.patience.wait_for(lambda: call.record.append(CallStatus.REFUSED, attempt=attempt))
    return True
