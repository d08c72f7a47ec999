"""A JobSet as Kueue sees it: its Workload, and what admission puts into its pod templates and takes out."""

from __future__ import annotations

import hashlib

from tests.simulators.kubernetes.conditions import make_owner_reference
from tests.simulators.kubernetes.objects import Obj, copy_object
from tests.simulators.kubernetes.storage import Storage

PREFIX = "kueue.x-k8s.io/"
QUEUE = f"{PREFIX}queue-name"
PRIORITY_CLASS = f"{PREFIX}priority-class"
JOB_UID = f"{PREFIX}job-uid"
FINALIZER = f"{PREFIX}resource-in-use"


def read_labels(obj: Obj) -> Obj:
    """Return an object's labels, {} without any."""
    return obj["metadata"].get("labels") or {}


def make_workload(storage: Storage, jobset: Obj) -> Obj | None:
    """Return the Workload of a JobSet, or None as long as its priority class does not exist."""
    metadata = jobset["metadata"]
    priority = make_priority(storage, jobset)
    if priority is None:
        return None
    text = f"JobSet\njobset.x-k8s.io\n{metadata['name']}\n{metadata['uid']}"
    suffix = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:5]
    return {
        "metadata": {
            "name": f"jobset-{metadata['name']}-{suffix}",
            "namespace": metadata["namespace"],
            "labels": {JOB_UID: metadata["uid"]},
            "finalizers": [FINALIZER],
            "ownerReferences": [make_owner_reference(jobset)],
        },
        "spec": {
            "active": True,
            "queueName": read_labels(jobset)[QUEUE],
            **priority,
            "podSets": [_make_pod_set(replicated) for replicated in jobset["spec"]["replicatedJobs"]],
        },
    }


def make_priority(storage: Storage, jobset: Obj) -> Obj | None:
    """Return what a JobSet's priority class says in a Workload's spec; None when there is no such class."""
    name = read_labels(jobset).get(PRIORITY_CLASS)
    if name is None:
        return {"priority": 0}
    found = storage.get("workloadpriorityclasses", "", name)
    if found is None:
        return None
    reference = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": name}
    return {"priority": found["value"], "priorityClassRef": reference}


def _make_pod_set(replicated: Obj) -> Obj:
    spec = replicated["template"]["spec"]
    parallelism = spec.get("parallelism", 1)
    return {
        "name": replicated["name"],
        "count": replicated.get("replicas", 1) * min(parallelism, spec.get("completions", parallelism)),
        "template": copy_object(spec["template"]),
        "topologyRequest": {
            "podIndexLabel": "batch.kubernetes.io/job-completion-index",
            "subGroupCount": replicated.get("replicas", 1),
            "subGroupIndexLabel": "jobset.sigs.k8s.io/job-index",
        },
    }


def start_jobset(jobset: Obj, workload: Obj) -> None:
    """Let an admitted JobSet run, its pods marked with where they were admitted; in place."""
    for replicated in jobset["spec"]["replicatedJobs"]:
        metadata = replicated["template"]["spec"]["template"].setdefault("metadata", {})
        metadata["labels"] = {
            **(metadata.get("labels") or {}),
            f"{PREFIX}podset": replicated["name"],
            f"{PREFIX}local-queue-name": workload["spec"]["queueName"],
            f"{PREFIX}cluster-queue-name": workload["status"]["admission"]["clusterQueue"],
        }
        metadata["annotations"] = {
            **(metadata.get("annotations") or {}),
            f"{PREFIX}workload": workload["metadata"]["name"],
        }
    jobset["spec"]["suspend"] = False


def stop_jobset(jobset: Obj, workload: Obj) -> None:
    """Suspend a JobSet and give it back the pod templates that it was created with; in place."""
    templates = {pod_set["name"]: pod_set["template"] for pod_set in workload["spec"]["podSets"]}
    for replicated in jobset["spec"]["replicatedJobs"]:
        replicated["template"]["spec"]["template"] = copy_object(templates[replicated["name"]])
    jobset["spec"]["suspend"] = True
