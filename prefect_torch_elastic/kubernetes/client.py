"""The verbs of the Kubernetes API that gangs need: JSON in, JSON out, and errors that people understand.

One `Cluster` serves several threads. Objects are plain dicts: the models of the client library differ from
release to release, and drop fields that they do not know.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from prefect_torch_elastic.kubernetes.answers import ClusterError
from prefect_torch_elastic.kubernetes.connection import Connection, Request, load_configuration
from prefect_torch_elastic.kubernetes.insisting import insist
from prefect_torch_elastic.kubernetes.resources import (
    JOBSET_GROUP,
    KINDS,
    KUEUE_GROUP,
    KUEUE_VERSIONS,
    Kind,
    Resource,
)
from prefect_torch_elastic.kubernetes.visibility import Visibility
from prefect_torch_elastic.kubernetes.watching import Watch

__all__ = ["KINDS", "Cluster", "ClusterError", "Kind", "Listing", "Resource", "Watch"]

_T = TypeVar("_T")
_WATCH_SLACK_SECONDS = 30.0  # the API ends a watch by itself; one that is silent for longer is dead


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The objects of one kind at one moment.

    Attributes:
        items: Whole objects.
        resource_version: Where a watch goes on from.
    """

    items: Sequence[dict[str, Any]]
    resource_version: str


class Cluster:
    """A Kubernetes API, under one identity.

    Every method raises `ClusterError` when the API refuses or does not answer. Errors that may pass are
    waited out for a few seconds, with growing delays, unless they befall a watch.
    """

    def __init__(self, connection: Connection, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._connection, self._sleep = connection, sleep
        self._kueue_version = KUEUE_VERSIONS[0]
        self._visibility = Visibility(connection)
        self._lock, self._is_closed = threading.Lock(), False
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()

    @classmethod
    def connect(
        cls,
        *,
        kubeconfig: str | None = None,
        context: str | None = None,
        credentials: Mapping[str, Any] | None = None,
    ) -> Cluster:
        """Return a cluster; nothing is sent yet.

        Args:
            kubeconfig: Path or text of a kubeconfig. Without it the file in `KUBECONFIG`, the service account
                of the pod that this runs in, or `~/.kube/config`, in that order.
            context: Of that kubeconfig; by default its current one.
            credentials: Fields of a `KubernetesClusterConfig` block, `config` and `context_name`, instead.

        Raises:
            ClusterError: If none of these names a cluster.
            MissingExtraError: If `kubernetes` is not installed.
        """
        return cls(Connection(lambda: load_configuration(kubeconfig, context, credentials)))

    def close(self) -> None:
        """End all watches, and those that are just being opened; close the connections that are idle."""
        with self._lock:
            self._is_closed, watches = True, [*self._watches]
        for watch in watches:
            watch.close()
        self._connection.close()

    def create(
        self, kind: Kind, namespace: str, body: Mapping[str, Any], *, dry_run: bool = False
    ) -> dict[str, Any]:
        """Create an object; fields that the cluster does not know are refused, not dropped.

        If an answer was lost and the object is there with all of our labels, that is the answer.

        Raises:
            ClusterError: `error.exists` if there is another object of that name.
        """
        name: str = body["metadata"]["name"]
        labels: dict[str, str] = body["metadata"].get("labels", {})
        query = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})

        def find_ours() -> dict[str, Any] | None:
            try:
                found = self._ask("get", kind, namespace, name)
            except ClusterError:
                return None
            known: dict[str, str] = found["metadata"].get("labels", {})
            return found if labels and labels.items() <= known.items() else None

        return self._insist(
            lambda: self._ask("create", kind, namespace, name, query=query, body=body),
            settle=None if dry_run else find_ours,
        )

    def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None:
        """Return an object, None if there is none of that name."""
        try:
            return self._insist(lambda: self._ask("get", kind, namespace, name))
        except ClusterError as error:
            if error.status == 404 and not error.not_installed:
                return None
            raise

    def list(
        self, kind: Kind, namespace: str, *, labels: str = "", fields: str = "", limit: int | None = None
    ) -> Listing:
        """Return the objects of a namespace that the selectors fit, at most `limit` of them."""
        query = _select(labels, fields) | ({} if limit is None else {"limit": str(limit)})
        found = self._insist(lambda: self._ask("list", kind, namespace, query=query))
        items: Sequence[dict[str, Any]] = found.get("items") or ()  # Go writes no items as null
        resource = self._resource(kind)
        # The API leaves both out of the items of its own kinds.
        named = {"apiVersion": resource.api_version, "kind": resource.kind}
        return Listing(
            items=[named | item for item in items],
            resource_version=found["metadata"].get("resourceVersion", ""),
        )

    def watch(
        self,
        kind: Kind,
        namespace: str,
        *,
        labels: str = "",
        resource_version: str,
        timeout_seconds: float,
    ) -> Watch:
        """Return what happens after a listing, for so many seconds: one connection, no second try.

        Raises:
            ClusterError: `error.expired` if the listing is too old, here or while it is read.
        """
        query = _select(labels) | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(max(1, round(timeout_seconds))),
        }
        request = self._request("watch", kind, namespace, query=query)
        response = self._connection.open(request, read_seconds=timeout_seconds + _WATCH_SLACK_SECONDS)
        watch = Watch(request, response)
        with self._lock:
            self._watches.add(watch)
            is_closed = self._is_closed
        if is_closed:
            watch.close()
        return watch

    def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None = None) -> bool:
        """Delete an object, and say whether there was one; it stays until all that it owns is gone.

        Args:
            kind: Of the object.
            namespace: Where.
            name: Its name.
            uid: Another object of that name is left alone.
        """
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Foreground",
        }
        if uid is not None:
            body["preconditions"] = {"uid": uid}

        def attempt() -> bool:
            try:
                self._ask("delete", kind, namespace, name, body=body)
            except ClusterError as error:
                if error.status == 404 or (error.status == 409 and uid is not None):
                    return False  # another object has the name
                raise
            return True

        return self._insist(attempt)

    def patch(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Merge a patch into an object, and return what it is then."""
        return self._insist(lambda: self._ask("patch", kind, namespace, name, body=body))

    def can(self, verb: str, kind: Kind, namespace: str, *, subresource: str = "") -> bool:
        """Return whether a role allows us this."""
        resource = self._resource(kind)
        facts = {
            "verb": verb,
            "group": resource.group,
            "resource": resource.plural,
            "subresource": subresource,
            "namespace": namespace if resource.namespaced else "",
        }
        status = self._review("authorization.k8s.io/v1", "SelfSubjectAccessReview", resourceAttributes=facts)
        return bool(status["allowed"])

    def whoami(self) -> str:
        """Return the name that the API knows us by."""
        status = self._review("authentication.k8s.io/v1", "SelfSubjectReview")
        return str(status["userInfo"]["username"])

    def versions(self) -> dict[str, Sequence[str]]:
        """Return the served versions of JobSet's and Kueue's API groups; none if it is not installed."""
        return {group: self._list_versions(group) for group in (JOBSET_GROUP, KUEUE_GROUP)}

    def pending_position(self, namespace: str, local_queue: str, workload: str) -> tuple[int, int] | None:
        """Return a Workload's place in its LocalQueue and in the ClusterQueue behind it, both from 1.

        None if it does not wait, or if the cluster does not tell: this is an optional API of Kueue's.
        """
        return self._visibility.find(namespace, local_queue, workload)

    def _resource(self, kind: Kind) -> Resource:
        resource = KINDS[kind]
        return replace(resource, version=self._kueue_version) if resource.group == KUEUE_GROUP else resource

    def _request(self, verb: str, kind: Kind, namespace: str, name: str = "", **rest: Any) -> Request:
        resource = self._resource(kind)
        path = resource.path(namespace, "" if verb == "create" else name)
        return Request(verb=verb, path=path, resource=resource, namespace=namespace, name=name, **rest)

    def _ask(self, verb: str, kind: Kind, namespace: str, name: str = "", **rest: Any) -> dict[str, Any]:
        """Ask once; of a cluster with an older Kueue in the version that it has."""
        try:
            return self._connection.fetch(self._request(verb, kind, namespace, name, **rest))
        except ClusterError as error:
            if not (error.not_installed and KINDS[kind].group == KUEUE_GROUP):
                raise
            served = self._list_versions(KUEUE_GROUP)
            known = next((version for version in KUEUE_VERSIONS if version in served), None)
            if known is None or known == self._kueue_version:
                raise
            self._kueue_version = known
        return self._connection.fetch(self._request(verb, kind, namespace, name, **rest))

    def _list_versions(self, group: str) -> Sequence[str]:
        request = Request(verb="get", path=f"/apis/{group}", name=group)
        try:
            found = self._insist(lambda: self._connection.fetch(request))
        except ClusterError as error:
            if error.status == 404:
                return []
            raise
        served: Sequence[dict[str, str]] = found.get("versions") or ()
        return [entry["version"] for entry in served]

    def _review(self, api_version: str, kind: str, **spec: Any) -> dict[str, Any]:
        """Ask the API about ourselves."""
        body = {"apiVersion": api_version, "kind": kind, "spec": spec}
        path = f"/apis/{api_version}/{kind.lower()}s"
        request = Request(verb="create", path=path, name=kind, body=body)
        return self._insist(lambda: self._connection.fetch(request))["status"]

    def _insist(self, call: Callable[[], _T], *, settle: Callable[[], _T | None] | None = None) -> _T:
        return insist(call, sleep=self._sleep, settle=settle)


def _select(labels: str, fields: str = "") -> dict[str, str]:
    query = {"labelSelector": labels, "fieldSelector": fields}
    return {key: value for key, value in query.items() if value}
