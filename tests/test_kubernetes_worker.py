"""The worker: a JobSet for each run, followed to its end, taken over by the next worker, never leaked."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
from prefect import flow, get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import InfrastructureNotAvailable, InfrastructureNotFound
from prefect.states import Cancelling, Completed, Failed, Running, Scheduled
from prefect.workers.base import BaseWorker

from prefect_torch_elastic.errors import ElasticError, MissingExtraError
from prefect_torch_elastic.hosting.asking import Outage
from prefect_torch_elastic.kubernetes import following as following_room
from prefect_torch_elastic.kubernetes import worker as worker_room
from prefect_torch_elastic.kubernetes.answers import ClusterError
from prefect_torch_elastic.kubernetes.clusters import Clusters
from prefect_torch_elastic.kubernetes.creating import (
    GangPlace,
    Means,
    create_gang,
    delete_gang,
    parse_pid,
)
from prefect_torch_elastic.kubernetes.following import Following
from prefect_torch_elastic.kubernetes.phases import GangPhase
from prefect_torch_elastic.kubernetes.reporting import Reporter
from prefect_torch_elastic.kubernetes.request import GangRequest
from prefect_torch_elastic.kubernetes.resources import Kind
from prefect_torch_elastic.kubernetes.variables import TorchElasticJobConfiguration
from prefect_torch_elastic.kubernetes.worker import TorchElasticWorker
from tests.gangfakes import (
    Clock,
    FakeCluster,
    FakeObserver,
    FakeRuns,
    make_jobset,
    make_run,
    make_status,
    refuse,
    sight,
)

LOG = logging.getLogger("tests.worker")
PLACE = GangPlace(namespace="ml", name="train-1", uid="uid-1", grace_seconds=10)


def ask_for(**fields: Any) -> GangRequest:
    values: dict[str, Any] = {
        "name": "train-1",
        "namespace": "ml",
        "nnodes": 2,
        "command": ("python",),
        "image": "train:1",
        "pool_id": "p",
        "flow_run_id": "r",
        "flow_run_name": "owl",
        "worker_name": "w",
    }
    return GangRequest(**{**values, **fields})


def make_means() -> Means:
    clock = Clock()
    return Means(clock=clock, sleep=clock.sleep)


async def eventually(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110  (what is waited for knows nothing of tests)
            await asyncio.sleep(0.01)


# --- creating and deleting --------------------------------------------------------------------------------


async def test_gang_is_created_with_a_secret_that_belongs_to_it():
    cluster = FakeCluster()
    request = ask_for(credentials_secret="train-1-credentials", credential_names=("TOKEN",))
    place = await create_gang(cluster, request, {"TOKEN": "hidden"})
    [secret] = cluster.secrets()
    assert secret["metadata"]["name"].startswith("train-1-credentials-")
    assert (place.pid, place.uid) == ("ml:train-1", "uid-1")
    assert secret["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    assert "hidden" not in str(cluster.objects[Kind.JOBSET, "ml", "train-1"])


def secret_in(jobset: dict[str, Any]) -> str:
    [role] = jobset["spec"]["replicatedJobs"]
    [trainer] = role["template"]["spec"]["template"]["spec"]["containers"]
    [name] = [one["valueFrom"]["secretKeyRef"]["name"] for one in trainer["env"] if one["name"] == "TOKEN"]
    return name


async def test_gang_that_is_created_again_does_not_lean_on_the_secret_of_the_former():
    cluster = FakeCluster()
    request = ask_for(credentials_secret="train-1-credentials", credential_names=("TOKEN",))
    await create_gang(cluster, request, {"TOKEN": "hidden"})
    del cluster.objects[Kind.JOBSET, "ml", "train-1"]  # its Secret waits for the garbage collector
    second = await create_gang(cluster, request, {"TOKEN": "hidden"})
    owners = {
        one["metadata"]["name"]: one["metadata"]["ownerReferences"][0]["uid"] for one in cluster.secrets()
    }
    assert owners[secret_in(cluster.objects[Kind.JOBSET, "ml", "train-1"])] == second.uid


async def test_gang_that_exists_gets_the_secret_that_its_pods_name():
    cluster = FakeCluster()
    request = ask_for(credentials_secret="train-1-credentials", credential_names=("TOKEN",))
    await create_gang(cluster, request, {})  # its worker died before the Secret was there
    await create_gang(cluster, request, {"TOKEN": "hidden"})
    await create_gang(cluster, request, {"TOKEN": "hidden"})
    [secret] = cluster.secrets()
    assert secret["metadata"]["name"] == secret_in(cluster.objects[Kind.JOBSET, "ml", "train-1"])


async def test_gang_whose_secret_is_refused_leaves_nothing():
    cluster = FakeCluster()
    cluster.errors["create", Kind.SECRET] = [refuse(403, "Forbidden")]
    request = ask_for(credentials_secret="s", credential_names=("TOKEN",))
    with pytest.raises(ClusterError):
        await create_gang(cluster, request, {"TOKEN": "hidden"})
    assert cluster.deleted() == ["train-1"]


async def test_gang_that_exists_for_the_run_is_found():
    cluster = FakeCluster()
    first = await create_gang(cluster, ask_for(), {})
    assert await create_gang(cluster, ask_for(), {}) == first


async def test_gang_of_another_run_is_refused_by_name():
    cluster = FakeCluster()
    await create_gang(cluster, ask_for(flow_run_id="other"), {})
    with pytest.raises(ElasticError, match="JobSet `train-1` exists in namespace `ml`, and not for this run"):
        await create_gang(cluster, ask_for(), {})


async def test_gang_in_a_queue_that_does_not_exist_is_refused_with_those_that_do_c042():
    cluster = FakeCluster()
    for name in ("small", "large"):
        cluster.objects[Kind.LOCAL_QUEUE, "ml", name] = {"metadata": {"name": name}}
    with pytest.raises(ElasticError, match=r"no LocalQueue `smal` in namespace `ml`\. .* `large`, `small`\."):
        await create_gang(cluster, ask_for(queue="smal"), {})
    assert not [verb for verb, _, _ in cluster.calls if verb == "create"]


async def test_gang_in_a_queue_that_does_not_exist_is_refused_without_the_right_to_list_them_c042():
    cluster = FakeCluster()
    cluster.errors["list", Kind.LOCAL_QUEUE] = [refuse(403, "Forbidden")]
    with pytest.raises(ElasticError, match="`kubectl get localqueues -n ml`"):
        await create_gang(cluster, ask_for(queue="lq"), {})


async def test_gang_is_created_without_the_right_to_look_for_its_queue():
    cluster = FakeCluster()
    cluster.errors["get", Kind.LOCAL_QUEUE] = [refuse(403, "Forbidden")]
    assert (await create_gang(cluster, ask_for(queue="lq"), {})).name == "train-1"


async def test_run_that_starts_again_waits_until_its_former_pods_are_gone():
    cluster = FakeCluster(gets_while_leaving=2)
    first = await create_gang(cluster, ask_for(), {})
    cluster.objects[Kind.JOBSET, "ml", "train-1"]["status"] = {
        "conditions": [{"type": "Failed", "status": "True"}]
    }
    second = await create_gang(cluster, ask_for(), {}, means=make_means())
    assert second.uid != first.uid


async def test_create_is_tried_again_while_a_webhook_starts():
    cluster = FakeCluster()
    cluster.errors["create", Kind.JOBSET] = [refuse(500, may_pass=True), refuse(500, may_pass=True)]
    assert (await create_gang(cluster, ask_for(), {}, means=make_means())).name == "train-1"


async def test_delete_waits_until_the_pods_are_gone():
    cluster = FakeCluster(gets_while_leaving=3)
    place = await create_gang(cluster, ask_for(), {})
    assert await delete_gang(cluster, place, log=LOG, means=make_means())
    assert not cluster.objects


async def test_delete_gives_up_on_pods_that_cannot_end(caplog):
    cluster = FakeCluster(gets_while_leaving=10_000)
    place = await create_gang(cluster, ask_for(), {})
    assert not await delete_gang(cluster, place, log=LOG, means=make_means())
    assert "kubectl get pods -n ml" in caplog.text


async def test_delete_leaves_a_namesake_alone():
    cluster = FakeCluster()
    await create_gang(cluster, ask_for(), {})
    assert await delete_gang(cluster, PLACE, log=LOG)
    other = await create_gang(cluster, ask_for(), {})
    former = GangPlace(namespace="ml", name="train-1", uid="former", grace_seconds=1)
    assert await delete_gang(cluster, former, log=LOG)
    assert cluster.objects[Kind.JOBSET, "ml", "train-1"]["metadata"]["uid"] == other.uid


@pytest.mark.parametrize(
    ("pid", "where"),
    [("ml:train-1", ("ml", "train-1")), ("4242", None), ("a:b:c", None), (":b", None), ("a:", None)],
)
def test_pid_is_namespace_and_name(pid: str, where: tuple[str, str] | None):
    assert parse_pid(pid) == where


# --- following --------------------------------------------------------------------------------------------


class FakeView:
    """Passes nothing on: the test says what is seen."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    def follow(self, uid: str, hear: Any) -> None: ...

    def unfollow(self, uid: str) -> None: ...


class Gang:
    """A gang that is followed, on a clock of its own."""

    def __init__(self, run: Any, *, keeps_finished: bool = False, resumes: bool = True) -> None:
        self.run, self.api, self.cluster, self.clock = run, FakeRuns(run), FakeCluster(), Clock()
        self.cluster.add(
            {"metadata": {"namespace": PLACE.namespace, "name": PLACE.name, "uid": PLACE.uid}, "spec": {}}
        )
        self.following = Following(
            view=FakeView(self.cluster),
            place=PLACE,
            run=run,
            reporter=Reporter(
                self.api,
                run,
                log=LOG,
                outage=Outage(lambda _: None),
                resource={},
                emit=lambda **_: None,
                sleep=self.clock.sleep,
            ),
            inadmissible_grace_seconds=600,
            keeps_finished=keeps_finished,
            resumes=resumes,
            means=Means(clock=self.clock, sleep=self.clock.sleep),
        )

    def say(self, phase: GangPhase, message: str = "", **facts: Any) -> None:
        self.following.hear(sight(PLACE.uid, phase, message, **facts))

    async def end(self) -> str:
        await asyncio.wait_for(self.following.follow(), 10)
        return self.api.state(self.run).type.value

    @property
    def is_gone(self) -> bool:
        return not self.cluster.objects


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following_room, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(following_room, "LAST_TICK_SECONDS", 0.01)


async def test_gang_that_failed_fails_its_run_and_goes():
    gang = Gang(make_run(Running()))
    gang.say(GangPhase.FAILED, "Node 1 failed.")
    assert await gang.end() == "FAILED"
    assert gang.api.state(gang.run).message == "Node 1 failed."
    assert gang.is_gone


async def test_gang_that_ended_stays_for_its_time_to_live():
    gang = Gang(make_run(Failed()), keeps_finished=True)
    gang.say(GangPhase.FAILED)
    assert await gang.end() == "FAILED"
    assert not gang.is_gone


async def test_report_of_the_leader_is_waited_for():
    gang = Gang(make_run(Running()))
    gang.say(GangPhase.SUCCEEDED)
    following = asyncio.create_task(gang.end())
    await asyncio.sleep(0.05)
    assert not following.done()
    gang.api.put(gang.run, Completed())
    assert await following == "COMPLETED"
    assert gang.is_gone


async def test_gang_without_a_report_crashes_its_run():
    gang = Gang(make_run(Running()))
    gang.say(GangPhase.SUCCEEDED)
    following = asyncio.create_task(gang.end())
    await asyncio.sleep(0.05)
    gang.clock.now = 31.0
    assert await following == "CRASHED"
    assert "PREFECT_API_URL" in str(gang.api.state(gang.run).message)


async def test_cancelled_gang_is_gone_before_its_run_is_called_cancelled():
    gang = Gang(make_run(Running()))
    gang.say(GangPhase.RUNNING)
    following = asyncio.create_task(gang.end())
    await asyncio.sleep(0.02)
    gang.api.put(gang.run, Cancelling(message="no more"))
    gang.following.see_run(gang.api.runs[gang.run.id])
    assert await following == "CANCELLED"
    assert gang.is_gone


async def test_preempted_gang_that_does_not_resume_is_gone_before_its_run_fails():
    gang = Gang(make_run(Running()), resumes=False)
    gang.say(GangPhase.STOPPING, "Preempted for a workload with a higher priority. It stops.", preemptions=1)
    at_end: list[bool] = []
    put = gang.api.put

    def look_and_put(run: FlowRun, state: State[Any], **fields: Any) -> None:
        at_end.append(gang.is_gone)
        put(run, state, **fields)

    gang.api.put = look_and_put
    assert await gang.end() == "FAILED"
    assert at_end == [True]
    assert "`resume_after_preemption` is off" in str(gang.api.state(gang.run).message)


async def test_gang_of_a_deleted_run_goes():
    gang = Gang(make_run(Running()))
    gang.following.see_run(None)
    assert await gang.end() == "RUNNING"
    assert gang.is_gone


async def test_gang_stays_for_the_next_round_when_its_run_gets_no_final_state():
    gang = Gang(make_run(Running()))
    gang.api.refusals = 100
    gang.say(GangPhase.FAILED)
    assert await gang.end() == "RUNNING"
    assert not gang.is_gone


async def test_run_without_pods_and_jobset_gets_its_final_state_however_often_it_is_refused():
    gang = Gang(make_run(Running()), resumes=False)
    gang.api.refusals = 100
    gang.say(GangPhase.STOPPING, preemptions=1)
    assert await gang.end() == "FAILED"
    assert gang.is_gone


async def test_gang_that_another_worker_follows_is_left_alone():
    gang = Gang(make_run(Running()))
    gang.say(GangPhase.RUNNING)
    gang.following.leave()
    assert await gang.end() == "RUNNING"
    assert not gang.is_gone


async def test_times_are_said_at_the_end(caplog):
    caplog.set_level(logging.INFO, logger=LOG.name)
    gang = Gang(make_run(Running()))
    gang.say(GangPhase.FAILED)
    await gang.end()
    assert caplog.messages[-1].startswith("The gang waited 0 s for its quota")


# --- the worker under a real API --------------------------------------------------------------------------


def test_worker_is_known_by_its_type():
    assert BaseWorker.get_worker_class_from_type("torch-elastic") is TorchElasticWorker


class Farm:
    """A pool with workers whose cluster is a fake."""

    def __init__(self, client: PrefectClient, pool: str) -> None:
        self.client, self.pool = client, pool
        self.cluster = FakeCluster()
        self.cluster.objects[Kind.LOCAL_QUEUE, "ml", "lq"] = {"metadata": {"name": "lq"}}
        self.observers: list[FakeObserver] = []

    def observe(self, *args: Any, **options: Any) -> FakeObserver:
        self.observers.append(FakeObserver(*args, **options))
        return self.observers[-1]

    def make_worker(self, name: str = "one") -> TorchElasticWorker:
        return TorchElasticWorker(work_pool_name=self.pool, name=name)

    async def create_run(self, **job_variables: Any) -> uuid.UUID:
        variables = {"image": "train:1", "command": "python -m train", "namespace": "ml", **job_variables}
        run = await self.client.create_flow_run(
            noop, state=Scheduled(), work_pool_name=self.pool, job_variables=variables
        )
        return run.id

    async def state(self, run_id: uuid.UUID) -> tuple[str, str]:
        state = (await self.client.read_flow_run(run_id)).state
        assert state
        return state.type.value, str(state.name)

    async def wait_for(self, run_id: uuid.UUID, name: str) -> None:
        async with asyncio.timeout(20):
            while (await self.state(run_id))[1] != name:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    @property
    def jobsets(self) -> list[dict[str, Any]]:
        return [thing for key, thing in self.cluster.objects.items() if key[0] is Kind.JOBSET]

    def say(self, phase: GangPhase, message: str = "") -> None:
        self.observers[-1].say(self.jobsets[0]["metadata"]["uid"], phase, message)


@flow
def noop() -> None:
    """Stands for a run."""


@pytest.fixture
async def farm(prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Farm]:
    async with get_client() as client:
        name = f"gpus-{uuid.uuid4().hex[:6]}"
        template = TorchElasticWorker.get_default_base_job_template()
        await client.create_work_pool(
            WorkPoolCreate(name=name, type="torch-elastic", base_job_template=template)
        )
        made = Farm(client, name)
        make = partial(Clusters, connect=lambda _: made.cluster, observe=made.observe)  # type: ignore[arg-type]
        monkeypatch.setattr(worker_room, "Clusters", make)
        yield made
        await client.delete_work_pool(name)


async def test_run_is_queued_preempted_and_completed_by_its_leader(farm: Farm):
    run_id = await farm.create_run(queue="lq", env={"HF_TOKEN": "hidden"})
    async with farm.make_worker() as worker:
        await worker.get_and_submit_flow_runs()
        await eventually(lambda: farm.jobsets and worker.followings)
        farm.say(GangPhase.QUEUED, "At place 3.")
        await farm.wait_for(run_id, "Queued")
        farm.say(GangPhase.RUNNING)
        await farm.client.set_flow_run_state(run_id, Running())  # the leader's
        farm.say(GangPhase.PREEMPTED)
        await farm.wait_for(run_id, "Preempted")
        assert (await farm.state(run_id))[0] == "PENDING"
        farm.say(GangPhase.STARTING)
        await farm.wait_for(run_id, "Starting")
        await farm.client.set_flow_run_state(run_id, Running())
        await farm.client.set_flow_run_state(run_id, Completed())
        farm.say(GangPhase.SUCCEEDED)
        await eventually(lambda: not worker.claimed)
        run = await farm.client.read_flow_run(run_id)
        assert (run.state_name, run.infrastructure_pid) == (
            "Completed",
            f"ml:{farm.cluster.deleted()[0]}",
        )
        assert not farm.jobsets
    assert farm.cluster.is_closed
    assert not farm.observers[-1].is_running


@pytest.mark.parametrize(
    ("variables", "errors", "message"),
    [
        pytest.param({"image": None}, [], "`image` is not set", id="spec"),
        pytest.param({}, [refuse(403, "Forbidden")], "HTTP 403", id="forbidden"),
    ],
)
async def test_run_whose_gang_cannot_be_created_fails(
    farm: Farm, variables: dict[str, Any], errors: list[Exception], message: str
):
    farm.cluster.errors["create", Kind.JOBSET] = list(errors)
    run_id = await farm.create_run(**variables)
    async with farm.make_worker() as worker:
        await worker.get_and_submit_flow_runs()
        await farm.wait_for(run_id, "Failed")
        await eventually(lambda: not worker.claimed)
    run = await farm.client.read_flow_run(run_id)
    assert run.state
    assert message in str(run.state.message)
    assert not farm.jobsets


class Late:
    """The API; somebody cancels the run right before the first state that is set here."""

    def __init__(self, client: PrefectClient) -> None:
        self._client, self._is_late = client, True

    async def set_flow_run_state(self, flow_run_id: uuid.UUID, state: State[Any], force: bool = False) -> Any:
        if self._is_late:
            self._is_late = False
            await self._client.set_flow_run_state(flow_run_id, Cancelling(message="no more"))
        return await self._client.set_flow_run_state(flow_run_id, state, force=force)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


async def test_cancellation_that_a_preemption_wrote_over_is_put_back(farm: Farm):
    run_id = await farm.create_run()
    await farm.client.set_flow_run_state(run_id, Running(), force=True)
    run = await farm.client.read_flow_run(run_id)
    late: Any = Late(farm.client)
    reporter = Reporter(late, run, log=LOG, outage=Outage(print), resource={}, emit=lambda **_: None)
    await reporter.show(0.0, make_status(GangPhase.PREEMPTED))
    state = (await farm.client.read_flow_run(run_id)).state
    assert state
    assert (state.type.value, state.name, state.message) == ("CANCELLING", "Cancelling", "no more")


async def test_gang_outlives_its_worker_and_is_taken_over(farm: Farm):
    run_id = await farm.create_run()

    async def die() -> None:
        async with farm.make_worker("one") as worker:
            await worker.get_and_submit_flow_runs()
            await eventually(lambda: worker.followings)
            raise asyncio.CancelledError  # as a worker ends that is told to

    with pytest.raises(asyncio.CancelledError):
        await die()
    assert farm.jobsets
    async with farm.make_worker("one") as worker:
        await eventually(lambda: worker.followings)
        farm.say(GangPhase.FAILED, "Node 1 failed.")
        await eventually(lambda: not worker.claimed)
    assert await farm.state(run_id) == ("FAILED", "Failed")
    assert not farm.jobsets


async def test_adopted_gang_gets_the_secret_that_its_worker_could_not_create(farm: Farm):
    run_id = await farm.create_run(env={"HF_TOKEN": "hidden"})
    async with farm.make_worker("one") as worker:
        run = await farm.client.read_flow_run(run_id)
        stray = farm.cluster.create(
            Kind.JOBSET, "ml", {"apiVersion": "v", "kind": "JobSet", **make_jobset(run_id)}
        )
        worker.adopt((await worker._open().open(None, "ml")), stray, run)
        await eventually(lambda: worker.followings)
        assert [key for key in farm.cluster.objects if key[0] is Kind.SECRET]
        farm.say(GangPhase.FAILED)
        await eventually(lambda: not worker.claimed)


async def test_worker_without_the_client_library_does_not_start(farm: Farm, monkeypatch: pytest.MonkeyPatch):
    def connect(_: Any) -> Any:
        raise MissingExtraError("Run `pip install 'prefect-torch-elastic[kubernetes]'`.")

    monkeypatch.setattr(worker_room, "Clusters", partial(Clusters, connect=connect))
    worker = farm.make_worker()
    with pytest.raises(MissingExtraError, match="pip install"):
        await worker.start(run_once=True, printer=lambda _: None)
    assert not worker.is_setup


async def test_cluster_that_is_away_at_the_start_is_no_reason_to_stop(
    farm: Farm, monkeypatch: pytest.MonkeyPatch
):
    answers: list[Any] = [ElasticError("away"), farm.cluster]

    def connect(_: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    make = partial(Clusters, connect=connect, observe=farm.observe)  # type: ignore[arg-type]
    monkeypatch.setattr(worker_room, "Clusters", make)
    await farm.create_run()
    async with farm.make_worker() as worker:
        await worker.get_and_submit_flow_runs()
        await eventually(lambda: worker.followings)
        farm.say(GangPhase.FAILED)
        await eventually(lambda: not worker.claimed)


async def test_cancelled_run_is_noticed_and_its_gang_deleted(farm: Farm, monkeypatch: pytest.MonkeyPatch):
    from prefect_torch_elastic.kubernetes import reconciler

    monkeypatch.setattr(reconciler, "LOOK_SECONDS", 0.05)
    run_id = await farm.create_run(queue="lq")
    async with farm.make_worker() as worker:
        await worker.get_and_submit_flow_runs()
        await eventually(lambda: worker.followings)
        farm.say(GangPhase.QUEUED)
        await farm.wait_for(run_id, "Queued")
        await farm.client.set_flow_run_state(run_id, Cancelling())
        await farm.wait_for(run_id, "Cancelled")
        await eventually(lambda: not worker.claimed)
    assert not farm.jobsets


async def test_infrastructure_is_killed_by_its_pid(farm: Farm):
    configuration = TorchElasticJobConfiguration()
    async with farm.make_worker() as worker:
        await create_gang(farm.cluster, ask_for(), {})
        await worker.kill_infrastructure("ml:train-1", configuration)
        assert farm.cluster.deleted() == ["train-1"]
        with pytest.raises(InfrastructureNotFound, match="no JobSet `none`"):
            await worker.kill_infrastructure("ml:none", configuration)
        with pytest.raises(InfrastructureNotAvailable, match="another type of worker"):
            await worker.kill_infrastructure("host:42:x", configuration)
