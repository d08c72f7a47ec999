"""What a gang is doing now, read from its JobSet, its Workload, its Job and its pods (pure).

Which object is believed first: the JobSet about its end, then Kueue's Workload about the quota, then the
JobSet and its Job about attempts and pods. A JobSet that Kueue gave up says only that it is suspended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from prefect_torch_elastic.kubernetes.attempts import is_of_past_attempt
from prefect_torch_elastic.kubernetes.conditions import (
    Object,
    field,
    moment,
    number,
    objects,
    read_condition,
    text,
)
from prefect_torch_elastic.kubernetes.gangview import Reading, View
from prefect_torch_elastic.kubernetes.phases import GangPhase
from prefect_torch_elastic.kubernetes.readings import read_gang


@dataclass(frozen=True, kw_only=True)
class GangReading:
    """What a gang is doing now.

    Why a pod of it failed is said by `podfailures.diagnose_pods`, not here.

    Attributes:
        phase: Where it is.
        message: The same in sentences: who waits for what, what comes next, what to do. It changes only with
            what it says, so that each change is worth a line in a log.
        detail: The words of Kueue or of a controller behind it; empty if there are none.
        preemption: For whom its quota was taken, as half a sentence, until it has a quota again; else empty.
        preemptions: How often its quota was taken for a workload that goes first.
        evictions: How often its quota was taken for any reason, preemptions included.
        restarts: How often the JobSet started a new attempt.
        counted_restarts: Those that count towards `max_restarts`.
        max_restarts: How many of those there may be.
        nodes_ready: How many of its pods run now.
        nnodes: How many pods it has.
        look_again_seconds: After how many seconds the same objects mean something else, None for never.
    """

    phase: GangPhase
    message: str
    detail: str = ""
    preemption: str = ""
    preemptions: int = 0
    evictions: int = 0
    restarts: int = 0
    counted_restarts: int = 0
    max_restarts: int = 0
    nodes_ready: int = 0
    nnodes: int = 0
    look_again_seconds: float | None = None


def needs_pods(jobset: dict[str, Any], workload: dict[str, Any] | None) -> bool:
    """Return whether the pods of the gang say more about its status than the other objects do.

    So it is while they start, and when they have failed; a gang of many pods is not listed while all is well.
    """
    if read_condition(jobset, "Failed").is_true:
        return True
    if read_condition(jobset, "Completed").is_true or text(jobset, "metadata", "deletionTimestamp"):
        return False
    if field(jobset, "spec", "suspend") is True:
        return False
    if read_condition(workload, "Evicted").is_true or read_condition(workload, "Admitted").is_false:
        return False
    if read_condition(jobset, "RestartingJobSet").is_true:
        return True
    jobs = objects(jobset, "status", "replicatedJobsStatus")
    return not jobs or any(number(job, "ready") + number(job, "succeeded") == 0 for job in jobs)


def read_status(
    *,
    jobset: dict[str, Any] | None,
    workload: dict[str, Any] | None,
    job: dict[str, Any] | None,
    pods: Sequence[dict[str, Any]] = (),
    now: datetime,
    position: tuple[int, int] | None = None,
    sees_workloads: bool = True,
) -> GangReading:
    """Return what the gang is doing now.

    Args:
        jobset: Its JobSet, None if that is gone.
        workload: The Workload that Kueue made for it, if there is one.
        job: The Job of its nodes, if there is one.
        pods: Its pods, if they were looked at.
        now: The time, with a time zone.
        position: Its place in its queue and in the ClusterQueue behind it, both from 1, if known.
        sees_workloads: Whether a Workload would be known if there were one; else nothing follows from none.
    """
    preemptions, evictions = _count_evictions(workload)
    if jobset is None:
        gone = "The gang is gone: its JobSet was deleted."
        return GangReading(phase=GangPhase.GONE, message=gone, preemptions=preemptions, evictions=evictions)
    nnodes = _count_nodes(jobset, job)
    view = View(
        jobset=jobset,
        workload=workload,
        job=job,
        pods=pods,
        now=now,
        position=position,
        sees_workloads=sees_workloads,
        nnodes=nnodes,
        nodes_ready=min(nnodes, _count_ready(jobset, job, pods, nnodes)),
        preemptions=preemptions,
        evictions=evictions,
    )
    return _conclude(view, read_gang(view))


def _conclude(view: View, reading: Reading) -> GangReading:
    return GangReading(
        phase=reading.phase,
        message=reading.message,
        detail=reading.detail,
        preemption=reading.preemption,
        preemptions=view.preemptions,
        evictions=view.evictions,
        restarts=view.restarts,
        counted_restarts=view.counted_restarts,
        max_restarts=view.max_restarts,
        nodes_ready=view.nodes_ready,
        nnodes=view.nnodes,
        look_again_seconds=reading.look_again_seconds,
    )


def _count_evictions(workload: Object | None) -> tuple[int, int]:
    """Return how many preemptions and how many evictions there were.

    Kueue's statistics are trusted: conditions have a resolution of a second, and fast ones are never seen.
    """
    stats = objects(workload, "status", "schedulingStats", "evictions")
    evictions = sum(number(item, "count") for item in stats)
    preemptions = sum(number(item, "count") for item in stats if text(item, "reason") == "Preempted")
    evicted = read_condition(workload, "Evicted")
    seen = int(evicted.is_true)
    return max(preemptions, seen if evicted.reason == "Preempted" else 0), max(evictions, seen)


def _count_nodes(jobset: Object, job: Object | None) -> int:
    for role in objects(jobset, "spec", "replicatedJobs"):
        if nodes := number(role, "template", "spec", "parallelism"):
            return nodes
    return number(job, "spec", "parallelism")


def _count_ready(jobset: Object, job: Object | None, pods: Sequence[Object], nnodes: int) -> int:
    """Return how many pods run or have ended well: by the Job, or by the pods, which say it earlier."""
    by_job = 0
    if not is_of_past_attempt(jobset, job):
        by_job = number(job, "status", "ready") + number(job, "status", "succeeded")
    if job is None:
        jobs = objects(jobset, "status", "replicatedJobsStatus")
        if jobs and all(number(item, "ready") + number(item, "succeeded") for item in jobs):
            by_job = nnodes
    by_pods = sum(
        text(pod, "status", "phase") == "Succeeded"
        or (
            text(pod, "status", "phase") == "Running" and moment(pod, "metadata", "deletionTimestamp") is None
        )
        for pod in pods
    )
    return max(by_job, by_pods)
