"""Where the ranks of a node are, written down while they run: stacks, collectives, and what the kernel knows.

It changes nothing, and stops no rank. One that is held by SIGSTOP or a debugger is only looked at from
outside: woken for its stacks it would make a step, and look alive. That is done when it is ended (`rankset`).
A rank that has failed is no part of the answer: it must not be taken for one that has returned.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect_torch_elastic.node import processes
from prefect_torch_elastic.node.rankprocess import EVIDENCE_SUFFIXES, RankProcess, keep_evidence
from prefect_torch_elastic.node.sampling import sample_rank
from prefect_torch_elastic.node.stackdump import StackDump
from prefect_torch_elastic.observations import EvidenceTaken, LastCollective, RankSnapshot

LONGEST_SECONDS = 2.5  # for a rank that holds Python's lock, and on a machine with too much to do
PYSPY_SECONDS = 2.0
PYSPY_END_SECONDS = 0.2  # for all of a node, from SIGTERM to SIGKILL
STACKS_CHARACTERS = 16_000
_OUR_THREAD = "node/flightrecorder.py"
_COLLECTIVES, _KERNEL, _PYSPY = EVIDENCE_SUFFIXES


class EvidenceTaking:
    """The evidence of a node's ranks while it is being written; each look takes no time.

    Args:
        ranks: The ranks of the node.
        node: The node's number.
        number: The request's number.
    """

    def __init__(self, ranks: Sequence[RankProcess], *, node: int, number: int) -> None:
        self._node, self._number = node, number
        self._deadline = time.monotonic() + LONGEST_SECONDS
        self._takings = [_RankTaking(rank, number) for rank in ranks]

    def look(self) -> EvidenceTaken | None:
        """Return the evidence when all of it is there or the time is over, until then None."""
        complete = [taking.is_complete() for taking in self._takings]  # of each: one may have to sleep again
        if all(complete) or time.monotonic() >= self._deadline:
            return self.finish()
        return None

    def finish(self) -> EvidenceTaken:
        """Return what is there now."""
        ending = [taking for taking in self._takings if taking.ask_pyspy_to_end()]
        deadline = time.monotonic() + PYSPY_END_SECONDS
        for taking in ending:
            taking.end_pyspy(deadline)
        snapshots = [snapshot for taking in self._takings if (snapshot := taking.finish())]
        return EvidenceTaken(node=self._node, number=self._number, ranks=snapshots)


class _RankTaking:
    def __init__(self, rank: RankProcess, number: int) -> None:
        self._rank, self._number = rank, number
        self._started_at = time.monotonic()
        self._dump: StackDump | None = None
        self._pyspy: subprocess.Popen[bytes] | None = None
        self._sample = sample_rank(rank)
        self._is_alive = rank.alive
        tree = processes.list_tree(rank.pid) if rank.alive else []
        self._efforts = {str(pid): processes.read_effort(pid) for pid in tree}
        self._is_in_disk = any(processes.read_state(pid) == "D" for pid in tree)
        self._is_stopped = rank.alive and processes.is_stopped(rank.pid)
        if not rank.alive:
            return
        rank.read_news()  # it may have become ready a moment ago
        self._pyspy = _start_pyspy(rank.pid, self._path(_PYSPY))
        if rank.can_dump and not self._is_stopped:
            rank.ask_for_evidence(number)
            self._dump = StackDump(rank)

    def is_complete(self) -> bool:
        if not self._rank.alive:
            return True
        dumped = self._dump is None or self._dump.is_complete()
        written = self._dump is None or self._rank.evidence_number == self._number
        return dumped and written and self._pyspy_ended()

    def ask_pyspy_to_end(self) -> bool:
        """Whether there is one that has to be ended."""
        if self._pyspy is None or self._pyspy.poll() is not None:
            return False
        self._pyspy.terminate()
        return True

    def end_pyspy(self, deadline: float) -> None:
        """End it, and let the rank go on if it was held for it."""
        assert self._pyspy is not None
        try:
            self._pyspy.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._pyspy.kill()
            self._pyspy.wait()
        if not self._is_stopped:
            self._rank.send(signal.SIGCONT)

    def finish(self) -> RankSnapshot | None:
        rank = self._rank
        if rank.returned_at is None and (rank.failed_at is not None or not rank.alive):
            return None
        stacks = order_stacks(self._rank.read_stacks()) if self._dump or not self._is_alive else ""
        if not stacks and self._is_alive:
            stacks = self._write_kernel()
        sample = self._sample
        collectives = read_collectives(self._path(_COLLECTIVES), self._number)
        return RankSnapshot(
            rank=sample.rank,
            is_alive=self._is_alive,
            is_stopped=self._is_stopped,
            step=sample.step,
            phase=sample.phase,
            busy=sample.busy,
            idle_seconds=sample.idle_seconds,
            efforts=self._efforts,
            is_in_disk=self._is_in_disk,
            look_bytes=self._count_look_bytes(),
            stacks=_cut(stacks),
            files=self._keep_files(),
            collectives=collectives or [],
            has_answered=collectives is not None,
        )

    def _pyspy_ended(self) -> bool:
        if self._pyspy is None or time.monotonic() - self._started_at > PYSPY_SECONDS:
            return True
        return self._pyspy.poll() is not None

    def _count_look_bytes(self) -> int:
        """Return how much the rank has written for this look, if it has answered."""
        if self._dump is None:
            return 0
        written = [self._path(".stacks"), self._path(_COLLECTIVES)]
        sizes = [path.stat().st_size if path.exists() else 0 for path in written]
        return max(0, sizes[0] - self._rank.dump_start) + sizes[1]

    def _write_kernel(self) -> str:
        """Keep what /proc says of a process that cannot speak for itself, and return it."""
        text = processes.describe(self._rank.pid)
        with suppress(OSError):
            self._path(_KERNEL).write_text(text)
        return text

    def _keep_files(self) -> list[str]:
        kept = [keep_evidence(self._rank.prefix, suffix) for suffix in (".stacks", *EVIDENCE_SUFFIXES)]
        return [name for name in kept if name]

    def _path(self, suffix: str) -> Path:
        return Path(f"{self._rank.prefix}{suffix}")


def order_stacks(text: str) -> str:
    """Return faulthandler's stacks with the thread that took the signal first, the main one, without ours."""
    threads = [thread.strip("\n") for thread in text.split("\n\n")]
    return "\n\n".join(thread for thread in reversed(threads) if thread and _OUR_THREAD not in thread)


def read_collectives(path: Path, number: int) -> list[LastCollective] | None:
    """Return what a rank has written of its collectives for this request, or when another rank failed.

    None if it has not, or if it could not read its own records.
    """
    try:
        written: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if written["number"] not in (number, 0) or "problem" in written:
        return None
    return [LastCollective(**one) for one in written["last"]]


def _cut(text: str) -> str:
    if len(text) <= STACKS_CHARACTERS:
        return text
    return f"{text[:STACKS_CHARACTERS]}\n[{len(text) - STACKS_CHARACTERS} characters left out]"


def _start_pyspy(pid: int, target: Path) -> subprocess.Popen[bytes] | None:
    """Let py-spy, where it is installed, look from outside, without stopping the rank.

    For native frames it would have to stop it for seconds, and might leave it so when it is ended.
    """
    program = shutil.which("py-spy")
    if program is None:
        return None
    with suppress(OSError), target.open("wb") as file:
        return subprocess.Popen(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.DEVNULL,
        )
    return None
