"""What the webhooks of JobSet 0.12 and Kueue 0.19 do with a JobSet: defaults, names, what may not change."""

from __future__ import annotations

import re
from typing import Any

from tests.simulators.kubernetes.causes import SUBDOMAIN, SUBDOMAIN_RULE, Cause, deny, refuse_invalid
from tests.simulators.kubernetes.objects import Resource, copy_object

Obj = dict[str, Any]

WEBHOOK = "vjobset.kb.io"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_RULE = (
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic "
    "character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for "
    "validation is '[a-z]([-a-z0-9]*[a-z0-9])?')"
)
_TOO_LONG = "JobSet name is too long, {} names generated for this JobSet will exceed 63 characters"
_ACTIONS = ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")
_GATED_ACTIONS = ("RestartJob", "RestartJobAndIgnoreMaxRestarts")
_REASONS = (
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
)
_STRATEGIES = ("Recreate", "BlockingRecreate", "InPlaceRestart")
# What Kueue changes in a pod template to admit a gang, and so may be changed while the JobSet is suspended.
_CHANGEABLE_METADATA = ("labels", "annotations")
_CHANGEABLE_SPEC = ("nodeSelector", "tolerations", "schedulingGates")


def set_defaults(obj: Obj, *, is_new: bool = True) -> None:
    """Fill in, in place, what the mutating webhooks fill in: Kueue suspends what has a queue."""
    spec = obj.setdefault("spec", {})
    network = spec.setdefault("network", {})
    network.setdefault("enableDNSHostnames", True)
    network.setdefault("publishNotReadyAddresses", True)
    spec.setdefault("successPolicy", {}).setdefault("operator", "All")
    spec.setdefault("startupPolicy", {}).setdefault("startupPolicyOrder", "AnyOrder")
    for replicated in spec.get("replicatedJobs") or []:
        replicated.setdefault("groupName", "default")
        replicated.setdefault("replicas", 1)
        replicated["template"].setdefault("metadata", {})
        job = replicated["template"].setdefault("spec", {})
        job.setdefault("completionMode", "Indexed")
        job["template"].setdefault("metadata", {})
        job["template"].setdefault("spec", {}).setdefault("restartPolicy", "OnFailure")
    if failure := spec.get("failurePolicy"):
        failure.setdefault("maxRestarts", 0)
        failure.setdefault("restartStrategy", "Recreate")
        for index, rule in enumerate(failure.get("rules") or []):
            rule.setdefault("name", f"failurePolicyRule{index}")
    if is_new and QUEUE_LABEL in (obj["metadata"].get("labels") or {}):
        spec["suspend"] = True


def check_new(resource: Resource, obj: Obj) -> None:
    """Refuse a new JobSet that the CRD's schema or a validating webhook refuses.

    Raises:
        InvalidError: With 422.
        ForbiddenError: With 403, from Kueue.
    """
    name = obj["metadata"]["name"]
    causes = [*_find_duplicates(obj), *_find_unsupported(obj)]
    if causes:
        raise refuse_invalid(resource, name, causes)
    if causes := [*_find_long_names(obj), *_find_bad_rules(obj)]:
        raise refuse_invalid(resource, name, causes, webhook=WEBHOOK)
    _check_queue(obj)


def _find_duplicates(obj: Obj) -> list[Cause]:
    causes: list[Cause] = []
    seen: set[str] = set()
    for index, replicated in enumerate(obj["spec"].get("replicatedJobs") or []):
        if replicated["name"] in seen:
            field, value = f"spec.replicatedJobs[{index}]", {"name": replicated["name"]}
            causes.append(
                Cause(
                    field=field,
                    value=value,
                    text="",
                    word="Duplicate value",
                    reason="FieldValueDuplicate",
                )
            )
        seen.add(replicated["name"])
        pod = replicated["template"]["spec"]["template"]["spec"]
        for number, container in enumerate(pod.get("containers") or []):
            names: set[str] = set()
            for place, variable in enumerate(container.get("env") or []):
                if variable["name"] in names:
                    where = f"spec.replicatedJobs[{index}].template.spec.template.spec"
                    causes.append(
                        Cause(
                            field=f"{where}.containers[{number}].env[{place}]",
                            value={"name": variable["name"]},
                            text="",
                            word="Duplicate value",
                            reason="FieldValueDuplicate",
                        )
                    )
                names.add(variable["name"])
    return causes


def _find_unsupported(obj: Obj) -> list[Cause]:
    failure = obj["spec"].get("failurePolicy") or {}
    causes: list[Cause] = []
    for index, rule in enumerate(failure.get("rules") or []):
        known = (*_ACTIONS, *_GATED_ACTIONS)
        if rule["action"] not in known:
            causes.append(_unsupported(f"spec.failurePolicy.rules[{index}].action", rule["action"], known))
    if (strategy := failure.get("restartStrategy", "Recreate")) not in _STRATEGIES:
        causes.append(_unsupported("spec.failurePolicy.restartStrategy", strategy, _STRATEGIES))
    return causes


def _unsupported(field: str, value: str, known: tuple[str, ...]) -> Cause:
    text = "supported values: " + ", ".join(f'"{word}"' for word in known)
    return Cause(
        field=field, value=value, text=text, word="Unsupported value", reason="FieldValueNotSupported"
    )


def _find_long_names(obj: Obj) -> list[Cause]:
    causes: list[Cause] = []
    for index, replicated in enumerate(obj["spec"].get("replicatedJobs") or []):
        field = f"spec.replicatedJobs[{index}].name"
        job = f"{obj['metadata']['name']}-{replicated['name']}-{max(0, replicated['replicas'] - 1)}"
        if len(job) > 63:
            causes.append(Cause(field=field, value=job, text=_TOO_LONG.format("job")))
        if not _LABEL.fullmatch(job):
            causes.append(Cause(field=field, value=job, text=_LABEL_RULE))
        spec = replicated["template"]["spec"]
        if spec["completionMode"] == "Indexed" and spec.get("completions"):
            pod = f"{job}-{spec['completions'] - 1}-abcde"
            if len(pod) > 63:
                causes.append(Cause(field=field, value=job, text=_TOO_LONG.format("pod")))
    return causes


def _find_bad_rules(obj: Obj) -> list[Cause]:
    causes: list[Cause] = []
    names = {replicated["name"] for replicated in obj["spec"].get("replicatedJobs") or []}
    rules: list[Obj] = (obj["spec"].get("failurePolicy") or {}).get("rules") or []
    for index, rule in enumerate(rules):
        field = f"spec.failurePolicy.rules[{index}]"
        if rule["action"] in _GATED_ACTIONS:
            text = "the RestartJob feature gate is not enabled"
            causes.append(Cause(field=f"{field}.action", value=rule["action"], text=text))
        for reason in rule.get("onJobFailureReasons") or []:
            if reason not in _REASONS:
                text = f"invalid job failure reason, must be one of {list(_REASONS)}"
                causes.append(Cause(field=f"{field}.onJobFailureReasons", value=reason, text=text))
        for target in rule.get("targetReplicatedJobs") or []:
            if target not in names:
                text = f"invalid replicatedJob name '{target}' does not appear in .spec.ReplicatedJobs"
                causes.append(Cause(field=f"{field}.targetReplicatedJobs", value=target, text=text))
    return causes


def _check_queue(obj: Obj) -> None:
    labels = obj["metadata"].get("labels") or {}
    for label in (QUEUE_LABEL, PRIORITY_LABEL):
        if label in labels and not SUBDOMAIN.fullmatch(labels[label]):
            raise deny(
                WEBHOOK, f'metadata.labels[{label}]: Invalid value: "{labels[label]}": {SUBDOMAIN_RULE}'
            )


def check_change(resource: Resource, new: Obj, old: Obj) -> None:
    """Refuse a change of what may not change.

    Raises:
        InvalidError: With 422, from the CRD's rules or JobSet's webhook.
        ForbiddenError: With 403, from Kueue.
    """
    name = old["metadata"]["name"]
    for field in ("network", "successPolicy", "failurePolicy", "startupPolicy", "volumeClaimPolicies"):
        if new["spec"].get(field) != old["spec"].get(field):
            cause = Cause(field=f"spec.{field}", value=new["spec"].get(field), text="Value is immutable")
            raise refuse_invalid(resource, name, [cause])
    changeable = bool(new["spec"].get("suspend") or old["spec"].get("suspend"))
    causes = [
        Cause(field=f"spec.{field}", value=None, text="field is immutable")
        for field in ("replicatedJobs", "managedBy")
        if _frozen(new, field, changeable=changeable) != _frozen(old, field, changeable=changeable)
    ]
    if causes:
        raise refuse_invalid(resource, name, causes, webhook=WEBHOOK)
    if not old["spec"].get("suspend"):
        _check_labels_while_running(new, old)


def _frozen(obj: Obj, field: str, *, changeable: bool) -> Any:
    value = obj["spec"].get(field)
    if field != "replicatedJobs" or not changeable:
        return value
    replicated_jobs = copy_object({"jobs": value})["jobs"]
    for replicated in replicated_jobs or []:
        template = replicated["template"]["spec"]["template"]
        for part, names in (("metadata", _CHANGEABLE_METADATA), ("spec", _CHANGEABLE_SPEC)):
            for name in names:
                (template.get(part) or {}).pop(name, None)
    return replicated_jobs


def _check_labels_while_running(new: Obj, old: Obj) -> None:
    before, after = old["metadata"].get("labels") or {}, new["metadata"].get("labels") or {}
    for label in (QUEUE_LABEL, PRIORITY_LABEL):
        if before.get(label) == after.get(label):
            continue
        value = f'metadata.labels[{label}]: Invalid value: "{after.get(label, "")}": '
        if label == PRIORITY_LABEL and label not in before:
            raise deny(WEBHOOK, value + "WorkloadPriorityClass cannot be added to a non-suspended workload")
        raise deny(WEBHOOK, value + "field is immutable")
