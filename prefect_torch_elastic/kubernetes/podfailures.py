"""Why a pod of a gang failed, or cannot start: read from the pod as Kubernetes tells it (pure)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any

from prefect_torch_elastic.evidence import Category
from prefect_torch_elastic.kubernetes.attempts import read_failed
from prefect_torch_elastic.kubernetes.conditions import (
    Condition,
    Object,
    index_of,
    mapping,
    read_condition,
    text,
)
from prefect_torch_elastic.kubernetes.podends import STOPPED, End, ending_of, explain_end
from prefect_torch_elastic.kubernetes.podwaits import (
    BLOCKING,
    CONTAINER_CONFIG,
    IMAGE_PULL,
    UNSCHEDULABLE,
    WAITING,
    read_wait,
)

EVICTED = "Evicted"
DISRUPTED = "Disrupted"
NOT_ADMITTED = "NotAdmitted"
DEADLINE = "DeadlineExceeded"

_NO_COUNT = "Nothing is wrong with the program, and it does not count as an attempt."
_CURES = {
    IMAGE_PULL: (
        "Correct `image`; or, if its registry asks for a login, give the service account of the pods "
        "an `imagePullSecrets`."
    ),
    CONTAINER_CONFIG: "Create in the namespace what the message names, or correct `secret_env` or `volumes`.",
    UNSCHEDULABLE: (
        "If no autoscaler adds machines, ask for less per node, or compare `node_selector` and "
        "`tolerations` with the machines (`kubectl describe nodes`)."
    ),
    DISRUPTED: _NO_COUNT,
    Category.NODE_LOST: _NO_COUNT,
    NOT_ADMITTED: "If it happens again on that machine, ask an administrator to look at its devices.",
    DEADLINE: "Raise `active_deadline_seconds`, or train fewer steps.",
}
_DISRUPTIONS = {
    "PreemptionByScheduler": (DISRUPTED, "gave its place to a pod with a higher pod priority"),
    "DeletionByTaintManager": (
        str(Category.NODE_LOST),
        "was removed: its machine does not answer, or takes no pods any more",
    ),
    "DeletionByPodGC": (str(Category.NODE_LOST), "was removed: its machine is gone"),
    "EvictionByEvictionAPI": (DISRUPTED, "was evicted: somebody drains its machine"),
    "TerminationByKubelet": (DISRUPTED, "was ended by its machine, which shuts down or runs short"),
}
_LOST_REASONS = ("NodeLost", "NodeShutdown", "Shutdown", "Terminated")
_REFUSALS = ("UnexpectedAdmissionError", "NodeAffinity", "TopologyAffinityError", "Preempting")
_JOB_EXIT = re.compile(r"for pod \S*?/?(?P<pod>[^/\s]+) failed with exit code (?P<code>\d+)")
_JOB_DISRUPTED = re.compile(r"Pod \S*?/?(?P<pod>[^/\s]+) has condition DisruptionTarget")
_LATEST = datetime.max.replace(tzinfo=UTC)


class _Weight(IntEnum):
    """Which failure explains which: the lowest is named."""

    CLUSTER = 0  # the cluster ended it, so the others lost their peer
    PROGRAM = 1
    WAITING = 2
    VICTIM = 3
    STOPPED = 4


@dataclass(frozen=True, kw_only=True)
class PodFailure:
    """What went wrong with a pod of a gang.

    Attributes:
        category: One word for machines: that of the failed rank where the pod could tell, as in
            `evidence.Category`, else one of this room, `podends` and `podwaits`.
        pod: The name of the pod, empty if the matter is not that of one pod.
        node: Its index in the gang, None if unknown.
        node_name: The machine that it was on, empty if it never got one.
        message: What happened, in a sentence.
        cure: What to do about it, empty if there is nothing to say.
        exit_code: That of the container, None if it never ended.
        is_consequence: Whether the cause is elsewhere: the pod lost its peers, or was told to stop. It says
            less than a failure without that which was seen before.
    """

    category: str
    pod: str
    node: int | None
    node_name: str
    message: str
    cure: str = ""
    exit_code: int | None = None
    is_consequence: bool = False

    @property
    def blocks_start(self) -> bool:
        """Whether the pod will not start until somebody changes something, while the gang holds its quota."""
        return self.category in BLOCKING

    @property
    def ends_attempt(self) -> bool:
        """Whether this is why a new attempt is needed: the pod ran, and the cause is not in another one."""
        return self.category not in WAITING and not self.is_consequence


@dataclass(frozen=True, kw_only=True)
class _Suspect:
    weight: _Weight
    at: datetime
    failure: PodFailure


def diagnose_pods(
    pods: Sequence[dict[str, Any]], *, job: dict[str, Any] | None, grace_seconds: float
) -> PodFailure | None:
    """Return the failure that explains the others, None if no pod has one.

    A pod that could not be scheduled or whose image is not there has one as well, see `blocks_start`.

    Args:
        pods: The pods of the gang; those that are gone already may be missing.
        job: The Job of the gang; it remembers a pod's exit code after the pod is gone.
        grace_seconds: What the program was given between SIGTERM and its own end.
    """
    over = _read_job(job)
    if over and over.category == DEADLINE:
        return over
    found = [suspect for pod in pods if (suspect := _suspect(pod, grace_seconds))]
    if job is not None and not read_failed(job).is_true:  # a suspended Job tells its pods to stop: no failure
        found = [suspect for suspect in found if suspect.failure.category != STOPPED]
    if not found:
        return over
    found.sort(key=lambda suspect: (suspect.weight, suspect.at, suspect.failure.pod))
    if over and found[0].weight >= _Weight.WAITING:
        return over
    first = found[0].failure
    more = Counter(suspect.failure.category for suspect in found)[first.category] - 1
    if not more:
        return first
    return replace(first, message=f"{first.message} ({more} more pod{'s' if more > 1 else ''} likewise.)")


def name_pod(pod: Object) -> str:
    """Return a pod as sentences name it, with its place in the gang and its machine."""
    index, machine = index_of(pod), text(pod, "spec", "nodeName")
    place = [f"node {index}"] if index is not None else []
    place += [f"on `{machine}`"] if machine else []
    return f"Pod `{text(pod, 'metadata', 'name')}`" + (f" ({' '.join(place)})" if place else "")


def _suspect(pod: Object, grace_seconds: float) -> _Suspect | None:
    if text(pod, "status", "phase") == "Succeeded":
        return None
    end = ending_of(pod)
    return (
        _suspect_cluster(pod, end)
        or (_suspect_end(pod, end, grace_seconds) if end else None)
        or _suspect_wait(pod)
    )


def _suspect_cluster(pod: Object, end: End | None) -> _Suspect | None:
    """Return what the cluster did to the pod, if it was the cluster."""
    reason, said = text(pod, "status", "reason"), text(pod, "status", "message")
    disruption = read_condition(pod, "DisruptionTarget")
    cure = ""
    if reason == "Evicted":
        category, what = EVICTED, f"was evicted from its machine: {said or 'the kubelet does not say why'}"
        cure = _cure_eviction(said)
    elif disruption.is_true:
        category, what = _explain_disruption(disruption)
    elif reason in _LOST_REASONS:
        category, what = str(Category.NODE_LOST), f"was lost with its machine ({reason})"
    elif reason in _REFUSALS or reason.startswith("OutOf"):
        category, what = NOT_ADMITTED, f"was refused by its machine ({reason}{': ' if said else ''}{said})"
    else:
        return None
    at = disruption.since if disruption.is_true else end.at if end else None
    failure = _make(pod, category, what, cure=cure or _CURES.get(category, ""), end=end)
    return _Suspect(weight=_Weight.CLUSTER, at=at or _LATEST, failure=failure)


def _explain_disruption(disruption: Condition) -> tuple[str, str]:
    category, what = _DISRUPTIONS.get(
        disruption.reason, (DISRUPTED, f"was removed by the cluster ({disruption.reason})")
    )
    return category, f"{what} ({disruption.message})" if disruption.message else what


def _cure_eviction(said: str) -> str:
    if re.search(r"ephemeral[- ](local )?storage", said):
        return (
            "Set `ephemeral_storage` to what its checkpoints, cached data and logs take on the machine's "
            "disk, or write them to a volume."
        )
    if "EmptyDir" in said:
        return "Raise the size limit of that volume (`shm_size` for /dev/shm), or write less into it."
    if "memory" in said:
        return "Set `memory` to what a pod needs: those that use more than they asked for are evicted first."
    return ""


def _suspect_end(pod: Object, end: End, grace_seconds: float) -> _Suspect | None:
    if end.exit_code == 0:
        return None
    told = bool(text(pod, "metadata", "deletionTimestamp"))
    account = explain_end(end, was_deleted=told, grace_seconds=grace_seconds)
    weight = _Weight.PROGRAM
    if account.category == Category.HOST_OUT_OF_MEMORY and end.reason == "OOMKilled":
        weight = _Weight.CLUSTER
    elif account.is_victim:
        weight = _Weight.VICTIM
    elif account.was_stopped:
        weight = _Weight.STOPPED
    failure = _make(pod, account.category, account.what, cure=account.cure, end=end)
    failure = replace(failure, is_consequence=account.is_victim or account.was_stopped)
    return _Suspect(weight=weight, at=end.at or _LATEST, failure=failure)


def _suspect_wait(pod: Object) -> _Suspect | None:
    wait = read_wait(pod)
    if wait is None or not wait.category:
        return None
    failure = _make(pod, wait.category, f"waits: {wait.what}", cure=_CURES[wait.category])
    if wait.category == IMAGE_PULL and wait.detail:
        failure = replace(failure, message=f"{failure.message} {wait.detail}")
    return _Suspect(weight=_Weight.WAITING, at=_LATEST, failure=failure)


def _make(pod: Object, category: str, what: str, *, cure: str, end: End | None = None) -> PodFailure:
    stop = "" if what.endswith((".", "!", "?")) else "."
    return PodFailure(
        category=category,
        pod=text(pod, "metadata", "name"),
        node=index_of(pod),
        node_name=text(pod, "spec", "nodeName"),
        message=f"{name_pod(pod)} {what}{stop}",
        cure=cure,
        exit_code=end.exit_code if end else None,
    )


def _read_job(job: Object | None) -> PodFailure | None:
    """Return what the Job remembers of a failure."""
    condition = read_failed(job)
    if not condition.is_true:
        return None
    if condition.reason == DEADLINE:
        seconds = mapping(job, "spec").get("activeDeadlineSeconds")
        limit = f" of {seconds} s" if seconds is not None else ""
        message = f"The gang ran longer than its `active_deadline_seconds`{limit}."
        return _remember(DEADLINE, "", message)
    if match := _JOB_EXIT.search(condition.message):
        message = f"Pod `{match['pod']}` ended with exit code {match['code']}."
        return _remember(str(Category.EXITED_EARLY), match["pod"], message, exit_code=int(match["code"]))
    if match := _JOB_DISRUPTED.search(condition.message):
        return _remember(DISRUPTED, match["pod"], f"Pod `{match['pod']}` was removed by the cluster.")
    return None


def _remember(category: str, pod: str, message: str, *, exit_code: int | None = None) -> PodFailure:
    match = re.search(r"-(\d+)-[a-z0-9]+$", pod)
    return PodFailure(
        category=category,
        pod=pod,
        node=int(match[1]) if match else None,
        node_name="",
        message=message,
        cure=_CURES.get(category, ""),
        exit_code=exit_code,
    )
