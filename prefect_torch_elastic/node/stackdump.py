"""The Python stacks of a rank, which a signal makes it write whatever it does, and when they are whole.

faulthandler writes from C without the interpreter's lock, so ranks in a collective answer too.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from prefect_torch_elastic.node.rankprocess import RankProcess
from prefect_torch_elastic.rankstate import DUMP_SIGNAL

_DUMP_SECONDS = 0.3
_STILL_SECONDS = 0.2
_OUTERMOST = (b" in <module>", b" in _run_module_as_main", b"  ...")  # the last one ends a very deep stack
_MOST_STACKS_BYTES = 1 << 20


def dump_stacks(ranks: list[RankProcess]) -> None:
    """Let living ranks write the stacks of all their threads, before anything is killed; bounded.

    One that SIGSTOP holds is continued: the stacks are the first thing that it does then.
    """
    asked = [rank for rank in ranks if rank.alive and rank.can_dump]
    dumps = [StackDump(rank) for rank in asked]
    for rank in asked:
        rank.send(signal.SIGCONT)
    deadline = time.monotonic() + _DUMP_SECONDS
    while dumps and time.monotonic() < deadline:
        time.sleep(0.01)
        dumps = [dump for dump in dumps if not dump.is_complete()]


class StackDump:
    """The stacks of one rank, asked for now.

    faulthandler writes thread by thread and leaves no end mark. The main thread comes last, so its outermost
    frame is the end; a file that has not grown for a while is taken for complete too.
    """

    def __init__(self, rank: RankProcess) -> None:
        self._path = Path(f"{rank.prefix}.stacks")
        if self._size() > _MOST_STACKS_BYTES:  # of a rank that is looked at for days
            os.truncate(self._path, 0)
        self._start = self._seen = rank.dump_start = self._size()
        self._grew_at = time.monotonic()
        if _handles(rank.pid):
            rank.send(DUMP_SIGNAL)

    def is_complete(self) -> bool:
        """Whether the stacks are there; look again after a moment."""
        size, now = self._size(), time.monotonic()
        if size != self._seen:
            self._seen, self._grew_at = size, now
        if size == self._start:
            return False
        return now - self._grew_at > _STILL_SECONDS or self._read_end().endswith(_OUTERMOST)

    def _read_end(self) -> bytes:
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(max(self._start, self._seen - 100))
            return file.read().rstrip(b"\n")
        return b""

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0


def _handles(pid: int) -> bool:
    """Whether a process handles the signal: one that has started another program would die of it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (DUMP_SIGNAL - 1) & 1)
