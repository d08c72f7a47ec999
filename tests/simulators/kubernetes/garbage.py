"""The garbage collector: what is owned goes with its owners, in the way the owner's deletion asked for."""

from __future__ import annotations

from tests.simulators.kubernetes.objects import FOREGROUND_FINALIZER, ORPHAN_FINALIZER, RESOURCES, Obj
from tests.simulators.kubernetes.refusals import NotFoundError
from tests.simulators.kubernetes.storage import Key, Storage

PLURAL_OF_KIND = {resource.kind: resource.plural for resource in RESOURCES.values()}


def make_key(obj: Obj) -> Key:
    """Return where an object is stored."""
    metadata = obj["metadata"]
    return (PLURAL_OF_KIND[obj["kind"]], metadata.get("namespace") or "", metadata["name"])


def needs_collector(obj: Obj) -> bool:
    """Whether an object waits for the collector: it is deleted, and its dependents come first."""
    finalizers = obj["metadata"].get("finalizers") or ()
    return FOREGROUND_FINALIZER in finalizers or ORPHAN_FINALIZER in finalizers


def reconcile(storage: Storage, key: Key, now: float) -> float | None:
    """Collect one object, or see to the dependents of one that is being deleted."""
    obj = storage.get(*key)
    if obj is None:
        return None
    if needs_collector(obj) and "deletionTimestamp" in obj["metadata"]:
        if ORPHAN_FINALIZER in obj["metadata"]["finalizers"]:
            _orphan_dependents(storage, obj)
        elif _delete_dependents(storage, obj):
            return None
        _drop_finalizers(storage, key)
        return None
    owners = obj["metadata"].get("ownerReferences") or ()
    if owners and not any(_owner_exists(storage, obj, owner) for owner in owners):
        _delete(storage, obj, "Background")
    return None


def _owner_exists(storage: Storage, obj: Obj, reference: Obj) -> bool:
    plural = PLURAL_OF_KIND.get(reference["kind"])
    if plural is None:  # a kind that nobody simulates: never ours to judge
        return True
    owner = storage.get(plural, obj["metadata"].get("namespace") or "", reference["name"])
    return owner is not None and owner["metadata"]["uid"] == reference["uid"]


def _delete_dependents(storage: Storage, owner: Obj) -> bool:
    """Delete what `owner` owns; return whether any of it still blocks the owner's own end."""
    uid = owner["metadata"]["uid"]
    for dependent in storage.owned_by(uid):
        # What has dependents of its own takes them along first: a Job waits for its pods.
        deep = bool(storage.owned_by(dependent["metadata"]["uid"]))
        _delete(storage, dependent, "Foreground" if deep else "Background")
    return any(
        reference["uid"] == uid and reference.get("blockOwnerDeletion")
        for dependent in storage.owned_by(uid)
        for reference in dependent["metadata"]["ownerReferences"]
    )


def _orphan_dependents(storage: Storage, owner: Obj) -> None:
    uid = owner["metadata"]["uid"]

    def forget_owner(obj: Obj) -> None:
        references = obj["metadata"]["ownerReferences"]
        obj["metadata"]["ownerReferences"] = [ref for ref in references if ref["uid"] != uid]

    for dependent in storage.owned_by(uid):
        storage.mutate(*make_key(dependent), forget_owner)


def _drop_finalizers(storage: Storage, key: Key) -> None:
    def drop(obj: Obj) -> None:
        kept = [
            name
            for name in obj["metadata"].get("finalizers") or ()
            if name not in (FOREGROUND_FINALIZER, ORPHAN_FINALIZER)
        ]
        obj["metadata"]["finalizers"] = kept
        if not kept:
            del obj["metadata"]["finalizers"]

    storage.mutate(*key, drop)


def _delete(storage: Storage, obj: Obj, propagation: str) -> None:
    if "deletionTimestamp" in obj["metadata"]:
        return
    try:
        storage.delete(*make_key(obj), propagation=propagation, uid=obj["metadata"]["uid"])
    except NotFoundError:
        return
