"""The rounds of a worker: runs that were cancelled, and JobSets that nobody follows."""

from __future__ import annotations

import logging
import uuid
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun, WorkerStatus
from prefect.states import Cancelling, Completed, Pending, Running, Scheduled

from prefect_torch_elastic.hosting.asking import Outage
from prefect_torch_elastic.kubernetes import reconciler as module
from prefect_torch_elastic.kubernetes.naming import KEPT_ANNOTATION, WORKER_ANNOTATION
from prefect_torch_elastic.kubernetes.reconciler import Fate, Reconciler, decide_fate
from prefect_torch_elastic.kubernetes.resources import Kind
from tests.gangfakes import Clock, FakeCluster, FakeRuns, make_jobset, make_run, refuse

ENDED: dict[str, Any] = {"conditions": [{"type": "Completed", "status": "True"}]}


class FakeFollowing:
    def __init__(self, run: FlowRun, *, waits: bool = False) -> None:
        self.run, self.waits = run, waits
        self.seen: list[FlowRun | None] = []
        self.has_left = False

    def see_run(self, run: FlowRun | None) -> None:
        self.seen.append(run)

    def leave(self) -> None:
        self.has_left = True


class FakeHost:
    name = "here"

    def __init__(self) -> None:
        self.followings: dict[str, Any] = {}
        self.claimed: set[uuid.UUID] = set()
        self.adopted: list[uuid.UUID] = []
        self.lost: list[uuid.UUID] = []
        self.unreachable: set[uuid.UUID] = set()

    def adopt(self, view: Any, jobset: Any, run: FlowRun) -> None:
        self.adopted.append(run.id)

    async def open_places_of(self, runs: Any) -> set[uuid.UUID]:
        return {run.id for run in runs} - self.unreachable

    async def report_lost(self, run: FlowRun) -> None:
        self.lost.append(run.id)


class Rounds:
    """A reconciler with all that it works with."""

    def __init__(self, *runs: FlowRun) -> None:
        self.host, self.cluster, self.api, self.clock = FakeHost(), FakeCluster(), FakeRuns(*runs), Clock()
        view = SimpleNamespace(cluster=self.cluster, namespaces={"ml"})
        self.reconciler = Reconciler(
            self.host,
            client=self.api,  # type: ignore[arg-type]
            pool_name="gpus",
            clusters=SimpleNamespace(views=[view], labels="pool"),  # type: ignore[arg-type]
            log=logging.getLogger("tests.rounds"),
            outage=Outage(lambda _: None),
            clock=self.clock,
        )

    def online(self, *names: str) -> None:
        self.api.workers = [SimpleNamespace(name=name, status=WorkerStatus.ONLINE) for name in names]


@pytest.mark.parametrize(
    ("owner", "run", "jobset", "fate"),
    [
        pytest.param("there", None, {}, Fate.LEAVE, id="another-worker-lives"),
        pytest.param("there", make_run(Completed()), {}, Fate.LEAVE, id="another-worker-ends-it"),
        pytest.param("here", make_run(Running()), {}, Fate.ADOPT, id="we-died"),
        pytest.param("gone", make_run(Running()), {}, Fate.ADOPT, id="another-worker-died"),
        pytest.param("", make_run(Running()), {}, Fate.ADOPT, id="no-worker"),
        pytest.param("gone", make_run(Cancelling()), {}, Fate.ADOPT, id="cancelling"),
        pytest.param("gone", make_run(Completed()), {}, Fate.DELETE, id="run-is-over"),
        pytest.param("gone", None, {}, Fate.DELETE, id="run-was-deleted"),
    ],
)
def test_fate_of_a_jobset(owner: str, run: FlowRun | None, jobset: dict[str, Any], fate: Fate):
    stray = make_jobset(uuid.uuid4(), worker=owner, **jobset)
    assert decide_fate(stray, run, worker_name="here", online=["there"]) is fate


def test_fate_of_an_ended_jobset_is_its_time_to_live():
    stray = make_jobset(uuid.uuid4(), **ENDED)
    assert decide_fate(stray, make_run(Completed()), worker_name="here", online=[]) is Fate.DELETE
    stray["metadata"]["annotations"][KEPT_ANNOTATION] = "true"
    assert decide_fate(stray, make_run(Completed()), worker_name="here", online=[]) is Fate.LEAVE


def test_jobset_that_is_being_deleted_is_adopted_so_that_its_run_is_told():
    stray = make_jobset(uuid.uuid4())
    stray["metadata"]["deletionTimestamp"] = "2026-11-29T13:10:00Z"
    assert decide_fate(stray, make_run(Running()), worker_name="here", online=[]) is Fate.ADOPT


def test_former_jobset_of_a_run_that_is_to_start_again_is_left_to_whoever_takes_the_run():
    stray = make_jobset(uuid.uuid4(), **ENDED)
    assert decide_fate(stray, make_run(Scheduled()), worker_name="here", online=[]) is Fate.LEAVE
    assert decide_fate(stray, make_run(Pending()), worker_name="here", online=[]) is Fate.ADOPT


async def survey(rounds: Rounds, *times: float) -> list[uuid.UUID]:
    for rounds.clock.now in times:
        await rounds.reconciler.tidy()
    return rounds.host.lost


async def test_run_whose_jobset_went_away_unseen_gets_its_end():
    run = make_run(Pending(name="Preempted"))
    assert await survey(Rounds(run), 60.0, 500.0, 959.0) == []
    assert await survey(Rounds(run), 60.0, 500.0, 970.0) == [run.id]


@pytest.mark.parametrize("known", ["jobset", "claimed", "unreachable", "list"])
async def test_run_whose_jobset_may_be_there_is_left_alone(known: str):
    run = make_run(Pending())
    rounds = Rounds(run)
    rounds.online("there")
    if known == "jobset":
        rounds.cluster.add(make_jobset(run.id, worker="there"))
    elif known == "claimed":
        rounds.host.claimed.add(run.id)
    elif known == "unreachable":
        rounds.host.unreachable.add(run.id)
    else:
        rounds.cluster.errors["list", Kind.JOBSET] = [refuse(500) for _ in range(3)]
    assert await survey(rounds, 60.0, 500.0, 2000.0) == []


async def test_run_is_not_lost_if_its_jobset_comes_in_time():
    run = make_run(Pending())
    rounds = Rounds(run)
    rounds.online("there")
    await survey(rounds, 60.0, 500.0)
    jobset = rounds.cluster.add(make_jobset(run.id, worker="there"))
    await survey(rounds, 600.0)
    del rounds.cluster.objects[Kind.JOBSET, "ml", jobset["metadata"]["name"]]
    assert await survey(rounds, 1000.0, 1800.0) == []
    assert await survey(rounds, 2000.0) == [run.id]


async def test_round_tells_each_gang_of_its_run():
    kept, deleted = make_run(Cancelling()), make_run()
    rounds = Rounds(kept)
    rounds.host.followings = {"a": FakeFollowing(make_run(id=kept.id)), "b": FakeFollowing(deleted)}
    await rounds.reconciler.look_at_runs()
    assert [following.seen for following in rounds.host.followings.values()] == [[kept], [None]]


async def test_runs_are_asked_for_in_parts(monkeypatch):
    monkeypatch.setattr(module, "_BATCH", 2)
    runs = [make_run() for _ in range(5)]
    rounds = Rounds(*runs)
    rounds.host.followings = {str(run.id): FakeFollowing(run) for run in runs}
    await rounds.reconciler.look_at_runs()
    assert all(following.seen for following in rounds.host.followings.values())


async def test_stray_is_adopted_under_our_name():
    run = make_run(Running())
    rounds = Rounds(run)
    jobset = rounds.cluster.add(make_jobset(run.id, worker="gone"))
    await rounds.reconciler.tidy()
    assert rounds.host.adopted == [run.id]
    assert jobset["metadata"]["annotations"][WORKER_ANNOTATION] == "here"


async def test_stray_that_may_not_be_marked_stays_with_one_warning(caplog):
    run = make_run(Running())
    rounds = Rounds(run)
    rounds.cluster.add(make_jobset(run.id))
    rounds.cluster.errors["patch", Kind.JOBSET] = [refuse(403, "Forbidden"), refuse(403, "Forbidden")]
    await rounds.reconciler.tidy()
    await rounds.reconciler.tidy()
    assert not rounds.host.adopted
    assert len([line for line in caplog.messages if "stays as it is" in line]) == 1


async def test_stray_of_a_run_that_is_over_is_deleted():
    run = make_run(Completed())
    rounds = Rounds(run)
    rounds.cluster.add(make_jobset(run.id))
    await rounds.reconciler.tidy()
    assert rounds.cluster.deleted() == ["train-1"]


async def test_gang_of_a_worker_that_lives_is_left_to_it():
    rounds = Rounds()
    rounds.online("there")
    rounds.cluster.add(make_jobset(uuid.uuid4(), worker="there"))
    await rounds.reconciler.tidy()
    assert not rounds.cluster.deleted()


async def test_gang_that_is_being_created_is_no_stray():
    run = make_run()
    rounds = Rounds(run)
    rounds.cluster.add(make_jobset(run.id))
    rounds.host.claimed.add(run.id)
    await rounds.reconciler.tidy()
    assert not rounds.host.adopted


async def test_jobset_of_somebody_else_is_left_alone():
    rounds = Rounds()
    rounds.cluster.add(make_jobset("no-uuid"))
    await rounds.reconciler.tidy()
    assert not rounds.cluster.deleted()


async def test_gang_that_another_worker_took_over_is_followed_no_more():
    run = make_run()
    rounds = Rounds(run)
    jobset = rounds.cluster.add(make_jobset(run.id, worker="there"))
    following = rounds.host.followings[jobset["metadata"]["uid"]] = FakeFollowing(run)
    await rounds.reconciler.tidy()
    assert following.has_left


async def test_nothing_is_deleted_while_the_api_is_away():
    rounds = Rounds()
    rounds.cluster.add(make_jobset(uuid.uuid4()))
    rounds.api.errors.append(httpx.ConnectError("refused"))
    await rounds.reconciler._try(rounds.reconciler.tidy)
    assert not rounds.cluster.deleted()


async def test_forbidden_list_is_said_once(caplog):
    rounds = Rounds()
    rounds.cluster.errors["list", Kind.JOBSET] = [refuse(403, "Forbidden"), refuse(403, "Forbidden")]
    await rounds.reconciler.tidy()
    await rounds.reconciler.tidy()
    assert len(caplog.messages) == 1


async def test_gang_that_waits_has_a_heartbeat_now_and_then(monkeypatch):
    sent: list[uuid.UUID] = []
    monkeypatch.setattr(module, "heartbeat_seconds", lambda: 180)
    monkeypatch.setattr(module, "send_heartbeat", lambda run: sent.append(run.id))
    waiting, running = make_run(), make_run()
    rounds = Rounds()
    rounds.host.followings = {"a": FakeFollowing(waiting, waits=True), "b": FakeFollowing(running)}
    for now in (0.0, 5.0, 179.0, 181.0):
        rounds.clock.now = now
        rounds.reconciler._send_heartbeats()
    assert sent == [waiting.id, waiting.id]


async def test_rounds_go_on_until_the_last_gang_has_ended(monkeypatch):
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    rounds = Rounds()
    rounds.host.claimed.add(uuid.uuid4())
    looks: list[int] = []

    async def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            rounds.host.claimed.clear()

    monkeypatch.setattr(rounds.reconciler, "look_at_runs", look)
    rounds.reconciler.close()
    await rounds.reconciler.serve()
    assert len(looks) == 3
