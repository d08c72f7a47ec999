"""Gangs that live on a simulated cluster, and what an observer in another process sees, at what cost."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from prefect_torch_elastic.kubernetes.manifest import render_jobset
from prefect_torch_elastic.kubernetes.naming import select_pool
from prefect_torch_elastic.kubernetes.request import GangRequest
from tests.benchmarks import observer_process
from tests.simulators.cluster import Cluster

STEADY_SECONDS = 30.0  # the gangs do nothing but run, and half of them wait
_DEADLINE_SECONDS = 300.0
_POOL = "bench"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What the observer has cost up to a moment."""

    at: float
    cpu_seconds: float
    peak_mb: float
    requests: int


@dataclass(frozen=True, kw_only=True)
class Life:
    """What watching `gangs` gangs cost from the creation of the first to the end of the last.

    Attributes:
        gangs: How many there were.
        lives: The whole time.
        steady: The part of it in which nothing changed.
        latencies: Seconds from a change in the cluster to the observer's word of it.
        asked: Requests by verb and kind.
    """

    gangs: int
    lives: tuple[Cost, Cost]
    steady: tuple[Cost, Cost]
    latencies: list[float]
    asked: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def requests_per_gang(self) -> float:
        """Requests for one gang's whole life."""
        return (self.lives[1].requests - self.lives[0].requests) / self.gangs

    @property
    def cpu_seconds_per_gang(self) -> float:
        """CPU seconds for one gang's whole life."""
        return (self.lives[1].cpu_seconds - self.lives[0].cpu_seconds) / self.gangs

    @property
    def steady_requests(self) -> float:
        """Requests for a gang and minute while nothing changes."""
        return (self.steady[1].requests - self.steady[0].requests) / self._steady_gang_minutes

    @property
    def steady_cpu_seconds(self) -> float:
        """CPU seconds for a gang and minute while nothing changes."""
        return (self.steady[1].cpu_seconds - self.steady[0].cpu_seconds) / self._steady_gang_minutes

    @property
    def peak_mb(self) -> float:
        """The most memory that the process ever had."""
        return self.lives[1].peak_mb

    @property
    def _steady_gang_minutes(self) -> float:
        return self.gangs * (self.steady[1].at - self.steady[0].at) / 60


class Recorder:
    """Notes when gangs really run and end: in the simulator's storage, before any client can know."""

    def __init__(self, cluster: Cluster) -> None:
        self.moments: dict[tuple[str, str], float] = {}
        self._changes = cluster.storage.subscribe("jobsets")
        self._is_closing = False
        self._thread = threading.Thread(target=self._record, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_closing = True
        self._changes.close()
        self._thread.join(10)

    def count(self, phase: str) -> int:
        """Return how many gangs have reached a phase."""
        return sum(reached == phase for _, reached in list(self.moments))

    def _record(self) -> None:
        while not self._is_closing:
            if (change := self._changes.take()) is None:
                continue
            status = change.object.get("status", {})
            phases = {
                "Running": any(role.get("ready") for role in status.get("replicatedJobsStatus", ())),
                "Succeeded": any(
                    condition["type"] == "Completed" and condition["status"] == "True"
                    for condition in status.get("conditions", ())
                ),
            }
            for phase in (phase for phase, is_so in phases.items() if is_so):
                self.moments.setdefault((change.object["metadata"]["name"], phase), time.time())


class ObserverProcess:
    """The observer, in a process of its own."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._path = folder / f"sightings-{time.monotonic_ns()}"
        self._path.touch()
        script = Path(observer_process.__file__)
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(cluster.kubeconfig), select_pool(_POOL), str(self._path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate(timeout=30)

    def cost(self) -> Cost:
        """Return what it has cost so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        said = json.loads(self._process.stdout.readline())
        return Cost(at=time.time(), requests=sum(self.asked().values()), **said)

    def asked(self) -> Counter[str]:
        """Return how many requests there were by verb and kind; nobody else uses that door."""
        asked: Counter[str] = Counter()
        for (verb, what), count in self._cluster.server.counts.items():
            asked[f"{verb.lower()} {what.rpartition('/')[2]}"] += (
                count  # what means no kind is told by its path
            )
        return asked

    def sightings(self) -> dict[tuple[str, str], float]:
        """Return when each gang was first said to be in each phase."""
        first: dict[tuple[str, str], float] = {}
        for line in self._path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                row = json.loads(line)
                first.setdefault((row["gang"], row["phase"]), row["at"])
        return first


@contextmanager
def observed(folder: Path, *, gpus: int) -> Iterator[tuple[Cluster, ObserverProcess, Recorder]]:
    """A cluster with a queue of that size, an observer that has made its first lists, and a recorder."""
    with (
        Cluster(hollow=True) as cluster,
        ObserverProcess(cluster, folder) as observer,
        Recorder(cluster) as recorder,
    ):
        cluster.add_queue("lq", gpu=gpus)
        cluster.wait_for(lambda: cluster.server.open_watches == 3, timeout_seconds=60)
        yield cluster, observer, recorder


def live(folder: Path, *, gangs: int, nnodes: int) -> Life:
    """Let gangs live: one half runs while the other waits in the queue, then the other half."""
    half = gangs - gangs // 2
    with observed(folder, gpus=half * nnodes) as (cluster, observer, recorder):
        begun = observer.cost()
        for number in range(gangs):
            create_gang(cluster, f"gang-{number}", nnodes=nnodes)
        wait_for(cluster, recorder, "Running", half)
        cluster.wait_for(lambda: len({gang for gang, _ in observer.sightings()}) == gangs, _DEADLINE_SECONDS)
        time.sleep(5.0)  # questions that are asked once, at the start
        steady = observer.cost()
        time.sleep(STEADY_SECONDS)
        still = observer.cost()
        for ended in (half, gangs):
            finish_running(cluster)
            wait_for(cluster, recorder, "Succeeded", ended)
            wait_for(cluster, recorder, "Running", gangs)
        cluster.wait_for(
            lambda: sum(phase == "Succeeded" for _, phase in observer.sightings()) == gangs, _DEADLINE_SECONDS
        )
        seen = observer.sightings()
        return Life(
            gangs=gangs,
            lives=(begun, observer.cost()),
            steady=(steady, still),
            latencies=[seen[key] - at for key, at in recorder.moments.items() if key in seen],
            asked=dict(observer.asked()),
        )


def create_gang(cluster: Cluster, name: str, *, nnodes: int) -> None:
    """Create a gang that asks for one GPU a pod."""
    request = GangRequest(
        name=name,
        namespace=cluster.namespace,
        nnodes=nnodes,
        command=("python", "-m", "prefect_torch_elastic.node"),
        image="example/trainer:1",
        pool_id=_POOL,
        flow_run_id=f"run-{name}",
        flow_run_name=name,
        worker_name="bench",
        gpu=1,
        queue="lq",
    )
    manifest: dict[str, Any] = render_jobset(request)
    cluster.api.create("jobsets", manifest, namespace=cluster.namespace)


def wait_for(cluster: Cluster, recorder: Recorder, phase: str, count: int) -> None:
    """Wait until so many gangs have reached a phase."""
    cluster.wait_for(lambda: recorder.count(phase) >= count, _DEADLINE_SECONDS)


def finish_running(cluster: Cluster, *, exit_code: int = 0, most: int | None = None) -> None:
    """Let the running pods end, or the first few of them."""
    running = [pod for pod in cluster.storage.list("pods") if pod["status"].get("phase") == "Running"]
    for pod in running[:most]:
        cluster.hollow_pods.finish(pod, exit_code)


def median_milliseconds(latencies: list[float]) -> float:
    """Return the median in milliseconds."""
    return statistics.median(latencies) * 1000
