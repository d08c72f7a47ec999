"""What somebody who watches the API sees: conditions, counters and their order, without what is chance.

The same functions read a captured stream of a real cluster and the writes of the simulated one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from tests.simulators.kubernetes.objects import Obj

_SUFFIXES = (
    (re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "UID"),
    (re.compile(r"(jobset-[a-z0-9-]+)-[0-9a-f]{5}\b"), r"\1"),
    (re.compile(r"(-\d+-\d+)-[a-z0-9]{5}\b"), r"\1"),
)
_WATCHED = {"jobsets": "jobset", "jobs": "job", "workloads": "workload", "pods": "pod"}

Write = tuple[str, str, Obj]
"""Type, plural and object of a write."""


def strip_chance(text: str) -> str:
    """Return a text without what differs from run to run: uids and the random ends of names."""
    for pattern, replacement in _SUFFIXES:
        text = pattern.sub(replacement, text)
    return text


def list_conditions(writes: Iterable[Write]) -> dict[str, dict[str, list[list[str]]]]:
    """Return what each object said in each condition, one after the other: status, reason, message."""
    told: dict[str, dict[str, list[list[str]]]] = {}
    for kind, plural, obj in writes:
        if plural in ("jobsets", "jobs", "workloads") and kind != "DELETED":
            own = told.setdefault(f"{_WATCHED[plural]}/{strip_chance(obj['metadata']['name'])}", {})
            for condition in (obj.get("status") or {}).get("conditions") or ():
                said = [condition["status"], condition["reason"], strip_chance(condition.get("message", ""))]
                before = own.setdefault(condition["type"], [])
                if not before or before[-1] != said:
                    before.append(said)
    return told


def list_milestones(writes: Iterable[Write]) -> list[str]:
    """Return what happened to all objects, in order: `workload/x Evicted=True`, `job/x suspend=False`."""
    seen: dict[str, dict[str, str]] = {}
    found: list[str] = []
    for kind, plural, obj in writes:
        if plural not in _WATCHED:
            continue
        name, uid = f"{_WATCHED[plural]}/{strip_chance(obj['metadata']['name'])}", obj["metadata"]["uid"]
        facts = {"gone": "True"} if kind == "DELETED" else _read_facts(plural, obj)
        before = seen.setdefault(uid, {})
        found.extend(
            f"{name} {fact}={value}" for fact, value in sorted(facts.items()) if before.get(fact) != value
        )
        before.update(facts)
    return found


def _read_facts(plural: str, obj: Obj) -> dict[str, str]:
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    if plural == "pods":
        return {"phase": status.get("phase", "Pending")}
    # When a Workload is marked is a race of the garbage collector with Kueue.
    marked = "deletionTimestamp" in obj["metadata"] and plural != "workloads"
    facts: dict[str, Any] = {"deleting": True} if marked else {}
    for condition in status.get("conditions") or ():
        if condition["type"] != "PodsReady":  # it comes and goes about a second late
            facts[condition["type"]] = condition["status"]
    if plural != "workloads":
        facts["suspend"] = spec.get("suspend", False)
    if plural == "jobs":
        facts["attempt"] = obj["metadata"]["labels"]["jobset.sigs.k8s.io/restart-attempt"]
    for counter in ("restarts", "failed", "completedIndexes", "terminalState"):
        if status.get(counter):
            facts[counter] = status[counter]
    return {name: str(fact) for name, fact in facts.items()}


def read_counters(writes: Sequence[Write]) -> dict[str, Obj]:
    """Return the counters of each JobSet, Job and Workload as they were last seen."""
    last: dict[str, Obj] = {}
    names = {
        "jobsets": ("restarts", "restartsCountTowardsMax", "terminalState"),
        "jobs": ("failed", "succeeded", "completedIndexes"),
        "workloads": ("schedulingStats",),
    }
    for kind, plural, obj in writes:
        if plural in names and kind != "DELETED":
            status = obj.get("status") or {}
            own = {name: status[name] for name in names[plural] if name in status}
            last[f"{_WATCHED[plural]}/{strip_chance(obj['metadata']['name'])}"] = own
    return last
