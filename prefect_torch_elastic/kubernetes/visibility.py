"""The place of a gang in its queue: an API of Kueue's that many clusters do not have or do not show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect_torch_elastic.kubernetes.answers import ClusterError
from prefect_torch_elastic.kubernetes.connection import Connection, Request
from prefect_torch_elastic.kubernetes.resources import KUEUE_VERSIONS, VISIBILITY_GROUP, Resource


class Visibility:
    """Asks for places in queues; where a cluster does not tell, it is not asked again."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._refused: set[tuple[str, str]] = set()  # namespaces and versions: a role is for one namespace

    def find(self, namespace: str, local_queue: str, workload: str) -> tuple[int, int] | None:
        """Return a Workload's place in its LocalQueue and in the ClusterQueue behind it, both from 1."""
        for version in KUEUE_VERSIONS:
            if (namespace, version) in self._refused:
                continue
            try:
                waiting = self._list(version, namespace, local_queue)
            except ClusterError as error:
                if not (error.not_installed or error.forbidden):
                    return None
                self._refused.add((namespace, version))
                continue
            for item in waiting:
                if item["metadata"]["name"] == workload:
                    return _place(item, "positionInLocalQueue"), _place(item, "positionInClusterQueue")
            return None
        return None

    def _list(self, version: str, namespace: str, local_queue: str) -> Sequence[dict[str, Any]]:
        queue = Resource(group=VISIBILITY_GROUP, version=version, plural="localqueues", kind="LocalQueue")
        path = queue.path(namespace, local_queue, subresource="pendingworkloads")
        request = Request(verb="get", path=path, resource=queue, namespace=namespace, name=local_queue)
        return self._connection.fetch(request).get("items") or ()


def _place(item: dict[str, Any], field: str) -> int:
    return int(item.get(field) or 0) + 1  # Kueue counts from 0, and leaves a 0 out
