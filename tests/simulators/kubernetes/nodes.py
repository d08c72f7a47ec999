"""Which simulated node a pod goes to, whether it fits, and which address it gets.

Addresses are those of one /24 network of loopback, which no other kubelet on this machine uses meanwhile: a
leader may listen on the same port as the leader of another test.
"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction

from tests.simulators.kubernetes.objects import Obj
from tests.simulators.kubernetes.quantities import parse_quantity

HOST_IP = "127.0.0.1"
DEFAULT_CAPACITY = {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "8", "ephemeral-storage": "100Gi"}

_GUARD_PORT = 29399  # whoever is bound to it on .255 has the network


def sum_requests(pod: Obj) -> dict[str, Fraction]:
    """Return what a pod asks of its node; a limit without a request is one."""
    total: dict[str, Fraction] = {"pods": Fraction(1)}
    for container in pod["spec"]["containers"]:
        resources = container.get("resources") or {}
        asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        for name, value in asked.items():
            total[name] = total.get(name, Fraction(0)) + parse_quantity(value)
    return total


@dataclass(kw_only=True)
class SimulatedNode:
    """One node: what it has, and what runs on it."""

    name: str
    capacity: Mapping[str, str]
    labels: Mapping[str, str]
    used: dict[str, dict[str, Fraction]] = field(default_factory=dict)
    is_lost: bool = False

    def lacks(self, requests: Mapping[str, Fraction]) -> list[str]:
        """Return the resources of which too little is left."""
        return [name for name, value in requests.items() if value > self.free(name)]

    def free(self, name: str) -> Fraction:
        """Return how much of a resource is left."""
        total = parse_quantity(self.capacity.get(name, "110" if name == "pods" else "0"))
        return total - sum(requests.get(name, Fraction(0)) for requests in self.used.values())


class Nodes:
    """All simulated nodes; safe for threads.

    Args:
        count: How many there are at first.
        capacity: What each has, by resource.
        suffix: What their names end with.
        labels: What all of them have, besides their host's name.
    """

    def __init__(
        self,
        count: int,
        capacity: Mapping[str, str] | None = None,
        *,
        suffix: str = "",
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._capacity = dict(DEFAULT_CAPACITY if capacity is None else capacity)
        self._suffix, self._labels = suffix, dict(labels or {})
        self._lock = threading.Lock()
        self._nodes: dict[str, SimulatedNode] = {}
        self.add(count)

    def add(self, count: int, labels: Mapping[str, str] | None = None) -> list[SimulatedNode]:
        """Add nodes, and return them."""
        with self._lock:
            added = [self._make(len(self._nodes) + i, labels or {}) for i in range(count)]
            self._nodes |= {node.name: node for node in added}
        return added

    def all(self) -> list[SimulatedNode]:
        """Return the nodes."""
        return list(self._nodes.values())

    def find(self, name: str) -> SimulatedNode | None:
        """Return a node, None when it is none of ours."""
        return self._nodes.get(name)

    def lose(self, name: str) -> None:
        """Give no more pods to a node."""
        self._nodes[name].is_lost = True

    def place(self, pod: Obj) -> str | None:
        """Put the pod on the node with the fewest pods where it fits; None when there is none."""
        requests, uid = sum_requests(pod), pod["metadata"]["uid"]
        with self._lock:
            fitting = [node for node in self._matching(pod) if not node.lacks(requests)]
            if not fitting:
                return None
            chosen = min(fitting, key=lambda node: len(node.used))
            chosen.used[uid] = requests
            return chosen.name

    def take(self, pod: Obj) -> str:
        """Count a pod that somebody else has put on a node, if that is one of ours; return its name."""
        name: str = pod["spec"]["nodeName"]
        if node := self.find(name):
            with self._lock:
                node.used[pod["metadata"]["uid"]] = sum_requests(pod)
        return name

    def release(self, uid: str) -> None:
        """Take a pod off its node."""
        with self._lock:
            for node in self._nodes.values():
                node.used.pop(uid, None)

    def explain(self, pod: Obj) -> str:
        """Return why no node takes the pod, in the scheduler's words."""
        requests = sum_requests(pod)
        with self._lock:
            total, matching = len(self._nodes), self._matching(pod)
            short = [name for node in matching for name in node.lacks(requests)]
        reasons = [f"{short.count(name)} Insufficient {name}" for name in sorted(set(short))]
        if total > len(matching):
            reasons.append(f"{total - len(matching)} node(s) didn't match Pod's node affinity/selector")
        if not total:
            return "no nodes available to schedule pods"
        return f"0/{total} nodes are available: {', '.join(reasons)}."

    def _matching(self, pod: Obj) -> list[SimulatedNode]:
        wanted = (pod["spec"].get("nodeSelector") or {}).items()
        return [node for node in self._nodes.values() if not node.is_lost and wanted <= node.labels.items()]

    def _make(self, number: int, labels: Mapping[str, str]) -> SimulatedNode:
        name = f"node-{number}{self._suffix}"
        own = {"kubernetes.io/hostname": name, **self._labels}
        return SimulatedNode(name=name, capacity=self._capacity, labels={**own, **labels})


class Addresses:
    """Addresses of one network, 127.20.x.1 to 127.20.x.250, each of one pod at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._guard, self._network = _take_network(random.sample(range(256), 256))
        self._used: set[str] = set()
        self._last = 0

    def take(self) -> str:
        """Return an address that no living pod has, the one used longest ago."""
        with self._lock:
            for _ in range(250):
                self._last = self._last % 250 + 1
                address = f"{self._network}.{self._last}"
                if address not in self._used:
                    self._used.add(address)
                    return address
        raise RuntimeError("All 250 addresses of this kubelet are in use: end some pods first.")

    def release(self, address: str) -> None:
        """Take back an address."""
        with self._lock:
            self._used.discard(address)

    def close(self) -> None:
        """Leave the network to others."""
        self._guard.close()


def _take_network(candidates: Iterable[int]) -> tuple[socket.socket, str]:
    for number in candidates:
        guard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with suppress(OSError):
            guard.bind((f"127.20.{number}.255", _GUARD_PORT))
            return guard, f"127.20.{number}"
        guard.close()
    raise RuntimeError("Every network 127.20.x of this machine is in use by another simulated kubelet.")
