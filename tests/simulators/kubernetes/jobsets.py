"""The JobSet controller: the Jobs of a JobSet, what they add up to, and when all of them start anew.

The order in `reconcile` is the real one, and it matters: a failed Job is seen before a suspended JobSet is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulators.kubernetes.conditions import (
    find_condition,
    is_true,
    list_owned,
    make_owner_reference,
    record_event,
    set_condition,
)
from tests.simulators.kubernetes.jobset_children import (
    ATTEMPT,
    REPLICATED_JOB,
    list_missing_jobs,
    make_service,
    merge_template,
)
from tests.simulators.kubernetes.jobset_failures import decide_failure
from tests.simulators.kubernetes.objects import Obj, copy_object, parse_time
from tests.simulators.kubernetes.refusals import AlreadyExistsError, NotFoundError
from tests.simulators.kubernetes.storage import Key, Storage

COMPONENT = "jobset"
CONTROLLER = "jobset.sigs.k8s.io/jobset-controller"


@dataclass(kw_only=True)
class Sync:
    """One look at a JobSet: its Jobs by what they are, and the status that is being written."""

    storage: Storage
    jobset: Obj
    now: float
    status: Obj
    previous: list[Obj] = field(default_factory=list)
    active: list[Obj] = field(default_factory=list)
    succeeded: list[Obj] = field(default_factory=list)
    failed: list[Obj] = field(default_factory=list)
    events: list[tuple[str, str, bool]] = field(default_factory=list)

    @property
    def spec(self) -> Obj:
        """The JobSet's spec."""
        return self.jobset["spec"]

    def turn(self, kind: str, value: bool, reason: str, message: str, *, warning: bool = False) -> None:
        """Set a condition and tell it; one that is not there is never added as False."""
        if not value and find_condition({"status": self.status}, kind) is None:
            return
        if set_condition(self.status, kind, value, reason, message, now=self.now):
            self.events.append((reason, message, warning))

    def finish(self, state: str, reason: str, message: str) -> None:
        """Say that the JobSet is over: `Completed` or `Failed`."""
        self.turn(state, True, reason, message, warning=state == "Failed")
        self.status["terminalState"] = state
        self.turn("RestartingJobSet", False, f"JobSet{state}", f"jobset {state.lower()}")


def reconcile(storage: Storage, key: Key, now: float) -> float | None:
    """Look at one JobSet; return seconds until it has to be looked at again."""
    jobset = storage.get(*key)
    if jobset is None or "deletionTimestamp" in jobset["metadata"]:
        return None
    if jobset["spec"].get("managedBy", CONTROLLER) != CONTROLLER:
        return None
    sync = Sync(storage=storage, jobset=jobset, now=now, status=copy_object(jobset.get("status") or {}))
    sync.status.setdefault("restarts", 0)
    _sort_jobs(sync)
    _count_jobs(sync)
    if is_true(jobset, "Completed") or is_true(jobset, "Failed"):
        return _clean_up(sync)
    _delete_jobs(sync, sync.previous)
    if _all_ready(sync):
        sync.turn("RestartingJobSet", False, "JobsReady", "all jobs are ready")
    if sync.failed:
        _apply_failure(sync)
    elif _is_successful(sync):
        sync.finish("Completed", "AllJobsCompleted", "jobset completed successfully")
    else:
        _drive_jobs(sync)
    _write_status(sync)
    return None


def _sort_jobs(sync: Sync) -> None:
    for job in list_owned(sync.storage, sync.jobset, "Job"):
        if int(job["metadata"]["labels"][ATTEMPT]) < sync.status["restarts"]:
            sync.previous.append(job)
        elif is_true(job, "Complete"):
            sync.succeeded.append(job)
        elif is_true(job, "Failed"):
            sync.failed.append(job)
        else:
            sync.active.append(job)


def _count_jobs(sync: Sync) -> None:
    """Write `replicatedJobsStatus`: Jobs by what they are, not pods."""

    def belongs(job: Obj) -> bool:
        return job["metadata"]["labels"][REPLICATED_JOB] == name

    counts: list[Obj] = []
    for replicated in sync.spec["replicatedJobs"]:
        name = replicated["name"]
        active = [job for job in sync.active if belongs(job)]
        counts.append(
            {
                "name": name,
                "ready": sum(_is_job_ready(job) for job in active),
                "active": sum(bool((job.get("status") or {}).get("active")) for job in active),
                "succeeded": sum(belongs(job) for job in sync.succeeded),
                "failed": sum(belongs(job) for job in sync.failed),
                "suspended": sum(bool(job["spec"].get("suspend")) for job in active),
            }
        )
    sync.status["replicatedJobsStatus"] = counts


def _is_job_ready(job: Obj) -> bool:
    spec, status = job["spec"], job.get("status") or {}
    wanted = min(spec.get("parallelism", 1), spec.get("completions", spec.get("parallelism", 1)))
    return status.get("ready", 0) + status.get("succeeded", 0) >= wanted


def _all_ready(sync: Sync) -> bool:
    replicas = {job["name"]: job.get("replicas", 1) for job in sync.spec["replicatedJobs"]}
    return all(
        count["ready"] + count["succeeded"] >= replicas[count["name"]]
        for count in sync.status["replicatedJobsStatus"]
    )


def _is_successful(sync: Sync) -> bool:
    policy = sync.spec.get("successPolicy") or {}
    targets = policy.get("targetReplicatedJobs") or [job["name"] for job in sync.spec["replicatedJobs"]]
    replicas = {job["name"]: job.get("replicas", 1) for job in sync.spec["replicatedJobs"]}
    counts = {count["name"]: count["succeeded"] for count in sync.status["replicatedJobsStatus"]}
    if policy.get("operator", "All") == "Any":
        return any(counts[name] > 0 for name in targets)
    return all(counts[name] >= replicas[name] for name in targets)


def _clean_up(sync: Sync) -> float | None:
    """End what still runs; what failed stays to be looked at, until the JobSet's own time is up."""
    _delete_jobs(sync, sync.active)
    _write_status(sync)
    keep_seconds = sync.spec.get("ttlSecondsAfterFinished")
    if keep_seconds is None:
        return None
    end = find_condition(sync.jobset, "Completed") or find_condition(sync.jobset, "Failed")
    assert end is not None
    left = parse_time(end["lastTransitionTime"]) + keep_seconds - sync.now
    if left > 0:
        return left
    metadata = sync.jobset["metadata"]
    sync.storage.delete("jobsets", metadata["namespace"], metadata["name"], propagation="Foreground")
    return None


def _delete_jobs(sync: Sync, jobs: list[Obj]) -> None:
    for job in jobs:
        metadata = job["metadata"]
        if "deletionTimestamp" not in metadata:
            sync.storage.delete(
                "jobs", metadata["namespace"], metadata["name"], propagation="Foreground", uid=metadata["uid"]
            )


def _apply_failure(sync: Sync) -> None:
    counted = sync.status.get("restartsCountTowardsMax", 0)
    decision = decide_failure(sync.jobset, sync.failed, counted_restarts=counted)
    if decision.is_final:
        sync.finish("Failed", decision.reason, decision.message)
        return
    sync.status["restarts"] += 1
    if decision.counts:
        sync.status["restartsCountTowardsMax"] = sync.status.get("restartsCountTowardsMax", 0) + 1
    sync.turn("RestartingJobSet", True, decision.reason, decision.message, warning=True)
    sync.events.append((f"{decision.action}FailurePolicyAction", decision.message, True))


def _drive_jobs(sync: Sync) -> None:
    """Create what is missing, then suspend or resume all of it."""
    _create_service(sync)
    strategy = (sync.spec.get("failurePolicy") or {}).get("restartStrategy", "Recreate")
    if not (strategy == "BlockingRecreate" and sync.previous):
        # An old Job that is still going keeps its name; its DELETED brings us back.
        owned = list_owned(sync.storage, sync.jobset, "Job")
        names = {job["metadata"]["name"] for job in owned}
        for job in list_missing_jobs(sync.jobset, names, restarts=sync.status["restarts"]):
            sync.storage.create("jobs", job)
    if sync.spec.get("suspend"):
        for job in sync.active:
            _change_job(sync, job, _suspend)
        sync.turn("Suspended", True, "SuspendedJobs", "jobset is suspended")
        sync.turn("RestartingJobSet", False, "JobSetSuspended", "jobset is suspended")
        return
    templates = {job["name"]: job["template"]["spec"]["template"] for job in sync.spec["replicatedJobs"]}

    def resume(job: Obj) -> None:
        merge_template(job, templates[job["metadata"]["labels"][REPLICATED_JOB]])
        job["spec"]["suspend"] = False

    for job in sync.active:
        if job["spec"].get("suspend"):
            _change_job(sync, job, resume)
    if is_true(sync.jobset, "Suspended"):
        sync.turn("Suspended", False, "ResumeJobs", "jobset is resumed")


def _suspend(job: Obj) -> None:
    job["spec"]["suspend"] = True


def _change_job(sync: Sync, job: Obj, change: Callable[[Obj], None]) -> None:
    try:
        sync.storage.mutate("jobs", job["metadata"]["namespace"], job["metadata"]["name"], change)
    except NotFoundError:
        return


def _create_service(sync: Sync) -> None:
    if not (sync.spec.get("network") or {}).get("enableDNSHostnames", True):
        return
    service = make_service(sync.jobset)
    service["metadata"]["ownerReferences"] = [make_owner_reference(sync.jobset)]
    metadata = service["metadata"]
    if sync.storage.get("services", metadata["namespace"], metadata["name"]) is None:
        try:
            sync.storage.create("services", service)
        except AlreadyExistsError:  # silently shared, as the real controller does
            return


def _write_status(sync: Sync) -> None:
    def write(obj: Obj) -> None:
        obj["status"] = sync.status

    metadata = sync.jobset["metadata"]
    sync.storage.mutate("jobsets", metadata["namespace"], metadata["name"], write, status=True)
    for reason, message, warning in sync.events:
        record_event(sync.storage, sync.jobset, COMPONENT, reason, message, now=sync.now, warning=warning)
