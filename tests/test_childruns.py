"""Child runs: one for each call and number, found again by anybody, and shown under the task."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, get_client, task
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterIdempotencyKey
from prefect.client.schemas.objects import FlowRun, TaskRun
from prefect.context import TaskRunContext
from prefect.states import Crashed, Running
from prefect.workers.process import ProcessWorker

from prefect_torch_elastic.dispatch.childruns import (
    ChildRequest,
    find_child,
    mark_seen,
    open_child,
    was_seen,
)
from prefect_torch_elastic.errors import SpecError

POOL = "childruns"

SCRIPT = """
import json, sys
from uuid import UUID
from prefect import get_client
from prefect_torch_elastic.dispatch.childruns import ChildRequest, open_child

facts = json.loads(sys.argv[1])
ids = {name: facts.pop(name) for name in ("task_run_id", "flow_run_id")}
ids = {name: UUID(text) if text else None for name, text in ids.items()}
with get_client(sync_client=True) as client:
    print(open_child(client, ChildRequest(**facts, **ids), number=0).id)
"""


@pytest.fixture
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        if POOL not in [pool.name for pool in client.read_work_pools()]:
            template = ProcessWorker.get_default_base_job_template()
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template))
        yield client


def request(**facts: Any) -> ChildRequest:
    known: dict[str, Any] = {
        "task_name": "pretrain",
        "run_name": "pretrain-7b",
        "parameters": {"steps": "1000"},
        "pool": POOL,
        "job_variables": {"command": "python -m node"},
        "digest": uuid.uuid4().hex,
        "task_run_id": uuid.uuid4(),
        "flow_run_id": None,
    }
    return ChildRequest(**{**known, **facts})


@flow
def parent() -> None: ...


@pytest.fixture(params=[True, False], ids=["in a flow", "without a flow"])
def call(request: pytest.FixtureRequest, client: SyncPrefectClient) -> ChildRequest:
    flow_run_id = client.create_flow_run(parent).id if request.param else None
    return globals()["request"](flow_run_id=flow_run_id)


def count(client: SyncPrefectClient, digest: str, number: int = 0) -> int:
    keys = FlowRunFilterIdempotencyKey(any_=[f"torch-elastic-{digest}-{number}"])
    return client.count_flow_runs(flow_run_filter=FlowRunFilter(idempotency_key=keys))


def list_task_runs(client: SyncPrefectClient, flow_run_id: UUID) -> list[TaskRun]:
    return client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])))


def eventually(read: Callable[[], Any], until: Callable[[Any], bool]) -> Any:
    """Return what is read once it fits: task runs are written a moment after they happen."""
    deadline = time.monotonic() + 20
    while not until(value := read()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return value


# --- what stands in the API ------------------------------------------------------------------------------


def test_child_is_a_run_of_a_flow_with_the_name_of_the_task(client):
    child = open_child(client, request(tags=frozenset({"b", "a"})), number=0)
    run = client.read_flow_run(child.id)
    assert client.read_flow(run.flow_id).name == "pretrain"
    assert (run.name, run.parameters, sorted(run.tags)) == ("pretrain-7b", {"steps": "1000"}, ["a", "b"])


def test_child_waits_for_a_worker_of_the_pool_now(client):
    call = request()
    run = client.read_flow_run(open_child(client, call, number=0).id)
    assert (run.work_pool_name, run.work_queue_name) == (POOL, "default")
    assert run.job_variables == call.job_variables
    assert run.state is not None
    assert run.state.is_scheduled()
    found = client.get_scheduled_flow_runs_for_work_pool(POOL)
    assert run.id in [response.flow_run.id for response in found]


def test_child_is_never_retried_by_the_server(client):
    child = open_child(client, request(), number=0)
    client.set_flow_run_state(child.id, Running(), force=True)
    assert client.read_flow_run(child.id).empirical_policy.retries == 0


def test_child_says_which_call_it_is(client):
    call = request()
    labels = client.read_flow_run(open_child(client, call, number=2).id).labels
    assert labels["torch-elastic.call"] == call.digest
    assert labels["torch-elastic.number"] == 2
    assert labels["torch-elastic.task-run-id"] == str(call.task_run_id)


def test_task_name_that_a_flow_cannot_have_is_adapted(client):
    child = open_child(client, request(task_name="a/b <c>"), number=0)
    assert client.read_flow(child.flow_id).name == "a-b -c-"


def test_child_of_a_pool_that_went_away_is_refused(client):
    with pytest.raises(SpecError, match=r"`work_pool='gone'`: the work pool was deleted"):
        open_child(client, request(pool="gone"), number=0)


# --- one child -------------------------------------------------------------------------------------------


def test_child_is_found_again(client, call):
    first = open_child(client, call, number=0)
    client.set_flow_run_state(first.id, Running(), force=True)
    again = open_child(client, call, number=0)
    assert again.id == first.id
    assert again.state is not None
    assert again.state.is_running()  # not scheduled a second time
    assert count(client, call.digest) == 1


def test_child_of_another_number_or_call_is_another_one(client, call):
    others = [open_child(client, call, number=number).id for number in (0, 1)]
    others.append(open_child(client, request(flow_run_id=call.flow_run_id), number=0).id)
    assert len(set(others)) == 3


def test_child_is_one_when_many_ask_at_once(client, call):
    def ask(_: int) -> UUID:
        with get_client(sync_client=True) as own:
            return open_child(own, call, number=0).id

    with ThreadPoolExecutor(4) as threads:
        ids = set(threads.map(ask, range(4)))
    assert len(ids) == 1
    assert count(client, call.digest) == 1
    if call.flow_run_id:
        assert len(list_task_runs(client, call.flow_run_id)) == 1


def test_child_is_one_when_another_process_asks_at_once(client, call, run_script):
    facts = {"task_name", "run_name", "parameters", "pool", "job_variables", "digest"}
    document = {name: getattr(call, name) for name in facts} | {
        "task_run_id": str(call.task_run_id),
        "flow_run_id": call.flow_run_id and str(call.flow_run_id),
    }
    script = run_script.start(SCRIPT, args=[json.dumps(document)])
    mine = open_child(client, call, number=0).id
    theirs = script.wait(60)
    assert theirs.rc == 0, theirs.stderr
    assert theirs.stdout.strip() == str(mine)


def test_child_that_nobody_opened_is_not_found(client):
    assert find_child(client, uuid.uuid4().hex, number=0) is None


# --- seen ------------------------------------------------------------------------------------------------


def test_end_of_a_child_is_seen_once_it_is_marked(client):
    child = open_child(client, request(), number=0)
    assert not was_seen(client.read_flow_run(child.id))
    mark_seen(client, child.id)
    labels = client.read_flow_run(child.id).labels
    assert was_seen(client.read_flow_run(child.id))
    assert "torch-elastic.call" in labels  # the others stay


def test_run_that_was_deleted_needs_no_mark(client):
    mark_seen(client, uuid.uuid4())


# --- in the graph ----------------------------------------------------------------------------------------


def run_with_child(client: SyncPrefectClient) -> tuple[UUID, TaskRun, FlowRun]:
    found: dict[str, Any] = {}

    @task(task_run_name="pretrain-{steps}")
    def pretrain(steps: int) -> None:
        context = TaskRunContext.get()
        assert context is not None
        call = request(
            run_name=context.task_run.name,
            task_run_id=context.task_run.id,
            flow_run_id=context.task_run.flow_run_id,
        )
        found.update(task=context.task_run, child=open_child(client, call, number=0))

    @flow
    def main() -> None:
        pretrain(7)

    main()
    return found["task"].flow_run_id, found["task"], found["child"]


def test_child_is_nested_under_the_task_in_the_graph(client):
    flow_run_id, task_run, child = run_with_child(client)

    def read() -> dict[str, Any]:
        graph = client.request("GET", f"/flow_runs/{flow_run_id}/graph-v2").json()
        return {node["id"]: node for _, node in graph["nodes"]}

    nodes = eventually(read, until=lambda nodes: len(nodes) >= 2)
    assert nodes.keys() == {str(task_run.id), str(child.id)}
    assert nodes[str(task_run.id)]["kind"] == "task-run"
    assert nodes[str(child.id)]["kind"] == "flow-run"
    assert nodes[str(child.id)]["label"] == "pretrain / pretrain-7"
    assert nodes[str(child.id)]["encapsulating"] == [{"id": str(task_run.id)}]


def test_states_of_the_child_leave_those_of_the_task_alone(client):
    flow_run_id, task_run, child = run_with_child(client)
    client.set_flow_run_state(child.id, Crashed(), force=True)

    def read() -> dict[UUID, str]:
        runs = list_task_runs(client, flow_run_id)
        return {run.id: run.state_name or "" for run in runs}

    states = eventually(read, until=lambda states: states.get(task_run.id) == "Completed")
    assert states.pop(task_run.id) == "Completed"
    assert list(states.values()) == ["Crashed"]  # the run that stands for the child
