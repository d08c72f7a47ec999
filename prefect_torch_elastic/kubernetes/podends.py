"""How the container of a pod ended: its exit code, and what the program in it had to say (pure).

The program of a node writes its last word to the termination log as JSON. Where it could not, Kubernetes puts
the end of the container's log there.
"""

from __future__ import annotations

import json
import re
import signal as signals
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from prefect_torch_elastic.evidence import Category
from prefect_torch_elastic.explanations import CURES, signal_name
from prefect_torch_elastic.kubernetes.conditions import Object, mapping, moment, number, objects, text
from prefect_torch_elastic.kubernetes.naming import CONTAINER
from prefect_torch_elastic.pod import ExitCode, Why

NOT_STARTED = "NotStarted"
REFUSED = "Refused"
STOPPED = "Stopped"
KILLED_AFTER_GRACE = "KilledAfterGrace"
LEADER_UNREACHABLE = "LeaderUnreachable"

_KILLED_CODE = 128 + signals.SIGKILL
_NOT_STARTED_CODES = (126, 127, 128)
_SHARED_MEMORY = re.compile(r"bus error|out of shared memory|/dev/shm|shared memory object", re.IGNORECASE)
_LONGEST_LINE = 300


@dataclass(frozen=True, kw_only=True)
class End:
    """How a container ended.

    Attributes:
        container: Its name.
        exit_code: 128 and the number of the signal, if one ended it.
        reason: The kubelet's word for it, such as `OOMKilled`.
        message: The end of its log, or an error of the container runtime; empty where `word` is there.
        word: What the program said in the end, None if it could not.
        at: When, if that is known.
    """

    container: str
    exit_code: int
    reason: str
    message: str
    word: Object | None
    at: datetime | None


@dataclass(frozen=True, kw_only=True)
class Account:
    """An end in words.

    Attributes:
        category: One word for machines.
        what: To follow the pod's name in a sentence.
        cure: What to do, empty if there is nothing to say.
        is_victim: Whether the cause is in another pod.
        was_stopped: Whether it ended because it was told to.
    """

    category: str
    what: str
    cure: str = ""
    is_victim: bool = False
    was_stopped: bool = False


def ending_of(pod: Object) -> End | None:
    """Return how a pod's container ended: the program's own if that failed, else another one that did."""
    statuses = [
        *objects(pod, "status", "containerStatuses"),
        *objects(pod, "status", "initContainerStatuses"),
    ]
    ends = [end for status in statuses if (end := _read_end(status))]
    ends.sort(key=lambda end: (end.exit_code == 0, end.container != CONTAINER))
    return ends[0] if ends else None


def _read_end(status: Object) -> End | None:
    ended = mapping(status, "state", "terminated")
    if not ended:
        return None
    message = text(ended, "message")
    word = _read_word(message)
    return End(
        container=text(status, "name"),
        exit_code=number(ended, "exitCode"),
        reason=text(ended, "reason"),
        message="" if word else message,
        word=word,
        at=moment(ended, "finishedAt"),
    )


def _read_word(message: str) -> Object | None:
    try:
        word: Any = json.loads(message)
    except (ValueError, RecursionError):  # the end of a log may look like anything
        return None
    return cast("Object", word) if isinstance(word, dict) and text(cast("Object", word), "why") else None


def explain_end(end: End, *, was_deleted: bool, grace_seconds: float) -> Account:
    """Return an end in words.

    Args:
        end: The end.
        was_deleted: Whether the pod was told to stop, by whomever.
        grace_seconds: How long it had then.
    """
    if end.reason == "OOMKilled":
        return Account(
            category=Category.HOST_OUT_OF_MEMORY,
            what=f"ran out of memory: the kernel killed container `{end.container}` (OOMKilled)",
            cure=CURES[Category.HOST_OUT_OF_MEMORY],
        )
    if end.reason == "ContainerStatusUnknown":
        return Account(category=Category.NODE_LOST, what="was lost: its machine cannot tell how it ended")
    if end.reason in ("StartError", "ContainerCannotRun") or end.exit_code in _NOT_STARTED_CODES:
        said = f": {_last_line(end.message)}" if end.message else ""
        return Account(
            category=NOT_STARTED,
            what=f"could not start its program (exit code {end.exit_code}){said}",
            cure="Check that `image` holds Python and prefect-torch-elastic, built for the machines' CPUs.",
        )
    return _explain_word(end, end.word) if end.word else _explain_code(end, was_deleted, grace_seconds)


def _explain_word(end: End, word: Object) -> Account:
    message = text(word, "message") or f"the gang ended with exit code {end.exit_code}"
    category = text(word, "category")
    match text(word, "why"):
        case Why.LOST_NODE | Why.DISMISSED:
            return Account(category=Category.PEER_LOST, what=f"lost its peers: {message}", is_victim=True)
        case Why.LEADER_UNREACHABLE:
            what = f"could not reach the leader: {message}"
            return Account(
                category=LEADER_UNREACHABLE,
                what=what,
                cure="Look at the pod of node 0 first. If that ran, see whether pods may open connections "
                "to each other (NetworkPolicy, DNS).",
                is_victim=True,
            )
        case Why.STOPPED:
            return Account(category=STOPPED, what=f"was told to stop: {message}", was_stopped=True)
        case Why.REFUSED:
            return Account(category=category or REFUSED, what=f"refused to run: {message}")
        case _:
            shared = _SHARED_MEMORY.search(message) and Category.SHARED_MEMORY
            cure = CURES.get(cast("Category", shared or category), "")
            return Account(
                category=category or shared or Category.EXITED_EARLY, what=f"failed: {message}", cure=cure
            )


def _explain_code(end: End, was_deleted: bool, grace_seconds: float) -> Account:
    said = f". Its last line: {line}" if (line := _last_line(end.message)) else ""
    if end.exit_code == ExitCode.STOPPED:
        what = f"was told to stop (exit code {end.exit_code})"
        return Account(category=STOPPED, what=what, was_stopped=True)
    if end.exit_code == _KILLED_CODE and was_deleted:
        return Account(
            category=KILLED_AFTER_GRACE,
            what=f"was told to stop, did not within {grace_seconds:g} s and was killed{said}",
            cure="Raise `grace_seconds` above the time of one step and one save, or save more often.",
            was_stopped=True,
        )
    if end.exit_code == 128 + signals.SIGBUS or _SHARED_MEMORY.search(end.message):
        return Account(
            category=Category.SHARED_MEMORY,
            what=f"{_name_code(end.exit_code)}, as a full /dev/shm makes it{said}",
            cure=CURES[Category.SHARED_MEMORY],
        )
    if end.exit_code == _KILLED_CODE:
        return Account(
            category=Category.KILLED, what=f"was killed by SIGKILL{said}", cure=CURES[Category.KILLED]
        )
    category = Category.CRASHED if end.exit_code > 128 else Category.EXITED_EARLY
    return Account(category=category, what=f"{_name_code(end.exit_code)}{said}")


def _name_code(exit_code: int) -> str:
    if exit_code > 128:
        return f"was ended by {signal_name(exit_code - 128)} (exit code {exit_code})"
    return f"ended with exit code {exit_code}"


def _last_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1][-_LONGEST_LINE:] if lines else ""
