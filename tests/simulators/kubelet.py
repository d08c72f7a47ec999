"""Nodes that run pods as processes of this machine, for an API server that is simulated or real.

In the test's own process, with a handle on everything:

    kubelet = Kubelet(RestClient.connect(kubeconfig), folder=folder)
    kubelet.start()
    kubelet.oom_kill("gang-node-0-1-x2x4z")
    kubelet.close()

As a process of its own: python -m tests.simulators.kubelet --kubeconfig FILE [--patience 5]

It is scheduler (if there is none), kubelet and container runtime in one: it binds pods to nodes, starts
containers, reports their status, and lets deleted pods go. There are no images, volumes, limits or probes:
the first container's command runs as it is, in an empty folder.
"""

from __future__ import annotations

import argparse
import logging
import signal
import tempfile
import threading
import time
from pathlib import Path

import urllib3

from tests.simulators.kubernetes.nodeobjects import HEARTBEAT_SECONDS, NodeObjects
from tests.simulators.kubernetes.nodes import DEFAULT_CAPACITY, Addresses, Nodes
from tests.simulators.kubernetes.objects import Obj
from tests.simulators.kubernetes.podnames import PodNames
from tests.simulators.kubernetes.podruns import PodHost, PodRun, change_status, delete_pod
from tests.simulators.kubernetes.podstatus import FINAL, evicted, note_never_run
from tests.simulators.kubernetes.restclient import RestClient, RestError, Watch
from tests.simulators.kubernetes.scheduling import Scheduling

_RETRY_SECONDS = 0.2
_END_SECONDS = 10.0
_LOOK_SECONDS = 0.2  # whether a scheduler has done its part

logger = logging.getLogger(__name__)


class Kubelet:
    """All nodes of a simulated cluster.

    Args:
        namespace: Whose pods to run, whichever node a scheduler gives them; when empty, those of everybody
            that are on our nodes.
        nodes: Where they run; two nodes by default.
        folder: For logs and homes of pods.
        dns_delay_seconds: How long a pod's name stays unknown after the pod has an address.
        scheduler_patience_seconds: How long a pod may wait for a scheduler of the cluster before it is put on
            a node here, like all that follow; by default it does not wait.
    """

    def __init__(
        self,
        api: RestClient,
        *,
        folder: Path,
        namespace: str = "",
        nodes: Nodes | None = None,
        dns_delay_seconds: float = 0.0,
        scheduler_patience_seconds: float = 0.0,
    ) -> None:
        self.nodes = Nodes(2) if nodes is None else nodes
        self._api, self._namespace = api, namespace
        self._objects = NodeObjects(api)
        self._scheduling = Scheduling(api, self.nodes, patience_seconds=scheduler_patience_seconds)
        self._host = PodHost(
            api=api,
            addresses=Addresses(),
            names=PodNames(folder / "names.json", delay_seconds=dns_delay_seconds),
            folder=folder,
        )
        self._lock = threading.RLock()
        self._runs: dict[str, PodRun] = {}  # by uid: those that are on a node, until their threads end
        self._unplaced: dict[str, Obj] = {}  # by uid, in the order in which they came
        self._logs: dict[str, Path] = {}  # by name of the pod: they outlive it
        self._watch: Watch | None = None
        self._closing = threading.Event()
        loops = (self._follow, self._beat)
        self._threads = [threading.Thread(target=loop, name="kubelet", daemon=True) for loop in loops]

    def start(self) -> None:
        """Register the nodes and run pods from now on."""
        self._objects.register(self.nodes.all())
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Kill all pods without a word, and end; the nodes are removed."""
        self._closing.set()
        with self._lock:
            if self._watch is not None:
                self._watch.close()
            runs = list(self._runs.values())
        for thread in filter(threading.Thread.is_alive, self._threads):
            thread.join(_END_SECONDS)
        for run in runs:
            run.lose()
        for run in runs:
            run.join(_END_SECONDS)
        self._host.names.close()
        self._host.addresses.close()
        self._objects.remove()
        self._api.close()

    # --- what a test may do to pods and nodes ------------------------------------------------------------

    def living(self) -> list[str]:
        """Return the names of pods of which something may run."""
        with self._lock:
            return sorted(run.pod["metadata"]["name"] for run in self._runs.values())

    def pid(self, pod: str) -> int:
        """Return the pid of a pod's first process."""
        process = self._find(pod).process
        if process is None:
            raise ValueError(f"`{pod}` has no process now.")
        return process.pid

    def log(self, pod: str) -> str:
        """Return what a pod has printed, living or not."""
        file = self._logs[pod]
        return file.read_text(errors="replace") if file.exists() else ""

    def kill(self, pod: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to the first process of a pod, whether it has a handler or not."""
        self._find(pod).kill(number)

    def oom_kill(self, pod: str) -> None:
        """Kill a pod's container for its memory."""
        self._find(pod).kill(signal.SIGKILL, reason="OOMKilled")

    def evict(self, pod: str, resource: str = "ephemeral-storage") -> None:
        """Evict a pod because its node runs out of a resource, which is no business of the eviction API."""
        run = self._find(pod)
        run.kill(signal.SIGKILL, verdict=evicted(run.pod, resource))

    def add_nodes(self, count: int, labels: dict[str, str] | None = None) -> None:
        """Add nodes, on which pods that wait for room are tried."""
        self._objects.register(self.nodes.add(count, labels))
        self._place_waiting()

    def lose_node(self, node: str) -> list[Obj]:
        """Cut a node off: its processes end unheard, and its pods seem to run. Return these pods."""
        self.nodes.lose(node)
        with self._lock:
            runs = [run for run in self._runs.values() if run.place.node == node]
        for run in runs:
            run.lose()
        self._objects.report_lost(node)
        return [run.pod for run in runs]

    # --- the loop ----------------------------------------------------------------------------------------

    def _follow(self) -> None:
        while not self._closing.is_set():
            try:
                self._list_and_watch()
            except (RestError, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                if not self._closing.is_set():
                    logger.warning("Looking at the pods again: %s", error)
                    self._closing.wait(_RETRY_SECONDS)

    def _beat(self) -> None:
        """Keep the nodes alive, and look after pods that wait for a scheduler in vain."""
        while not self._closing.wait(_LOOK_SECONDS if self._scheduling.is_undecided else HEARTBEAT_SECONDS):
            try:
                self._objects.beat(self.nodes.all())
                self._place_waiting()
            except (RestError, urllib3.exceptions.HTTPError) as error:
                logger.warning("The next heartbeat will do: %s", error)

    def _list_and_watch(self) -> None:
        pods, version = self._api.list_at("pods", namespace=self._namespace)
        there = {pod["metadata"]["uid"] for pod in pods}
        with self._lock:
            gone = [run for uid, run in self._runs.items() if uid not in there]
        for run in gone:
            run.stop(0)
        for pod in pods:
            self._see("MODIFIED", pod)
        watch = self._api.watch("pods", namespace=self._namespace, resource_version=version)
        with self._lock:
            self._watch = watch
        if self._closing.is_set():  # it may have begun after `close` looked
            watch.close()
        for kind, pod in watch:
            if kind == "ERROR":
                return
            if kind != "BOOKMARK":
                self._see(kind, pod)

    def _see(self, kind: str, pod: Obj) -> None:
        """Do what a pod's new version asks for."""
        metadata, uid = pod["metadata"], pod["metadata"]["uid"]
        is_going = kind == "DELETED" or "deletionTimestamp" in metadata
        with self._lock:
            run = self._runs.get(uid)
            if run is not None:
                if is_going:
                    run.stop(0 if kind == "DELETED" else metadata.get("deletionGracePeriodSeconds", 0))
                return
            self._scheduling.see(pod)
            if is_going and kind != "DELETED":
                self._let_go(pod)
            # A pod of a node that was lost, or of a kubelet before us, is not pending.
            waits = not is_going and pod.get("status", {}).get("phase", "Pending") == "Pending"
            name = pod["spec"].get("nodeName")
            if waits and not pod["spec"].get("schedulingGates") and (not name or self._plays(name)):
                self._unplaced[uid] = pod
            else:
                self._unplaced.pop(uid, None)
        self._place_waiting()

    def _plays(self, name: str) -> bool:
        """Whether we are the kubelet of a node.

        A scheduler may choose a node that is none of ours; within one namespace nobody else runs its pods.
        """
        node = self.nodes.find(name)
        return bool(self._namespace) if node is None else not node.is_lost

    def _place_waiting(self) -> None:
        """Start the pods for which there is room."""
        with self._lock:
            for uid, pod in list(self._unplaced.items()):
                node = self._scheduling.place(pod)
                if node is not None:
                    del self._unplaced[uid]
                    self._run(pod, node)
            left = list(self._unplaced.values())
        for pod in left:
            self._scheduling.explain(pod)

    def _run(self, pod: Obj, node: str) -> None:
        run = PodRun(pod, node=node, number=len(self._logs), host=self._host, on_end=self._forget)
        self._runs[run.uid] = run
        self._logs[pod["metadata"]["name"]] = run.log
        run.start()

    def _forget(self, run: PodRun) -> None:
        with self._lock:
            self._runs.pop(run.uid, None)
        self.nodes.release(run.uid)
        if not self._closing.is_set():
            self._place_waiting()

    def _let_go(self, pod: Obj) -> None:
        """Finish the deletion of a pod of ours of which nothing runs here."""
        name = pod["spec"].get("nodeName")
        if not name or not self._plays(name) or not pod["metadata"].get("deletionGracePeriodSeconds"):
            return
        if pod.get("status", {}).get("phase") not in FINAL:  # else its Job would wait for an end of it
            change_status(self._api, pod, lambda pod: note_never_run(pod, now=time.time()))
        delete_pod(self._api, pod, grace_seconds=0)

    def _find(self, pod: str) -> PodRun:
        with self._lock:
            for run in self._runs.values():
                if run.pod["metadata"]["name"] == pod:
                    return run
        raise ValueError(f"No pod `{pod}` runs here, but {', '.join(self.living()) or 'none'}.")


def main() -> None:
    """Run a kubelet until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulators.kubelet", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True, metavar="FILE")
    parser.add_argument("--namespace", default="", metavar="NAME", help="everybody's pods by default")
    parser.add_argument("--nodes", type=int, default=2, metavar="N")
    parser.add_argument("--cpu", default=DEFAULT_CAPACITY["cpu"], help="of each node")
    parser.add_argument("--memory", default=DEFAULT_CAPACITY["memory"], help="of each node")
    parser.add_argument("--gpu", default=DEFAULT_CAPACITY["nvidia.com/gpu"], help="of each node")
    parser.add_argument("--patience", type=float, default=0.0, metavar="S", help="with a scheduler, seconds")
    given = parser.parse_args()
    capacity = {**DEFAULT_CAPACITY, "cpu": given.cpu, "memory": given.memory, "nvidia.com/gpu": given.gpu}
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with tempfile.TemporaryDirectory(prefix="kubelet-") as folder:
        kubelet = Kubelet(
            RestClient.connect(given.kubeconfig),
            namespace=given.namespace,
            nodes=Nodes(given.nodes, capacity),
            folder=Path(folder),
            scheduler_patience_seconds=given.patience,
        )
        kubelet.start()
        print(f"{given.nodes} nodes run pods of {given.namespace or 'all namespaces'}", flush=True)
        ended.wait()
        kubelet.close()


if __name__ == "__main__":
    main()
