"""Flow runs for tests of a pool's side: made as a driver makes them, read back as a user sees them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from uuid import UUID

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, Log, State

    from prefect_torch_elastic.hosting.ownrun import OwnRun

SETTLE_SECONDS = 15.0  # logs and events go in batches


def client() -> SyncPrefectClient:
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)


def create_run(*, state: State[Any] | None = None) -> UUID:
    """Make a flow run as a driver does, Pending as a worker leaves it."""
    from prefect import Flow
    from prefect.states import Pending

    with client() as api:
        return api.create_flow_run(Flow(fn=lambda: None, name="hosted"), state=state or Pending()).id


def read_run(run_id: UUID) -> FlowRun:
    with client() as api:
        return api.read_flow_run(run_id)


def read_state(run_id: UUID) -> State[Any]:
    state = read_run(run_id).state
    assert state
    return state


def set_state(run_id: UUID, state: State[Any]) -> None:
    with client() as api:
        api.set_flow_run_state(run_id, state, force=True)


def cancel_run(run_id: UUID) -> None:
    """Cancel a run, as its page does."""
    from prefect.states import Cancelling

    set_state(run_id, Cancelling())


def begin_run() -> OwnRun:
    """Return a run that this process has begun; it is to be watched."""
    from prefect_torch_elastic.hosting.ownrun import OwnRun

    own = OwnRun(create_run())
    assert own.begin()
    return own


def read_logs(*, flow_run: UUID | None = None, task_run: UUID | None = None) -> list[Log]:
    """Return the lines that a page shows, of a flow run or of a task run."""
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId, LogFilterTaskRunId
    from prefect.client.schemas.sorting import LogSort

    chosen = LogFilter(
        flow_run_id=LogFilterFlowRunId(any_=[flow_run]) if flow_run else None,
        task_run_id=LogFilterTaskRunId(any_=[task_run]) if task_run else None,
    )
    with client() as api:
        return api.read_logs(log_filter=chosen, limit=200, sort=LogSort.TIMESTAMP_ASC)


def wait_for(look: Callable[[], Any], *, seconds: float = SETTLE_SECONDS) -> Any:
    """Return what `look` returns as soon as that is true, and the last of it at the deadline."""
    deadline = time.monotonic() + seconds
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
