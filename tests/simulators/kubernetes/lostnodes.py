"""What becomes of pods on a node that is cut off: tainted, deleted, at last collected without a kubelet."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from tests.simulators.kubernetes.objects import Obj
from tests.simulators.kubernetes.podruns import change_status, delete_pod
from tests.simulators.kubernetes.podstatus import COLLECTED, DELETED_BY_TAINT, note_disruption
from tests.simulators.kubernetes.restclient import RestClient, RestError


class NodeController:
    """The control plane's half of losing nodes; a step at a time, in a thread per node."""

    def __init__(self, api: RestClient) -> None:
        self._api = api
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def give_up(
        self, node: str, pods: list[Obj], *, taint_after_seconds: float, remove_after_seconds: float
    ) -> None:
        """Give up a node from which nothing was heard.

        Args:
            node: Its name.
            pods: What seems to run there.
            taint_after_seconds: When the pods are marked and deleted; they stay, for no kubelet lets them go.
            remove_after_seconds: When the Node is removed after that, and the pods' objects with it.
        """

        def act() -> None:
            if not self._closing.wait(taint_after_seconds):
                self._taint(pods)
            if not self._closing.wait(remove_after_seconds):
                self._collect(node, pods)

        self._threads.append(threading.Thread(target=act, name="node-controller", daemon=True))
        self._threads[-1].start()

    def close(self) -> None:
        """Do nothing any more."""
        self._closing.set()
        for thread in self._threads:
            thread.join(10)

    def _taint(self, pods: list[Obj]) -> None:
        for pod in pods:
            change_status(self._api, pod, lambda pod: note_disruption(pod, DELETED_BY_TAINT, now=time.time()))
            delete_pod(self._api, pod)

    def _collect(self, node: str, pods: list[Obj]) -> None:
        with suppress(RestError):
            self._api.request("DELETE", f"/api/v1/nodes/{node}")
        for pod in pods:
            change_status(self._api, pod, _fail)
            delete_pod(self._api, pod, grace_seconds=0)


def _fail(pod: Obj) -> None:
    note_disruption(pod, COLLECTED, now=time.time())
    pod["status"]["phase"] = "Failed"
