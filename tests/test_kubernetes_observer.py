"""The observer of gangs: what it says of them, and what it asks for that."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from prefect_torch_elastic.kubernetes.answers import ClusterError
from prefect_torch_elastic.kubernetes.client import Cluster
from prefect_torch_elastic.kubernetes.manifest import render_jobset
from prefect_torch_elastic.kubernetes.naming import select_pool
from prefect_torch_elastic.kubernetes.observer import Observer, Sighting
from prefect_torch_elastic.kubernetes.phases import GangPhase
from prefect_torch_elastic.kubernetes.request import GangRequest
from prefect_torch_elastic.kubernetes.resources import Kind
from tests.gangobjects import (
    AWAY,
    FORBIDDEN,
    LABELS,
    Clock,
    ScriptedCluster,
    Thing,
    as_cluster,
    failed,
    failing,
    job,
    jobset,
    meta,
    pod,
    running,
    starting,
    workload,
)
from tests.simulators.cluster import Cluster as SimulatedCluster
from tests.simulators.kubernetes.faults import Break


class Stage:
    """An observer of a scripted cluster on a virtual clock, without threads."""

    def __init__(self, *things: Thing) -> None:
        self.clock = Clock()
        self.cluster = ScriptedCluster(self.clock, *things)
        self.seen: list[Sighting] = []
        self.warnings: list[str] = []
        self.observer = Observer(
            as_cluster(self.cluster),
            namespaces=["ml"],
            labels=LABELS,
            listen=self.seen.append,
            warn=self.warnings.append,
            clock=self.clock,
            now=self.clock.now,
        )

    @property
    def phases(self) -> list[GangPhase]:
        return [sighting.status.phase for sighting in self.seen]

    def sync(self, *kinds: Kind) -> None:
        """List everything, or some kinds, and say what follows within a second."""
        for watcher in self.observer._watchers:
            if not kinds or watcher.source.kind in kinds:
                watcher.run_once()
        self.wait(1.0)

    def change(self, *things: Thing) -> None:
        self.cluster.put(*things)
        self.sync()

    def wait(self, seconds: float) -> None:
        """Let time pass as the observer's thread would."""
        until = self.clock.seconds + seconds
        while (due := self.observer.step()) <= until:
            self.clock.seconds = max(self.clock.seconds, due)
        self.clock.seconds = until


def queued() -> Stage:
    stage = Stage(jobset(), workload())
    stage.sync()
    return stage


def test_observer_tells_each_phase_of_a_gang_once():
    stage = queued()
    stage.sync()
    stage.change(starting(), workload(admitted=True), job(), pod(0), pod(1))
    stage.change(running(), job(ready=2))
    assert stage.phases == [GangPhase.QUEUED, GangPhase.STARTING, GangPhase.RUNNING]
    sighting = stage.seen[-1]
    assert (sighting.namespace, sighting.name, sighting.uid) == ("ml", "gang", "uid-of-gang")
    assert sighting.flow_run_id == "run-of-gang"
    known = stage.observer.sighting("uid-of-gang")
    assert known is not None
    assert known.status == sighting.status


def test_observer_says_nothing_before_all_kinds_were_listed():
    stage = Stage(jobset(), workload())
    stage.sync(Kind.JOBSET, Kind.JOB)
    assert not stage.seen
    stage.sync(Kind.WORKLOAD)
    assert stage.phases == [GangPhase.QUEUED]


@pytest.mark.parametrize("is_told", [True, False], ids=["by-an-event", "by-the-next-list"])
def test_observer_tells_that_a_gang_is_gone(is_told: bool):
    stage = queued()
    gone = stage.cluster.delete(jobset())
    if is_told:
        stage.cluster.put(gone)
        stage.cluster.scripts[Kind.JOBSET] = [[("DELETED", gone)]]
    stage.sync()
    assert stage.phases == [GangPhase.QUEUED, GangPhase.GONE]
    assert stage.seen[-1].jobset is None
    assert stage.observer.sighting("uid-of-gang") is None


def test_observer_tells_that_kueue_ignores_a_gang_without_any_event_c042():
    stage = Stage(jobset())
    stage.sync()
    stage.wait(20)
    assert GangPhase.UNMANAGED not in stage.phases
    stage.wait(20)
    assert stage.phases[-1] is GangPhase.UNMANAGED
    assert stage.cluster.asked["list workload of one gang"] == 1


def test_observer_finds_a_workload_that_no_watch_told_of_before_it_calls_kueue_deaf():
    stage = Stage(jobset())
    stage.sync()
    stage.cluster.put(workload())
    stage.wait(40)
    assert GangPhase.UNMANAGED not in stage.phases
    assert stage.phases[-1] is GangPhase.QUEUED


def test_observer_does_not_call_kueue_deaf_while_the_api_is_away():
    stage = Stage(jobset())
    stage.sync()
    stage.cluster.errors[Kind.WORKLOAD] = [AWAY] * 3
    stage.wait(34)
    assert GangPhase.UNMANAGED not in stage.phases
    stage.wait(10)
    assert stage.phases[-1] is GangPhase.UNMANAGED


def test_observer_does_not_take_workloads_that_it_may_not_see_for_none():
    stage = Stage(jobset())
    stage.cluster.errors[Kind.WORKLOAD] = [FORBIDDEN] * 9
    stage.sync()
    stage.wait(60)
    assert GangPhase.UNMANAGED not in stage.phases


def test_observer_looks_at_pods_while_they_start_and_ever_more_rarely():
    stage = Stage(starting(), workload(admitted=True), job(), pod(0), pod(1, phase="Pending"))
    stage.sync()
    assert stage.cluster.asked["list pod of one gang"] == 1
    stage.wait(60)
    early = stage.cluster.asked["list pod of one gang"]
    assert 4 <= early <= 8
    stage.wait(600)
    assert stage.cluster.asked["list pod of one gang"] - early <= 11


def test_observer_leaves_pods_alone_while_all_run_or_none_exists():
    stage = queued()
    stage.wait(120)
    stage.change(running(), workload(admitted=True), job(ready=2))
    before = stage.cluster.asked["list pod of one gang"]
    stage.wait(600)
    assert stage.cluster.asked["list pod of one gang"] == before <= 1


def test_observer_lists_pods_of_a_gang_that_changes_all_the_time_only_now_and_then():
    stage = Stage(starting(), workload(admitted=True), job(), pod(0))
    for _ in range(30):
        stage.change(job())
    assert 10 <= stage.cluster.asked["list pod of one gang"] <= 16


def test_observer_says_why_pods_failed_with_the_first_word_of_it():
    stage = Stage(running(), workload(admitted=True), job(ready=2))
    stage.sync()
    stage.change(failing(), pod(0), pod(1, phase="Failed", exit_code=1))
    failure = stage.seen[-1].failure
    assert stage.phases == [GangPhase.RUNNING, GangPhase.RESTARTING]
    assert failure is not None
    assert (failure.pod, failure.exit_code) == ("gang-node-0-1-abcde", 1)


def test_observer_keeps_the_first_failure_when_only_its_victims_are_left():
    stage = Stage(running(), workload(admitted=True), job(ready=2))
    stage.sync()
    stage.change(failing(), pod(0), culprit := pod(1, phase="Failed", exit_code=1))
    stage.cluster.delete(culprit)
    stage.change(failed(), pod(0, phase="Failed", exit_code=143))
    stage.wait(60)
    failure = stage.seen[-1].failure
    assert stage.phases[-1] is GangPhase.FAILED
    assert failure is not None
    assert failure.pod == "gang-node-0-1-abcde"


def test_observer_forgets_a_failure_when_all_pods_run_again():
    stage = Stage(running(), workload(admitted=True), job(ready=2))
    stage.sync()
    stage.change(failing(), pod(1, phase="Failed", exit_code=1))
    stage.change(running(), job(ready=2))
    assert (stage.phases[-1], stage.seen[-1].failure) == (GangPhase.RUNNING, None)


@pytest.mark.parametrize("error", [AWAY, FORBIDDEN], ids=["away", "forbidden"])
def test_observer_tells_that_a_gang_failed_when_its_pods_cannot_be_listed(error: ClusterError):
    stage = Stage(running(), workload(admitted=True), job(ready=2))
    stage.sync()
    stage.cluster.errors[Kind.POD] = [error] * 9
    stage.change(failed())
    assert (stage.phases[-1], stage.seen[-1].failure) == (GangPhase.FAILED, None)
    assert len(stage.warnings) == (error is FORBIDDEN)


def test_observer_tells_that_kueue_cannot_start_a_gang_which_has_no_pods():
    stage = queued()
    refused = workload()
    refused["status"]["conditions"] = [
        {"type": "Finished", "status": "True", "reason": "FailedToStart", "message": "conflict"}
    ]
    stage.change(refused)
    assert stage.phases[-1] is GangPhase.FAILED
    assert stage.seen[-1].status.detail == "conflict"


def test_observer_asks_nothing_more_about_a_gang_that_has_failed():
    stage = Stage(failed(), workload(admitted=True), failing(), pod(1, phase="Failed", exit_code=1))
    stage.sync()
    stage.wait(60)
    asked = stage.cluster.asked.copy()
    stage.wait(3600)
    assert stage.cluster.asked == asked


def test_observer_says_the_place_in_the_queue_and_when_it_changes():
    stage = Stage(jobset(), workload())
    stage.cluster.position = (2, 5)
    stage.sync()
    stage.cluster.position = (0, 3)
    stage.wait(61)
    assert stage.phases == [GangPhase.QUEUED, GangPhase.QUEUED]
    assert stage.seen[0].status.message != stage.seen[1].status.message


def test_observer_asks_for_places_in_the_queue_at_most_once_a_second():
    names = [f"gang-{number}" for number in range(100)]
    stage = Stage(*map(jobset, names), *map(workload, names))
    stage.sync()
    stage.wait(300)
    assert 200 <= stage.cluster.asked["position"] <= 302


def test_observer_lists_and_watches_no_more_for_many_gangs():
    asked: list[Counter[str]] = []
    for count in (1, 100):
        names = [f"gang-{number}" for number in range(count)]
        stage = Stage(*map(running, names), *(workload(name, admitted=True) for name in names))
        stage.sync()
        stage.wait(600)
        assert len(stage.seen) == count
        asked.append(stage.cluster.asked)
    assert asked[0] == asked[1]


def test_observer_survives_objects_of_any_shape():
    stage = queued()
    odd = {
        "kind": "JobSet",
        "metadata": meta("odd", "uid-of-odd"),
        "spec": {"replicatedJobs": "none"},
        "status": [],
    }
    stage.change(odd)
    assert {sighting.name for sighting in stage.seen} == {"gang", "odd"}


# --- its threads -----------------------------------------------------------------------------------------


class Live:
    """An observer in its own threads; the watches wait until they are closed."""

    def __init__(self, *things: Thing, listen: Callable[[Sighting], None]) -> None:
        self.cluster = ScriptedCluster(Clock(), *things)
        for kind in (Kind.JOBSET, Kind.JOB, Kind.WORKLOAD):
            self.cluster.scripts[kind] = [[math.inf]] * 9
        self.warnings: list[str] = []
        self.observer = Observer(
            as_cluster(self.cluster),
            namespaces=["ml"],
            labels=LABELS,
            listen=listen,
            warn=self.warnings.append,
        )

    def __enter__(self) -> Live:
        self.observer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.observer.close()


def observer_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("observer")]


def test_observer_ends_its_threads():
    told = threading.Event()
    with Live(jobset(), workload(), listen=lambda _: told.set()):
        assert told.wait(10)
        assert len(observer_threads()) == 4
    assert observer_threads() == []


def test_observer_looks_into_a_namespace_that_is_added_later():
    told: list[str] = []
    both = threading.Event()

    def listen(sighting: Sighting) -> None:
        told.append(sighting.namespace)
        if len(told) == 2:
            both.set()

    elsewhere = jobset("other")
    elsewhere["metadata"]["namespace"] = "elsewhere"
    with Live(jobset(), workload(), elsewhere, listen=listen) as live:
        live.observer.add_namespace("elsewhere")
        live.observer.add_namespace("elsewhere")
        assert both.wait(10)
        assert len(observer_threads()) == 7
    assert sorted(told) == ["elsewhere", "ml"]


def test_observer_goes_on_when_a_listener_breaks():
    second = threading.Event()
    names: list[str] = []

    def listen(sighting: Sighting) -> None:
        names.append(sighting.name)
        if len(names) == 2:
            second.set()
        raise RuntimeError("a bug in the listener")

    with Live(jobset("a"), workload("a"), jobset("b"), workload("b"), listen=listen) as live:
        assert second.wait(10)
    assert sorted(set(names)) == ["a", "b"]
    assert live.warnings


# --- on a simulated cluster ------------------------------------------------------------------------------


class Wired:
    """An observer of a simulated cluster with real watches; it notes the names of gangs that run."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.simulated = cluster
        self.running: set[str] = set()
        self.cluster = Cluster.connect(kubeconfig=str(cluster.kubeconfig))
        self.observer = Observer(
            self.cluster,
            namespaces=[cluster.namespace],
            labels=select_pool("pool"),
            listen=self._listen,
            warn=print,
        )

    def _listen(self, sighting: Sighting) -> None:
        if sighting.status.phase is GangPhase.RUNNING:
            self.running.add(sighting.name)

    def run_gang(self, name: str) -> None:
        """Create a gang, and wait until it is said to run."""
        request = GangRequest(
            name=name,
            namespace=self.simulated.namespace,
            nnodes=2,
            command=("python",),
            image="example/trainer:1",
            pool_id="pool",
            flow_run_id=f"run-of-{name}",
            flow_run_name=name,
            worker_name="worker",
            queue="lq",
        )
        self.simulated.api.create("jobsets", render_jobset(request), namespace=self.simulated.namespace)
        self.simulated.wait_for(lambda: name in self.running)


@pytest.fixture
def wired() -> Iterator[Wired]:
    with SimulatedCluster(hollow=True) as cluster:
        cluster.add_queue("lq")
        wired = Wired(cluster)
        wired.observer.start()
        yield wired
        wired.observer.close()
        wired.cluster.close()
        assert observer_threads() == []


def test_observer_sees_a_gang_that_starts_after_every_kind_of_broken_watch(wired: Wired):
    wired.run_gang("first")
    for how in (Break.DROP, Break.GARBAGE, Break.GONE):
        for plural in ("jobsets", "jobs", "workloads"):
            wired.simulated.faults.break_watches(plural, how)
        wired.run_gang(f"after-{how}")


def test_observer_sees_gangs_again_when_the_api_server_was_away(wired: Wired):
    wired.run_gang("first")
    wired.simulated.faults.fail("list", "*", status=503, times=3)
    wired.simulated.server.drop_connections()
    wired.run_gang("second")
