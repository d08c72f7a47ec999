"""Why a pod does not run yet, in the words of the scheduler and of the machine's kubelet (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from prefect_torch_elastic.kubernetes.conditions import Object, mapping, objects, read_condition, text

IMAGE_PULL = "ImagePull"
CONTAINER_CONFIG = "ContainerConfig"
UNSCHEDULABLE = "Unschedulable"
BLOCKING = frozenset({IMAGE_PULL, CONTAINER_CONFIG})
WAITING = BLOCKING | {UNSCHEDULABLE}

_REASONS = {
    **dict.fromkeys(
        ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ImageInspectError", "ErrImageNeverPull"),
        IMAGE_PULL,
    ),
    **dict.fromkeys(("RegistryUnavailable", "SignatureValidationFailed"), IMAGE_PULL),
    **dict.fromkeys(
        ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"), CONTAINER_CONFIG
    ),
}


@dataclass(frozen=True, kw_only=True)
class PodWait:
    """What a pod waits for.

    Attributes:
        category: `IMAGE_PULL`, `CONTAINER_CONFIG` or `UNSCHEDULABLE`; empty for what passes by itself.
        what: The same for people, to follow "it waits: ".
        detail: The cluster's own words, empty if there are none.
        container: The container that does not start, empty if that is not the matter.
    """

    category: str
    what: str
    detail: str = ""
    container: str = ""


def read_wait(pod: Object) -> PodWait | None:
    """Return what a pod waits for, None if it runs, is over or is being deleted."""
    if text(pod, "status", "phase") not in ("Pending", "") or text(pod, "metadata", "deletionTimestamp"):
        return None
    scheduled = read_condition(pod, "PodScheduled")
    if scheduled.reason == "SchedulingGated":
        return PodWait(category="", what="Kueue has yet to choose its machine")
    if scheduled.is_false:
        words = scheduled.message.partition(". ")[0].partition(" preemption:")[0].rstrip(" ,.")
        what = f"no machine fits ({words or scheduled.reason})"
        return PodWait(category=UNSCHEDULABLE, what=what, detail=scheduled.message)
    return _read_containers(pod) or PodWait(category="", what=_describe_progress(pod))


def _read_containers(pod: Object) -> PodWait | None:
    for container in [
        *objects(pod, "status", "initContainerStatuses"),
        *objects(pod, "status", "containerStatuses"),
    ]:
        reason = text(container, "state", "waiting", "reason")
        category = _REASONS.get(reason, "")
        if category:
            detail = text(container, "state", "waiting", "message")
            image = text(container, "image")
            subject = f"its image `{image}`" if category == IMAGE_PULL and image else "its image"
            what = f"{subject} cannot be pulled ({reason})"
            if category == CONTAINER_CONFIG:
                what = f"its container cannot be created ({reason}{': ' if detail else ''}{detail})"
            return PodWait(
                category=category, what=what, detail=detail or reason, container=text(container, "name")
            )
    return None


def _describe_progress(pod: Object) -> str:
    if not text(pod, "spec", "nodeName"):
        return "the scheduler looks for a machine"
    if not mapping(pod, "status"):
        return "its machine has not taken it yet"
    running = [c for c in objects(pod, "status", "initContainerStatuses") if mapping(c, "state", "running")]
    if running:
        return f"init container `{text(running[0], 'name')}` runs"
    return f"`{text(pod, 'spec', 'nodeName')}` pulls the image and mounts the volumes"
