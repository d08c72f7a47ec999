"""Who is admitted: the queues' order, the quota of each ClusterQueue, and who has to make room for whom.

One pass looks at every workload without quota, best first (`BestEffortFIFO`); a gang gets all or nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulators.kubernetes import kueue_states
from tests.simulators.kubernetes.conditions import find_condition, is_true, record_event
from tests.simulators.kubernetes.kueue_flavors import (
    Amounts,
    Assignment,
    add,
    assign_flavors,
    list_requests,
)
from tests.simulators.kubernetes.objects import Obj, parse_time
from tests.simulators.kubernetes.quantities import parse_quantity
from tests.simulators.kubernetes.storage import Key, Storage

COMPONENT = "kueue-admission"


@dataclass(kw_only=True)
class Round:
    """What one pass knows of a ClusterQueue: quota in use, what preemptors wait for, who did not fit."""

    used: Amounts = field(default_factory=dict)
    claimed: Amounts = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)


def reconcile(storage: Storage, key: Key, now: float) -> float | None:
    """Go once through all workloads that wait for quota; there is one scheduler, so `key` says nothing."""
    rounds: dict[str, Round] = {}
    workloads = storage.list("workloads")
    for workload in workloads:
        if admission := _read_admission(workload):
            add(rounds.setdefault(admission["clusterQueue"], Round()).used, _read_usage(workload), 1)
    for workload in sorted(filter(_waits, workloads), key=order):
        if problem := _find_closed_queue(storage, workload):
            _write_pending(storage, workload, "Inadmissible", problem, None, now)
        elif is_true(workload, "Requeued") or find_condition(workload, "Requeued") is None:
            queue = _find_cluster_queue(storage, workload)
            assert queue is not None, "its queues were just seen to be open"
            round_ = rounds.setdefault(queue["metadata"]["name"], Round())
            _try_admission(storage, workload, queue, round_, now)
    return None


def order(workload: Obj) -> tuple[int, str, str]:
    """Sort key of a queue: priority, then age (an eviction for missing pods makes a workload young again)."""
    evicted = find_condition(workload, "Evicted")
    since: str = workload["metadata"]["creationTimestamp"]
    if evicted and evicted["status"] == "True" and evicted["reason"] == "PodsReadyTimeout":
        since = evicted["lastTransitionTime"]
    return (-workload["spec"].get("priority", 0), since, workload["metadata"]["uid"])


def _waits(workload: Obj) -> bool:
    """Whether a workload is without quota and wants some."""
    over = is_true(workload, "Finished") or "deletionTimestamp" in workload["metadata"]
    return not (over or is_true(workload, "QuotaReserved")) and workload["spec"].get("active", True)


def _find_cluster_queue(storage: Storage, workload: Obj) -> Obj | None:
    local = storage.get(
        "localqueues", workload["metadata"]["namespace"], workload["spec"].get("queueName", "")
    )
    return storage.get("clusterqueues", "", local["spec"]["clusterQueue"]) if local else None


def _find_closed_queue(storage: Storage, workload: Obj) -> str:
    namespace, name = workload["metadata"]["namespace"], workload["spec"].get("queueName", "")
    local = storage.get("localqueues", namespace, name)
    if local is None:
        return f"LocalQueue {name} doesn't exist"
    if local["spec"].get("stopPolicy", "None") != "None":
        return f"LocalQueue {name} is inactive"
    cluster = storage.get("clusterqueues", "", local["spec"]["clusterQueue"])
    if cluster is None:
        return f"ClusterQueue {local['spec']['clusterQueue']} doesn't exist"
    if cluster["spec"].get("stopPolicy", "None") != "None":
        return f"ClusterQueue {cluster['metadata']['name']} is inactive"
    return ""


def _try_admission(storage: Storage, workload: Obj, queue: Obj, round_: Round, now: float) -> None:
    shape = f"{workload['spec'].get('priority', 0)} {list_requests(workload)}"
    if shape in round_.refused:  # Kueue does not ask twice for the same, and says nothing about the second
        return
    assignment = assign_flavors(workload, queue, round_.used)
    if not assignment.problem:
        if not assign_flavors(workload, queue, _sum(round_.used, round_.claimed)).problem:
            _admit(storage, workload, queue, assignment, now)
            add(round_.used, assignment.usage, 1)
        return
    problem = assignment.problem
    victims = [] if assignment.never else _find_victims(storage, workload, queue, round_.used)
    if victims:
        for victim in victims:
            _preempt(storage, victim, workload, queue, now)
        problem = f"{problem}. Pending the preemption of {len(victims)} workload(s)"
        add(round_.claimed, assign_flavors(workload, queue, {}).usage, 1)
    else:
        round_.refused.add(shape)
    _write_pending(storage, workload, "Pending", problem, list_requests(workload), now)


def _sum(first: Amounts, second: Amounts) -> Amounts:
    total = dict(first)
    add(total, second, 1)
    return total


def _find_victims(storage: Storage, workload: Obj, queue: Obj, used: Amounts) -> list[Obj]:
    """Return whom to evict so that `workload` fits: who is on the way out first, then the least."""
    policy = (queue["spec"].get("preemption") or {}).get("withinClusterQueue", "Never")
    if policy != "LowerPriority":
        return []
    name, priority = queue["metadata"]["name"], workload["spec"].get("priority", 0)
    candidates = [
        other
        for other in storage.list("workloads")
        if _read_admission(other).get("clusterQueue") == name and other["spec"].get("priority", 0) < priority
    ]
    candidates.sort(
        key=lambda other: (
            not is_true(other, "Evicted"),
            other["spec"].get("priority", 0),
            -_read_admission_time(other),
        )
    )
    left, victims = dict(used), []
    for candidate in candidates:
        add(left, _read_usage(candidate), -1)
        victims.append(candidate)
        if not assign_flavors(workload, queue, left).problem:
            return _spare(workload, queue, left, victims)
    return []


def _spare(workload: Obj, queue: Obj, left: Amounts, victims: list[Obj]) -> list[Obj]:
    """Let off who need not go, the best first."""
    for victim in reversed(victims[:-1]):
        usage = _read_usage(victim)
        add(left, usage, 1)
        if assign_flavors(workload, queue, left).problem:
            add(left, usage, -1)
        else:
            victims.remove(victim)
    return victims


def _preempt(storage: Storage, victim: Obj, preemptor: Obj, queue: Obj, now: float) -> None:
    if is_true(victim, "Evicted"):
        return
    name = queue["metadata"]["name"]
    _mutate(storage, victim, lambda obj: kueue_states.write_preemption(obj, preemptor, name, now=now))
    evicted = storage.get("workloads", victim["metadata"]["namespace"], victim["metadata"]["name"])
    message = (find_condition(evicted, "Evicted") or {}).get("message", "") if evicted else ""
    for reason in ("EvictedDueToPreempted", "Preempted"):
        record_event(storage, victim, COMPONENT, reason, message, now=now)


def _admit(storage: Storage, workload: Obj, queue: Obj, assignment: Assignment, now: float) -> None:
    name = queue["metadata"]["name"]
    admission = {"clusterQueue": name, "podSetAssignments": assignment.pod_sets}
    _mutate(storage, workload, lambda obj: kueue_states.write_admission(obj, admission, now=now))
    waited = int(now - parse_time(workload["metadata"]["creationTimestamp"]))
    for reason, verb, since in (
        ("QuotaReserved", "Quota reserved in", f"queued was {waited}s"),
        ("Admitted", "Admitted by", "reservation was 0s"),
    ):
        text = f"{verb} ClusterQueue {name}, wait time since {since}"
        record_event(storage, workload, COMPONENT, reason, text, now=now)


def _write_pending(
    storage: Storage, workload: Obj, reason: str, message: str, requests: list[Obj] | None, now: float
) -> None:
    before = find_condition(workload, "QuotaReserved") or {}
    if (before.get("reason"), before.get("message")) == (reason, message):
        return

    def write(obj: Obj) -> None:
        kueue_states.write_pending(obj, reason, message, requests, now=now)

    _mutate(storage, workload, write)
    record_event(storage, workload, COMPONENT, reason, message, now=now, warning=True)


def _mutate(storage: Storage, workload: Obj, write: Callable[[Obj], None]) -> None:
    metadata = workload["metadata"]
    storage.mutate("workloads", metadata["namespace"], metadata["name"], write, status=True)


def _read_admission(workload: Obj) -> Obj:
    """Return the quota that a workload holds; one that has finished holds none."""
    over = is_true(workload, "Finished")
    return {} if over else (workload.get("status") or {}).get("admission") or {}


def _read_admission_time(workload: Obj) -> float:
    admitted = find_condition(workload, "QuotaReserved")
    return parse_time(admitted["lastTransitionTime"]) if admitted else 0.0


def _read_usage(workload: Obj) -> Amounts:
    usage: Amounts = {}
    for part in _read_admission(workload).get("podSetAssignments") or ():
        amounts = {
            (part["flavors"][name], name): parse_quantity(value)
            for name, value in part["resourceUsage"].items()
        }
        add(usage, amounts, 1)
    return usage
