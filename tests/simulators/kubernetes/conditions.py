"""Conditions, timestamps and Event objects: how controllers say what they see."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tests.simulators.kubernetes.objects import Obj, format_micro_time, format_time
from tests.simulators.kubernetes.storage import Storage

_event_numbers = itertools.count(1)


def find_condition(obj: Obj, kind: str) -> Obj | None:
    """Return an object's condition of a type, whatever it says."""
    conditions: Sequence[Obj] = (obj.get("status") or {}).get("conditions") or ()
    return next((condition for condition in conditions if condition["type"] == kind), None)


def is_true(obj: Obj, kind: str) -> bool:
    """Whether an object's condition of a type says True."""
    condition = find_condition(obj, kind)
    return condition is not None and condition["status"] == "True"


def read_reason(obj: Obj, kind: str) -> str:
    """Return the reason of a condition, "" without one."""
    condition = find_condition(obj, kind)
    return condition.get("reason", "") if condition else ""


def set_condition(
    status: Obj,
    kind: str,
    value: bool,
    reason: str,
    message: str,
    *,
    now: float,
    generation: int | None = None,
) -> bool:
    """Add or change a condition in a status; the time moves only when True becomes False or back.

    Args:
        status: The status to change.
        kind: Type of the condition.
        value: What it says.
        reason: In one word.
        message: For people.
        now: Seconds since the epoch.
        generation: `observedGeneration`, which Kueue writes and JobSet does not.

    Returns:
        Whether that is news: the condition is new, has turned, or has another reason.
    """
    conditions: list[Obj] = status.setdefault("conditions", [])
    found = next((condition for condition in conditions if condition["type"] == kind), None)
    said = "True" if value else "False"
    turned = found is None or found["status"] != said
    news = turned or (found is not None and found["reason"] != reason)
    if found is None:
        found = Obj(type=kind)
        conditions.append(found)
    if turned:
        found["lastTransitionTime"] = format_time(now)
    found.update(status=said, reason=reason, message=message)
    if generation is not None:
        found["observedGeneration"] = generation
    return news


def record_event(
    storage: Storage,
    about: Obj,
    component: str,
    reason: str,
    message: str,
    *,
    now: float,
    warning: bool = False,
) -> None:
    """Create the Event object that `kubectl describe` would show."""
    metadata = about["metadata"]
    namespace = metadata.get("namespace") or "default"
    storage.create(
        "events",
        {
            "metadata": {"name": f"{metadata['name']}.{next(_event_numbers):016x}", "namespace": namespace},
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "name": metadata["name"],
                "namespace": namespace,
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
            },
            "type": "Warning" if warning else "Normal",
            "reason": reason,
            "message": message,
            "count": 1,
            "firstTimestamp": format_time(now),
            "lastTimestamp": format_time(now),
            "eventTime": format_micro_time(now),
            "source": {"component": component},
            "reportingComponent": component,
            "reportingInstance": "",
        },
    )


def make_owner_reference(owner: Obj) -> Obj:
    """Return the reference by which a controller owns what it creates."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def list_owned(storage: Storage, owner: Obj, kind: str) -> list[Obj]:
    """Return the objects of a kind that `owner` controls, by name."""
    uid = owner["metadata"]["uid"]
    return [
        obj
        for obj in storage.owned_by(uid)
        if obj["kind"] == kind
        and any(ref["uid"] == uid and ref.get("controller") for ref in obj["metadata"]["ownerReferences"])
    ]
