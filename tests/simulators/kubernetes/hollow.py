"""Pods without processes, for thousands of them: each runs at once, and ends when a test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from tests.simulators.kubernetes.nodes import HOST_IP
from tests.simulators.kubernetes.objects import Obj
from tests.simulators.kubernetes.podstatus import FINAL, Ending, Place, note_ended, note_running
from tests.simulators.kubernetes.refusals import NotFoundError
from tests.simulators.kubernetes.storage import Storage

_NODE = "hollow-node"
_SIGTERM_CODE = 143


class HollowPods:
    """Runs all pods of a storage, without any of the API's costs."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._changes = storage.subscribe("pods")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="hollow-pods", daemon=True)

    def start(self) -> None:
        """Run pods from now on."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; the pods stay as they are."""
        self._closing.set()
        self._changes.close()
        self._thread.join(10)

    def finish(self, pod: Obj, exit_code: int) -> None:
        """Let the container of a running pod end."""
        now = time.time()
        ending = Ending(exit_code=exit_code, started_at=now, finished_at=now)
        self._mutate(pod, lambda pod: note_ended(pod, _place(pod), ending, now=now), status=True)

    def _follow(self) -> None:
        while not self._closing.is_set():
            change = self._changes.take()
            if change is not None and change.type != "DELETED":
                self._see(change.object)

    def _see(self, pod: Obj) -> None:
        ended = pod.get("status", {}).get("phase") in FINAL
        if "deletionTimestamp" in pod["metadata"]:
            if not ended:
                self.finish(pod, _SIGTERM_CODE)
            if pod["metadata"].get("deletionGracePeriodSeconds"):
                metadata = pod["metadata"]
                self._storage.finish_pod_deletion(
                    metadata["namespace"], metadata["name"], uid=metadata["uid"]
                )
        elif not ended and not pod["spec"].get("nodeName"):
            self._begin(pod)

    def _begin(self, pod: Obj) -> None:
        now = time.time()
        self._mutate(pod, lambda pod: pod["spec"].update(nodeName=_NODE), status=False)
        self._mutate(pod, lambda pod: note_running(pod, _place(pod), started_at=now, now=now), status=True)

    def _mutate(self, pod: Obj, change: Callable[[Obj], None], *, status: bool) -> None:
        metadata = pod["metadata"]
        with suppress(NotFoundError):
            self._storage.mutate("pods", metadata["namespace"], metadata["name"], change, status=status)


def _place(pod: Obj) -> Place:
    """Return an address of the pod's own, made of its uid."""
    number = int(pod["metadata"]["uid"][:6], 16)
    return Place(node=_NODE, host_ip=HOST_IP, pod_ip=f"127.{number >> 16}.{number >> 8 & 255}.{number & 255}")
