"""What a cancellation leaves behind: a task that is Cancelled, and a flow run that ends Cancelled too.

Prefect calls a task Crashed whose body ends by a BaseException. And only a process that a worker has started
is told when its flow run is cancelled: nobody tells `python flow.py`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import CancelledRun, TerminationSignal
from prefect.states import Cancelled
from prefect.transactions import get_transaction

from prefect_torch_elastic import compat
from prefect_torch_elastic.local import GangCancelled

SUPERVISOR_SECONDS = 12.0  # it hears of a cancellation at once, or asks every 10 s
_TICK_SECONDS = 0.1

_ended: set[UUID] = set()
_ending = threading.Lock()


class FlowCancelled(GangCancelled):
    """The flow run of the task, or one around it, is being cancelled.

    Attributes:
        flow_run_id: Which one; it runs in this process.
    """

    def __init__(self, message: str, flow_run_id: UUID) -> None:
        super().__init__(message)
        self.flow_run_id = flow_run_id


def flow_runs_here() -> list[UUID]:
    """Return the flow run of a task and those around it in this process: they take the task with them."""
    flow = FlowRunContext.get()
    if flow is None or flow.flow_run is None:
        return []
    return [flow.flow_run.id, *(run.id for run in compat.outer_flow_runs(flow))]


def goes_on_elsewhere(error: BaseException) -> bool:
    """Whether another process goes on with the flow run, so that nothing of it has to stop.

    On SIGTERM Prefect cancels submitted and async tasks first: these end by GangCancelled, as if somebody had
    cancelled them.
    """
    return _may_be_sigterm(error) and compat.flow_goes_on_elsewhere()


def will_be_killed(error: BaseException) -> bool:
    """Whether this process was told to end, by a supervisor that sends SIGKILL some seconds later."""
    if isinstance(error, TerminationSignal):
        return True
    return isinstance(error, GangCancelled) and is_supervised() and compat.flow_is_being_cancelled()


def _may_be_sigterm(error: BaseException) -> bool:
    return isinstance(error, TerminationSignal | GangCancelled) and not isinstance(error, FlowCancelled)


def name_stop(error: BaseException) -> str:
    """Return why a task ends early, as a sentence.

    Args:
        error: What was raised into its wait.
    """
    match error:
        case GangCancelled():
            return str(error)
        case TerminationSignal() if compat.flow_is_being_cancelled():
            return "The flow run was cancelled."
        case TerminationSignal():
            return "The process of the flow was asked to end (SIGTERM)."
        case KeyboardInterrupt():
            return "The flow was interrupted (Ctrl-C)."
        case TimeoutError() | CancelledError():  # Prefect's timeout of a sync task, or of the flow around it
            return "The task or its flow timed out."
        case _:
            return f"The task was stopped ({type(error).__name__})."


def conclude_stop(error: BaseException) -> State[Any]:
    """Return the state of a task that was stopped: it goes into no cache, and is not retried.

    Args:
        error: What ended the wait. Anything that is no cancellation is raised again.
    """
    match error:
        case _ if goes_on_elsewhere(error):
            raise error
        case FlowCancelled():
            message, data = str(error), TerminationSignal(signal.SIGTERM)
        case GangCancelled():
            message, data = str(error), CancelledRun(str(error))
        case _ if compat.flow_is_being_cancelled():
            message, data = "The flow run was cancelled.", error
        case _:
            raise error
    if (transaction := get_transaction()) is not None:
        transaction.write_on_commit = False
    return Cancelled(message=message, data=data)


def is_supervised() -> bool:
    """Whether a worker has started this process: it is told of a cancellation, and reports the end."""
    return bool(os.environ.get("PREFECT__FLOW_RUN_ID"))


def wake_flow(error: FlowCancelled) -> None:
    """End the flow of a process that nobody supervises, as a supervisor does.

    It tells Prefect's engine that SIGTERM means a cancellation, and wakes the main thread, which may wait for
    this task or do something else.
    """
    if not is_supervised() and _claim(error) and not compat.cancel_main_flow():
        _ended.discard(error.flow_run_id)


def end_flow(error: FlowCancelled, *, given_up: Callable[[], bool], log: Any) -> None:
    """See to it that a flow run ends Cancelled that `wake_flow` could not wake; the task is over.

    Args:
        error: Says which flow run.
        given_up: Whether the flow has ended by itself meanwhile.
        log: The task run's logger.
    """
    if is_supervised():
        _wait_for_supervisor(given_up)
    if compat.flow_is_being_cancelled() or given_up() or not _claim(error):
        return
    try:
        _report(error.flow_run_id)
    except Exception as refusal:  # noqa: BLE001  (the server calls it Cancelled in some minutes)
        log.warning("The flow run could not be called Cancelled: %s", refusal)
    compat.cancel_main_flow()


def _claim(error: FlowCancelled) -> bool:
    """Return True once for a flow run: several of its tasks see at once that it is cancelled."""
    with _ending:
        is_first = error.flow_run_id not in _ended
        _ended.add(error.flow_run_id)
        return is_first


def _wait_for_supervisor(given_up: Callable[[], bool]) -> None:
    until = time.monotonic() + SUPERVISOR_SECONDS
    with suppress(TerminationSignal):  # the supervisor's: it is raised again outside the task
        while time.monotonic() < until and not compat.flow_is_being_cancelled() and not given_up():
            time.sleep(_TICK_SECONDS)


def _report(flow_run_id: UUID) -> None:
    """Report the end of a flow run that Prefect's engine would call a crash."""
    state = Cancelled(message="Flow run was cancelled.")
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run_id, state, force=True)
    flow = FlowRunContext.get()
    if flow is not None and flow.flow_run is not None and flow.flow_run.id == flow_run_id:
        flow.flow_run.state = state  # the engine's own object: it changes no final state
