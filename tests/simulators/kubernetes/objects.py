"""The kinds that the simulated API serves, and the rules of metadata that all of their objects share."""

from __future__ import annotations

import pickle
import random
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Obj = dict[str, Any]

FOREGROUND_FINALIZER = "foregroundDeletion"
ORPHAN_FINALIZER = "orphan"

# The alphabet of real name suffixes: no vowels, so that no words come out.
_SUFFIX_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"


@dataclass(frozen=True, kw_only=True)
class Resource:
    """One kind as the API serves it."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    has_status: bool = False
    counts_generations: bool = True

    @property
    def api_version(self) -> str:
        """`apiVersion` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def full_name(self) -> str:
        """The plural with the group, as messages spell it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def is_custom(self) -> bool:
        """Whether a CRD defines it (no strategic merge patch then)."""
        return self.group.endswith("x-k8s.io")


def _core(plural: str, kind: str, **traits: bool) -> Resource:
    return Resource(group="", version="v1", plural=plural, kind=kind, **traits)


def _kueue(plural: str, kind: str, **traits: bool) -> Resource:
    return Resource(group="kueue.x-k8s.io", version="v1beta2", plural=plural, kind=kind, **traits)


RESOURCES: Mapping[str, Resource] = {
    resource.plural: resource
    for resource in (
        _core("pods", "Pod", has_status=True),
        _core("services", "Service", has_status=True, counts_generations=False),
        _core("secrets", "Secret", counts_generations=False),
        _core("configmaps", "ConfigMap", counts_generations=False),
        _core("serviceaccounts", "ServiceAccount", counts_generations=False),
        _core("persistentvolumeclaims", "PersistentVolumeClaim", has_status=True, counts_generations=False),
        _core("resourcequotas", "ResourceQuota", has_status=True, counts_generations=False),
        _core("events", "Event", counts_generations=False),
        _core("nodes", "Node", namespaced=False, has_status=True, counts_generations=False),
        _core("namespaces", "Namespace", namespaced=False, has_status=True, counts_generations=False),
        Resource(group="batch", version="v1", plural="jobs", kind="Job", has_status=True),
        Resource(
            group="jobset.x-k8s.io", version="v1alpha2", plural="jobsets", kind="JobSet", has_status=True
        ),
        _kueue("workloads", "Workload", has_status=True),
        _kueue("localqueues", "LocalQueue", has_status=True),
        _kueue("clusterqueues", "ClusterQueue", namespaced=False, has_status=True),
        _kueue("resourceflavors", "ResourceFlavor", namespaced=False),
        _kueue("workloadpriorityclasses", "WorkloadPriorityClass", namespaced=False),
        Resource(
            group="scheduling.k8s.io",
            version="v1",
            plural="priorityclasses",
            kind="PriorityClass",
            namespaced=False,
        ),
    )
}


def copy_object(obj: Obj) -> Obj:
    """Return a deep copy that may be changed."""
    return pickle.loads(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL))


def format_time(seconds: float) -> str:
    """Return a moment as `metadata.creationTimestamp` spells it: UTC, whole seconds."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_micro_time(seconds: float) -> str:
    """Return a moment as `eventTime` spells it: UTC with microseconds."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_time(text: str) -> float:
    """Return the seconds since the epoch of either spelling."""
    return datetime.fromisoformat(text).timestamp()


def make_suffix(length: int = 5) -> str:
    """Return a random end of a name, as the API server and the Job controller make them."""
    return "".join(random.choices(_SUFFIX_ALPHABET, k=length))


def set_identity(obj: Obj, resource: Resource, *, now: float) -> None:
    """Fill in the metadata of a new object, in place: name of a `generateName`, uid, creation time."""
    obj.setdefault("apiVersion", resource.api_version)
    obj.setdefault("kind", resource.kind)
    metadata = obj.setdefault("metadata", {})
    if not metadata.get("name") and metadata.get("generateName"):
        metadata["name"] = metadata["generateName"] + make_suffix()
    if resource.namespaced:
        metadata.setdefault("namespace", "default")
    else:
        metadata.pop("namespace", None)
    metadata["uid"] = str(uuid.uuid4())
    metadata["creationTimestamp"] = format_time(now)
    if resource.counts_generations:
        metadata["generation"] = 1
    for left_by_the_client in ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds"):
        metadata.pop(left_by_the_client, None)


# What the server owns: a client's words about these in a PUT or PATCH are not heard.
_SERVERS_OWN = ("uid", "creationTimestamp", "generation", "deletionTimestamp", "deletionGracePeriodSeconds")


def keep_identity(new: Obj, old: Obj, resource: Resource, *, subresource: str) -> None:
    """Undo, in place, what an update may not change: the server's metadata, and the other half of the object.

    A plain update leaves `status` alone; one of the `status` subresource leaves everything else alone.
    """
    if subresource == "status":
        status = new.get("status")
        new.clear()
        new.update(copy_object(old))
        new.pop("status", None)
        if status is not None:
            new["status"] = status
        return
    metadata, before = new.setdefault("metadata", {}), old["metadata"]
    for name in _SERVERS_OWN:
        metadata.pop(name, None)
        if name in before:
            metadata[name] = before[name]
    if resource.has_status:
        new.pop("status", None)
        if "status" in old:
            new["status"] = copy_object({"status": old["status"]})["status"]
    outside = ("metadata", "status")
    changed = any(new.get(key) != old.get(key) for key in {*new, *old} if key not in outside)
    if resource.counts_generations and changed:
        metadata["generation"] = before.get("generation", 0) + 1


def decide_pod_grace(pod: Obj, asked_seconds: int | None) -> int:
    """Return how long a deleted pod may go on: nobody waits for one without a node, or one that has ended."""
    if not pod.get("spec", {}).get("nodeName"):
        return 0
    if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    if asked_seconds is not None:
        return max(0, asked_seconds)
    return int(pod["spec"].get("terminationGracePeriodSeconds", 30))
