"""What the API says about itself and about who asks: versions, groups, kinds, and access reviews."""

from __future__ import annotations

from typing import Any

from tests.simulators.kubernetes.faults import Faults
from tests.simulators.kubernetes.objects import RESOURCES, Resource
from tests.simulators.kubernetes.storage import Storage, make_not_found

Obj = dict[str, Any]

USER = "system:serviceaccount:default:simulated"
_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_SERVED_ELSEWHERE = {"authorization.k8s.io": "v1", "authentication.k8s.io": "v1"}
_VISIBILITY = "visibility.kueue.x-k8s.io"
_VERSION: Obj = {"major": "1", "minor": "36", "gitVersion": "v1.36.2", "platform": "linux/amd64"}


def describe(parts: list[str], *, absent_groups: set[str]) -> Obj | None:
    """Return the discovery document of a path, or None if the path is none of those."""
    versions = _SERVED_ELSEWHERE | {
        resource.group: resource.version for resource in RESOURCES.values() if resource.group
    }
    versions = {group: version for group, version in versions.items() if group not in absent_groups}
    match parts:
        case ["version"]:
            return _VERSION
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        case ["apis"]:
            groups = [_describe_group(group, version) for group, version in versions.items()]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        case ["apis", group] if group in versions:
            return {"kind": "APIGroup", "apiVersion": "v1"} | _describe_group(group, versions[group])
        case ["api", "v1"]:
            return _describe_resources("", "v1")
        case ["apis", group, version] if versions.get(group) == version:
            return _describe_resources(group, version)
        case _:
            return None


def _describe_group(group: str, version: str) -> Obj:
    served = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [served], "preferredVersion": served}


def _describe_resources(group: str, version: str) -> Obj:
    found: list[Obj] = []
    for resource in RESOURCES.values():
        if (resource.group, resource.version) == (group, version):
            found += _describe_resource(resource)
    name = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": found}


def _describe_resource(resource: Resource) -> list[Obj]:
    common = {"singularName": "", "namespaced": resource.namespaced, "kind": resource.kind}
    described: list[Obj] = [{"name": resource.plural, **common, "verbs": _VERBS}]
    if resource.has_status:
        described.append({"name": f"{resource.plural}/status", **common, "verbs": ["get", "patch", "update"]})
    return described


def review(parts: list[str], body: Obj, *, faults: Faults, user: str = USER) -> Obj | None:
    """Return the answer of an access review or of `kubectl auth whoami`; None for other paths."""
    match parts:
        case ["apis", "authorization.k8s.io", "v1", "selfsubjectaccessreviews"]:
            asked = body.get("spec", {}).get("resourceAttributes") or {}
            what = asked.get("resource", "")
            if asked.get("subresource"):
                what = f"{what}/{asked['subresource']}"
            denied = faults.is_denied(asked.get("verb", ""), what)
            return body | {"status": {"allowed": not denied, **({"reason": ""} if denied else {})}}
        case ["apis", "authentication.k8s.io", "v1", "selfsubjectreviews"]:
            groups = ["system:serviceaccounts", "system:authenticated"]
            return body | {"status": {"userInfo": {"username": user, "groups": groups}}}
        case _:
            return None


def list_pending(storage: Storage, parts: list[str], query: dict[str, str]) -> Obj | None:
    """Return Kueue's summary of the workloads that wait in a queue, in order; None for other paths."""
    match parts:
        case [
            "apis",
            "visibility.kueue.x-k8s.io",
            version,
            "namespaces",
            namespace,
            "localqueues",
            name,
            tail,
        ]:
            queue = storage.get("localqueues", namespace, name)
            if tail != "pendingworkloads" or queue is None:
                raise make_not_found("localqueues", name)
            cluster_queue = queue["spec"].get("clusterQueue", "")
        case [
            "apis",
            "visibility.kueue.x-k8s.io",
            version,
            "clusterqueues",
            cluster_queue,
            "pendingworkloads",
        ]:
            namespace, name = "", ""
        case _:
            return None
    items = [
        item
        for item in _rank_pending(storage, cluster_queue)
        if not name or (item["localQueueName"], item["metadata"]["namespace"]) == (name, namespace)
    ]
    start, limit = int(query.get("offset") or 0), int(query.get("limit") or 1000)
    return {
        "kind": "PendingWorkloadsSummary",
        "apiVersion": f"{_VISIBILITY}/{version}",
        "metadata": {},
        "items": items[start : start + limit],
    }


def _rank_pending(storage: Storage, cluster_queue: str) -> list[Obj]:
    queues = {
        (queue["metadata"]["namespace"], queue["metadata"]["name"])
        for queue in storage.list("localqueues")
        if queue["spec"].get("clusterQueue") == cluster_queue
    }
    waiting = [
        workload
        for workload in storage.list("workloads")
        if (workload["metadata"]["namespace"], workload["spec"].get("queueName")) in queues
        and _is_pending(workload)
    ]
    waiting.sort(key=lambda found: (-found["spec"].get("priority", 0), _queued_since(found)))
    positions: dict[tuple[str, str], int] = {}
    ranked: list[Obj] = []
    for position, workload in enumerate(waiting):
        metadata, queue = workload["metadata"], workload["spec"]["queueName"]
        here = positions.get((metadata["namespace"], queue), 0)
        positions[metadata["namespace"], queue] = here + 1
        kept = ("name", "namespace", "creationTimestamp", "ownerReferences")
        ranked.append(
            {
                "metadata": {key: metadata[key] for key in kept if key in metadata},
                "priority": workload["spec"].get("priority", 0),
                "localQueueName": queue,
                "positionInClusterQueue": position,
                "positionInLocalQueue": here,
            }
        )
    return ranked


def _is_pending(workload: Obj) -> bool:
    conditions = {c["type"]: c["status"] for c in workload.get("status", {}).get("conditions", ())}
    is_done = conditions.get("Finished") == "True" or conditions.get("QuotaReserved") == "True"
    return not is_done and workload["spec"].get("active", True)


def _queued_since(workload: Obj) -> tuple[str, int]:
    evicted = [
        condition["lastTransitionTime"]
        for condition in workload.get("status", {}).get("conditions", ())
        if condition["type"] == "Evicted" and condition["status"] == "True"
    ]
    return max([workload["metadata"]["creationTimestamp"], *evicted]), int(
        workload["metadata"]["resourceVersion"]
    )
