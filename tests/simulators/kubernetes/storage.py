"""What is stored: objects by kind, namespace and name, their versions, each write with a version of its own.

Objects that come out are the stored ones themselves and must not be changed: 1,600 pods are listed without a
copy. To change one use `mutate`, or copy it (`objects.copy_object`) and `update`. What goes in is copied.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tests.simulators.kubernetes.history import History, Subscription
from tests.simulators.kubernetes.objects import (
    FOREGROUND_FINALIZER,
    ORPHAN_FINALIZER,
    RESOURCES,
    Obj,
    copy_object,
    decide_pod_grace,
    format_time,
    keep_identity,
    set_identity,
)
from tests.simulators.kubernetes.refusals import AlreadyExistsError, ConflictError, NotFoundError

Key = tuple[str, str, str]
"""Plural, namespace ("" for kinds without one), name."""

_FINALIZER_OF_PROPAGATION = {"Foreground": FOREGROUND_FINALIZER, "Orphan": ORPHAN_FINALIZER}


class Storage:
    """Objects in memory, safe for threads; every write has its own `resourceVersion`, over all kinds."""

    def __init__(self, clock: Callable[[], float] = time.time, *, history: int = 20_000) -> None:
        self.clock = clock
        self._lock = threading.RLock()
        self._objects: dict[Key, Obj] = {}
        self._of_plural: dict[str, dict[Key, None]] = {}
        self._of_label: dict[tuple[str, str, str], dict[Key, None]] = {}
        self._of_owner: dict[str, dict[Key, None]] = {}
        self._history = History(kept=history)
        self._encoded: dict[str, bytes] = {}
        for name in ("default", "kube-system"):
            self.create("namespaces", {"metadata": {"name": name}, "status": {"phase": "Active"}})

    @property
    def version(self) -> int:
        """The `resourceVersion` of the last write."""
        return self._history.version

    def now(self) -> str:
        """Return the clock's time as conditions spell it."""
        return format_time(self.clock())

    def create(self, plural: str, obj: Obj) -> Obj:
        """Store a new object; its status is kept (the API's clients may not send one, controllers may)."""
        resource, new = RESOURCES[plural], copy_object(obj)
        with self._lock:
            set_identity(new, resource, now=self.clock())
            key = _key(plural, new)
            if key in self._objects:
                details = {"name": key[2], "group": resource.group, "kind": plural}
                raise AlreadyExistsError(
                    f'{resource.full_name} "{key[2]}" already exists',
                    details={name: value for name, value in details.items() if value},
                )
            return self._write("ADDED", key, new, previous=None)

    def get(self, plural: str, namespace: str, name: str) -> Obj | None:
        """Return an object, or None."""
        return self._objects.get((plural, namespace if RESOURCES[plural].namespaced else "", name))

    def list(
        self, plural: str, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> list[Obj]:
        """Return the objects of a kind that carry all `labels`, by namespace and name."""
        with self._lock:
            buckets: list[dict[Key, None]] = [self._of_plural.get(plural, {})]
            for label, value in (labels or {}).items():
                buckets.append(self._of_label.get((plural, label, value), {}))
            smallest = min(buckets, key=len)
            others = [bucket for bucket in buckets[1:] if bucket is not smallest]
            return [
                self._objects[key]
                for key in sorted(smallest)
                if namespace in (None, key[1]) and all(key in bucket for bucket in others)
            ]

    def owned_by(self, uid: str) -> list[Obj]:
        """Return the objects of any kind with an ownerReference to `uid`."""
        with self._lock:
            return [self._objects[key] for key in sorted(self._of_owner.get(uid, {}))]

    def snapshot(
        self, plural: str, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> tuple[list[Obj], int]:
        """Return a list and the version that it is true of."""
        with self._lock:
            return self.list(plural, namespace, labels), self._history.version

    def update(self, plural: str, obj: Obj, *, subresource: str = "") -> Obj:
        """Replace an object (without its status), or with `subresource="status"` its status only.

        Raises:
            ConflictError: If `obj` names a `resourceVersion` that is not the last one, or another uid.
            NotFoundError: If there is no such object.
        """
        new = copy_object(obj)
        with self._lock:
            key = _key(plural, new)
            old = self._require(key)
            self._check_precondition(key, old, new.get("metadata", {}))
            return self._replace(key, new, old, subresource=subresource)

    def mutate(
        self, plural: str, namespace: str, name: str, change: Callable[[Obj], None], *, status: bool = False
    ) -> Obj:
        """Read, change and write under the lock; nothing happens (no event) when nothing changed.

        What `change` does outside of its half is not kept: `status=True` writes only the status, else all
        but the status (and `generation` counts changes of the spec).
        """
        with self._lock:
            key: Key = (plural, namespace if RESOURCES[plural].namespaced else "", name)
            old = self._require(key)
            new = copy_object(old)
            change(new)
            return self._replace(key, new, old, subresource="status" if status else "")

    def delete(
        self,
        plural: str,
        namespace: str,
        name: str,
        *,
        propagation: str = "Background",
        grace_seconds: int | None = None,
        uid: str | None = None,
        version: str | None = None,
    ) -> Obj:
        """Delete an object, or mark it for deletion while finalizers or a pod's grace period hold it.

        Dependents are the garbage collector's business. A pod on a node stays until `finish_pod_deletion`.
        """
        with self._lock:
            key: Key = (plural, namespace if RESOURCES[plural].namespaced else "", name)
            old = self._require(key)
            self._check_precondition(key, old, {"uid": uid, "resourceVersion": version})
            new = copy_object(old)
            metadata = new["metadata"]
            grace = decide_pod_grace(new, grace_seconds) if plural == "pods" else 0
            if "deletionTimestamp" in metadata:
                grace = min(grace, metadata.get("deletionGracePeriodSeconds", 0))
            elif finalizer := _FINALIZER_OF_PROPAGATION.get(propagation):
                metadata["finalizers"] = [*metadata.get("finalizers", []), finalizer]
            if not metadata.get("finalizers") and grace == 0:
                return self._remove(key, old)
            if metadata.get("deletionGracePeriodSeconds") != grace:
                metadata["deletionGracePeriodSeconds"] = grace
                metadata["deletionTimestamp"] = format_time(self.clock() + grace)
                if RESOURCES[plural].counts_generations and "deletionTimestamp" not in old["metadata"]:
                    metadata["generation"] = metadata.get("generation", 0) + 1
            return old if new == old else self._write("MODIFIED", key, new, previous=old)

    def finish_pod_deletion(self, namespace: str, name: str, *, uid: str | None = None) -> None:
        """Say for the kubelet that a pod's processes have ended; it goes once its finalizers are gone."""
        try:
            self.delete("pods", namespace, name, grace_seconds=0, uid=uid)
        except (NotFoundError, ConflictError):
            return

    def subscribe(self, *plurals: str, since: int | None = None) -> Subscription:
        """Return the writes from now on, or those after version `since`, of all kinds or of `plurals`.

        Raises:
            GoneError: If the history no longer reaches back to `since`.
        """
        with self._lock:
            return self._history.subscribe(*plurals, since=since)

    def forget_history(self) -> None:
        """Compact: every watch from an older version is told 410 from now on."""
        with self._lock:
            self._history.forget()

    def encode(self, obj: Obj) -> bytes:
        """Return the JSON of a stored object; it is made once per version."""
        version: str = obj["metadata"]["resourceVersion"]
        found = self._encoded.get(version)
        if found is None:
            if len(self._encoded) > 20_000:
                self._encoded.clear()
            # The kind comes first, so that lists of built-in kinds can leave it out without a new encoding.
            named = {"apiVersion": obj["apiVersion"], "kind": obj["kind"]}
            found = json.dumps(named | obj, separators=(",", ":")).encode()
            self._encoded[version] = found
        return found

    def _require(self, key: Key) -> Obj:
        found = self._objects.get(key)
        if found is None:
            raise make_not_found(key[0], key[2])
        return found

    def _check_precondition(self, key: Key, old: Obj, asked: Mapping[str, Any]) -> None:
        for field, name in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
            is_value = old["metadata"][field]
            if asked.get(field) not in (None, "", is_value):
                what = f'Operation cannot be fulfilled on {RESOURCES[key[0]].full_name} "{key[2]}": '
                if field == "resourceVersion":
                    why = "the object has been modified; please apply your changes to the latest version"
                    raise ConflictError(f"{what}{why} and try again")
                raise ConflictError(
                    f"{what}Precondition failed: {name} in precondition: {asked[field]}, "
                    f"{name} in object meta: {is_value}"
                )

    def _replace(self, key: Key, new: Obj, old: Obj, *, subresource: str) -> Obj:
        keep_identity(new, old, RESOURCES[key[0]], subresource=subresource)
        new["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
        if new == old:
            return old
        metadata = new["metadata"]
        waits = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds", 0) > 0
        if "deletionTimestamp" in metadata and not waits:
            return self._remove(key, new)
        return self._write("MODIFIED", key, new, previous=old)

    def _remove(self, key: Key, last: Obj) -> Obj:
        self._unindex(key)
        gone = {**last, "metadata": {**last["metadata"]}}
        return self._publish("DELETED", key, gone, previous=self._objects.pop(key))

    def _write(self, kind: str, key: Key, new: Obj, *, previous: Obj | None) -> Obj:
        if previous is not None:
            self._unindex(key)
        self._objects[key] = new
        for bucket in self._buckets(key, new):
            bucket[key] = None
        return self._publish(kind, key, new, previous=previous)

    def _publish(self, kind: str, key: Key, obj: Obj, *, previous: Obj | None) -> Obj:
        obj["metadata"]["resourceVersion"] = str(self._history.version + 1)
        self._history.append(kind, key[0], obj, previous)
        return obj

    def _buckets(self, key: Key, obj: Obj) -> Iterable[dict[Key, None]]:
        yield self._of_plural.setdefault(key[0], {})
        for label, value in (obj["metadata"].get("labels") or {}).items():
            yield self._of_label.setdefault((key[0], label, value), {})
        for owner in obj["metadata"].get("ownerReferences") or ():
            yield self._of_owner.setdefault(owner["uid"], {})

    def _unindex(self, key: Key) -> None:
        for bucket in self._buckets(key, self._objects[key]):
            bucket.pop(key, None)


def make_not_found(plural: str, name: str) -> NotFoundError:
    """Return the 404 of an object."""
    resource = RESOURCES[plural]
    details = {"name": name, "group": resource.group, "kind": plural}
    return NotFoundError(
        f'{resource.full_name} "{name}" not found',
        details={field: value for field, value in details.items() if value},
    )


def _key(plural: str, obj: Obj) -> Key:
    metadata = obj["metadata"]
    return (plural, metadata.get("namespace") or "", metadata["name"])
