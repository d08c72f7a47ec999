"""Which of the objects that a cluster has belong to which gang, and how much of each is kept (pure).

A gang is known by the uid of its JobSet: a name may be taken again, a uid never is. What no status is read
from is dropped at the door: a pod template is most of an object, and there are three copies of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from prefect_torch_elastic.kubernetes import conditions
from prefect_torch_elastic.kubernetes.naming import FLOW_RUN_LABEL, WORKLOAD_OF_LABEL
from prefect_torch_elastic.kubernetes.resources import Kind

_DROPPED_METADATA = {"managedFields", "selfLink"}
_DROPPED_ANNOTATIONS = {"kubectl.kubernetes.io/last-applied-configuration"}
_KEPT_OF_PODSPEC = {"terminationGracePeriodSeconds"}
_DROPPED_OF_CONTAINER = {"env", "envFrom", "volumeMounts", "securityContext"}
_JOBSET = "JobSet"

Object = dict[str, Any]
Key = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Gang:
    """The objects of one gang as last seen.

    Attributes:
        namespace: Where they are.
        name: The name of the JobSet.
        uid: Its uid.
        flow_run_id: The flow run that it was created for, empty if it does not say.
        jobset: The JobSet.
        workload: The newest Workload that Kueue made for it, None if there is none.
        job: The newest Job of its nodes, None if there is none.
    """

    namespace: str
    name: str
    uid: str
    flow_run_id: str
    jobset: Object
    workload: Object | None = None
    job: Object | None = None

    @property
    def versions(self) -> tuple[str, ...]:
        """What changes whenever one of the objects does; good for nothing but a comparison."""
        seen = (self.jobset, self.workload, self.job)
        return tuple(f"{_meta(thing, 'uid')}@{_meta(thing, 'resourceVersion')}" for thing in seen)

    @property
    def pod_stop_seconds(self) -> float:
        """What a pod of it has between SIGTERM and SIGKILL."""
        for role in conditions.objects(self.jobset, "spec", "replicatedJobs"):
            path = ("template", "spec", "template", "spec", "terminationGracePeriodSeconds")
            return float(conditions.number(role, *path) or 30)
        return 30.0


class GangCache:
    """The JobSets, Workloads and Jobs of some namespaces, by gang. It is not locked."""

    def __init__(self) -> None:
        self._objects: dict[Kind, dict[Key, Object]] = {Kind.JOBSET: {}, Kind.WORKLOAD: {}, Kind.JOB: {}}
        self._keys: dict[str, dict[Kind, set[Key]]] = {}

    def replace(self, kind: Kind, namespace: str, items: Iterable[Object]) -> set[str]:
        """Take in all objects of a kind in a namespace; return the uids of the gangs that changed."""
        fresh = {_key(thing): thing for thing in items}
        gone = [key for key in self._objects[kind] if key[0] == namespace and key not in fresh]
        changed = {self._drop(kind, key) for key in gone}
        for thing in fresh.values():
            changed |= self.put(kind, thing)
        return changed - {""}

    def put(self, kind: Kind, thing: Object) -> set[str]:
        """Take in one object; return the uids of the gangs that changed."""
        key, uid = _key(thing), find_gang(kind, thing)
        known = self._objects[kind].get(key)
        changed: set[str] = set()
        if known is not None:
            if _is_same(known, thing):
                return changed
            if find_gang(kind, known) != uid:  # deleted and created again by that name
                changed.add(self._drop(kind, key))
        if uid:
            self._objects[kind][key] = strip(kind, thing)
            self._keys.setdefault(uid, {}).setdefault(kind, set()).add(key)
            changed.add(uid)
        return changed

    def remove(self, kind: Kind, thing: Object) -> set[str]:
        """Take in that an object was deleted; return the uids of the gangs that changed."""
        known = self._objects[kind].get(_key(thing))
        if known is None or _meta(known, "uid") != _meta(thing, "uid"):
            return set()
        return {self._drop(kind, _key(thing))}

    def find(self, uid: str) -> Gang | None:
        """Return a gang, None if there is no JobSet with that uid."""
        jobset = self._newest(uid, Kind.JOBSET)
        if jobset is None:
            return None
        return Gang(
            namespace=_meta(jobset, "namespace"),
            name=_meta(jobset, "name"),
            uid=uid,
            flow_run_id=conditions.text(jobset, "metadata", "labels", FLOW_RUN_LABEL),
            jobset=jobset,
            workload=self._newest(uid, Kind.WORKLOAD),
            job=self._newest(uid, Kind.JOB),
        )

    def list_gangs(self, namespace: str | None = None) -> list[str]:
        """Return the uids of the gangs, of all namespaces or of one."""
        jobsets = self._objects[Kind.JOBSET].items()
        return [_meta(thing, "uid") for key, thing in jobsets if namespace in (None, key[0])]

    def _newest(self, uid: str, kind: Kind) -> Object | None:
        keys = self._keys.get(uid, {}).get(kind, ())
        # Kueue may replace a Workload: the new one counts, and one that goes away only if it is the last.
        ranked = sorted((self._objects[kind][key] for key in keys), key=_rank)
        return ranked[-1] if ranked else None

    def _drop(self, kind: Kind, key: Key) -> str:
        uid = find_gang(kind, self._objects[kind].pop(key))
        kinds = self._keys[uid]
        kinds[kind].discard(key)
        if not any(kinds.values()):
            del self._keys[uid]
        return uid


def find_gang(kind: Kind, thing: Object) -> str:
    """Return the uid of the JobSet that an object is, or belongs to; empty if it is of another kind."""
    if kind is Kind.JOBSET:
        return _meta(thing, "uid")
    for owner in conditions.objects(thing, "metadata", "ownerReferences"):
        if conditions.text(owner, "kind") == _JOBSET:
            return conditions.text(owner, "uid")
    if kind is Kind.WORKLOAD and not conditions.objects(thing, "metadata", "ownerReferences"):
        return conditions.text(thing, "metadata", "labels", WORKLOAD_OF_LABEL)
    return ""


def strip(kind: Kind, thing: Object) -> Object:
    """Return a copy of an object without what no status and no diagnosis is read from."""
    kept = {**thing, "metadata": _strip_metadata(thing)}
    spec = conditions.mapping(thing, "spec")
    match kind:
        case Kind.JOBSET:
            kept["spec"] = _with_each(spec, "replicatedJobs", _strip_role)
        case Kind.WORKLOAD:
            kept["spec"] = _with_each(spec, "podSets", _strip_podset)
        case Kind.JOB:
            kept["spec"] = _without(spec, {"template"})
        case Kind.POD:
            kept["spec"] = _without(
                _with_each(spec, "containers", _strip_container), {"tolerations", "securityContext"}
            )
        case _:
            pass
    return kept


def _strip_metadata(thing: Object) -> Object:
    metadata = _without(conditions.mapping(thing, "metadata"), _DROPPED_METADATA)
    if annotations := conditions.mapping(metadata, "annotations"):
        metadata["annotations"] = _without(annotations, _DROPPED_ANNOTATIONS)
    return metadata


def _strip_podset(podset: conditions.Object) -> Object:
    return _without(podset, {"template"})


def _strip_container(container: conditions.Object) -> Object:
    return _without(container, _DROPPED_OF_CONTAINER)


def _strip_role(role: conditions.Object) -> Object:
    podspec = conditions.mapping(role, "template", "spec", "template", "spec")
    job = dict(conditions.mapping(role, "template", "spec"))
    job["template"] = {"spec": {name: podspec[name] for name in _KEPT_OF_PODSPEC if name in podspec}}
    return {**role, "template": {"spec": job}}


def _with_each(spec: conditions.Object, name: str, change: Callable[[conditions.Object], Object]) -> Object:
    if name not in spec:
        return dict(spec)
    return {**spec, name: [change(one) for one in conditions.objects(spec, name)]}


def _without(value: conditions.Object, names: set[str]) -> Object:
    return {name: part for name, part in value.items() if name not in names}


def _is_same(known: Object, thing: Object) -> bool:
    version = _meta(thing, "resourceVersion")
    same_uid = _meta(known, "uid") == _meta(thing, "uid")
    return bool(version) and same_uid and _meta(known, "resourceVersion") == version


def _rank(thing: Object) -> tuple[bool, str, str]:
    lives = not _meta(thing, "deletionTimestamp")
    return lives, _meta(thing, "creationTimestamp"), _meta(thing, "name")


def _key(thing: Object) -> Key:
    return _meta(thing, "namespace"), _meta(thing, "name")


def _meta(thing: Object | None, name: str) -> str:
    return conditions.text(thing, "metadata", name)
