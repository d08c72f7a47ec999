"""Who gives pods their nodes: a scheduler of the cluster, or the kubelet, if there is none."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.simulators.kubernetes.nodes import Nodes
from tests.simulators.kubernetes.objects import Obj
from tests.simulators.kubernetes.podruns import change_status
from tests.simulators.kubernetes.podstatus import note_unschedulable
from tests.simulators.kubernetes.restclient import RestClient


class Scheduling:
    """Chooses nodes for pods, unless somebody else does.

    A scheduler is there once it has said a word about any pod, and absent once a pod has waited in vain; what
    was found out first is kept.

    Args:
        patience_seconds: How long a pod waits for a word; without any, there is no scheduler.
    """

    def __init__(
        self,
        api: RestClient,
        nodes: Nodes,
        *,
        patience_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._nodes = api, nodes
        self._patience_seconds, self._clock = patience_seconds, clock
        self._is_there: bool | None = None if patience_seconds else False
        self._since: dict[str, float] = {}  # by uid of a pod: when it was first asked about
        self._said: dict[str, str] = {}  # by uid of a pod

    @property
    def is_undecided(self) -> bool:
        """Whether it is yet to be found out if there is a scheduler."""
        return self._is_there is None

    def see(self, pod: Obj) -> None:
        """Take note of a pod that the kubelet has not touched."""
        if self.is_undecided and (pod["spec"].get("nodeName") or _is_unschedulable(pod)):
            self._is_there = True

    def place(self, pod: Obj) -> str | None:
        """Return the node of a pod; None when it has none, and we have none for it, or are not to choose."""
        if pod["spec"].get("nodeName"):
            return self._nodes.take(pod)
        if self.is_undecided:
            now = self._clock()
            if now - self._since.setdefault(pod["metadata"]["uid"], now) >= self._patience_seconds:
                self._is_there = False
        return self._nodes.place(pod) if self._is_there is False else None

    def explain(self, pod: Obj) -> None:
        """Write once why we have no node for a pod, if we are to choose."""
        uid, message = pod["metadata"]["uid"], self._nodes.explain(pod)
        if self._is_there is False and self._said.get(uid) != message:
            self._said[uid] = message
            change_status(self._api, pod, lambda pod: note_unschedulable(pod, message, now=time.time()))


def _is_unschedulable(pod: Obj) -> bool:
    conditions: list[Obj] = pod.get("status", {}).get("conditions") or []
    words = [(condition["type"], condition.get("reason")) for condition in conditions]
    return ("PodScheduled", "Unschedulable") in words
