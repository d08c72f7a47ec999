"""What a test borrows from a real control plane, and how it is given back, by a later test if need be."""

from __future__ import annotations

import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

from tests.simulators.kubernetes.objects import Obj
from tests.simulators.kubernetes.restclient import RestClient, RestError

OWNER_LABEL = "prefect-torch-elastic.test/process"
"""On everything outside of namespaces: the pid of the tests that made it."""

_GANGS = ("jobsets", "jobs", "pods")
_GLOBALS = ("nodes", "clusterqueues", "resourceflavors", "workloadpriorityclasses", "namespaces")
_END_SECONDS = 15.0
_POLL_SECONDS = 0.2


class BorrowedServer:
    """A namespace of a real API server, from `enter` to `leave`."""

    def __init__(self, kubeconfig: Path) -> None:
        self.api = RestClient.connect(kubeconfig)
        self.namespace = f"test-{uuid.uuid4().hex[:8]}"
        self.labels = {OWNER_LABEL: str(os.getpid())}

    def enter(self) -> None:
        """Create the namespace; what tests that were killed have left is removed before."""
        self._sweep()
        self.api.create("namespaces", {"metadata": {"name": self.namespace, "labels": self.labels}})
        with suppress(RestError):  # a controller makes it too, but pods that come first are refused
            self.api.create("serviceaccounts", {"metadata": {"name": "default"}}, namespace=self.namespace)

    def end_gangs(self) -> None:
        """Delete what runs, and wait for its end: it needs a kubelet that still lives."""
        deadline = time.monotonic() + _END_SECONDS
        while self._delete_gangs(self.namespace) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def leave(self) -> None:
        """Delete the namespace; the control plane removes what is left in it."""
        self.api.delete("namespaces", self.namespace)
        self.api.close()

    def _delete_gangs(self, namespace: str) -> int:
        """Delete all gangs of a namespace now, and return how many objects there were."""
        count = 0
        for plural in _GANGS:
            for obj in self.api.list(plural, namespace=namespace):
                grace_seconds = 0 if plural == "pods" else None
                name = obj["metadata"]["name"]
                self.api.delete(plural, name, namespace=namespace, grace_seconds=grace_seconds)
                count += 1
        return count

    def _sweep(self) -> None:
        for plural in _GLOBALS:
            for obj in self.api.list(plural, labels=OWNER_LABEL):
                if _is_left_behind(obj):
                    if plural == "namespaces":
                        self._delete_gangs(obj["metadata"]["name"])
                    self.api.delete(plural, obj["metadata"]["name"])


def _is_left_behind(obj: Obj) -> bool:
    owner = obj["metadata"]["labels"][OWNER_LABEL]
    return "deletionTimestamp" not in obj["metadata"] and not psutil.pid_exists(int(owner))
