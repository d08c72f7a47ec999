"""Evidence of all nodes in, one verdict out: which rank failed first, of what, and what to do. Pure."""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prefect_torch_elastic.evidence import Category, Diagnosis, RankEvidence
from prefect_torch_elastic.explanations import CURES, render_exit, summarise

if TYPE_CHECKING:
    from prefect_torch_elastic.wire import RankInfo

# What a rank raises because another one is gone: gloo's, NCCL's and the store's own words.
_PEER_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process exited|socket (closed|error)"
    r"|failed to (recv|read|send)|EnforceNotMet|recvvalue failed|peer closed|communicator was aborted"
    r"|gloo/transport|unhandled system error|connect(ion)? error",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(r"timed out|timeout|watchdog", re.IGNORECASE)
# Marks of torch's own messages; gloo's and the store's come as plain `RuntimeError`.
_TORCH_WORDS = re.compile(
    r"gloo|nccl|c10d|TCPStore|ProcessGroup|monitoredBarrier|unbound_buffer|(writev|readv) \[|/pytorch/"
    r"|for recv operation|for send operation",
    re.IGNORECASE,
)
# torch's words when /dev/shm is full, mostly about a data loader's worker
_SHARED_MEMORY = re.compile(
    r"out of shared memory\. Please|killed by signal: Bus error|file </torch_|shared memory object",
    re.IGNORECASE,
)
_WORKER_KILLED = re.compile(r"DataLoader worker .*killed by signal: Killed", re.IGNORECASE)
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
    culprit = min(failed, key=lambda rank: (is_victim(rank), rank.failed_at or 0.0))
    if is_victim(culprit) and (returned := _returned_before(culprit, ranks)):
        return _diagnose_early_return(culprit, returned, ranks)
    category = _categorise(culprit)
    return Diagnosis(
        category=category,
        summary=summarise(
            culprit, category, several_nodes=several_nodes or len({rank.node_rank for rank in ranks}) > 1
        ),
        cure=CURES[category],
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


def _returned_before(victim: RankEvidence, ranks: Sequence[RankEvidence]) -> list[RankEvidence]:
    returned = [rank for rank in ranks if rank.returned_at is not None]
    return [rank for rank in returned if (rank.returned_at or 0.0) <= (victim.failed_at or 0.0)]


def _diagnose_early_return(
    victim: RankEvidence, returned: Sequence[RankEvidence], ranks: Sequence[RankEvidence]
) -> Diagnosis:
    """A rank waited for one that had returned: it is no machine's fault, and not its own either."""
    first = returned[0]
    numbers = ", ".join(str(rank.rank) for rank in returned)
    how = "timed out" if _is_collective_timeout(victim) else "lost its peer"
    words = victim.exc_message.strip().splitlines()
    return Diagnosis(
        category=Category.COLLECTIVES_APART,
        summary=(
            f"rank {victim.rank} {how} in a collective; rank {numbers} had already finished"
            f"{f': {victim.exc_type}: {words[0]}' if words else '.'}"
        ),
        cure=CURES[Category.COLLECTIVES_APART],
        rank=first.rank,
        local_rank=first.local_rank,
        node_rank=first.node_rank,
        exc_type=victim.exc_type,
        exc_message=victim.exc_message,
        step=first.step,
        victims=sorted(rank.rank for rank in ranks if rank not in returned),
        log=first.log,
        error=victim.error,
        last_lines=victim.last_lines,
    )


def diagnose_hang(
    category: Category, *, summary: str, culprit: RankInfo | None, step: int | None, victims: Sequence[int]
) -> Diagnosis:
    """Return the verdict on a gang that made no progress while all its ranks lived.

    Args:
        category: What was proven.
        summary: The cause, a sentence.
        culprit: The rank that the others wait for; None if nobody is to blame.
        step: Its last step.
        victims: Ranks that wait.
    """
    return Diagnosis(
        category=category,
        summary=summary,
        cure=CURES[category],
        rank=culprit.rank if culprit else None,
        local_rank=culprit.local_rank if culprit else None,
        node_rank=culprit.node_rank if culprit else None,
        step=step,
        victims=sorted(victims),
        log=culprit.log if culprit else "",
    )


NEVER_AGAIN = frozenset({Category.NON_RETRYABLE, Category.RESULT_NOT_SENDABLE, Category.CALL_NOT_LOADABLE})
"""Categories in which running the same thing again cannot help."""

INFRASTRUCTURE = frozenset({Category.LAUNCHER_LOST})
"""Categories that a new gang mends; a lost node was replaced until the same budget was spent."""

MACHINES = INFRASTRUCTURE | {
    Category.NODE_LOST,
    Category.PEER_LOST,
    Category.COLLECTIVE_TIMEOUT,
    Category.STOPPED_RESPONDING,
    Category.HANG,
    Category.STUCK_SAVE,
    Category.KILLED,
    Category.CRASHED,
    Category.SETUP_FAILED,
}
"""Categories that a machine may be to blame for: where the next gang gets other machines, they earn one."""


def diagnose_lost_node(node_rank: int, *, reason: str, pods_remain: bool = False) -> Diagnosis:
    """Return the verdict on a gang that could not go on without a node.

    Args:
        node_rank: The node.
        reason: How it was lost.
        pods_remain: Only its agent is gone; whatever it ran in is there and has told us so.
    """
    return Diagnosis(
        category=Category.NODE_LOST,
        summary=f"node {node_rank} was lost: {reason}.",
        cure=CURES[Category.NODE_LOST],
        node_rank=node_rank,
        pods_remain=pods_remain,
    )


def diagnose_missing_nodes(problem: str) -> Diagnosis:
    """Return the verdict on a gang that was never whole; `problem` says who is missing, a sentence."""
    return Diagnosis(
        category=Category.NODE_LOST,
        summary=problem,
        cure="See what keeps them (`kubectl describe pod`), or raise `rdzv_timeout_seconds`.",
        pods_remain=True,
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
        cure=CURES[Category.SETUP_FAILED],
        node_rank=node_rank,
        non_retryable=not may_pass,
    )


def diagnose_run_timeout(seconds: float) -> Diagnosis:
    """Return the verdict on a gang that was stopped because it ran too long."""
    return Diagnosis(
        category=Category.TIMED_OUT,
        summary=f"the gang ran longer than `run_timeout_seconds={seconds:g}` and was stopped.",
        cure=CURES[Category.TIMED_OUT],
    )


def diagnose_lost_launcher(exit_code: int, *, last_words: str = "") -> Diagnosis:
    """Return the verdict on a gang whose launcher process died.

    Args:
        exit_code: As in `subprocess`, negative for a signal.
        last_words: The end of its log, for a launcher that failed by itself.
    """
    how = f"{render_exit(exit_code)}: {last_words}" if last_words else render_exit(exit_code)
    return Diagnosis(
        category=Category.LAUNCHER_LOST,
        summary=f"the gang's launcher process died ({how}); its ranks were ended with it.",
        cure=CURES[Category.LAUNCHER_LOST],
        exit_code=exit_code if exit_code >= 0 else None,
        signal=-exit_code if exit_code < 0 else None,
    )


def diagnose_lost_job(flow_run: str, *, pool: str, reason: str) -> Diagnosis:
    """Return the verdict on a gang whose job in a work pool is gone and left no ending.

    Args:
        flow_run: Name of the child flow run.
        pool: The work pool.
        reason: What is known, as a sentence.
    """
    return Diagnosis(
        category=Category.NODE_LOST,
        summary=f"the gang's job in work pool `{pool}`, flow run '{flow_run}', is gone: {reason}",
        cure=f"See the log of that flow run and of the workers of `{pool}`; `max_attempts` sends it again.",
    )


def is_victim(rank: RankEvidence) -> bool:
    """Whether the rank only lost its peers, or waited for them in vain."""
    if _was_ended_by_watchdog(rank):
        return True
    lost = _is_distributed(rank) and bool(_PEER_LOST.search(rank.exc_message))
    return lost or _is_collective_timeout(rank)


def _is_distributed(rank: RankEvidence) -> bool:
    """Whether torch raised it: a user's `RuntimeError` may speak of connections and time-outs too."""
    if rank.exc_type is None or rank.exc_type not in _DISTRIBUTED_TYPES:
        return False
    return (
        rank.exc_type.startswith("Dist")
        or "torch/distributed/" in rank.traceback
        or bool(_TORCH_WORDS.search(rank.exc_message))
    )


def _was_ended_by_watchdog(rank: RankEvidence) -> bool:
    """NCCL's watchdog aborts a rank that waited too long for the others; its last words are in the log."""
    return rank.signal == signals.SIGABRT and any(_WATCHDOG.search(line) for line in rank.last_lines)


def _is_collective_timeout(rank: RankEvidence) -> bool:
    return _is_distributed(rank) and bool(_TIMEOUT.search(rank.exc_message))


def _categorise(rank: RankEvidence) -> Category:
    match rank.stage:
        case "load" if rank.exc_type != "MemoryError":
            return Category.CALL_NOT_LOADABLE
        case "result":
            return Category.RESULT_NOT_SENDABLE
        case "start" if rank.exc_type is None and rank.signal is None and not rank.reason:
            return Category.SETUP_FAILED
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
    if _WORKER_KILLED.search(rank.exc_message):
        return Category.HOST_OUT_OF_MEMORY if rank.oom_killed else Category.KILLED
    if _SHARED_MEMORY.search(rank.exc_message):
        return Category.SHARED_MEMORY
    if _is_collective_timeout(rank):
        return Category.COLLECTIVE_TIMEOUT
    if is_victim(rank):
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
