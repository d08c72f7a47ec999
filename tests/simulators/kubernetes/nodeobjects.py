"""The Node objects of simulated nodes: what a real control plane wants to see in order to use them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import urllib3

from tests.simulators.kubernetes.nodes import HOST_IP, SimulatedNode
from tests.simulators.kubernetes.objects import Obj, format_time
from tests.simulators.kubernetes.restclient import RestClient, RestError

# The node lifecycle controller gives up a node after 40 to 50 s without a sign of life. A heartbeat in the
# status is one, like a Lease; this way nothing else is left to be removed.
HEARTBEAT_SECONDS = 10.0

logger = logging.getLogger(__name__)

_PRESSURES = ("MemoryPressure", "DiskPressure", "PIDPressure")


class NodeObjects:
    """The objects of a kubelet's nodes, from `register` to `remove`."""

    def __init__(self, api: RestClient, *, clock: Callable[[], float] = time.time) -> None:
        self._api, self._clock = api, clock
        self._registered: list[str] = []
        self._beaten_at = clock()

    def register(self, nodes: Iterable[SimulatedNode]) -> None:
        """Create the nodes, ready for pods; what an earlier kubelet has left of them is used."""
        for node in nodes:
            try:
                self._api.create("nodes", _render(node, now=self._clock()))
            except RestError as error:
                if error.status != 409:
                    raise
                self._report(node.name, "True")
            # Admission taints each new node as not ready, and only the node lifecycle controller, if it
            # runs, would take that back.
            self._taint(node.name, None)
            self._registered.append(node.name)

    def beat(self, nodes: Iterable[SimulatedNode]) -> None:
        """Say that the nodes live, if it is time to."""
        if self._clock() - self._beaten_at < HEARTBEAT_SECONDS:
            return
        self._beaten_at = self._clock()
        for node in nodes:
            if not node.is_lost:
                self._report(node.name, "True")

    def report_lost(self, name: str) -> None:
        """Write that nothing is heard of a node, as the node lifecycle controller does some time later.

        It is done at once, so that a scheduler puts no more pods there.
        """
        self._report(name, "Unknown")
        self._taint(name, [{"key": "node.kubernetes.io/unreachable", "effect": "NoSchedule"}])

    def remove(self) -> None:
        """Delete the nodes, if the API server is still there."""
        try:
            while self._registered:
                self._api.delete("nodes", self._registered.pop())
        except (RestError, urllib3.exceptions.HTTPError) as error:
            logger.warning("The nodes stay: %s", error)

    def _report(self, name: str, ready: str) -> None:
        status = {"conditions": _render_conditions(ready, now=self._clock())}
        self._patch(name, {"status": status}, subresource="status")

    def _taint(self, name: str, taints: list[Obj] | None) -> None:
        self._patch(name, {"spec": {"taints": taints}})

    def _patch(self, name: str, body: Obj, *, subresource: str = "") -> None:
        try:
            self._api.patch("nodes", name, body, subresource=subresource)
        except RestError as error:
            if error.status != 404:  # somebody has removed the node
                raise


def _render(node: SimulatedNode, *, now: float) -> Obj:
    resources = {**node.capacity, "pods": "110"}
    return {
        "metadata": {"name": node.name, "labels": dict(node.labels)},
        "status": {
            "capacity": resources,
            "allocatable": resources,
            "conditions": _render_conditions("True", now=now),
            "addresses": [{"type": "InternalIP", "address": HOST_IP}],
        },
    }


def _render_conditions(ready: str, *, now: float) -> list[Obj]:
    """Return all conditions of a node; `ready` is True, False or Unknown."""
    moment = format_time(now)
    times = {"lastHeartbeatTime": moment, "lastTransitionTime": moment}
    reason = "KubeletReady" if ready == "True" else "NodeStatusUnknown"
    no_pressure = [{"type": kind, "status": "False", "reason": "Simulated", **times} for kind in _PRESSURES]
    return [*no_pressure, {"type": "Ready", "status": ready, "reason": reason, **times}]
