"""How a call is found again in the Prefect API: one child flow run for each call and number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import FlowRunCreate, StateCreate, TaskRunCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey
from prefect.client.schemas.objects import FlowRun, FlowRunPolicy, StateType, TaskRun, TaskRunResult
from prefect.exceptions import PrefectHTTPStatusError
from prefect.types import BANNED_CHARACTERS

from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.runkey import TRACKING_KEY

SEEN_LABEL = "torch-elastic.seen"
CALL_LABEL = "torch-elastic.call"
NUMBER_LABEL = "torch-elastic.number"
TASK_RUN_LABEL = "torch-elastic.task-run-id"

_NOT_IN_FLOW_NAMES = re.compile(f"[{re.escape(''.join(BANNED_CHARACTERS))}]")


@dataclass(frozen=True, kw_only=True)
class ChildRequest:
    """What is asked of the API for one call.

    Attributes:
        task_name: Name of the task, which is the name of the child's flow.
        run_name: Name of the child run.
        parameters: What the UI shows as its parameters; see `reprs.short_reprs`.
        pool: The work pool.
        job_variables: For its worker.
        digest: Of the call; with a number it names one child for ever.
        task_run_id: The driver's task run, under which the child is shown.
        flow_run_id: The driver's flow run, None without a flow.
        tags: Of the child run.
    """

    task_name: str
    run_name: str
    parameters: Mapping[str, Any]
    pool: str
    job_variables: Mapping[str, Any]
    digest: str
    task_run_id: UUID
    flow_run_id: UUID | None
    tags: frozenset[str] = frozenset()


def render_flow_name(task_name: str) -> str:
    """Return the name of a task as one that Prefect takes for a flow."""
    return _NOT_IN_FLOW_NAMES.sub("-", task_name)


def open_child(client: SyncPrefectClient, request: ChildRequest, *, number: int) -> FlowRun:
    """Return the child run of a call: the one that exists, or a new one that waits for a worker.

    Two drivers that ask at once, and one that was killed and asks again, get the same child: its key is
    unique in the API. So the call may also be repeated when an answer got lost.

    Args:
        client: Of the Prefect API.
        request: The call.
        number: Counts the children of a call, from 0; the next one is asked for when the last is used up.

    Raises:
        SpecError: If the pool is gone.
    """
    if found := find_child(client, request.digest, number=number):
        return found
    tracking = _create_tracking_run(client, request, number) if request.flow_run_id else None
    return _create_child(client, request, number, tracking)


def find_child(client: SyncPrefectClient, digest: str, *, number: int) -> FlowRun | None:
    """Return the child run of a call if it exists."""
    keys = FlowRunFilterIdempotencyKey(any_=[_render_key(digest, number)])
    runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(idempotency_key=keys), limit=1)
    return runs[0] if runs else None


def was_seen(run: FlowRun) -> bool:
    """Whether a driver has taken over how a child ended, so that a retry needs another child."""
    return run.labels.get(SEEN_LABEL) is True


def mark_seen(client: SyncPrefectClient, flow_run_id: UUID) -> None:
    """Write on a child run that a driver has taken over how it ended; a deleted run needs no mark."""
    try:
        client.update_flow_run_labels(flow_run_id, {SEEN_LABEL: True})
    except PrefectHTTPStatusError as error:
        if error.response.status_code != 404:
            raise


def _render_key(digest: str, number: int) -> str:
    return f"torch-elastic-{digest}-{number}"


def _create_tracking_run(client: SyncPrefectClient, request: ChildRequest, number: int) -> TaskRun:
    """Return the task run that stands for the child in the graph, with the driver's task run as its parent.

    The driver's task run itself cannot: its row is written later than this, and the graph would show the
    child in its place. The server copies every state of the child to this one.
    """
    body = TaskRunCreate(
        id=None,
        name=f"{request.task_name}-{number}",
        flow_run_id=request.flow_run_id,
        task_key=f"{TRACKING_KEY}.{request.task_name}",
        # unique in the flow run: a second one is the first; `runkey` takes the number off
        dynamic_key=f"{request.digest}-{number}",
        state=StateCreate(type=StateType.PENDING),
        task_inputs={"__parents__": [TaskRunResult(id=request.task_run_id)]},
    )
    answer = client.request("POST", "/task_runs/", json=body.model_dump(mode="json", exclude={"id"}))
    return TaskRun.model_validate(answer.json())


def _create_child(
    client: SyncPrefectClient, request: ChildRequest, number: int, tracking: TaskRun | None
) -> FlowRun:
    body = FlowRunCreate(
        flow_id=client.create_flow_from_name(render_flow_name(request.task_name)),
        name=request.run_name if number == 0 else f"{request.run_name} ({number + 1})",
        parameters=dict(request.parameters),
        tags=sorted(request.tags),
        labels={
            CALL_LABEL: request.digest,
            NUMBER_LABEL: number,
            TASK_RUN_LABEL: str(request.task_run_id),
        },
        parent_task_run_id=tracking.id if tracking else None,
        # without a time of ours: a worker takes what is due by the server's clock
        state=StateCreate(type=StateType.SCHEDULED),
        # a retry of the server would run the body where no driver waits for it
        empirical_policy=FlowRunPolicy(retries=0, retry_delay=0),
        idempotency_key=_render_key(request.digest, number),
        work_pool_name=request.pool,
        job_variables=dict(request.job_variables),
    )
    document = body.model_dump(mode="json", exclude_unset=True)
    try:
        answer = client.request("POST", "/flow_runs/", json=document)
    except PrefectHTTPStatusError as error:
        if error.response.status_code != 404:
            raise
        raise SpecError(
            f"`work_pool={request.pool!r}`: the work pool was deleted a moment ago. Make it again with "
            f"`prefect work-pool create`, or pass another one."
        ) from error
    return FlowRun.model_validate(answer.json())
