"""The phase of a gang and the sentence for it, one question after the other (pure).

Each `_read_` function answers one question and returns None if it does not decide; the first answer counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefect_torch_elastic.kubernetes.attempts import Response, decide_response, read_failure
from prefect_torch_elastic.kubernetes.conditions import (
    Condition,
    Object,
    mapping,
    number,
    read_condition,
    text,
)
from prefect_torch_elastic.kubernetes.gangview import Reading, View, count_left
from prefect_torch_elastic.kubernetes.phases import GangPhase
from prefect_torch_elastic.kubernetes.podwaits import PodWait, read_wait
from prefect_torch_elastic.kubernetes.quota import read_quota, read_slow_start, read_suspension


def read_gang(view: View) -> Reading:
    """Return what a gang is doing now."""
    return (
        _read_end(view)
        or _read_deletion(view)
        or read_quota(view)
        or read_suspension(view)
        or _read_failure(view)
        or _read_pods(view)
    )


def _read_end(view: View) -> Reading | None:
    if (done := read_condition(view.jobset, "Completed")).is_true:
        message = f"All {view.nnodes} pods have ended well." if view.nnodes > 1 else "The pod has ended well."
        return Reading(phase=GangPhase.SUCCEEDED, message=message, detail=done.message)
    if (failed := read_condition(view.jobset, "Failed")).is_true:
        job = read_failure(view.jobset, view.job).message
        detail = "; ".join(part for part in (failed.message, job) if part)
        return Reading(phase=GangPhase.FAILED, message=_explain_failed(view, failed), detail=detail)
    finished = read_condition(view.workload, "Finished")
    if finished.is_true and finished.reason == "FailedToStart":
        message = (
            "Kueue admitted the gang and could not start it: what its pods ask for (`node_selector`, "
            "`tolerations`, `labels`, `annotations`) contradicts what the queue adds to them."
        )
        return Reading(phase=GangPhase.FAILED, message=message, detail=finished.message)
    return None


def _explain_failed(view: View, failed: Condition) -> str:
    match failed.reason:
        case "FailJobSetFailurePolicyAction":
            return f"The gang failed in attempt {view.attempt}, in a way that another attempt would not mend."
        case "ReachedMaxRestarts":
            if not view.restarts:
                return "The gang failed in its only attempt."
            used = f"{view.counted_restarts} of {view.max_restarts} used"
            return f"The gang failed: attempt {view.attempt} ended too, and no restart is left ({used})."
        case _:
            return f"The gang failed in attempt {view.attempt}."


def _read_deletion(view: View) -> Reading | None:
    if not text(view.jobset, "metadata", "deletionTimestamp"):
        return None
    message = f"The gang is being deleted{count_left(view)}."
    return Reading(phase=GangPhase.STOPPING, message=message)


def _read_failure(view: View) -> Reading | None:
    restarting = read_condition(view.jobset, "RestartingJobSet")
    if restarting.is_true:
        free = restarting.reason.startswith("FailurePolicy_")
        cause = "after a disruption, which does not count" if free else _count_restarts(view, 0)
        message = f"Restarting {cause}: attempt {view.attempt} begins; {_describe_pods(view)}"
        return Reading(phase=GangPhase.RESTARTING, message=message, detail=restarting.message)
    failure = read_failure(view.jobset, view.job)
    if not failure.is_true:
        return None
    match decide_response(view.jobset, failure):
        case Response.FAIL:
            message = f"Attempt {view.attempt} failed, and there will be no other{count_left(view)}."
            return Reading(phase=GangPhase.STOPPING, message=message, detail=failure.message)
        case Response.RESTART_FREE:
            cause = "after a disruption, which does not count"
        case Response.RESTART:
            cause = _count_restarts(view, 1)
    message = f"Restarting {cause}: attempt {view.attempt} ended{count_left(view)}."
    return Reading(phase=GangPhase.RESTARTING, message=message, detail=failure.message)


def _count_restarts(view: View, coming: int) -> str:
    spent = view.counted_restarts + coming
    return f"after a failure (restart {spent} of {view.max_restarts})"


def _read_pods(view: View) -> Reading:
    attempt = f" (attempt {view.attempt})" if view.restarts else ""
    if view.nnodes and view.nodes_ready >= view.nnodes:
        message = f"All {view.nnodes} pods run{attempt}." if view.nnodes > 1 else f"The pod runs{attempt}."
        return Reading(phase=GangPhase.RUNNING, message=message)
    has_pods = view.pods or view.pods_left or view.nodes_ready
    if not has_pods and read_condition(view.workload, "Admitted").is_true:
        return read_slow_start(view, "The gang is admitted, and its pods are created now.")
    if not has_pods and not mapping(view.jobset, "status"):
        return Reading(phase=GangPhase.CREATED, message="Created; JobSet has yet to act on it.")
    return Reading(phase=GangPhase.STARTING, message=f"Starting{attempt}: {_describe_pods(view)}")


def _describe_pods(view: View) -> str:
    """Return how many pods run, and what keeps the others."""
    running = f"{view.nodes_ready} of {view.nnodes} pods run"
    parts = ["the pod does not run yet" if view.nnodes == 1 and not view.nodes_ready else running]
    waits = [(pod, wait) for pod in view.pods if (wait := read_wait(pod))]
    stuck = [(pod, wait) for pod, wait in waits if wait.category]
    if stuck:
        parts.append(_describe_stuck(stuck))
    elif len(waits) == 1 and view.nnodes - view.nodes_ready == 1:
        pod, wait = waits[0]
        parts.append(f"`{text(pod, 'metadata', 'name')}` waits: {wait.what}")
    elif any(text(pod, "spec", "nodeName") for pod, _ in waits):
        parts.append("images are pulled and volumes mounted")
    elif old := number(view.job, "status", "terminating"):
        parts.append(f"{old} of before still {'have' if old > 1 else 'has'} to end")
    return f"{'; '.join(parts)}."


def _describe_stuck(stuck: Sequence[tuple[Object, PodWait]]) -> str:
    pod, first = stuck[0]
    same = sum(wait.category == first.category for _, wait in stuck) - 1
    more = f", and {same} more wait{'' if same > 1 else 's'} likewise" if same else ""
    return f"`{text(pod, 'metadata', 'name')}` waits: {first.what}{more}"
