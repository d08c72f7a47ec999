"""How the driver of a dispatched call talks to an API that is away now and then."""

from __future__ import annotations

import uuid
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect import flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Completed, Crashed, Failed, Pending, Running, Scheduled

from prefect_torch_elastic.dispatch import driver
from prefect_torch_elastic.dispatch.childruns import ChildRequest, mark_seen, open_child
from prefect_torch_elastic.dispatch.childtimes import render_times
from prefect_torch_elastic.dispatch.driver import insist
from prefect_torch_elastic.dispatch.endings import Ending, EndingKind, put_ending
from prefect_torch_elastic.dispatch.failurelabel import SeenFailure, render_failure_label
from prefect_torch_elastic.dispatch.order import CallKind, CallReference
from prefect_torch_elastic.dispatch.pools import ELASTIC_TYPE, Pool
from prefect_torch_elastic.dispatch.waiting import ChildEnd, ChildVerdict
from prefect_torch_elastic.errors import GangFailed, PoolRunFailed
from prefect_torch_elastic.evidence import Category, Diagnosis
from prefect_torch_elastic.outcomes import CallRecord
from prefect_torch_elastic.payload import PythonPayload
from prefect_torch_elastic.runlog import RunLog
from prefect_torch_elastic.spec import build_spec
from prefect_torch_elastic.store import open_store
from prefect_torch_elastic.wire import GangStatus


def away(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://api/flow_runs")
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(code, request=request))


class Answers:
    """Gives answers in turn; an exception is raised."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)

    def __call__(self) -> object:
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.mark.parametrize(
    "outage",
    [
        pytest.param(away(503), id="busy"),
        pytest.param(httpx.ConnectError("refused"), id="gone"),
        pytest.param(httpx.ReadTimeout("slow"), id="slow"),
    ],
)
def test_insist_asks_again_while_the_api_is_away(outage: Exception):
    said: list[str] = []
    answer = insist(Answers(outage, outage, 7), seconds=10, pause_seconds=0, say=said.append)
    assert (answer, len(said)) == (7, 2)


@pytest.mark.parametrize("error", [away(404), away(409), ValueError("ours")], ids=["404", "409", "ours"])
def test_insist_raises_what_is_no_outage(error: Exception):
    with pytest.raises(type(error)):
        insist(Answers(error, 7), seconds=10)


def test_insist_gives_up_when_its_time_is_over():
    with pytest.raises(httpx.HTTPStatusError):
        insist(Answers(away(503), 7), seconds=0)


def test_insist_lets_an_interruption_through():
    with pytest.raises(KeyboardInterrupt):
        insist(Answers(away(503), KeyboardInterrupt(), 7), seconds=10, pause_seconds=0)


# ---------------------------------------------------------------- children of earlier tries


@pytest.fixture
def client(prefect_server: str) -> Any:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        yield client


def open_children(client: Any, digest: str, *, count: int) -> list[Any]:
    from prefect.client.schemas.actions import WorkPoolCreate

    client.create_work_pool(WorkPoolCreate(name="tries", type="process"), overwrite=True)
    request = ChildRequest(
        task_name="train",
        run_name="train-1",
        parameters={},
        pool="tries",
        job_variables={},
        digest=digest,
        task_run_id=uuid.uuid4(),
        flow_run_id=None,
    )
    return [open_child(client, request, number=number) for number in range(count)]


def find(client: Any, digest: str) -> Any:
    """Return what a driver of the call finds."""
    dispatch: Any = object.__new__(driver._Dispatch)
    dispatch._client = client
    dispatch._call = SimpleNamespace(identity=SimpleNamespace(digest=digest))
    return dispatch._find()


def test_child_of_a_driver_that_was_killed_is_found(client: Any):
    digest = uuid.uuid4().hex
    assert find(client, digest) == (None, 0)
    first, _ = open_children(client, digest, count=2)
    found, number = find(client, digest)
    assert (found.id, number) == (first.id, 0)


def test_child_whose_end_was_taken_over_is_not_waited_for_again(client: Any):
    digest = uuid.uuid4().hex
    first, second = open_children(client, digest, count=2)
    mark_seen(client, first.id)
    assert find(client, digest)[0].id == second.id


def test_child_whose_mark_the_api_did_not_take_is_not_waited_for_again(
    client: Any, monkeypatch: pytest.MonkeyPatch
):
    digest = uuid.uuid4().hex
    first, second = open_children(client, digest, count=2)
    monkeypatch.setattr(driver, "_concluded", {first.id})
    assert find(client, digest)[0].id == second.id


def test_child_that_was_cancelled_is_not_waited_for(client: Any):
    from prefect.states import Cancelled

    digest = uuid.uuid4().hex
    (only,) = open_children(client, digest, count=1)
    client.set_flow_run_state(only.id, Cancelled(), force=True)
    assert find(client, digest) == (None, 1)


# ---------------------------------------------------------------- gangs that a cluster starts again


CHILD: Any = SimpleNamespace(id=uuid.UUID(int=1), name="train-1")
LOST_NODE = asdict(
    Diagnosis(
        category=Category.NODE_LOST,
        summary="node 3 was lost: its connection closed.",
        cure="See the log.",
        rank=3,
        node_rank=3,
        traceback="Traceback: of rank 3",
    )
)


class Lines:
    """A log that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def info(self, text: str, *args: object) -> None:
        self.said.append(text % args)


class Gang:
    """The dispatch of a gang to a pool of our own type."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        store = open_store(str(folder))
        log = RunLog(store, "run")
        self.record = CallRecord(store=store, folder="run", log=log, call="c0", key=b"k" * 32, warn=print)
        self.log = Lines()
        self.dispatch: Any = object.__new__(driver._Dispatch)
        self.dispatch._kind = CallKind.GANG
        self.dispatch._payload = PythonPayload(function=train, args=(), kwargs={}, warn=print)
        self.dispatch._pool = Pool(
            name="train",
            type=ELASTIC_TYPE,
            is_paused=False,
            workers=1,
            workers_online=1,
            has_command=True,
            variables=frozenset(),
            limit=None,
        )
        self.dispatch._call = SimpleNamespace(
            spec=build_spec({"work_pool": "train", **fields}),
            record=self.record,
            patience=SimpleNamespace(wait_for=lambda work: work()),
            identity=SimpleNamespace(digest="0" * 32, folder="run"),
            task_name="train",
            task_run_name="train-0",
            task_run_id=str(uuid.UUID(int=2)),
            flow_run_id="",
            log=self.log,
        )

    def leave(self, diagnosis: dict[str, Any], *, kind: EndingKind) -> None:
        ending = Ending(status=GangStatus.FAILED, attempt=3, restarts=1, diagnosis=diagnosis)
        put_ending(self.record, CHILD.id, ending, kind=kind)

    def conclude(
        self,
        state: State[Any],
        *,
        run_count: int = 1,
        verdict: ChildVerdict | None = None,
        seen: SeenFailure | None = None,
    ) -> Any:
        labels = render_failure_label(seen) if seen else {}
        run = FlowRun.model_validate(
            {"flow_id": uuid.uuid4(), "state": state, "run_count": run_count, "labels": labels}
        )
        end = ChildEnd(
            verdict=verdict or ChildVerdict.ENDED,
            state_message=f"The child run is {state.name}: {state.message}",
            run=run,
        )
        return self.dispatch._conclude(end, CHILD)


def train() -> None:
    """Stands for the function of a gang."""


def test_gang_that_the_cluster_gave_up_failed_as_its_last_attempt_says(tmp_path: Path):
    gang = Gang(tmp_path)
    gang.leave(LOST_NODE, kind=EndingKind.SETBACK)
    with pytest.raises(GangFailed) as failed:
        gang.conclude(Failed(message="Pod `x-node-0-3` was OOMKilled; 3 of 3 attempts are spent."))
    error = failed.value
    assert (error.category, error.rank, error.traceback) == ("NodeLost", 3, "Traceback: of rank 3")
    assert str(error).splitlines()[0] == (
        "node 3 was lost: its connection closed. Pod `x-node-0-3` was OOMKilled; 3 of 3 attempts are spent."
    )
    assert "It was restarted 1 time before." in str(error)


@pytest.mark.parametrize(
    ("words", "first"),
    [
        pytest.param("node 3 was lost", "node 3 was lost: its connection closed.", id="less"),
        pytest.param(
            "Spent: node 3 was lost: its connection closed (node-b).",
            "Spent: node 3 was lost: its connection closed (node-b).",
            id="all-of-it",
        ),
    ],
)
def test_words_of_the_worker_and_of_the_gang_are_not_said_twice(tmp_path: Path, words: str, first: str):
    gang = Gang(tmp_path)
    gang.leave(LOST_NODE, kind=EndingKind.SETBACK)
    with pytest.raises(GangFailed) as failed:
        gang.conclude(Failed(message=words))
    assert str(failed.value).splitlines()[0] == first


def test_final_ending_of_a_gang_is_believed_before_that_of_an_attempt(tmp_path: Path):
    gang = Gang(tmp_path)
    gang.leave(LOST_NODE, kind=EndingKind.SETBACK)
    gang.leave({**LOST_NODE, "summary": "rank 0 failed."}, kind=EndingKind.FINAL)
    with pytest.raises(GangFailed, match=r"^rank 0 failed\."):
        gang.conclude(Failed(message="rank 0 failed."))


def test_gang_whose_jobset_was_deleted_is_gone_whatever_an_attempt_said(tmp_path: Path):
    gang = Gang(tmp_path)
    gang.leave(LOST_NODE, kind=EndingKind.SETBACK)
    with pytest.raises(GangFailed, match="is gone: The child run is Crashed: Somebody deleted the JobSet"):
        gang.conclude(Crashed(message="Somebody deleted the JobSet."), verdict=ChildVerdict.CRASHED)


def test_gang_that_failed_in_its_queue_did_not_start(tmp_path: Path):
    with pytest.raises(GangFailed, match="did not start: The child run is Failed: No such queue") as failed:
        Gang(tmp_path).conclude(Failed(message="No such queue."), run_count=0)
    assert failed.value.category == "SetupFailed"


def test_gang_that_failed_without_words_of_its_own_is_gone_with_those_of_its_worker(tmp_path: Path):
    with pytest.raises(GangFailed, match="is gone: The child run is Failed: Pod 0 was OOMKilled") as failed:
        Gang(tmp_path).conclude(Failed(message="Pod 0 was OOMKilled."))
    assert failed.value.category == "NodeLost"


KILLED = SeenFailure(category=Category.HOST_OUT_OF_MEMORY, attempt=4, pod="x-node-0-3-abcde", node=3)
WORDS = "Pod `x-node-0-3-abcde` was OOMKilled."


def test_failure_that_only_the_worker_saw_has_its_category(tmp_path: Path):
    with pytest.raises(GangFailed) as failed:
        Gang(tmp_path).conclude(Failed(message=WORDS), seen=KILLED)
    error = failed.value
    assert (error.category, error.node_rank, str(error).splitlines()[0]) == ("HostOutOfMemory", 3, WORDS)
    assert "train-1" in str(error).splitlines()[1]


def test_later_failure_that_the_worker_saw_goes_before_that_of_an_attempt(tmp_path: Path):
    gang = Gang(tmp_path)
    gang.leave(LOST_NODE, kind=EndingKind.SETBACK)  # of attempt 3
    with pytest.raises(GangFailed) as failed:
        gang.conclude(Failed(message=WORDS), seen=KILLED)
    assert (failed.value.category, failed.value.rank, failed.value.traceback) == ("HostOutOfMemory", None, "")


@pytest.mark.parametrize(
    ("category", "attempt", "said"),
    [
        pytest.param(Category.HOST_OUT_OF_MEMORY, 3, "HostOutOfMemory", id="it-knows-why-the-node-was-gone"),
        pytest.param(Category.EXITED_EARLY, 3, "NodeLost", id="it-knows-less"),
        pytest.param(Category.HOST_OUT_OF_MEMORY, 2, "NodeLost", id="of-an-attempt-before"),
    ],
)
def test_attempt_that_said_how_it_failed_is_believed_unless_the_worker_knows_more(
    tmp_path: Path, category: Category, attempt: int, said: str
):
    gang = Gang(tmp_path)
    gang.leave(LOST_NODE, kind=EndingKind.SETBACK)
    with pytest.raises(GangFailed) as failed:
        gang.conclude(Failed(message=WORDS), seen=replace(KILLED, category=category, attempt=attempt))
    assert (failed.value.category, failed.value.rank) == (said, 3)
    assert "its connection closed" in str(failed.value)


def test_gang_that_could_not_start_says_so_in_the_category_of_its_pod(tmp_path: Path):
    with pytest.raises(GangFailed, match="did not start") as failed:
        Gang(tmp_path).conclude(Failed(message=WORDS), run_count=0, seen=KILLED)
    assert failed.value.category == "HostOutOfMemory"


def test_plain_function_whose_pod_was_killed_is_no_gang_that_failed(tmp_path: Path):
    gang = Gang(tmp_path)
    gang.dispatch._kind = CallKind.BODY
    with pytest.raises(PoolRunFailed, match="was OOMKilled"):
        gang.conclude(Failed(message=WORDS), seen=KILLED)


def test_cluster_gets_the_attempts_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gang = Gang(tmp_path, nnodes=4, max_attempts=3)
    reference = CallReference(store="s3://b", order="run/calls/c0/order-1", root="r")
    monkeypatch.setattr(driver, "send_call", lambda *_, **__: reference)
    sent = gang.dispatch._request(2).job_variables
    assert (sent["nnodes"], sent["max_attempts"], sent["grace_seconds"]) == (4, 2, 60)


def state(make: Any, seconds: float, *, name: str | None = None) -> State[Any]:
    made = make(name=name) if name else make()
    return made.model_copy(update={"timestamp": BEGIN + timedelta(seconds=seconds)})


BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
HISTORY = [
    state(Scheduled, 0),
    state(Pending, 10),
    state(Pending, 20, name="Queued"),
    state(Pending, 60, name="Queued"),  # another place
    state(Pending, 80, name="Starting"),
    state(Running, 100),
    state(Pending, 400, name="Preempted"),
    state(Pending, 520, name="Starting"),
    state(Running, 530),
]


def test_times_of_a_gang_are_those_without_and_with_its_quota():
    said = render_times([*HISTORY, state(Completed, 1000)][::-1], until=BEGIN + timedelta(days=9))
    assert said == "The child run waited 3 min 0 s in its queue and ran 12 min 50 s."


def test_time_of_a_run_that_goes_on_counts_until_now():
    said = render_times(HISTORY, until=BEGIN + timedelta(seconds=540))
    assert said == "The child run waited 3 min 0 s in its queue and ran 5 min 10 s."


@pytest.mark.parametrize(
    "states", [[], [HISTORY[0], HISTORY[5], state(Completed, 600)]], ids=["none", "at-once"]
)
def test_run_that_was_never_queued_has_no_times_to_tell(states: list[State[Any]]):
    assert render_times(states, until=BEGIN) == ""


def test_times_are_read_from_the_history_of_the_child(tmp_path: Path, client: Any):
    gang = Gang(tmp_path)
    gang.dispatch._ask_aside = lambda ask: ask(client)
    run = client.create_flow_run(flow(train), state=Pending(name="Queued"))
    client.set_flow_run_state(run.id, Running())
    client.set_flow_run_state(run.id, Pending(name="Preempted"), force=True)
    client.set_flow_run_state(run.id, Failed(), force=True)
    gang.dispatch._tell_times(run)
    (said,) = gang.log.said
    assert said.startswith("The child run waited 0 s in its queue and ran 0 s")


@pytest.mark.parametrize(
    ("type", "answer"), [("process", HISTORY), (ELASTIC_TYPE, TimeoutError("no answer in 10 s"))]
)
def test_times_are_left_out_where_there_are_none(tmp_path: Path, type: str, answer: Any):
    gang = Gang(tmp_path)
    gang.dispatch._pool = replace(gang.dispatch._pool, type=type)
    gang.dispatch._ask_aside = lambda _: answer
    gang.dispatch._tell_times(CHILD)
    assert gang.log.said == []


@pytest.mark.parametrize("most", [1, 3])
def test_gang_whose_jobset_was_deleted_is_sent_again_within_its_attempts(tmp_path: Path, most: int):
    gang = Gang(tmp_path, max_attempts=most)
    end = ChildEnd(verdict=ChildVerdict.CRASHED, state_message="Somebody deleted it.", run=None)
    assert gang.dispatch._send_again(end, CHILD, 1) == ("attempt 2 of 3" if most == 3 else "")


def test_gang_that_its_cluster_gave_up_is_not_sent_again(tmp_path: Path):
    end = ChildEnd(verdict=ChildVerdict.ENDED, state_message="3 of 3 attempts are spent.", run=None)
    assert Gang(tmp_path).dispatch._send_again(end, CHILD, 1) == ""
