"""What Kueue writes into a Workload at each turn of its life: all reasons, texts and counters stand here."""

from __future__ import annotations

from tests.simulators.kubernetes.conditions import find_condition, set_condition
from tests.simulators.kubernetes.objects import Obj, format_time, parse_time

DEACTIVATED = "Deactivated"
RETRY_LIMIT = "RequeuingLimitExceeded"
_RESTARTED = {
    "ClusterQueueStopped": ("ClusterQueueRestarted", "The ClusterQueue was restarted after being stopped"),
    "LocalQueueStopped": ("LocalQueueRestarted", "The LocalQueue was restarted after being stopped"),
    "PodsReadyTimeout": ("BackoffFinished", "The workload backoff was finished"),
}


def _set(workload: Obj, kind: str, value: bool, reason: str, message: str, now: float) -> None:
    generation = workload["metadata"]["generation"]
    status = workload.setdefault("status", {})
    set_condition(status, kind, value, reason, message, now=now, generation=generation)


def write_admission(workload: Obj, admission: Obj, *, now: float) -> None:
    """Reserve quota and admit, in one write; what was said about an eviction is said to be past."""
    workload.setdefault("status", {})["admission"] = admission
    workload["status"].pop("resourceRequests", None)
    text = f"Quota reserved in ClusterQueue {admission['clusterQueue']}"
    _set(workload, "QuotaReserved", True, "QuotaReserved", text, now)
    for kind in ("Evicted", "Preempted"):
        if (past := find_condition(workload, kind)) and past["status"] == "True":
            _set(workload, kind, False, "QuotaReserved", f"Previously: {past['message']}", now)
    _set(workload, "Admitted", True, "Admitted", "The workload is admitted", now)


def write_pending(
    workload: Obj, reason: str, message: str, requests: list[Obj] | None, *, now: float
) -> None:
    """Say why there is no quota for it."""
    _set(workload, "QuotaReserved", False, reason, message, now)
    if requests is not None:
        workload["status"]["resourceRequests"] = requests


def write_eviction(workload: Obj, reason: str, message: str, *, now: float, cause: str = "") -> None:
    """Take the quota back, for a reason; it is counted at once, and given up once nothing runs any more."""
    counted = DEACTIVATED if reason.startswith(DEACTIVATED) else reason
    statistics = workload.setdefault("status", {}).setdefault("schedulingStats", {})
    evictions: list[Obj] = statistics.setdefault("evictions", [])
    for eviction in evictions:
        if (eviction["reason"], eviction["underlyingCause"]) == (counted, cause):
            eviction["count"] += 1
            break
    else:
        evictions.append({"reason": counted, "underlyingCause": cause, "count": 1})
    _set(workload, "Evicted", True, reason, message, now)


def write_preemption(workload: Obj, preemptor: Obj, queue: str, *, now: float) -> None:
    """Evict in favour of a workload with a higher priority."""
    job_uid = preemptor["metadata"]["labels"]["kueue.x-k8s.io/job-uid"]
    message = (
        f"Preempted to accommodate a workload (UID: {preemptor['metadata']['uid']}, JobUID: {job_uid}) "
        f"due to prioritization in the ClusterQueue; preemptor path: /{queue}; preemptee path: /{queue}"
    )
    write_eviction(workload, "Preempted", message, now=now)
    _set(workload, "Preempted", True, "InClusterQueue", message, now)


def write_release(workload: Obj, *, now: float) -> None:
    """Give up the quota of an evicted workload, of which nothing runs any more."""
    status = workload["status"]
    evicted, admitted = find_condition(workload, "Evicted"), find_condition(workload, "Admitted")
    assert evicted is not None, "only evicted workloads are released"
    if admitted is not None and admitted["status"] == "True":
        ran = int(now - parse_time(admitted["lastTransitionTime"]))
        past = status.get("accumulatedPastExecutionTimeSeconds", 0)
        status["accumulatedPastExecutionTimeSeconds"] = past + ran
    status.pop("admission", None)
    reason, message = evicted["reason"], evicted["message"]
    _set(workload, "QuotaReserved", False, "Pending", message, now)
    _set(workload, "Admitted", False, "NoReservation", "The workload has no reservation", now)
    # Who was preempted may come back at once; the others wait for a back-off, a queue or a person.
    _set(workload, "Requeued", reason == "Preempted", reason, message, now)


def write_requeue(workload: Obj, *, now: float) -> None:
    """Let an evicted workload compete again: its back-off is over, its queue open, or it is active again."""
    requeued = find_condition(workload, "Requeued")
    reactivated = ("Reactivated", "The workload was reactivated")
    reason, message = _RESTARTED.get(requeued["reason"] if requeued else "", reactivated)
    _set(workload, "Requeued", True, reason, message, now)


def write_backoff(workload: Obj, *, seconds: float, now: float) -> None:
    """Count a timeout, and say when the workload may compete again."""
    count = (workload["status"].get("requeueState") or {}).get("count", 0) + 1
    workload["status"]["requeueState"] = {"count": count, "requeueAt": format_time(now + seconds)}


def write_deactivation_target(workload: Obj, *, now: float) -> None:
    """Announce that Kueue itself will deactivate the workload."""
    text = "exceeding the maximum number of re-queuing retries"
    _set(workload, "DeactivationTarget", True, RETRY_LIMIT, text, now)


def write_deactivation(workload: Obj, *, now: float) -> None:
    """Evict a workload that is not active (any more); by Kueue's own doing when that was announced."""
    target = find_condition(workload, "DeactivationTarget")
    if target is None:
        write_eviction(workload, DEACTIVATED, "The workload is deactivated", now=now)
        return
    message = f"The workload is deactivated due to {target['message']}"
    write_eviction(workload, f"DeactivatedDueTo{target['reason']}", message, now=now, cause=target["reason"])
    status = workload["status"]
    status["conditions"] = [entry for entry in status["conditions"] if entry["type"] != "DeactivationTarget"]
    status.pop("requeueState", None)


def write_pods_ready(workload: Obj, *, admitted: bool, ready: bool, now: float) -> None:
    """Say whether all pods are up; Kueue does so whether it waits for that or not."""
    found = find_condition(workload, "PodsReady")
    reason = found["reason"] if found else "WaitForStart"
    if admitted and ready:
        again = reason in ("WaitForRecovery", "Recovered")
        text = "All pods reached readiness and the workload is running"
        _set(workload, "PodsReady", True, "Recovered" if again else "Started", text, now)
    elif admitted and reason != "WaitForStart":
        text = "At least one pod has failed, waiting for recovery"
        _set(workload, "PodsReady", False, "WaitForRecovery", text, now)
    else:
        text = "Not all pods are ready or succeeded"
        _set(workload, "PodsReady", False, "WaitForStart", text, now)


def write_finish(workload: Obj, reason: str, message: str, *, now: float) -> None:
    """Say that it is over: `Succeeded`, `Failed` or `OwnerNotFound`."""
    _set(workload, "Finished", True, reason, message, now)
