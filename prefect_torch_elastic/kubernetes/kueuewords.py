"""What Kueue says about a gang that it does not let run, in sentences for people who do not know it (pure).

Most of it is only in the message of a condition: without a feature that is off by default, the reason is
`Pending` both for a gang that waits for its turn and for one that can never fit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from prefect_torch_elastic.kubernetes.conditions import Condition

_SHORT = re.compile(
    r"insufficient (?:unused )?quota(?: in cohort)? for (?P<resource>\S+) in flavor (?P<flavor>[^,\s]+), "
    r"(?P<amount>\S+) more needed"
)
_TOO_LARGE = re.compile(
    r"insufficient quota for (?P<resource>\S+) in flavor (?P<flavor>[^,\s]+), "
    r"previously considered podsets requests \((?P<before>[^)]*)\) \+ current podset request "
    r"\((?P<asked>[^)]*)\) > maximum capacity \((?P<most>[^)]*)\)"
)
_TOO_LARGE_BEFORE_0_14 = re.compile(
    r"insufficient quota for (?P<resource>\S+) in flavor (?P<flavor>[^,\s]+), "
    r"request > maximum capacity \((?P<asked>\S+) > (?P<most>[^)\s]+)\)"
)
_NO_FLAVOR = re.compile(
    r"untolerated taint|doesn't match node affinity"
    r"|resource \S+ unavailable in ClusterQueue|flavor \S+ not found"
)
_CLOSED = re.compile(r"(ClusterQueue|LocalQueue) (?P<name>\S+) is (inactive|stopped)")
_MISSING = re.compile(r"(?P<kind>ClusterQueue|LocalQueue) (?P<name>\S+) doesn't exist")
_NEVER_REASONS = ("ExceedsMaxQuota", "NoMatchingFlavor", "Misconfigured")


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Why a gang has no quota.

    Attributes:
        why: To follow a colon; empty if Kueue gives no reason yet.
        never: Whether the end of other gangs would not help.
        cure: What to do then, empty for an ordinary wait.
    """

    why: str
    never: bool = False
    cure: str = ""


def explain_waiting(reserved: Condition, *, queue: str) -> Waiting:
    """Return why a gang waits, read from the condition `QuotaReserved` of its Workload."""
    said = reserved.message
    if match := _MISSING.search(said):
        if match["kind"] == "LocalQueue":
            cure = (
                "Correct `queue` (`kubectl get localqueues`), or create it: the gang then starts by itself."
            )
            return Waiting(why="there is no such queue in its namespace", never=True, cure=cure)
        why = f"its queue points to the ClusterQueue `{match['name']}`, which does not exist"
        return Waiting(why=why, never=True, cure="An administrator has to create it, or correct the queue.")
    if match := _CLOSED.search(said):
        why = f"`{match['name']}` is closed, until an administrator opens it again"
        return Waiting(why=why)
    if reserved.reason == "Suspended":
        return Waiting(why="the queue is on hold, until an administrator opens it again")
    too_large = _list_too_large(said)
    short = {flavor: needs for flavor, needs in _list_short(said).items() if flavor not in too_large}
    if short:
        return Waiting(why=f"{_join_flavors(short)} needed")
    if too_large:
        cure = f"Ask for less (`nnodes`, `gpu`, `cpu`, `memory`), or have the quota of `{queue}` raised."
        return Waiting(why=_join_flavors(too_large), never=True, cure=cure)
    if _NO_FLAVOR.search(said) or reserved.reason in _NEVER_REASONS:
        cure = "Compare `node_selector`, `tolerations` and resources with what the queue offers."
        return Waiting(why=f"no kind of machine of its queue suits it ({said})", never=True, cure=cure)
    if reserved.reason == "Inadmissible":
        return Waiting(why=said, never=True, cure="Kueue takes it when that has been put right.")
    return Waiting(why="" if said.startswith("Preempted to accommodate") else said)


def _list_short(said: str) -> dict[str, list[str]]:
    needs: dict[str, list[str]] = {}
    for match in _SHORT.finditer(said):
        needs.setdefault(match["flavor"], []).append(f"{match['amount']} more `{match['resource']}`")
    return needs


def _list_too_large(said: str) -> dict[str, list[str]]:
    needs: dict[str, list[str]] = {}
    for match in [*_TOO_LARGE.finditer(said), *_TOO_LARGE_BEFORE_0_14.finditer(said)]:
        before = match.groupdict().get("before") or "0"
        asked = match["asked"] if before == "0" else f"{before} + {match['asked']}"
        need = f"it asks for {asked} `{match['resource']}`, and the queue has {match['most']} at most"
        needs.setdefault(match["flavor"], []).append(need)
    return needs


def _join_flavors(needs: dict[str, list[str]]) -> str:
    """Return what each kind of machine lacks; the kinds are named only where there is a choice."""
    if len(needs) == 1:
        return " and ".join(next(iter(needs.values())))
    return ", or ".join(f"{' and '.join(lacks)} (`{flavor}`)" for flavor, lacks in needs.items())


def explain_preemption(preempted: Condition) -> str:
    """Return for whom a gang was preempted, to follow "Preempted"."""
    match preempted.reason:
        case "InCohortReclamation" | "InCohortReclaimWhileBorrowing":
            return "because another queue takes back the quota that it had lent"
        case "InCohortFairSharing":
            return "because another queue had less than its fair share"
        case _:
            return "for a workload with a higher priority"


def explain_eviction(evicted: Condition) -> str:
    """Return why a gang lost its quota, to follow "The gang lost its quota"."""
    match evicted.reason:
        case "PodsReadyTimeout":
            return "because its pods did not all run within the time that Kueue gives them"
        case "ClusterQueueStopped" | "LocalQueueStopped":
            return "because an administrator closed its queue"
        case "NodeFailures":
            return "because a machine failed"
        case "AdmissionCheck":
            return "because an admission check (such as an autoscaler's) was not met"
        case reason:
            said = f": {evicted.message}" if evicted.message else ""
            return f"({reason}{said})"


def explain_deactivation(evicted: Condition) -> str:
    """Return why Kueue gave a gang up, and what to do, as sentences."""
    match evicted.reason:
        case "DeactivatedDueToRequeuingLimitExceeded":
            return (
                "Kueue gave the gang up: its pods did not all run within the time that Kueue gives them, as "
                "often as Kueue tries. Look for what kept them from starting (image, machines, volumes), "
                "then run it again."
            )
        case "DeactivatedDueToMaximumExecutionTimeExceeded":
            return "Kueue ended the gang: it has run for its maximum execution time."
        case "DeactivatedDueToAdmissionCheck":
            return (
                "Kueue gave the gang up: an admission check rejected it, as an autoscaler does that cannot "
                "get the machines."
            )
        case _:
            return (
                "Somebody deactivated the gang in Kueue (`spec.active` of its Workload is false). Find out "
                "who and why, and run it again."
            )
