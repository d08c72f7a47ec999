"""What a kubelet writes into a pod's status at each stage, as captured from Kubernetes 1.36.2 (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tests.simulators.kubernetes.objects import Obj, format_time

FINAL = ("Succeeded", "Failed")

_EVICTED = (
    "The node was low on resource: {0}. Threshold quantity: 1Gi, available: 512Mi. Container {1} was using "
    "2Gi, request is 0, has larger consumption of {0}. "
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a pod is."""

    node: str
    host_ip: str
    pod_ip: str = ""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a container ended; `message` is its termination message."""

    exit_code: int
    started_at: float
    finished_at: float
    reason: str = ""
    message: str = ""

    def render(self, container_id: str) -> Obj:
        """Return the state of the container."""
        state: Obj = {
            "exitCode": self.exit_code,
            "reason": self.reason or ("Completed" if self.exit_code == 0 else "Error"),
            "startedAt": format_time(self.started_at),
            "finishedAt": format_time(self.finished_at),
            "containerID": container_id,
        }
        return {"terminated": {**state, **({"message": self.message} if self.message else {})}}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the kubelet or a node controller says about the pod as a whole, beyond its containers."""

    reason: str
    message: str
    disruption: str = ""  # reason of the condition DisruptionTarget, none when empty


def evicted(pod: Obj, resource: str) -> Verdict:
    """Return what the kubelet says of a pod that it evicts because the node runs out of a resource."""
    message = _EVICTED.format(resource, pod["spec"]["containers"][0]["name"])
    return Verdict(reason="Evicted", message=message, disruption="TerminationByKubelet")


DELETED_BY_TAINT = Verdict(
    reason="", message="Taint manager: deleting due to NoExecute taint", disruption="DeletionByTaintManager"
)
COLLECTED = Verdict(reason="", message="PodGC: node no longer exists", disruption="DeletionByPodGC")


def note_unschedulable(pod: Obj, message: str, *, now: float) -> None:
    """Write that no node takes the pod."""
    found = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    pod["status"] = {**pod.get("status", {}), "conditions": _merge(pod, [found], now)}


def note_waiting(pod: Obj, place: Place, reason: str, message: str = "", *, now: float) -> None:
    """Write that the pod is on its node, and what its container waits for."""
    names = ", ".join(container["name"] for container in pod["spec"]["containers"])
    unready = ("False", "ContainersNotReady", f"containers with unready status: [{names}]")
    waiting = {"reason": reason, **({"message": message} if message else {})}
    _write(
        pod,
        place,
        phase="Pending",
        state={"waiting": waiting},
        conditions=_conditions(sandbox=bool(place.pod_ip), initialized=("True",), ready=unready),
        now=now,
    )


def note_running(pod: Obj, place: Place, *, started_at: float, now: float) -> None:
    """Write that the pod's container runs, and is ready."""
    _write(
        pod,
        place,
        phase="Running",
        state={"running": {"startedAt": format_time(started_at)}},
        conditions=_conditions(sandbox=True, initialized=("True",), ready=("True",)),
        now=now,
    )


def note_ended(pod: Obj, place: Place, ending: Ending, verdict: Verdict | None = None, *, now: float) -> None:
    """Write that the pod's container has ended."""
    succeeded = ending.exit_code == 0 and verdict is None
    reason = "PodCompleted" if succeeded else "PodFailed"
    initialized = ("True", reason) if succeeded else ("True",)
    _write(
        pod,
        place,
        phase="Succeeded" if succeeded else "Failed",
        state=ending.render(_container_id(pod)),
        conditions=_conditions(sandbox=False, initialized=initialized, ready=("False", reason)),
        now=now,
    )
    if verdict and verdict.reason:
        pod["status"] |= {"reason": verdict.reason, "message": verdict.message}
    if verdict and verdict.disruption:
        note_disruption(pod, verdict, now=now)


def note_disruption(pod: Obj, verdict: Verdict, *, now: float) -> None:
    """Write that Kubernetes takes the pod away."""
    target = {"type": "DisruptionTarget", "status": "True", "reason": verdict.disruption}
    found = [{**target, "message": verdict.message}]
    pod["status"] = {**pod.get("status", {}), "conditions": _merge(pod, found, now)}


def note_never_run(pod: Obj, *, now: float) -> None:
    """Write that a pod was deleted before its container ran."""
    ended = {"type": "Ready", "status": "False", "reason": "PodFailed"}
    pod["status"] = {**pod.get("status", {}), "phase": "Failed", "conditions": _merge(pod, [ended], now)}


def note_init(pod: Obj, endings: Iterable[tuple[str, Ending]]) -> None:
    """Write how the init containers ended so far; call it after the other words about this stage."""
    pod["status"]["initContainerStatuses"] = [
        {
            "name": name,
            "ready": ending.exit_code == 0,
            "restartCount": 0,
            "state": ending.render(_container_id(pod)),
            "lastState": {},
        }
        for name, ending in endings
    ]


def _write(pod: Obj, place: Place, *, phase: str, state: Obj, conditions: list[Obj], now: float) -> None:
    kept = pod.get("status", {})
    status: Obj = {
        **kept,
        "phase": phase,
        "conditions": _merge(pod, conditions, now),
        "hostIP": place.host_ip,
        "startTime": kept.get("startTime", format_time(now)),
        "containerStatuses": [
            _render_container(pod, container, state) for container in pod["spec"]["containers"]
        ],
    }
    if place.pod_ip:
        status |= {"podIP": place.pod_ip, "podIPs": [{"ip": place.pod_ip}]}
    pod["status"] = status


def _render_container(pod: Obj, container: Mapping[str, str], state: Obj) -> Obj:
    image, runs = container.get("image", ""), "running" in state
    begun = "waiting" not in state
    return {
        "name": container["name"],
        "image": image,
        "imageID": f"simulated://{image}" if begun else "",
        **({"containerID": _container_id(pod)} if begun else {}),
        "ready": runs,
        "started": runs,
        "restartCount": 0,
        "lastState": {},
        "state": state,
    }


def _container_id(pod: Obj) -> str:
    return f"simulated://{pod['metadata']['uid']}"


def _conditions(*, sandbox: bool, initialized: tuple[str, ...], ready: tuple[str, ...]) -> list[Obj]:
    """Return the conditions of a stage; a tuple is status, reason and message as far as there are any."""
    found = {
        "PodReadyToStartContainers": ("True" if sandbox else "False",),
        "Initialized": initialized,
        "Ready": ready,
        "ContainersReady": ready,
        "PodScheduled": ("True",),
    }
    names = ("status", "reason", "message")
    return [{"type": kind, **dict(zip(names, words, strict=False))} for kind, words in found.items()]


def _merge(pod: Obj, found: list[Obj], now: float) -> list[Obj]:
    """Return the conditions with `found` put in; the time stays where the status does."""
    before = {condition["type"]: condition for condition in pod.get("status", {}).get("conditions", [])}
    generation = pod["metadata"].get("generation", 1)
    for condition in found:
        old = before.get(condition["type"], {})
        same = old.get("status") == condition["status"]
        moment = old["lastTransitionTime"] if same else format_time(now)
        before[condition["type"]] = {
            **condition,
            "lastProbeTime": None,
            "lastTransitionTime": moment,
            "observedGeneration": generation,
        }
    return list(before.values())
