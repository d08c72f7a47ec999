"""Evidence of all nodes in, one verdict out: which rank failed first, of what, and what to do.

Pure: plain data in, plain data out. `Category` is a contract for automations; see `docs/failures.md`.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Category(StrEnum):
    """The kinds of failure, stable names."""

    USER_ERROR = "UserError"
    NON_RETRYABLE = "NonRetryable"
    DEVICE_OUT_OF_MEMORY = "DeviceOutOfMemory"
    HOST_OUT_OF_MEMORY = "HostOutOfMemory"
    KILLED = "Killed"
    SHARED_MEMORY = "SharedMemory"
    CRASHED = "Crashed"
    EXITED_EARLY = "ExitedEarly"
    STOPPED_RESPONDING = "StoppedResponding"
    COLLECTIVE_TIMEOUT = "CollectiveTimeout"
    PEER_LOST = "PeerLost"
    RESULT_NOT_SENDABLE = "ResultNotSendable"
    CALL_NOT_LOADABLE = "CallNotLoadable"
    SETUP_FAILED = "SetupFailed"
    NODE_LOST = "NodeLost"
    LAUNCHER_LOST = "LauncherLost"
    TIMED_OUT = "TimedOut"


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """What one node saw of one rank of a failed gang.

    Attributes:
        failed_at: Monotonic seconds of the node at which the rank raised or ended; None if it did neither.
        exit_code: None while it ran, or when a signal ended it.
        told_to_stop: It ended only after the agent had asked it to.
        stage: How far it came: `start`, `load`, `run`, `result`.
        reason: The agent's own words for what it saw, such as `was stopped (SIGSTOP) for 5 s`.
        oom_killed: The kernel's counter rose while it died; None where there is no counter.
        memory_limit_bytes: The limit of its control group; None without one.
        traceback: Text of the exception, the user's frames last.
        non_retryable: The exception says that running again cannot help.
        last_lines: The end of its log.
    """

    rank: int
    local_rank: int
    node_rank: int
    pid: int = 0
    failed_at: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    told_to_stop: bool = False
    stage: str = "run"
    reason: str = ""
    exc_type: str | None = None
    exc_message: str = ""
    traceback: str = ""
    non_retryable: bool = False
    oom_killed: bool | None = None
    memory_limit_bytes: int | None = None
    step: int | None = None
    log: str = ""
    stacks: str = ""
    error: str = ""
    last_lines: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The verdict on one failure; `render_failure` turns it into text."""

    category: Category
    summary: str
    cure: str
    rank: int | None = None
    local_rank: int | None = None
    node_rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    exc_type: str | None = None
    exc_message: str = ""
    traceback: str = ""
    step: int | None = None
    victims: list[int] = field(default_factory=list[int])
    log: str = ""
    error: str = ""
    last_lines: list[str] = field(default_factory=list[str])
    non_retryable: bool = False


# What a rank raises because another one is gone: gloo's, NCCL's and the store's own words.
_PEER_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process exited|socket (closed|error)"
    r"|failed to (recv|read|send)|EnforceNotMet|recvvalue failed|peer closed|communicator was aborted"
    r"|gloo/transport|unhandled system error|connect(ion)? error",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(r"timed out|timeout|watchdog", re.IGNORECASE)
_COLLECTIVE = re.compile(
    r"gloo|nccl|collective|allreduce|all_reduce|barrier|store|recv|watchdog", re.IGNORECASE
)
# torch's words when /dev/shm is full, mostly about a data loader's worker
_SHARED_MEMORY = re.compile(
    r"out of shared memory\. Please|killed by signal: Bus error|file </torch_|shared memory object",
    re.IGNORECASE,
)
_WATCHDOG = re.compile(r"watchdog caught collective operation timeout|Watchdog.*terminat", re.IGNORECASE)
_DEVICE_OOM = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
_DISTRIBUTED_TYPES = {
    "RuntimeError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "DistError",
    "ConnectionResetError",
    "ConnectionRefusedError",
    "BrokenPipeError",
}


def diagnose(ranks: Sequence[RankEvidence], *, several_nodes: bool = False) -> Diagnosis:
    """Return the verdict on a failed round: the culprit and its cause; the other failed ranks are victims.

    A rank that only lost its peer is a victim whatever the clock says: the kernel closes a dead process's
    sockets before its parent learns of the death, so victims often raise first.

    Args:
        ranks: What is known; a node whose ranks go on may be missing.
        several_nodes: Whether the gang has more than one node, so that the culprit's is worth naming.
    """
    failed = [rank for rank in ranks if rank.failed_at is not None and not rank.told_to_stop]
    if not failed:
        return Diagnosis(
            category=Category.SETUP_FAILED,
            summary="the gang failed, but no rank of it did.",
            cure="This is a mistake in prefect-torch-elastic; please report it with the log.",
        )
    culprit = min(failed, key=lambda rank: (_is_victim(rank), rank.failed_at or 0.0))
    category = _categorise(culprit)
    return Diagnosis(
        category=category,
        summary=_summarise(
            culprit, category, several_nodes=several_nodes or len({rank.node_rank for rank in ranks}) > 1
        ),
        cure=_CURES[category],
        rank=culprit.rank,
        local_rank=culprit.local_rank,
        node_rank=culprit.node_rank,
        exit_code=culprit.exit_code,
        signal=culprit.signal,
        exc_type=culprit.exc_type,
        exc_message=culprit.exc_message,
        traceback=culprit.traceback,
        step=culprit.step,
        victims=sorted(rank.rank for rank in ranks if rank.rank != culprit.rank),
        log=culprit.log,
        error=culprit.error,
        last_lines=culprit.last_lines,
        non_retryable=category in NEVER_AGAIN or culprit.non_retryable,
    )


def parse_diagnosis(fields: Mapping[str, Any]) -> Diagnosis:
    """Return the diagnosis whose fields travelled as JSON."""
    values: dict[str, Any] = {**fields, "category": Category(fields["category"])}
    return Diagnosis(**values)


NEVER_AGAIN = frozenset({Category.NON_RETRYABLE, Category.RESULT_NOT_SENDABLE, Category.CALL_NOT_LOADABLE})
"""Categories in which running the same thing again cannot help."""

INFRASTRUCTURE = frozenset({Category.LAUNCHER_LOST})
"""Categories that a new gang mends; a lost node was replaced until the same budget was spent."""


def diagnose_lost_node(node_rank: int, *, reason: str) -> Diagnosis:
    """Return the verdict on a gang that could not go on without a node."""
    return Diagnosis(
        category=Category.NODE_LOST,
        summary=f"node {node_rank} was lost: {reason}.",
        cure=_CURES[Category.NODE_LOST],
        node_rank=node_rank,
    )


def diagnose_setup(problem: str, *, node_rank: int | None = None, may_pass: bool = False) -> Diagnosis:
    """Return the verdict on a gang that could not start its ranks.

    Args:
        problem: What is wrong, a sentence.
        node_rank: The node that found it.
        may_pass: Later it may be otherwise: devices are taken, nodes have not come.
    """
    return Diagnosis(
        category=Category.SETUP_FAILED,
        summary=problem,
        cure=_CURES[Category.SETUP_FAILED],
        node_rank=node_rank,
        non_retryable=not may_pass,
    )


def diagnose_run_timeout(seconds: float) -> Diagnosis:
    """Return the verdict on a gang that was stopped because it ran too long."""
    return Diagnosis(
        category=Category.TIMED_OUT,
        summary=f"the gang ran longer than `run_timeout_seconds={seconds:g}` and was stopped.",
        cure=_CURES[Category.TIMED_OUT],
    )


def diagnose_lost_launcher(exit_code: int | None) -> Diagnosis:
    """Return the verdict on a gang whose launcher process died without a word."""
    how = "its connection closed" if exit_code is None else render_exit(exit_code)
    return Diagnosis(
        category=Category.LAUNCHER_LOST,
        summary=f"the gang's launcher process died ({how}); its ranks were ended with it.",
        cure=_CURES[Category.LAUNCHER_LOST],
        exit_code=exit_code if exit_code is not None and exit_code >= 0 else None,
        signal=-exit_code if exit_code is not None and exit_code < 0 else None,
    )


def render_failure(diagnosis: Diagnosis, *, restarts: int) -> str:
    """Return the text of the error: the cause first, then the cure, the traceback and the log."""
    lines = [diagnosis.summary, diagnosis.cure]
    if restarts:
        lines.append(f"It was restarted {restarts} time{'s' if restarts > 1 else ''} before.")
    if diagnosis.traceback:
        lines += ["", f"On rank {diagnosis.rank}:", diagnosis.traceback.rstrip()]
    elif diagnosis.last_lines:
        lines += ["", f"Last lines of rank {diagnosis.rank}:", *diagnosis.last_lines[-10:]]
    if diagnosis.log:
        lines += ["", f"Full log of the rank: {diagnosis.log}"]
    return "\n".join(lines)


def render_exit(exit_code: int) -> str:
    """Return an exit status in words; a negative one is a signal, as in `subprocess`."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    return signal_name(-exit_code)


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _is_victim(rank: RankEvidence) -> bool:
    if _was_ended_by_watchdog(rank):
        return True
    if rank.exc_type is None or rank.exc_type not in _DISTRIBUTED_TYPES:
        return False
    return bool(_PEER_LOST.search(rank.exc_message)) or _is_collective_timeout(rank)


def _was_ended_by_watchdog(rank: RankEvidence) -> bool:
    """NCCL's watchdog aborts a rank that waited too long for the others; its last words are in the log."""
    return rank.signal == signals.SIGABRT and any(_WATCHDOG.search(line) for line in rank.last_lines)


def _is_collective_timeout(rank: RankEvidence) -> bool:
    if rank.exc_type not in _DISTRIBUTED_TYPES or not _TIMEOUT.search(rank.exc_message):
        return False
    # torch's own types need no further word; a RuntimeError may come from anywhere
    return rank.exc_type.startswith("Dist") or bool(_COLLECTIVE.search(rank.exc_message))


def _categorise(rank: RankEvidence) -> Category:
    match rank.stage:
        case "load":
            return Category.CALL_NOT_LOADABLE
        case "result":
            return Category.RESULT_NOT_SENDABLE
        case _:
            pass
    if rank.reason and rank.exc_type is None:
        return Category.STOPPED_RESPONDING
    if _was_ended_by_watchdog(rank):
        return Category.COLLECTIVE_TIMEOUT
    if rank.signal is not None:
        return _categorise_signal(rank)
    if rank.exc_type is None:
        return Category.EXITED_EARLY
    if rank.non_retryable:
        return Category.NON_RETRYABLE
    if rank.exc_type in {"OutOfMemoryError", "AcceleratorError"} and _DEVICE_OOM.search(rank.exc_message):
        return Category.DEVICE_OUT_OF_MEMORY
    if rank.exc_type == "MemoryError":
        return Category.HOST_OUT_OF_MEMORY
    if _SHARED_MEMORY.search(rank.exc_message):
        return Category.SHARED_MEMORY
    if _is_collective_timeout(rank):
        return Category.COLLECTIVE_TIMEOUT
    if _is_victim(rank):
        return Category.PEER_LOST
    return Category.USER_ERROR


def _categorise_signal(rank: RankEvidence) -> Category:
    match rank.signal:
        case signals.SIGKILL if rank.oom_killed:
            return Category.HOST_OUT_OF_MEMORY
        case signals.SIGKILL | signals.SIGTERM | signals.SIGINT | signals.SIGHUP:
            return Category.KILLED
        case signals.SIGBUS:
            return Category.SHARED_MEMORY
        case _:
            return Category.CRASHED


def _summarise(rank: RankEvidence, category: Category, *, several_nodes: bool) -> str:
    who = f"rank {rank.rank}"
    if several_nodes:
        who += f" (node {rank.node_rank})"
    at = f" at step {rank.step}" if rank.step is not None else ""
    if rank.exc_type == "TransferError" and rank.stage == "result":
        return rank.exc_message  # it names rank and type already, and reaches the user as it is
    if rank.exc_type is not None:
        verbs = {"load": "could not load the call", "result": "could not hand back its result"}
        verb = verbs.get(rank.stage, f"failed{at}")
        first = rank.exc_message.strip().splitlines()[0] if rank.exc_message.strip() else ""
        return f"{who} {verb}: {rank.exc_type}{': ' if first else ''}{first}"
    if category is Category.STOPPED_RESPONDING:
        return f"{who} {rank.reason}{at}."
    if rank.signal is not None:
        return f"{who} was killed by {signal_name(rank.signal)}{at}{_explain_signal(rank, category)}."
    return f"{who} ended with exit code {rank.exit_code}{at} before its function returned."


def _explain_signal(rank: RankEvidence, category: Category) -> str:
    limit = (
        f"host memory limit was {rank.memory_limit_bytes / 2**30:.1f} GiB"
        if rank.memory_limit_bytes
        else "the host has no memory limit for it"
    )
    match category:
        case Category.HOST_OUT_OF_MEMORY:
            return f": the kernel's out-of-memory killer did it ({limit})"
        case Category.KILLED if rank.signal == signals.SIGKILL and rank.oom_killed is None:
            return f" (often out of memory; {limit})"
        case Category.KILLED if rank.signal == signals.SIGKILL:
            return f" (somebody sent it: the kernel's out-of-memory counter did not rise; {limit})"
        case Category.SHARED_MEMORY:
            return " (often a full /dev/shm)"
        case Category.CRASHED if rank.signal == signals.SIGSEGV:
            return " (a memory error in native code)"
        case Category.CRASHED if rank.signal == signals.SIGABRT:
            return " (native code gave up; its last words are in the log)"
        case _:
            return ""


_CURES = {
    Category.USER_ERROR: "Mend the function where the traceback points and run the task again.",
    Category.NON_RETRYABLE: "The function asked for no further restarts or retries. Mend the cause first.",
    Category.DEVICE_OUT_OF_MEMORY: (
        "Use a smaller batch, gradient accumulation, activation checkpointing, or shard over more ranks."
    ),
    Category.HOST_OUT_OF_MEMORY: (
        "Ask for more `memory`, use fewer data loader workers, or pass paths instead of loaded data."
    ),
    Category.KILLED: (
        "If nobody sent the signal, look at the host's memory (`dmesg`, the container's limit) at that time."
    ),
    Category.SHARED_MEMORY: "Raise `shm_size`, or use fewer data loader workers.",
    Category.CRASHED: "The stacks at the crash are next to the rank's log (`*.stacks`).",
    Category.EXITED_EARLY: "Return from the function or raise an exception; do not call `os._exit`.",
    Category.STOPPED_RESPONDING: "Find out who stopped it (a debugger, `kill -STOP`, a frozen container).",
    Category.COLLECTIVE_TIMEOUT: (
        "All ranks must run the same collectives: compare the steps of the ranks and their stacks."
    ),
    Category.PEER_LOST: "Another rank closed its connection; look at the logs of the other ranks.",
    Category.RESULT_NOT_SENDABLE: (
        "Return a path or plain data. The training was not repeated, because that could not help."
    ),
    Category.CALL_NOT_LOADABLE: "Install what the function imports where the gang runs.",
    Category.SETUP_FAILED: "Nothing was trained. Mend the setting and run the task again.",
    Category.NODE_LOST: 'Ask for a range (`nnodes="1:2"`) if the gang may go on with fewer nodes.',
    Category.LAUNCHER_LOST: "Somebody killed it, or the host ran out of memory.",
    Category.TIMED_OUT: "Raise `run_timeout_seconds`, or train fewer steps.",
}
