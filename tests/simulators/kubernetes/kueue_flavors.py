"""What a gang would take of a ClusterQueue: its requests summed up, and the flavors that still have room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

from tests.simulators.kubernetes.objects import Obj
from tests.simulators.kubernetes.quantities import format_quantity, parse_quantity

Amounts = dict[tuple[str, str], Fraction]
"""By flavor and resource."""


@dataclass(kw_only=True)
class Assignment:
    """What one workload would take of a ClusterQueue: per pod set its flavors; or why it cannot."""

    usage: Amounts = field(default_factory=dict)
    pod_sets: list[Obj] = field(default_factory=list)
    problem: str = ""
    never: bool = False


def assign_flavors(workload: Obj, queue: Obj, used: Amounts) -> Assignment:
    """Return the flavors that a workload would get with `used` taken: in each group the first with room."""
    assignment = Assignment()
    for pod_set in workload["spec"]["podSets"]:
        requests, flavors = sum_requests(pod_set), {}
        for group in queue["spec"].get("resourceGroups") or ():
            covered = [name for name in requests if name in group["coveredResources"]]
            problems: list[str] = []
            for flavor in group["flavors"] if covered else ():
                found, never = _find_shortages(flavor, covered, requests, used, assignment.usage)
                if not found:
                    flavors.update(dict.fromkeys(covered, flavor["name"]))
                    break
                problems.extend(found)
                assignment.never = never
            else:
                if covered:
                    return _refuse(assignment, pod_set, problems)
        if missing := [name for name in requests if name not in flavors]:
            assignment.never = True
            return _refuse(
                assignment, pod_set, [f"resource {name} unavailable in ClusterQueue" for name in missing]
            )
        add(assignment.usage, {(flavors[name], name): amount for name, amount in requests.items()}, 1)
        assignment.pod_sets.append(
            {
                "name": pod_set["name"],
                "count": pod_set["count"],
                "flavors": flavors,
                "resourceUsage": _format(requests),
            }
        )
    assignment.never = False
    return assignment


def _refuse(assignment: Assignment, pod_set: Obj, problems: list[str]) -> Assignment:
    reasons = ", ".join(problems)
    assignment.problem = f"couldn't assign flavors to pod set {pod_set['name']}: {reasons}"
    return assignment


def _find_shortages(
    flavor: Obj, covered: list[str], requests: dict[str, Fraction], used: Amounts, mine: Amounts
) -> tuple[list[str], bool]:
    """Return what a flavor lacks for a pod set, and whether it would lack that in an empty cluster too."""
    quotas = {entry["name"]: parse_quantity(entry["nominalQuota"]) for entry in flavor["resources"]}
    found: list[str] = []
    never = False
    for name in covered:
        place, quota, request = (flavor["name"], name), quotas.get(name, Fraction(0)), requests[name]
        earlier = mine.get(place, Fraction(0))
        lacking = used.get(place, Fraction(0)) + earlier + request - quota
        if earlier + request > quota:
            never = True
            amounts = [format_quantity(name, amount) for amount in (earlier, request, quota)]
            found.append(
                f"insufficient quota for {name} in flavor {flavor['name']}, previously considered podsets "
                f"requests ({amounts[0]}) + current podset request ({amounts[1]}) > "
                f"maximum capacity ({amounts[2]})"
            )
        elif lacking > 0:
            found.append(
                f"insufficient unused quota for {name} in flavor {flavor['name']}, "
                f"{format_quantity(name, lacking)} more needed"
            )
    return found, never


def add(total: Amounts, amounts: Amounts, sign: int) -> None:
    """Add to a total, or with `sign=-1` take away."""
    for place, amount in amounts.items():
        total[place] = total.get(place, Fraction(0)) + sign * amount


def sum_requests(pod_set: Obj) -> dict[str, Fraction]:
    """Return what all pods of a pod set ask for; a limit without a request is one."""
    total: dict[str, Fraction] = {}
    spec = pod_set["template"]["spec"]
    for container in spec["containers"]:
        for name, amount in _read_requests(container):
            total[name] = total.get(name, Fraction(0)) + amount
    for container in spec.get("initContainers") or ():
        for name, amount in _read_requests(container):
            total[name] = max(total.get(name, Fraction(0)), amount)
    return {name: amount * pod_set["count"] for name, amount in total.items()}


def _read_requests(container: Obj) -> Iterable[tuple[str, Fraction]]:
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return [(name, parse_quantity(value)) for name, value in asked.items()]


def list_requests(workload: Obj) -> list[Obj]:
    """Return `status.resourceRequests` of a workload that waits."""
    return [
        {"name": pod_set["name"], "resources": _format(sum_requests(pod_set))}
        for pod_set in workload["spec"]["podSets"]
    ]


def _format(amounts: dict[str, Fraction]) -> dict[str, str]:
    return {name: format_quantity(name, amount) for name, amount in amounts.items()}
