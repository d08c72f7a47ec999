"""A whole Kubernetes cluster for a test: API server, controllers, Kueue, and nodes that run real processes.

    with Cluster(nodes=2) as cluster:
        cluster.add_queue("lq", gpu=8)
        worker = start_worker(cluster.kubeconfig)
        pod = cluster.wait_for(lambda: cluster.pods(phase="Running"))[0]
        cluster.oom_kill(pod["metadata"]["name"])
        cluster.assert_empty()

With `PTE_TEST_KUBECONFIG` the API server and the controllers are those of that file, and only the nodes are
ours; each cluster has a namespace of its own there, and nodes and queues whose names end with it. What only
the simulator has (`storage`, `controllers`, `faults`, `server`) is missing then: such a test asks for
`simulated_only()` first.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil
import pytest

from tests.simulators.kubelet import Kubelet
from tests.simulators.kubernetes.borrowing import BorrowedServer
from tests.simulators.kubernetes.faults import Faults
from tests.simulators.kubernetes.hollow import HollowPods
from tests.simulators.kubernetes.lostnodes import NodeController
from tests.simulators.kubernetes.nodes import Nodes
from tests.simulators.kubernetes.objects import Obj
from tests.simulators.kubernetes.podprocesses import POD_MARK
from tests.simulators.kubernetes.queues import QueueAdministration
from tests.simulators.kubernetes.restclient import RestClient
from tests.simulators.kubernetes.runner import Controllers
from tests.simulators.kubernetes.server import ApiServer
from tests.simulators.kubernetes.storage import Storage

REAL_CLUSTER = "PTE_TEST_KUBECONFIG"

_POLL_SECONDS = 0.02
# On a real server: between two looks; what a scheduler, Kueue and the garbage collector may need.
_REAL_POLL_SECONDS = 0.2
_SCHEDULER_SECONDS = 5.0
_KUEUE_SECONDS = 30.0
_COLLECT_SECONDS = 20.0
_LEFT_BEHIND = ("jobsets", "jobs", "pods", "workloads", "secrets", "services")

T = TypeVar("T")


class Cluster(QueueAdministration):
    """A cluster from `start` to `close`.

    Args:
        nodes: How many nodes there are; without any, pods wait for one.
        capacity: What each node has, by resource; 8 cpu, 32Gi and 8 GPUs by default.
        hollow: Pods run at once and without processes, until `finish` (simulator only).
        dns_delay_seconds: How long a pod's name stays unknown after the pod has an address.
        controllers: Options of `Controllers`; the Job controller collects for 0.05 s by default, not for 1 s.

    Attributes:
        kubeconfig: What clients are given.
        namespace: Where the test's objects belong.
        api: Raw access to objects; its requests are not counted, and no faults meet them.
        server, storage, controllers, faults: The simulator's parts.
        backdoor: The server that `api` and the kubelet use.
    """

    server: ApiServer
    backdoor: ApiServer
    storage: Storage
    controllers: Controllers
    faults: Faults

    def __init__(
        self,
        *,
        nodes: int = 2,
        capacity: Mapping[str, str] | None = None,
        hollow: bool = False,
        dns_delay_seconds: float = 0.0,
        controllers: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._node_count, self._capacity = nodes, capacity
        self._hollow = hollow
        self._dns_delay_seconds = dns_delay_seconds
        self._controller_options = {"batch_seconds": 0.05, **(controllers or {})}
        self.is_real = REAL_CLUSTER in os.environ  # whether the API server is a real one
        self._poll_seconds = _REAL_POLL_SECONDS if self.is_real else _POLL_SECONDS
        self._parts = ExitStack()

    def start(self) -> Self:
        """Start all parts."""
        self._folder = Path(tempfile.mkdtemp(prefix="cluster-"))
        self._parts.callback(shutil.rmtree, self._folder, ignore_errors=True)
        try:
            if self.is_real:
                self._connect()
            else:
                self._simulate()
            self._start_pods()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End all parts and every process of a pod."""
        self._parts.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def simulated_only(self) -> None:
        """Skip the test on a real API server."""
        if self.is_real:
            pytest.skip("needs the simulated API server")

    # --- what happens to pods and nodes ------------------------------------------------------------------

    def kill(self, pod: str, number: int = 9) -> None:
        """Send a signal to the first process of a pod."""
        self.kubelet.kill(pod, number)

    def oom_kill(self, pod: str) -> None:
        """Kill a pod's container for its memory."""
        self.kubelet.oom_kill(pod)

    def evict(self, pod: str, resource: str = "ephemeral-storage") -> None:
        """Evict a pod because its node runs out of a resource."""
        self.kubelet.evict(pod, resource)

    def drain(self, pod: str) -> None:
        """Evict a pod through the eviction API, as `kubectl drain` does."""
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
        self.api.create("pods", eviction, namespace=self.namespace, name=pod, subresource="eviction")

    def lose_node(
        self, node: str, *, taint_after_seconds: float = 0.5, remove_after_seconds: float = 0.5
    ) -> None:
        """Cut a node off: its processes end unheard; see `NodeController` for what comes then."""
        self.node_controller.give_up(
            node,
            self.kubelet.lose_node(node),
            taint_after_seconds=taint_after_seconds,
            remove_after_seconds=remove_after_seconds,
        )

    def add_nodes(self, count: int, labels: dict[str, str] | None = None) -> None:
        """Add nodes, on which pods that wait for room are tried."""
        self.kubelet.add_nodes(count, labels)

    def finish(self, pod: str, exit_code: int = 0) -> None:
        """Let a hollow pod end."""
        found = self.api.get("pods", pod, namespace=self.namespace)
        assert found is not None, f"no pod `{pod}`"
        self.hollow_pods.finish(found, exit_code)

    # --- what a test looks at ----------------------------------------------------------------------------

    def pods(self, jobset: str = "", *, phase: str = "") -> list[Obj]:
        """Return the pods of a JobSet (or all) in a phase (or any); one that is told to end runs no more."""
        labels = f"jobset.sigs.k8s.io/jobset-name={jobset}" if jobset else ""
        found = self.api.list("pods", namespace=self.namespace, labels=labels)
        if phase == "Running":
            found = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
        return [pod for pod in found if phase in ("", pod.get("status", {}).get("phase"))]

    def jobset(self, name: str) -> Obj | None:
        """Return a JobSet."""
        return self.api.get("jobsets", name, namespace=self.namespace)

    def log(self, pod: str) -> str:
        """Return what a pod has printed."""
        return self.kubelet.log(pod)

    def wait_for(self, predicate: Callable[[], T], timeout_seconds: float = 30.0) -> T:
        """Return the predicate's first true value.

        Raises:
            AssertionError: If there is none within the time; it shows what is in the namespace then.
        """
        deadline = time.monotonic() + timeout_seconds
        while not (value := predicate()):
            if time.monotonic() > deadline:
                raise AssertionError(f"Nothing came within {timeout_seconds:g} s.\n{self.describe()}")
            time.sleep(self._poll_seconds)
        return value

    def describe(self) -> str:
        """Return a line per object of the namespace, for the output of a failed test."""
        lines: list[str] = []
        for plural in ("jobsets", "workloads", "jobs", "pods"):
            for obj in self.api.list(plural, namespace=self.namespace):
                status = obj.get("status", {})
                conditions = [
                    f"{condition['type']}={condition['status']}/{condition.get('reason', '')}"
                    for condition in status.get("conditions", [])
                ]
                words = [status.get("phase", ""), *conditions]
                lines.append(f"{plural} {obj['metadata']['name']}: {' '.join(filter(None, words))}")
        return "\n".join(lines) or "There are no objects."

    def assert_empty(self, timeout_seconds: float = 10.0) -> None:
        """Fail unless every object that a gang brings, and every process of a pod, is gone in time."""
        deadline = time.monotonic() + timeout_seconds + (_COLLECT_SECONDS if self.is_real else 0.0)
        while left := [*self._objects(), *self._processes()]:
            assert time.monotonic() < deadline, "\n".join(["Left behind:", *left, self.describe()])
            time.sleep(self._poll_seconds)

    def _objects(self) -> list[str]:
        return [
            f"{plural}/{obj['metadata']['name']}"
            for plural in _LEFT_BEHIND
            for obj in self.api.list(plural, namespace=self.namespace)
        ]

    def _processes(self) -> list[str]:
        """Return the processes of pods that run below this cluster's folder."""
        found: list[str] = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                if POD_MARK in environment and environment.get("HOME", "").startswith(str(self._folder)):
                    found.append(f"process {process.pid}: {' '.join(process.cmdline())}")
            except (psutil.Error, OSError):
                continue
        return found

    # --- how it starts -----------------------------------------------------------------------------------

    def _simulate(self) -> None:
        self.namespace = "default"
        self.storage, self.faults = Storage(), Faults()
        self.controllers = Controllers(self.storage, **self._controller_options)
        self.controllers.start()
        self._parts.callback(self.controllers.close)
        # Two doors to one storage: what a test breaks or counts at the first must not meet the kubelet.
        self.server = ApiServer(self.storage, faults=self.faults)
        self.backdoor = ApiServer(self.storage)
        for server in (self.server, self.backdoor):
            server.start()
            self._parts.callback(server.close)
        self.kubeconfig = self._folder / "kubeconfig"
        self.server.write_kubeconfig(self.kubeconfig)
        self.api = RestClient(self.backdoor.url)
        self._parts.callback(self.api.close)

    def _connect(self) -> None:
        # Absolute, since the worker and its kubeconfig's reader have other working directories.
        self.kubeconfig = Path(os.environ[REAL_CLUSTER]).expanduser().absolute()
        self._borrowed = BorrowedServer(self.kubeconfig)
        self.api, self.namespace = self._borrowed.api, self._borrowed.namespace
        self.suffix, self.labels = f"-{self.namespace}", self._borrowed.labels
        self.answers_seconds = _KUEUE_SECONDS
        self._parts.callback(self._borrowed.leave)
        self._borrowed.enter()
        self._parts.callback(self.remove_queues)

    def _start_pods(self) -> None:
        if self._hollow:
            self.simulated_only()
            self.hollow_pods = HollowPods(self.storage)
            self.hollow_pods.start()
            self._parts.callback(self.hollow_pods.close)
            return
        folder = self._folder / "pods"
        folder.mkdir()
        self.kubelet = Kubelet(
            RestClient.connect(self.kubeconfig) if self.is_real else RestClient(self.api.url),
            folder=folder,
            namespace=self.namespace if self.is_real else "",
            nodes=Nodes(self._node_count, self._capacity, suffix=self.suffix, labels=self.labels),
            dns_delay_seconds=self._dns_delay_seconds,
            scheduler_patience_seconds=_SCHEDULER_SECONDS if self.is_real else 0.0,
        )
        self._parts.callback(self.kubelet.close)
        self.kubelet.start()
        if self.is_real:
            self._parts.callback(self._borrowed.end_gangs)
        self.node_controller = NodeController(self.api)
        self._parts.callback(self.node_controller.close)
