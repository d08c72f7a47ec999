"""What a gang is in Kubernetes: one JobSet with one Indexed Job, whose pods live and die together (pure).

Plain dictionaries: the models of the official client change between its versions. The failure rules, and that
the gang is one Job, were tried on a real control plane; each says what goes wrong without it.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Mapping
from typing import Any

from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.kubernetes import naming
from prefect_torch_elastic.kubernetes.overlay import apply_pod_template
from prefect_torch_elastic.kubernetes.podspec import render_pod_spec
from prefect_torch_elastic.kubernetes.request import GangRequest
from prefect_torch_elastic.pod import FINAL_CODES
from prefect_torch_elastic.spec_values import parse_topology

# When no worker is there to delete it.
_LONGEST_KEPT_SECONDS = 86_400


def render_jobset(request: GangRequest) -> dict[str, Any]:
    """Return the manifest of a gang.

    Raises:
        SpecError: If a value cannot be kept; it says which.
    """
    naming.check_name(request.name, nnodes=request.nnodes)
    _check_labels(request)
    spec: dict[str, Any] = {
        "ttlSecondsAfterFinished": _LONGEST_KEPT_SECONDS
        if request.ttl_seconds_after_finished is None
        else request.ttl_seconds_after_finished,
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All"},
        "failurePolicy": _render_failure_policy(request),
        "replicatedJobs": [{"name": naming.ROLE, "replicas": 1, "template": _render_job_template(request)}],
    }
    if request.queue:
        spec = {"suspend": True, **spec}  # Kueue lets it go; without Kueue nothing runs past the queue
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": request.name,
            "namespace": request.namespace,
            "labels": {**request.labels, **_own_labels(request), **_queue_labels(request)},
            "annotations": {
                **request.annotations,
                naming.WORKER_ANNOTATION: request.worker_name,
                naming.FLOW_RUN_NAME_ANNOTATION: request.flow_run_name,
                **({} if request.ttl_seconds_after_finished is None else {naming.KEPT_ANNOTATION: "true"}),
            },
        },
        "spec": spec,
    }


def render_job(jobset: dict[str, Any]) -> dict[str, Any]:
    """Return the Job that JobSet will make of a manifest, to ask the cluster whether it would take it."""
    template = copy.deepcopy(jobset["spec"]["replicatedJobs"][0]["template"])
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            **template["metadata"],
            "name": naming.name_job(jobset["metadata"]["name"]),
            "namespace": jobset["metadata"]["namespace"],
        },
        "spec": {**template["spec"], "suspend": True},
    }


def render_pod(jobset: dict[str, Any]) -> dict[str, Any]:
    """Return the leader's pod that will come of a manifest, to ask the cluster whether it would take it."""
    name = jobset["metadata"]["name"]
    template = render_job(jobset)["spec"]["template"]
    host = f"{naming.name_job(name)}-0"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **template["metadata"],
            "name": f"{host}-abcde",
            "namespace": jobset["metadata"]["namespace"],
        },
        "spec": {**template["spec"], "hostname": host, "subdomain": name},
    }


def render_credentials_secret(
    request: GangRequest, values: Mapping[str, str], owner: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the Secret with the variables of a gang that nobody may read in its manifest.

    Args:
        request: The gang; its `credentials_secret` is the name.
        values: The variables.
        owner: The JobSet as the cluster has it; the Secret goes when it does.
    """
    metadata: dict[str, Any] = {
        "name": request.credentials_secret or naming.name_secret(request.name),
        "namespace": request.namespace,
        "labels": _own_labels(request),
        "ownerReferences": [
            {
                "apiVersion": owner["apiVersion"],
                "kind": owner["kind"],
                "name": owner["metadata"]["name"],
                "uid": owner["metadata"]["uid"],
            }
        ],
    }
    data = {name: base64.b64encode(value.encode()).decode() for name, value in values.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": data}


def _render_failure_policy(request: GangRequest) -> dict[str, Any]:
    """Return when the JobSet starts the next attempt; a failure that no rule names is counted."""
    codes = "|".join(str(int(code)) for code in FINAL_CODES)
    rules: list[dict[str, Any]] = [
        _rule("config", "FailJobSet", "PodFailurePolicy", f"exit code ({codes}) "),
        _rule(
            "disruption",
            "RestartJobSetAndIgnoreMaxRestarts",
            "PodFailurePolicy",
            "condition DisruptionTarget ",
        ),
    ]
    if request.active_deadline_seconds is not None:  # the next attempt would get the same time again
        rules.append(_rule("deadline", "FailJobSet", "DeadlineExceeded"))
    return {
        "maxRestarts": request.max_attempts - 1,
        # A pod of the attempt before has the same host name: it must be gone first.
        "restartStrategy": "BlockingRecreate",
        "rules": rules,
    }


def _rule(name: str, action: str, reason: str, *patterns: str) -> dict[str, Any]:
    rule: dict[str, Any] = {"name": name, "action": action, "onJobFailureReasons": [reason]}
    return {**rule, "onJobFailureMessagePatterns": list(patterns)} if patterns else rule


def _render_job_template(request: GangRequest) -> dict[str, Any]:
    spec: dict[str, Any] = {
        # One Job for all pods: Kueue suspends several Jobs one after another, and in between a peer of a
        # pod that is stopped already would fail a Job that is not, which counts.
        "completionMode": "Indexed",
        "parallelism": request.nnodes,
        "completions": request.nnodes,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    # Never 143: these rules also see pods that a preemption stopped.
                    "onExitCodes": {
                        "containerName": naming.CONTAINER,
                        "operator": "In",
                        "values": [int(code) for code in FINAL_CODES],
                    },
                },
                {
                    "action": "FailJob",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
            ]
        },
        "template": _render_pod_template(request),
    }
    if request.active_deadline_seconds is not None:
        spec["activeDeadlineSeconds"] = request.active_deadline_seconds
    # JobSet does not copy its labels down.
    return {"metadata": {"labels": {**request.labels, **_own_labels(request)}}, "spec": spec}


def _render_pod_template(request: GangRequest) -> dict[str, Any]:
    annotations = dict(request.annotations)
    if request.topology:
        mode, label = parse_topology(request.topology)
        annotations[naming.TOPOLOGY_ANNOTATIONS[mode]] = label or "true"
    base: dict[str, Any] = {
        "metadata": {
            "labels": {
                **request.labels,
                **_own_labels(request),
                naming.PREFECT_FLOW_RUN_LABEL: request.flow_run_id,
            },
            "annotations": annotations,
        },
        "spec": render_pod_spec(request),
    }
    return apply_pod_template(base, request.pod_template)


def _own_labels(request: GangRequest) -> dict[str, str]:
    return {
        naming.MANAGED_BY_LABEL: naming.MANAGER,
        naming.POOL_LABEL: request.pool_id,
        naming.FLOW_RUN_LABEL: request.flow_run_id,
    }


def _queue_labels(request: GangRequest) -> dict[str, str]:
    values = {naming.QUEUE_LABEL: request.queue, naming.PRIORITY_LABEL: request.queue_priority}
    return {label: value for label, value in values.items() if value}


def _check_labels(request: GangRequest) -> None:
    fields = {naming.QUEUE_LABEL: "queue", naming.PRIORITY_LABEL: "queue_priority"}
    for label, value in request.labels.items():
        if label in fields:
            field = fields[label]
            raise SpecError(f"`labels[{label!r}]` has a field of its own. Pass `{field}={value!r}` instead.")
        if label in naming.OWN_LABELS:
            raise SpecError(f"`labels[{label!r}]` is set for each gang and finds it again. Remove it.")
        naming.check_label_value(f"labels[{label!r}]", value)
    if request.queue_priority and not request.queue:
        raise SpecError(
            f"`queue_priority={request.queue_priority!r}` means nothing without a queue. Pass `queue` too."
        )
    for field, value in (
        ("queue", request.queue or ""),
        ("queue_priority", request.queue_priority or ""),
        ("pool_id", request.pool_id),
        ("flow_run_id", request.flow_run_id),
    ):
        naming.check_label_value(field, value)
