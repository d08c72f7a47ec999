"""The Job controller: one pod per index, what their ends add up to, and when a Job is done with.

A failure is looked for before anything else, also in a suspended Job; see `reconcile`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.simulators.kubernetes import jobpods
from tests.simulators.kubernetes.conditions import (
    find_condition,
    is_true,
    list_owned,
    record_event,
    set_condition,
)
from tests.simulators.kubernetes.objects import Obj, copy_object, format_time, parse_time
from tests.simulators.kubernetes.storage import Key, Storage

COMPONENT = "job-controller"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a Job is given up."""

    reason: str
    message: str


@dataclass(kw_only=True)
class Sync:
    """One look at a Job: its pods as they are, and the status that is being written."""

    storage: Storage
    job: Obj
    pods: list[Obj]
    now: float
    status: Obj

    @property
    def completed(self) -> set[int]:
        """Indexes that have succeeded."""
        return jobpods.parse_indexes(self.status.get("completedIndexes", ""))

    @property
    def completions(self) -> int:
        """How many indexes there are."""
        spec = self.job["spec"]
        return spec.get("completions") or spec.get("parallelism") or 1

    @property
    def is_suspended(self) -> bool:
        """Whether the spec says so."""
        return bool(self.job["spec"].get("suspend"))

    def select(self, accept: Callable[[Obj], bool]) -> list[Obj]:
        """Return the pods for which a predicate of `jobpods` holds."""
        return [pod for pod in self.pods if accept(pod)]

    def record(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Tell an event about the Job."""
        record_event(self.storage, self.job, COMPONENT, reason, message, now=self.now, warning=warning)

    def set(self, kind: str, value: bool, reason: str, message: str) -> None:
        """Set a condition of the Job."""
        set_condition(self.status, kind, value, reason, message, now=self.now)


def reconcile(storage: Storage, key: Key, now: float) -> float | None:
    """Look at one Job; return seconds until it has to be looked at again."""
    job = storage.get(*key)
    if job is None:
        for pod in storage.list("pods", key[1], {"batch.kubernetes.io/job-name": key[2]}):
            jobpods.release_pod(storage, pod)
        return None
    pods = list_owned(storage, job, "Pod")
    sync = Sync(storage=storage, job=job, pods=pods, now=now, status=copy_object(job.get("status") or {}))
    sync.status["uncountedTerminatedPods"] = {}
    if is_true(job, "Complete") or is_true(job, "Failed") or "deletionTimestamp" in job["metadata"]:
        for pod in pods:
            jobpods.release_pod(storage, pod)
        if "deletionTimestamp" in job["metadata"]:
            _write_status(sync)
        return None
    failure = _find_failure(sync)
    if failure is not None:
        return _give_up(sync, failure)
    _count_ended(sync)
    if len(sync.completed) >= sync.completions:
        return _complete(sync)
    wait = _suspend(sync) if sync.is_suspended else _run(sync)
    _write_status(sync)
    return wait


def _find_failure(sync: Sync) -> Failure | None:
    target = find_condition(sync.job, "FailureTarget")
    if target is not None:
        return Failure(reason=target["reason"], message=target["message"])
    spec = sync.job["spec"]
    failed = [pod for pod in sync.pods if jobpods.is_failed(pod, sync.job)]
    counted = sync.status.get("failed", 0)
    for pod in failed:
        verdict = jobpods.judge_failed_pod(pod, sync.job)
        if verdict.action == "FailJob":
            return Failure(reason="PodFailurePolicy", message=verdict.message)
        counted += verdict.action == "Count" and jobpods.is_tracked(pod)
    if counted > spec.get("backoffLimit", 6):
        return Failure(reason="BackoffLimitExceeded", message="Job has reached the specified backoff limit")
    if (left := _measure_deadline(sync)) is not None and left <= 0:
        return Failure(reason="DeadlineExceeded", message="Job was active longer than specified deadline")
    return None


def _measure_deadline(sync: Sync) -> float | None:
    """Return the seconds left of `activeDeadlineSeconds`; a suspended Job uses none up."""
    deadline, started = sync.job["spec"].get("activeDeadlineSeconds"), sync.status.get("startTime")
    if deadline is None or started is None or sync.is_suspended:
        return None
    return parse_time(started) + deadline - sync.now


def _give_up(sync: Sync, failure: Failure) -> float | None:
    """End what runs and count all of it as failed; the Job itself has failed once every pod has ended."""
    active = sync.select(jobpods.is_active)
    terminating = sync.select(jobpods.is_terminating)
    lost = [pod for pod in sync.pods if jobpods.is_tracked(pod) and jobpods.read_phase(pod) != "Succeeded"]
    done = is_true(sync.job, "FailureTarget") and not active and not terminating and not lost
    for pod in active:
        jobpods.delete_pod(sync.storage, pod)
        sync.record("SuccessfulDelete", f"Deleted pod: {pod['metadata']['name']}")
    for pod in sync.pods:
        jobpods.release_pod(sync.storage, pod)
    if lost:
        sync.status["failed"] = sync.status.get("failed", 0) + len(lost)
    sync.set("FailureTarget", True, failure.reason, failure.message)
    if done:
        sync.set("Failed", True, failure.reason, failure.message)
        sync.record(failure.reason, failure.message, warning=True)
    _write_status(sync)
    return None if done or list_unended(sync) else 0.0


def list_unended(sync: Sync) -> list[Obj]:
    """Return the pods that still run, as they are by now."""
    return [pod for pod in list_owned(sync.storage, sync.job, "Pod") if jobpods.is_terminating(pod)]


def _count_ended(sync: Sync) -> None:
    """Add newly ended pods to the counters and let them go."""
    completed = sync.completed
    for pod in sync.select(jobpods.is_tracked):
        if jobpods.read_phase(pod) == "Succeeded":
            completed.add(jobpods.read_index(pod))
        elif not jobpods.is_failed(pod, sync.job):
            continue
        elif jobpods.judge_failed_pod(pod, sync.job).action == "Ignore":
            continue  # it stays until its replacement is there: see `_run`
        else:
            sync.status["failed"] = sync.status.get("failed", 0) + 1
        jobpods.release_pod(sync.storage, pod)
    if completed:
        sync.status["completedIndexes"] = jobpods.format_indexes(completed)
        sync.status["succeeded"] = len(completed)


def _complete(sync: Sync) -> float | None:
    why = ("CompletionsReached", "Reached expected number of succeeded pods")
    if is_true(sync.job, "SuccessCriteriaMet"):
        sync.set("Complete", True, *why)
        sync.status["completionTime"] = format_time(sync.now)
        sync.record("Completed", "Job completed")
    sync.set("SuccessCriteriaMet", True, *why)
    _write_status(sync)
    return None if is_true(sync.job, "SuccessCriteriaMet") else 0.0


def _suspend(sync: Sync) -> None:
    """Let all pods go, uncounted: their finalizer goes first, so that no end of theirs is heard of."""
    for pod in sync.select(jobpods.is_active):
        jobpods.release_pod(sync.storage, pod)
        jobpods.delete_pod(sync.storage, pod)
        sync.record("SuccessfulDelete", f"Deleted pod: {pod['metadata']['name']}")
    sync.status.pop("startTime", None)
    if not is_true({"status": sync.status}, "Suspended"):
        sync.record("Suspended", "Job suspended")
    sync.set("Suspended", True, "JobSuspended", "Job suspended")


def _run(sync: Sync) -> float | None:
    """Create the pods that are missing; return when the next ones may come."""
    if is_true(sync.job, "Suspended"):
        sync.set("Suspended", False, "JobResumed", "Job resumed")
        sync.status["startTime"] = format_time(sync.now)
        sync.record("Resumed", "Job resumed")
    sync.status.setdefault("startTime", format_time(sync.now))
    kept = [pod for pod in sync.pods if jobpods.is_active(pod) or _keeps_place(pod, sync.job)]
    taken = {jobpods.read_index(pod) for pod in kept} | sync.completed
    missing = [index for index in range(sync.completions) if index not in taken]
    missing = missing[: max(0, sync.job["spec"].get("parallelism", 1) - len(kept))]
    backoff = _measure_backoff(sync) if missing else 0.0
    if missing and backoff <= 0:
        for index in missing:
            pod = sync.storage.create("pods", jobpods.make_pod(sync.job, index))
            sync.record("SuccessfulCreate", f"Created pod: {pod['metadata']['name']}")
        for pod in sync.pods:
            if jobpods.is_failed(pod, sync.job):
                jobpods.release_pod(sync.storage, pod)
    waits = [wait for wait in (backoff, _measure_deadline(sync)) if wait and wait > 0]
    return min(waits, default=None)


def _keeps_place(pod: Obj, job: Obj) -> bool:
    return jobpods.is_terminating(pod) and jobpods.replaces_only_failed(job)


def _measure_backoff(sync: Sync) -> float:
    """Return the seconds until failed pods may be replaced: 10 s after the first failure, then twice that."""
    failed = [pod for pod in sync.pods if jobpods.read_phase(pod) == "Failed" and jobpods.is_tracked(pod)]
    count = len(failed) + sync.status.get("failed", 0)
    ends = [
        jobpods.read_finish_time(pod, default=sync.now) for pod in sync.pods if not jobpods.is_active(pod)
    ]
    if count == 0 or not ends:
        return 0.0
    pause = min(jobpods.FIRST_BACKOFF_SECONDS * 2 ** (count - 1), jobpods.LONGEST_BACKOFF_SECONDS)
    return max(ends) + pause - sync.now


def _write_status(sync: Sync) -> None:
    pods = list_owned(sync.storage, sync.job, "Pod")
    active = [pod for pod in pods if jobpods.is_active(pod)]
    sync.status.update(
        active=len(active),
        ready=sum(jobpods.is_ready(pod) for pod in active),
        terminating=sum(jobpods.is_terminating(pod) for pod in pods),
    )
    if not active:
        del sync.status["active"]

    def write(obj: Obj) -> None:
        obj["status"] = sync.status

    sync.storage.mutate(
        "jobs", sync.job["metadata"]["namespace"], sync.job["metadata"]["name"], write, status=True
    )
