"""Gangs that are cancelled, or whose driver, worker or JobSet goes away: nothing is left, nothing doubled."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from prefect_torch_elastic.kubernetes.naming import (
    FLOW_RUN_LABEL,
    MANAGED_BY_LABEL,
    MANAGER,
    POOL_LABEL,
    WORKER_ANNOTATION,
)
from tests.conftest import RunningScript
from tests.hosted import cancel_run, client, create_run, read_state
from tests.kueueruns import LIMITS, PRELUDE, KueueLab, KueueRun, open_lab, render_preemptor
from tests.simulators.cluster import Cluster

pytestmark = [
    pytest.mark.kueue,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("prefect_server", "nothing_left"),
]

Cancel = Callable[..., None]

GONE_SECONDS = LIMITS["grace_seconds"] + 10.0

# A worker looks for gangs that nobody follows every 15 s; here, every 2 s.
_BUSY = """
from prefect_torch_elastic.kubernetes import reconciler
reconciler.TIDY_SECONDS = 2.0
"""

# The same flow run again, in another process.
_DRIVER = f"""{PRELUDE}
from uuid import UUID
from prefect.flow_engine import load_flow_run, run_flow

@elastic_task(name="pretrain", work_pool=POOL, store=STORE, **LIMITS)
def pretrain(folder: str, steps: int, seconds: float) -> dict:
    return train(folder, steps, seconds)

@flow(name="training")
def training():
    return pretrain(str(FOLDER), 150, 0.05)

print("RESULT", json.dumps(run_flow(training, flow_run=load_flow_run(UUID(sys.argv[5])))))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=2) as started:
        started.add_queue("lq", cpu=2)
        started.add_priority_class("low", 100)
        started.add_priority_class("high", 1000)
        yield started


@pytest.fixture(scope="module")
def shared_lab(
    prefect_server: str, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KueueLab]:
    folder = tmp_path_factory.mktemp("kills")
    with open_lab(cluster, folder, worker_prelude=_BUSY, queue_priority="low") as opened:
        yield opened


@pytest.fixture
def lab(shared_lab: KueueLab) -> KueueLab:
    if shared_lab.worker is None or shared_lab.worker.poll() is not None:
        shared_lab.start_worker()
    return shared_lab


@pytest.fixture
def held(cluster: Cluster) -> Iterator[None]:
    """The queue admits nothing."""
    cluster.hold(drain=False)
    yield
    cluster.resume()


@pytest.fixture
def nothing_left(shared_lab: KueueLab, cluster: Cluster) -> Iterator[None]:
    """Whatever happened: no object and no process of a gang is left, and no driver."""
    yield
    drivers = [script for script in shared_lab.runner.running if script.process.poll() is None]
    for driver in drivers:
        driver.end()
    try:
        assert not drivers, "a driver still runs"
        cluster.assert_empty()
    except AssertionError:
        for jobset in jobsets(cluster):  # the next test meets none of it
            cluster.api.delete("jobsets", jobset["metadata"]["name"], namespace=cluster.namespace)
        raise


def jobsets(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the JobSets of runs; others of the tests have no label of ours."""
    labels = f"{MANAGED_BY_LABEL}={MANAGER}"
    return cluster.api.list("jobsets", namespace=cluster.namespace, labels=labels)


# ---------------------------------------------------------------- somebody cancels


@pytest.fixture
def cancelled(lab: KueueLab, cluster: Cluster) -> Cancel:
    """`cancelled(run)` cancels a flow run in the UI, or its child, and looks at all that has to follow."""

    def cancel(run: KueueRun, *, is_child: bool = False) -> None:
        child, flow_run = run.child(), UUID((run.folder / "flow-runs").read_text().strip())
        assert child
        cancel_run(child.id if is_child else flow_run)
        began = time.monotonic()
        lab.until(lambda: not jobsets(cluster), "the end of the JobSet", None, GONE_SECONDS)
        lab.until(lambda: read_state(child.id).name == "Cancelled", "Cancelled", None, GONE_SECONDS)
        said = run.script.wait(GONE_SECONDS).stdout
        assert time.monotonic() - began < GONE_SECONDS
        if is_child:  # the flow decides what that means; this one fails
            assert "CancelledRun" in said
        else:
            assert read_state(flow_run).name == "Cancelled"

    return cancel


def start(lab: KueueLab, steps: int = 400, **limits: Any) -> KueueRun:
    return lab.start(f"return pretrain(str(FOLDER), {steps}, 0.05)", **limits)


@pytest.mark.usefixtures("held")
def test_gang_that_is_cancelled_in_the_queue_goes_at_once(lab: KueueLab, cancelled: Cancel):
    run = start(lab)
    run.wait_for_state("Queued")
    cancelled(run)


def test_gang_that_is_cancelled_while_it_starts_goes_at_once(lab: KueueLab, cancelled: Cancel):
    run = start(lab, image="missing:1")
    run.wait_for_state("Starting")
    cancelled(run, is_child=True)


def test_gang_that_is_cancelled_while_it_runs_goes_within_its_grace(lab: KueueLab, cancelled: Cancel):
    run = start(lab)
    run.wait_for_step(5)
    cancelled(run)


def test_gang_that_is_cancelled_after_a_preemption_goes_at_once(
    lab: KueueLab, cluster: Cluster, cancelled: Cancel
):
    run = start(lab)
    run.wait_for_step(5)
    lab.preempt(seconds=120)
    run.wait_for_state("Preempted")
    cancelled(run)
    lab.end_preemptor()


# ---------------------------------------------------------------- driver and worker are killed


@dataclass
class Restarts:
    """A flow run whose driver and worker are killed and started again, and the JobSets that were seen."""

    lab: KueueLab
    run: KueueRun
    flow_run: UUID

    @classmethod
    def begin(cls, lab: KueueLab) -> Restarts:
        folder = lab.folder / f"run-{uuid.uuid4().hex[:6]}"
        folder.mkdir()
        flow_run = create_run()
        (folder / "flow-runs").write_text(str(flow_run))
        script = cls._drive(lab, folder, flow_run)
        return cls(lab=lab, run=KueueRun(lab=lab, folder=folder, script=script), flow_run=flow_run)

    @staticmethod
    def _drive(lab: KueueLab, folder: Path, flow_run: UUID) -> RunningScript:
        fields = {**LIMITS, "queue": "lq", "namespace": lab.cluster.namespace, "max_attempts": 1}
        arguments = [str(folder), lab.pool, lab.store, json.dumps(fields), str(flow_run)]
        return lab.runner.start(_DRIVER, args=arguments)

    def restart_driver(self) -> None:
        """Kill the driver, and start another that finds the run."""
        self.run.kill_driver()
        self.run.script = self._drive(self.lab, self.run.folder, self.flow_run)

    def wait_until_found(self) -> None:
        self.lab.until(lambda: "runs this call already" in self.run.script.stderr, "the run again", self.run)

    def restart_worker(self) -> None:
        self.lab.end_worker()
        self.lab.start_worker()

    def uid(self) -> str:
        """Return the uid of the one JobSet."""
        (jobset,) = jobsets(self.lab.cluster)
        return jobset["metadata"]["uid"]


def test_driver_and_worker_that_are_killed_in_every_phase_find_their_gang_again_c039(
    lab: KueueLab, cluster: Cluster
):
    cluster.hold(drain=False)
    story = Restarts.begin(lab)
    run = story.run
    run.wait_for_state("Queued")
    uids = [story.uid()]
    story.restart_driver()
    story.restart_worker()
    story.wait_until_found()
    cluster.resume()
    run.wait_for_state("Starting", "Running")
    story.restart_worker()
    run.wait_for_step(20)
    uids.append(story.uid())
    story.restart_worker()
    lab.preempt(seconds=120)
    run.wait_for_state("Preempted")
    story.restart_driver()
    story.restart_worker()
    story.wait_until_found()
    uids.append(story.uid())
    lab.end_preemptor()
    value = run.result()
    assert value["begun"] >= 20
    assert (value["sum"], value["preemptions"], value["attempt"]) == (sum(3 * n for n in range(150)), 1, 1)
    assert len(set(uids)) == 1
    assert len(run.children()) == 1
    assert read_state(story.flow_run).name == "Completed"
    assert run.history()[-1] == "Completed"
    assert "Crashed" not in run.history()


@pytest.mark.usefixtures("held")
def test_two_workers_of_a_pool_do_not_fight_and_one_takes_over_from_the_other(
    lab: KueueLab, cluster: Cluster
):
    first = lab.worker
    runs = [start(lab), start(lab)]
    lab.until(lambda: len(jobsets(cluster)) == 2, "two JobSets", runs[0])
    lab.worker = None
    lab.start_worker("other")
    lab.until(lambda: "other" in online(lab), "the other worker", runs[0])
    time.sleep(5.0)  # two rounds of both, in which nothing may happen
    owners = {jobset["metadata"]["annotations"][WORKER_ANNOTATION] for jobset in jobsets(cluster)}
    assert owners == {"worker"}
    assert len(jobsets(cluster)) == 2
    assert first
    first.kill()
    first.wait()
    forget_worker(lab, "worker")  # Prefect calls it offline after half a minute
    lab.until(lambda: owners_of(cluster) == ["other", "other"], "the takeover", runs[0])
    for run in runs:
        (child,) = run.children()
        cancel_run(child.id)
    lab.until(lambda: not jobsets(cluster), "the end of both", None, GONE_SECONDS)
    for run in runs:
        assert "Cancelled" in run.error()
    lab.end_worker()
    forget_worker(lab, "other")


def owners_of(cluster: Cluster) -> list[str]:
    return [jobset["metadata"]["annotations"][WORKER_ANNOTATION] for jobset in jobsets(cluster)]


def online(lab: KueueLab) -> list[str]:
    """Return the names of the workers that Prefect calls online."""
    with client() as api:
        workers = api.read_workers_for_work_pool(lab.pool)
    return [worker.name for worker in workers if worker.status and worker.status.value == "ONLINE"]


def forget_worker(lab: KueueLab, name: str) -> None:
    with client() as api:
        api.request("DELETE", f"/work_pools/{lab.pool}/workers/{name}")  # type: ignore[arg-type]


# ---------------------------------------------------------------- JobSets go, or stay


def test_gang_whose_jobset_is_deleted_by_hand_is_sent_again_and_goes_on(lab: KueueLab, cluster: Cluster):
    run = start(lab, 120, max_attempts=2)
    run.wait_for_step(20)
    (jobset,) = jobsets(cluster)
    cluster.api.delete("jobsets", jobset["metadata"]["name"], namespace=cluster.namespace)
    value = run.result()
    assert value["begun"] >= 20
    assert value["sum"] == sum(3 * n for n in range(120))
    children = run.children()
    assert [child.state.name for child in children if child.state] == ["Crashed", "Completed"]
    assert children[0].state
    assert "Somebody deleted the JobSet of this run" in (children[0].state.message or "")


@pytest.mark.usefixtures("held")
def test_jobset_whose_run_is_over_or_unknown_is_deleted(lab: KueueLab, cluster: Cluster):
    from prefect.states import Completed

    with client() as api:
        pool_id = str(api.read_work_pool(lab.pool).id)
    for name, run_id in {"over": create_run(state=Completed()), "unknown": uuid.uuid4()}.items():
        jobset = render_preemptor(name, 1, 60)
        labels = {MANAGED_BY_LABEL: MANAGER, POOL_LABEL: pool_id, FLOW_RUN_LABEL: str(run_id)}
        jobset["metadata"]["labels"] |= labels
        cluster.api.create("jobsets", jobset, namespace=cluster.namespace)
    lab.until(lambda: not jobsets(cluster), "the end of both")


@pytest.mark.usefixtures("held")
def test_create_that_a_webhook_fails_and_whose_answer_gets_lost_makes_one_jobset_c047(
    lab: KueueLab, cluster: Cluster, cancelled: Cancel
):
    cluster.simulated_only()
    before = len(cluster.server.requests)
    refused = 'failed calling webhook "mjobset.kb.io": connection refused'
    cluster.faults.fail("create", "jobsets", status=500, text=f"Internal error occurred: {refused}")
    cluster.faults.lose_answers("create", "jobsets")
    run = start(lab)
    run.wait_for_state("Queued")
    answers = [
        request.status
        for request in cluster.server.requests[before:]
        if (request.verb, request.what) == ("create", "jobsets")
    ]
    assert answers == [500]  # and one that got lost
    assert len(jobsets(cluster)) == 1
    cancelled(run)
