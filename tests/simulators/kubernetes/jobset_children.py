"""What a JobSet creates: its Jobs with their names and labels, and the headless Service of its pods."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator

from tests.simulators.kubernetes.conditions import make_owner_reference
from tests.simulators.kubernetes.objects import Obj, copy_object

PREFIX = "jobset.sigs.k8s.io/"
ATTEMPT = f"{PREFIX}restart-attempt"
REPLICATED_JOB = f"{PREFIX}replicatedjob-name"


def list_missing_jobs(jobset: Obj, existing: Container[str], *, restarts: int) -> Iterator[Obj]:
    """Yield the Jobs of an attempt whose names are not among the `existing`."""
    spec = jobset["spec"]
    total = sum(replicated.get("replicas", 1) for replicated in spec["replicatedJobs"])
    number = 0
    for replicated in spec["replicatedJobs"]:
        for index in range(replicated.get("replicas", 1)):
            if f"{jobset['metadata']['name']}-{replicated['name']}-{index}" not in existing:
                yield _make_job(jobset, replicated, index, number=number, total=total, restarts=restarts)
            number += 1


def _make_job(jobset: Obj, replicated: Obj, index: int, *, number: int, total: int, restarts: int) -> Obj:
    metadata, spec = jobset["metadata"], jobset["spec"]
    name = f"{metadata['name']}-{replicated['name']}-{index}"
    key = hashlib.sha1(f"{metadata['namespace']}/{name}".encode(), usedforsecurity=False).hexdigest()
    group = replicated.get("groupName", "default")
    of_group = [job for job in spec["replicatedJobs"] if job.get("groupName", "default") == group]
    before = of_group[: next(i for i, job in enumerate(of_group) if job["name"] == replicated["name"])]
    marks = {
        "jobset-name": metadata["name"],
        "jobset-uid": metadata["uid"],
        "replicatedjob-name": replicated["name"],
        "replicatedjob-replicas": str(replicated.get("replicas", 1)),
        "global-replicas": str(total),
        "job-index": str(index),
        "job-global-index": str(number),
        "job-key": key,
        "restart-attempt": str(restarts),
        "group-name": group,
        "group-replicas": str(sum(job.get("replicas", 1) for job in of_group)),
        "job-group-index": str(sum(job.get("replicas", 1) for job in before) + index),
    }
    labels = {f"{PREFIX}{name}": value for name, value in marks.items()}
    template = copy_object(replicated["template"])
    job_spec, job_metadata = template["spec"], template.get("metadata") or {}
    pod = job_spec["template"]
    for target in (job_metadata, pod.setdefault("metadata", {})):
        target["labels"] = {**(target.get("labels") or {}), **labels}
        target["annotations"] = {**(target.get("annotations") or {}), **labels}
    network = spec.get("network") or {}
    if network.get("enableDNSHostnames", True):
        pod["spec"]["subdomain"] = network.get("subdomain") or metadata["name"]
    job_spec["suspend"] = bool(spec.get("suspend"))
    job_spec.setdefault("completionMode", "Indexed")
    only_failed = "Failed" if job_spec.get("podFailurePolicy") else "TerminatingOrFailed"
    job_spec.setdefault("podReplacementPolicy", only_failed)
    return {
        "metadata": {
            "name": name,
            "namespace": metadata["namespace"],
            "labels": job_metadata["labels"],
            "annotations": job_metadata["annotations"],
            "ownerReferences": [make_owner_reference(jobset)],
        },
        "spec": job_spec,
    }


def make_service(jobset: Obj) -> Obj:
    """Return the headless Service that gives the pods of a JobSet their names."""
    metadata, network = jobset["metadata"], jobset["spec"].get("network") or {}
    return {
        "metadata": {
            "name": network.get("subdomain") or metadata["name"],
            "namespace": metadata["namespace"],
        },
        "spec": {
            "clusterIP": "None",
            "selector": {f"{PREFIX}jobset-name": metadata["name"]},
            "publishNotReadyAddresses": network.get("publishNotReadyAddresses", True),
        },
    }


def merge_template(job: Obj, template: Obj) -> None:
    """Put what Kueue decided on admission into a Job that exists; what it takes back later stays."""
    old = job["spec"]["template"]
    metadata = old.setdefault("metadata", {})
    new_metadata = template.get("metadata") or {}
    for field in ("labels", "annotations"):
        if added := new_metadata.get(field):
            metadata[field] = {**(metadata.get(field) or {}), **copy_object(added)}
    if selector := template["spec"].get("nodeSelector"):
        old["spec"]["nodeSelector"] = {**(old["spec"].get("nodeSelector") or {}), **selector}
    for field in ("tolerations", "schedulingGates"):
        known = old["spec"].get(field) or []
        added = [entry for entry in template["spec"].get(field) or () if entry not in known]
        if added:
            old["spec"][field] = [*known, *copy_object({"added": added})["added"]]
