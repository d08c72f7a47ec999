"""What the ending of a pool's job means for the task that waited for it: a value, a state, or an error."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, assert_never

from prefect.client.schemas.objects import FlowRun

from prefect_torch_elastic import parcel
from prefect_torch_elastic.calls import Call
from prefect_torch_elastic.conclusions import (
    describe_failure,
    find_value,
    load_result,
    refuse_failed_state,
    time_out,
)
from prefect_torch_elastic.diagnosis import diagnose_lost_job, diagnose_setup
from prefect_torch_elastic.dispatch.endings import Ending, EndingKind, fetch_ending
from prefect_torch_elastic.dispatch.failurelabel import SeenFailure, parse_failure_label
from prefect_torch_elastic.dispatch.order import CallKind
from prefect_torch_elastic.dispatch.verdicts import ChildVerdict
from prefect_torch_elastic.dispatch.waiting import ChildEnd
from prefect_torch_elastic.errors import GangFailed, PoolRunFailed, Superseded
from prefect_torch_elastic.evidence import Category, Diagnosis, parse_diagnosis
from prefect_torch_elastic.explanations import CURES, render_failure
from prefect_torch_elastic.local import GangCancelled
from prefect_torch_elastic.logentries import StoredPart
from prefect_torch_elastic.parts import PartDamaged, fetch_part
from prefect_torch_elastic.wire import GangStatus

# A gang only notices that a node is gone; whoever watches its pod knows that it was killed for its memory.
_GONE = (Category.NODE_LOST, Category.PEER_LOST)
_KNOWN_FROM_OUTSIDE = (Category.HOST_OUT_OF_MEMORY, Category.SHARED_MEMORY)


def conclude_ending(call: Call, ending: Ending, child: FlowRun) -> Any:
    """Return the value of a call that ended in a pool.

    Raises:
        GangFailed, GangTimedOut: If its gang ended without one.
        GangCancelled: If somebody cancelled its run.
        PoolRunFailed: If its body raised what cannot be raised here.
        Exception: What its body raised, or what was wrong with the call on arrival.
    """
    match ending.status:
        case GangStatus.SUCCEEDED:
            return _take_value(call, ending)
        case GangStatus.STOPPED:
            raise GangCancelled(ending.message or f"Flow run '{child.name}' was cancelled.")
        case GangStatus.TIMED_OUT:
            raise time_out(call.spec, restarts=ending.restarts)
        case GangStatus.FAILED if ending.diagnosis:
            return _conclude_failed_gang(call, ending)
        case GangStatus.FAILED:
            raise _load_error(call, ending, child)
        case _:
            assert_never(ending.status)


def fetch_setback(call: Call, end: ChildEnd, child: FlowRun) -> Ending | None:
    """Return what an attempt of a gang said of its failure, once no other one comes; None without such words.

    Whoever starts the machines has called the run Failed then. Later attempts may have been killed before
    they could say anything, so what that state says is added; and what their worker saw of them goes first.

    Raises:
        TransferError: If it cannot be trusted or understood.
        StoreError: If the store cannot be read.
    """
    if end.verdict is not ChildVerdict.ENDED or not (words := _words_of_failure(end)):
        return None
    setback = call.patience.wait_for(lambda: fetch_ending(call.record, child.id, kind=EndingKind.SETBACK))
    if setback is None or not setback.diagnosis:
        return None
    seen = _read_label(end)
    if seen and seen.attempt > setback.attempt:
        later = asdict(_diagnose_seen(seen, words, child))
        return Ending(status=GangStatus.FAILED, attempt=seen.attempt, diagnosis=later)
    diagnosis = {**setback.diagnosis, "summary": _join(str(setback.diagnosis["summary"]), words)}
    if seen and seen.attempt == setback.attempt and _knows_more(seen, diagnosis):
        diagnosis |= {"category": str(seen.category), "cure": CURES[seen.category]}
    return replace(setback, diagnosis=diagnosis)


def _read_label(end: ChildEnd) -> SeenFailure | None:
    return parse_failure_label(end.run.labels) if end.run else None


def _diagnose_seen(seen: SeenFailure, words: str, child: FlowRun) -> Diagnosis:
    """Return the verdict on an attempt that left none, in the words of its worker, which have the cure."""
    cure = f"The log of flow run '{child.name}' has more; `retries=` runs the task again."
    return Diagnosis(category=seen.category, summary=words, cure=cure, node_rank=seen.node)


def _knows_more(seen: SeenFailure, diagnosis: dict[str, Any]) -> bool:
    return diagnosis["category"] in _GONE and seen.category in _KNOWN_FROM_OUTSIDE


def _words_of_failure(end: ChildEnd) -> str:
    """Return the message of a run that Prefect calls Failed, empty for other runs."""
    state = end.run.state if end.run else None
    return (state.message or state.name or "") if state and state.is_failed() else ""


def _join(summary: str, words: str) -> str:
    if words in summary:
        return summary
    return words if summary.rstrip(".") in words else f"{summary.rstrip('.')}. {words}"


def give_up(end: ChildEnd, child: FlowRun, *, kind: CallKind, pool: str) -> Exception:
    """Return the error of a job that is over and left no ending."""
    said = end.state_message or "it said nothing"
    if kind is CallKind.GANG:
        seen, words = _read_label(end), _words_of_failure(end)
        if _failed_before_it_ran(end):
            did_not = f"the gang's job in work pool `{pool}`, flow run '{child.name}', did not start: {said}"
            diagnosis = diagnose_setup(did_not, may_pass=True)
            return _fail(
                replace(diagnosis, category=seen.category, node_rank=seen.node) if seen else diagnosis
            )
        if seen and words and end.verdict is ChildVerdict.ENDED:
            return _fail(_diagnose_seen(seen, words, child))
        return _fail(diagnose_lost_job(child.name, pool=pool, reason=said))
    return PoolRunFailed(
        f"flow run '{child.name}' in work pool `{pool}` ended without a result: {said}\n"
        "See its page and its log; `retries=` runs the task again.",
        flow_run_id=str(child.id),
        work_pool=pool,
    )


def _failed_before_it_ran(end: ChildEnd) -> bool:
    has_run = end.run is None or end.run.run_count > 0
    return end.verdict is ChildVerdict.ENDED and not has_run and bool(_words_of_failure(end))


def _fail(diagnosis: Diagnosis) -> GangFailed:
    return GangFailed(render_failure(diagnosis, restarts=0), diagnosis)


def _take_value(call: Call, ending: Ending) -> Any:
    part = ending.result
    assert part is not None, "a call that succeeded has a result"
    value = load_result(lambda: parcel.load_verified(_fetch(call, part), "the result"))
    refuse_failed_state(call, value, attempt=ending.attempt)
    return value


def _conclude_failed_gang(call: Call, ending: Ending) -> Any:
    diagnosis = parse_diagnosis(ending.diagnosis)
    if diagnosis.exc_type == Superseded.__name__ and (found := find_value(call)):
        return found.value  # another gang was faster
    error = ending.error
    load = (lambda: parcel.load_verified(_fetch(call, error), "the exception")) if error else None
    raise describe_failure(diagnosis, restarts=ending.restarts, load_cause=load)


def _load_error(call: Call, ending: Ending, child: FlowRun) -> BaseException:
    """Return what the body raised; where its class cannot be loaded, its text."""
    lost = PoolRunFailed(
        f"`{call.task_name}` failed in flow run '{child.name}': {ending.message}\n{ending.traceback}",
        flow_run_id=str(child.id),
        work_pool=call.spec.work_pool or "",
        traceback=ending.traceback,
    )
    if ending.error is None:
        return lost
    try:
        error: BaseException = parcel.load_verified(_fetch(call, ending.error), "the exception")
    except Exception:  # noqa: BLE001  (any error: loading runs code of the user's classes)
        return lost
    if not isinstance(error, Exception):  # SystemExit of the body would end the flow
        return lost
    if ending.traceback:
        error.add_note(f"In work pool `{call.spec.work_pool}`, flow run '{child.name}':\n{ending.traceback}")
    return error


def _fetch(call: Call, part: StoredPart) -> memoryview:
    store, folder = call.record.store, call.identity.folder
    try:
        data = call.patience.wait_for(lambda: fetch_part(store, folder, part))
    except PartDamaged as error:
        raise PoolRunFailed(f"what the work pool sent cannot be read: {error} Run the task again.") from error
    parcel.verify_bytes(data, f"{store.url}/{folder}/{part.key}", key=call.record.key)
    return data
