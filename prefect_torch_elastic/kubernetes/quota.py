"""Whether a gang has its quota, and if not, why and what comes next (pure)."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC

from prefect_torch_elastic.kubernetes import kueuewords
from prefect_torch_elastic.kubernetes.conditions import (
    Condition,
    field,
    moment,
    read_condition,
    text,
)
from prefect_torch_elastic.kubernetes.gangview import Reading, View, count_left
from prefect_torch_elastic.kubernetes.naming import PRIORITY_LABEL, select_pods
from prefect_torch_elastic.kubernetes.phases import GangPhase

UNMANAGED_AFTER_SECONDS = 30.0
SLOW_AFTER_SECONDS = 60.0
_LOST_REASONS = ("OutOfSync", "OwnerNotFound")


def read_quota(view: View) -> Reading | None:
    """Ask Kueue, unless its Workload belongs to an object that it no longer knows."""
    finished = read_condition(view.workload, "Finished")
    if view.workload is None or (finished.is_true and finished.reason in _LOST_REASONS):
        return None
    evicted = read_condition(view.workload, "Evicted")
    gave_up = evicted.is_true and evicted.reason.startswith("Deactivated")
    is_inactive = field(view.workload, "spec", "active") is False
    if is_inactive and not gave_up and view.holds_quota:
        message = f"Kueue deactivates the gang; its pods stop{count_left(view)}."
        return Reading(phase=GangPhase.STOPPING, message=message)
    if is_inactive or gave_up:
        message = kueuewords.explain_deactivation(evicted)
        return Reading(phase=GangPhase.DEACTIVATED, message=message, detail=evicted.message)
    if evicted.is_true:
        return _read_eviction(view, evicted)
    reserved = read_condition(view.workload, "QuotaReserved")
    if not reserved.is_true:
        waiting = kueuewords.explain_waiting(reserved, queue=view.queue)
        if waiting.never:
            return _read_inadmissible(view, waiting, detail=reserved.message)
        message = f"Queued{_explain_wait(view, waiting)}"
        return Reading(phase=GangPhase.QUEUED, message=message, detail=reserved.message)
    admitted = read_condition(view.workload, "Admitted")
    if admitted.is_true:
        return None
    message = "The quota is reserved; the gang waits for an admission check, such as an autoscaler's."
    return Reading(phase=GangPhase.PROVISIONING, message=message, detail=admitted.message)


def _read_inadmissible(view: View, waiting: kueuewords.Waiting, *, detail: str) -> Reading:
    message = f"The gang cannot start from queue `{view.queue}`: {waiting.why}. {waiting.cure}"
    return Reading(phase=GangPhase.INADMISSIBLE, message=message, detail=detail)


def _explain_wait(view: View, waiting: kueuewords.Waiting) -> str:
    """Return where a gang waits and for what, to follow a verb."""
    where = f" in `{view.queue}`"
    if view.position:
        where += f" at place {view.position[0]}"
        if view.position[1] != view.position[0]:
            where += f" ({view.position[1]} among all that share its quota)"
    return f"{where}{': ' if waiting.why else ''}{waiting.why}."


def _read_eviction(view: View, evicted: Condition) -> Reading:
    preemption = ""
    lost = f"The gang lost its quota {kueuewords.explain_eviction(evicted)} (eviction {view.evictions})"
    if evicted.reason == "Preempted":
        cause = kueuewords.explain_preemption(read_condition(view.workload, "Preempted"))
        lost = preemption = f"Preempted {cause} (preemption {view.preemptions})"
    return replace(_read_what_follows(view, evicted, f"{lost}."), preemption=preemption)


def _read_what_follows(view: View, evicted: Condition, lost: str) -> Reading:
    """Return where a gang is that lost its quota; `lost` is the sentence for that."""
    reserved = read_condition(view.workload, "QuotaReserved")
    if view.holds_quota:
        rest = f"Its pods save their work and stop{count_left(view)}; then it waits in `{view.queue}`."
        return Reading(phase=GangPhase.STOPPING, message=f"{lost} {rest}", detail=evicted.message)
    waiting = kueuewords.explain_waiting(reserved, queue=view.queue)
    if reserved.message == evicted.message:  # Kueue has not looked at it again
        waiting = kueuewords.Waiting(why="")
    if waiting.never:
        return _read_inadmissible(view, waiting, detail=reserved.message)
    phase = GangPhase.PREEMPTED if evicted.reason == "Preempted" else GangPhase.REQUEUED
    detail = reserved.message or evicted.message
    again = moment(view.workload, "status", "requeueState", "requeueAt")
    if again and again > view.now:
        back = f"Kueue puts it back into `{view.queue}` at {again.astimezone(UTC):%H:%M:%S} UTC"
        message = f"{lost} {back}. It then goes on from its last checkpoint."
        left = (again - view.now).total_seconds()
        return Reading(phase=phase, message=message, detail=detail, look_again_seconds=left)
    message = f"{lost} It waits{_explain_wait(view, waiting)} It goes on from its last checkpoint."
    return Reading(phase=phase, message=message, detail=detail)


def read_suspension(view: View) -> Reading | None:
    """Ask whether the JobSet is held back, although Kueue has admitted it or does not know it."""
    if field(view.jobset, "spec", "suspend") is not True:
        return None
    if read_condition(view.workload, "Admitted").is_true:
        return read_slow_start(view, "The gang is admitted, and starts now.")
    if view.queue and not view.sees_workloads:
        message = f"Queued in `{view.queue}`; why it waits is not known without the right to read Workloads."
        return Reading(phase=GangPhase.QUEUED, message=message)
    since = moment(view.jobset, "metadata", "creationTimestamp")
    suspended = read_condition(view.jobset, "Suspended")
    if suspended.is_true and suspended.since and since:
        since = max(since, suspended.since)
    left = UNMANAGED_AFTER_SECONDS - view.seconds_since(since)
    if left > 0 and since:
        message = f"Created; Kueue has yet to take notice of it in `{view.queue}`."
        if not view.queue:
            message = "Created, but suspended."
        return Reading(phase=GangPhase.CREATED, message=message, look_again_seconds=left)
    return Reading(phase=GangPhase.UNMANAGED, message=_explain_unmanaged(view), detail=suspended.message)


def _explain_unmanaged(view: View) -> str:
    name, namespace = text(view.jobset, "metadata", "name"), text(view.jobset, "metadata", "namespace")
    if not view.queue:
        resume = (
            f'kubectl -n {namespace} patch jobset {name} --type merge -p \'{{"spec":{{"suspend":false}}}}\''
        )
        return f"The gang is suspended and names no queue, so nobody will start it. `{resume}` does."
    priority = text(view.jobset, "metadata", "labels", PRIORITY_LABEL)
    causes = ["Kueue does not manage JobSets, or not those of this namespace", "or it does not run"]
    if priority:
        causes.insert(0, f"there is no WorkloadPriorityClass `{priority}` (`queue_priority`)")
    return (
        f"Kueue takes no notice of the gang in `{view.queue}`, so it will not start: {', '.join(causes)}. "
        f"`prefect-torch-elastic doctor --namespace {namespace} --queue {view.queue}"
        f"{f' --priority {priority}' if priority else ''}` says which."
    )


def read_slow_start(view: View, message: str) -> Reading:
    """Return that a gang is admitted, with a hint if nothing has come of it for long."""
    left = SLOW_AFTER_SECONDS - view.seconds_since(read_condition(view.workload, "Admitted").since)
    if left > 0:
        return Reading(phase=GangPhase.ADMITTED, message=message, look_again_seconds=left)
    name, namespace = text(view.jobset, "metadata", "name"), text(view.jobset, "metadata", "namespace")
    hint = (
        f"The gang is admitted, but has no pods after {SLOW_AFTER_SECONDS:.0f} s: something refuses them. "
        f"`kubectl -n {namespace} describe jobset,job -l {select_pods(name)}` says what."
    )
    return Reading(phase=GangPhase.ADMITTED, message=hint)
