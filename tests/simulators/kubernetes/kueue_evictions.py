"""Why Kueue takes quota back without a preemptor, what becomes of the gang, and when it may compete again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.simulators.kubernetes import kueue_states
from tests.simulators.kubernetes.conditions import find_condition, is_true, read_reason, record_event
from tests.simulators.kubernetes.kueue_workloads import stop_jobset
from tests.simulators.kubernetes.objects import Obj, parse_time
from tests.simulators.kubernetes.storage import Storage

COMPONENT = "jobset.x-k8s.io/jobset-kueue-controller"


@dataclass(frozen=True, kw_only=True)
class PodsReadyPolicy:
    """Kueue's `waitForPodsReady`, as an administrator configures it.

    Attributes:
        timeout_seconds: From admission until all pods are ready.
        recovery_seconds: For a gang that was ready and lost a pod.
        backoff_seconds: Before the first requeue; doubles with each.
        backoff_limit: Requeues until the workload is deactivated; None: never.
    """

    timeout_seconds: float
    recovery_seconds: float
    backoff_seconds: float = 60.0
    backoff_limit: int | None = None


@dataclass(kw_only=True)
class Pair:
    """A JobSet and its Workload at one moment."""

    storage: Storage
    jobset: Obj
    workload: Obj
    now: float
    pods_ready: PodsReadyPolicy | None

    @property
    def is_reserved(self) -> bool:
        """Whether the workload holds quota."""
        return is_true(self.workload, "QuotaReserved")

    @property
    def is_suspended(self) -> bool:
        """Whether the JobSet is told not to run."""
        return bool(self.jobset["spec"].get("suspend"))

    def write(self, write: Callable[[Obj], None], *, status: bool = True) -> None:
        """Change the Workload."""
        metadata = self.workload["metadata"]
        self.workload = self.storage.mutate(
            "workloads", metadata["namespace"], metadata["name"], write, status=status
        )

    def write_jobset(self, write: Callable[[Obj, Obj], None]) -> None:
        """Change the JobSet, by its Workload."""
        metadata = self.jobset["metadata"]
        self.storage.mutate(
            "jobsets", metadata["namespace"], metadata["name"], lambda obj: write(obj, self.workload)
        )

    def tell(self, about: Obj, component: str, reason: str, message: str) -> None:
        """Record an event."""
        record_event(self.storage, about, component, reason, message, now=self.now)


def follow_eviction(pair: Pair) -> float | None:
    """Stop the JobSet, release its quota once nothing is active, and let it compete again in time."""
    if pair.is_reserved or is_true(pair.workload, "Admitted"):
        if not pair.is_suspended:
            pair.write_jobset(stop_jobset)
            pair.tell(pair.jobset, COMPONENT, "Stopped", find_message(pair.workload))
        elif not _is_active(pair.jobset):
            pair.write(lambda obj: kueue_states.write_release(obj, now=pair.now))
        return None
    if not pair.is_suspended:
        pair.write_jobset(stop_jobset)
        return None
    if read_reason(pair.workload, "Requeued") == "" or is_true(pair.workload, "Requeued"):
        return None
    return _requeue(pair)


def _is_active(jobset: Obj) -> bool:
    counts = (jobset.get("status") or {}).get("replicatedJobsStatus") or ()
    return any(count["active"] for count in counts)


def _requeue(pair: Pair) -> float | None:
    match read_reason(pair.workload, "Requeued"):
        case "PodsReadyTimeout":
            at = (pair.workload["status"].get("requeueState") or {}).get("requeueAt")
            if at is not None and parse_time(at) > pair.now:
                return parse_time(at) - pair.now
            if at is not None:
                pair.write(lambda obj: obj["status"]["requeueState"].pop("requeueAt"))
        case "ClusterQueueStopped" | "LocalQueueStopped":
            if _find_stopped_queue(pair, "Hold", "HoldAndDrain"):
                return None
        case _:
            if not pair.workload["spec"]["active"]:
                return None
    pair.write(lambda obj: kueue_states.write_requeue(obj, now=pair.now))
    return None


def find_eviction(pair: Pair) -> str:
    """Evict for what is not the scheduler's business; return the reason, "" when there is none."""
    if not pair.workload["spec"]["active"]:
        pair.write(lambda obj: kueue_states.write_deactivation(obj, now=pair.now))
        if not pair.is_reserved:  # nothing to stop: release it here and now
            pair.write(lambda obj: kueue_states.write_release(obj, now=pair.now))
    elif not pair.is_reserved:
        return ""
    elif kind := _find_stopped_queue(pair, "HoldAndDrain"):
        text = f"The {kind} is stopped"
        pair.write(lambda obj: kueue_states.write_eviction(obj, f"{kind}Stopped", text, now=pair.now))
    elif (left := measure_patience(pair)) is not None and left <= 0:
        return _evict_for_timeout(pair)
    else:
        return ""
    return read_reason(pair.workload, "Evicted")


def _find_stopped_queue(pair: Pair, *policies: str) -> str:
    """Return the kind of the queue whose `stopPolicy` is one of `policies`, or ""."""
    local = pair.storage.get(
        "localqueues", pair.workload["metadata"]["namespace"], pair.workload["spec"].get("queueName", "")
    )
    cluster = pair.storage.get("clusterqueues", "", local["spec"]["clusterQueue"]) if local else None
    for kind, queue in (("ClusterQueue", cluster), ("LocalQueue", local)):
        if queue is not None and queue["spec"].get("stopPolicy") in policies:
            return kind
    return ""


def measure_patience(pair: Pair) -> float | None:
    """Return the seconds that Kueue still waits for pods; None when it does not wait at all."""
    policy, ready = pair.pods_ready, find_condition(pair.workload, "PodsReady")
    admitted = find_condition(pair.workload, "Admitted")
    if policy is None or ready is None or ready["status"] == "True" or admitted is None:
        return None
    if ready["reason"] == "WaitForRecovery":
        return parse_time(ready["lastTransitionTime"]) + policy.recovery_seconds - pair.now
    return parse_time(admitted["lastTransitionTime"]) + policy.timeout_seconds - pair.now


def _evict_for_timeout(pair: Pair) -> str:
    policy = pair.pods_ready
    assert policy is not None
    count = (pair.workload["status"].get("requeueState") or {}).get("count", 0)
    if policy.backoff_limit is not None and count >= policy.backoff_limit:
        pair.write(lambda obj: kueue_states.write_deactivation_target(obj, now=pair.now))
        pair.write(lambda obj: obj["spec"].update(active=False), status=False)
        return ""
    metadata = pair.workload["metadata"]
    text = f"Exceeded the PodsReady timeout {metadata['namespace']}/{metadata['name']}"
    cause = read_reason(pair.workload, "PodsReady")

    def evict(obj: Obj) -> None:
        kueue_states.write_eviction(obj, "PodsReadyTimeout", text, now=pair.now, cause=cause)
        kueue_states.write_backoff(obj, seconds=policy.backoff_seconds * 2**count, now=pair.now)

    pair.write(evict)
    return "PodsReadyTimeout"


def find_message(workload: Obj) -> str:
    """Return what is said about the eviction of a workload."""
    evicted = find_condition(workload, "Evicted")
    return evicted["message"] if evicted else ""
