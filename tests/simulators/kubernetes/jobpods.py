"""The pods of a Job: how they are made, what each of them counts as, and which failure rule they match."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.simulators.kubernetes.conditions import is_true, make_owner_reference
from tests.simulators.kubernetes.objects import Obj, copy_object, parse_time
from tests.simulators.kubernetes.refusals import NotFoundError
from tests.simulators.kubernetes.storage import Storage

TRACKING_FINALIZER = "batch.kubernetes.io/job-tracking"
INDEX = "batch.kubernetes.io/job-completion-index"
FIRST_BACKOFF_SECONDS = 10.0
LONGEST_BACKOFF_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What `podFailurePolicy` says about one failed pod: an action (`Count` without a rule) and why."""

    action: str
    message: str = ""


def make_pod(job: Obj, index: int) -> Obj:
    """Return the pod of one index, as the Job controller creates it."""
    name = job["metadata"]["name"]
    uid = job["metadata"]["uid"]
    template = copy_object(job["spec"]["template"])
    metadata, spec = template.get("metadata") or {}, template["spec"]
    generate_name = f"{name}-{index}-"
    spec["hostname"] = f"{name}-{index}"
    spec.setdefault("terminationGracePeriodSeconds", 30)
    field = {"apiVersion": "v1", "fieldPath": f"metadata.labels['{INDEX}']"}
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        env = [entry for entry in container.get("env") or () if entry["name"] != "JOB_COMPLETION_INDEX"]
        container["env"] = [*env, {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": field}}]
        resources = container.get("resources") or {}
        if limits := resources.get("limits"):  # the API's default: what is limited and not requested
            resources["requests"] = {**limits, **(resources.get("requests") or {})}
    return {
        "metadata": {
            "generateName": generate_name,
            "namespace": job["metadata"]["namespace"],
            "labels": {
                **(metadata.get("labels") or {}),
                INDEX: str(index),
                "batch.kubernetes.io/job-name": name,
                "batch.kubernetes.io/controller-uid": uid,
                "job-name": name,
                "controller-uid": uid,
            },
            "annotations": {**(metadata.get("annotations") or {}), INDEX: str(index)},
            "finalizers": [TRACKING_FINALIZER],
            "ownerReferences": [make_owner_reference(job)],
        },
        "spec": spec,
        "status": {"phase": "Pending"},
    }


def read_index(pod: Obj) -> int:
    """Return a pod's completion index."""
    return int(pod["metadata"]["annotations"][INDEX])


def is_deleted(pod: Obj) -> bool:
    """Whether somebody asked for the pod's end."""
    return "deletionTimestamp" in pod["metadata"]


def read_phase(pod: Obj) -> str:
    """Return a pod's phase."""
    return (pod.get("status") or {}).get("phase") or "Pending"


def is_active(pod: Obj) -> bool:
    """Whether a pod works, or will."""
    return read_phase(pod) in ("Pending", "Running") and not is_deleted(pod)


def is_ready(pod: Obj) -> bool:
    """Whether a pod says that it is ready."""
    return is_active(pod) and is_true(pod, "Ready")


def is_terminating(pod: Obj) -> bool:
    """Whether a pod is on its way out and has not ended."""
    return is_deleted(pod) and read_phase(pod) in ("Pending", "Running")


def is_tracked(pod: Obj) -> bool:
    """Whether a pod has not been counted yet."""
    return TRACKING_FINALIZER in (pod["metadata"].get("finalizers") or ())


def replaces_only_failed(job: Obj) -> bool:
    """Whether a pod that still terminates keeps its place (`podReplacementPolicy: Failed`)."""
    spec = job["spec"]
    return bool(spec.get("podFailurePolicy")) or spec.get("podReplacementPolicy") == "Failed"


def is_failed(pod: Obj, job: Obj) -> bool:
    """Whether a pod counts as failed; one that is being deleted does at once, unless it keeps its place."""
    if read_phase(pod) == "Failed":
        return True
    return is_deleted(pod) and read_phase(pod) != "Succeeded" and not replaces_only_failed(job)


def judge_failed_pod(pod: Obj, job: Obj) -> Verdict:
    """Return what the first matching rule of the Job's `podFailurePolicy` says."""
    rules: Sequence[Obj] = (job["spec"].get("podFailurePolicy") or {}).get("rules") or ()
    for number, rule in enumerate(rules):
        if why := _match_rule(pod, rule):
            return Verdict(
                action=rule["action"], message=f"{why} matching {rule['action']} rule at index {number}"
            )
    return Verdict(action="Count")


def _match_rule(pod: Obj, rule: Obj) -> str:
    where = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    if codes := rule.get("onExitCodes"):
        for name, exit_code in read_exit_codes(pod):
            listed = exit_code in codes["values"]
            wanted = codes["operator"] == "In"
            if codes.get("containerName") in (None, name) and exit_code != 0 and listed == wanted:
                return f"Container {name} for pod {where} failed with exit code {exit_code}"
        return ""
    for pattern in rule.get("onPodConditions") or ():
        for condition in (pod.get("status") or {}).get("conditions") or ():
            wanted = pattern.get("status", "True")
            if (condition["type"], condition["status"]) == (pattern["type"], wanted):
                return f"Pod {where} has condition {pattern['type']}"
    return ""


def read_exit_codes(pod: Obj) -> Iterator[tuple[str, int]]:
    """Yield the name and exit code of each container that has ended."""
    for status in _list_container_statuses(pod):
        if terminated := (status.get("state") or {}).get("terminated"):
            yield status["name"], int(terminated["exitCode"])


def read_finish_time(pod: Obj, *, default: float) -> float:
    """Return when the last container of a pod ended."""
    ends = [
        parse_time(terminated["finishedAt"])
        for status in _list_container_statuses(pod)
        if (terminated := (status.get("state") or {}).get("terminated")) and terminated.get("finishedAt")
    ]
    return max(ends, default=default)


def _list_container_statuses(pod: Obj) -> list[Obj]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def release_pod(storage: Storage, pod: Obj) -> None:
    """Take our finalizer off a pod: it is counted, or never will be."""

    def release(obj: Obj) -> None:
        kept = [name for name in obj["metadata"].get("finalizers") or () if name != TRACKING_FINALIZER]
        obj["metadata"]["finalizers"] = kept
        if not kept:
            del obj["metadata"]["finalizers"]

    if not is_tracked(pod):
        return
    try:
        storage.mutate("pods", pod["metadata"]["namespace"], pod["metadata"]["name"], release)
    except NotFoundError:
        return


def delete_pod(storage: Storage, pod: Obj) -> None:
    """Ask for a pod's end, with its own grace period."""
    metadata = pod["metadata"]
    try:
        storage.delete("pods", metadata["namespace"], metadata["name"], uid=metadata["uid"])
    except NotFoundError:
        return


def format_indexes(indexes: set[int]) -> str:
    """Return `completedIndexes` as the Job's status spells them: `0,2-4`."""
    runs: list[list[int]] = []
    for index in sorted(indexes):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    # Two in a row are spelt `0,1`, three `0-2`.
    return ",".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(str(index) for index in run) for run in runs
    )


def parse_indexes(text: str) -> set[int]:
    """Return the set that `format_indexes` wrote."""
    indexes: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        indexes.update(range(int(first), int(last or first) + 1))
    return indexes
