"""What only pods have: a log, a node, and an orderly eviction."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.simulators.kubernetes.objects import Obj
from tests.simulators.kubernetes.refusals import BadRequestError, ConflictError
from tests.simulators.kubernetes.storage import Storage

LOG_ANNOTATION = "simulator/log"
"""Where a kubelet on this machine writes the log of a pod's container."""


def read_log(pod: Obj, query: Mapping[str, str]) -> bytes:
    """Return a pod's log, or its last lines.

    Raises:
        BadRequestError: If its container has not started yet.
    """
    metadata = pod["metadata"]
    path = (metadata.get("annotations") or {}).get(LOG_ANNOTATION)
    started = any(
        "running" in status.get("state", {}) or "terminated" in status.get("state", {})
        for status in pod.get("status", {}).get("containerStatuses", ())
    )
    if path is None or not Path(path).exists():
        if started:
            return b""
        container = query.get("container") or pod["spec"]["containers"][0]["name"]
        raise BadRequestError(
            f'container "{container}" in pod "{metadata["name"]}" is waiting to start: ContainerCreating'
        )
    lines = Path(path).read_bytes().splitlines(keepends=True)
    if tail := query.get("tailLines"):
        lines = lines[-int(tail) :] if int(tail) else []
    text = b"".join(lines)
    return text[: int(query["limitBytes"])] if "limitBytes" in query else text


def bind(storage: Storage, pod: Obj, *, node: str) -> None:
    """Give a pod its node, as the scheduler does.

    Raises:
        ConflictError: If it has one.
    """
    metadata = pod["metadata"]
    if pod["spec"].get("nodeName"):
        raise ConflictError(
            f'Operation cannot be fulfilled on pods/binding "{metadata["name"]}": pod {metadata["name"]} is '
            f'already assigned to node "{pod["spec"]["nodeName"]}"'
        )
    where = (metadata["namespace"], metadata["name"])
    storage.mutate("pods", *where, lambda new: new["spec"].update(nodeName=node))
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": storage.now()}
    storage.mutate("pods", *where, lambda new: set_condition(new, scheduled), status=True)


def evict(storage: Storage, pod: Obj, *, grace_seconds: int | None = None) -> None:
    """Delete a pod after saying on it that it was disrupted."""
    where = (pod["metadata"]["namespace"], pod["metadata"]["name"])
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "EvictionByEvictionAPI",
        "message": "Eviction API: evicting",
        "lastTransitionTime": storage.now(),
    }
    if pod["spec"].get("nodeName"):
        storage.mutate("pods", *where, lambda new: set_condition(new, condition), status=True)
    storage.delete("pods", *where, grace_seconds=grace_seconds)


def set_condition(obj: Obj, condition: Obj) -> None:
    """Set one condition of a status, in place."""
    status = obj.setdefault("status", {})
    others = [known for known in status.get("conditions", []) if known["type"] != condition["type"]]
    status["conditions"] = [*others, condition]
