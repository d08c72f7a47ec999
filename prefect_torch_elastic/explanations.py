"""Failures in words: what happened to which rank, what to do, and signals by their names. Pure."""

from __future__ import annotations

import signal as signals

from prefect_torch_elastic.evidence import Category, Diagnosis, RankEvidence


def summarise(rank: RankEvidence, category: Category, *, several_nodes: bool) -> str:
    """Return the first line of a failure: the culprit, its cause, and the node where that helps."""
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
    if rank.stage == "start":
        return f"{who} could not be set up (exit code {rank.exit_code}); the end of its log says why."
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


CURES: dict[Category, str] = {
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
    Category.STOPPED_RESPONDING: "Find out who stopped it: a debugger, or somebody's `kill -STOP`.",
    Category.HANG: (
        "See the stack of the rank that the others wait for. If it was only slow, put `phase(...)` around "
        "that part, or raise `progress_timeout_seconds`."
    ),
    Category.COLLECTIVES_APART: (
        "Let every rank call the same collectives as often: give all ranks the same number of batches, and "
        "call no collective under `if rank == 0`."
    ),
    Category.STUCK_SAVE: (
        "See the stack of the rank: its store or its disk does not answer. If saves take so long, raise "
        "`progress_timeout_seconds`."
    ),
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
    Category.LAUNCHER_LOST: (
        "After a signal, somebody killed it or the host ran out of memory; else see `launcher.log`."
    ),
    Category.TIMED_OUT: "Raise `run_timeout_seconds`, or train fewer steps.",
}


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
