"""One rank as its agent sees it: a process, its page, its news, its log, and what became of it."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect_torch_elastic.channel import is_readable
from prefect_torch_elastic.evidence import RankEvidence
from prefect_torch_elastic.node import processes
from prefect_torch_elastic.node.forkserver import Child
from prefect_torch_elastic.node.tail import LogTail
from prefect_torch_elastic.rankstate import RankState, StopReason
from prefect_torch_elastic.wire import RankInfo

_DUMP_SECONDS = 0.3


class RankProcess:
    """A rank from before it is forked until it is reaped.

    Attributes:
        code: Exit code as in `subprocess`, negative for a signal; None while it lives.
        returned_at: When its function returned (monotonic seconds).
        failed_at: When it raised, or ended without having returned.
        reason: The agent's words for why it ended the rank itself.
    """

    def __init__(
        self, *, rank: int, local_rank: int, node_rank: int, prefix: Path, log: Path, level: int
    ) -> None:
        self.rank, self.local_rank, self.node_rank = rank, local_rank, node_rank
        self.prefix = prefix
        self.pid = 0
        self.code: int | None = None
        self.returned_at: float | None = None
        self.failed_at: float | None = None
        self.told_at: float | None = None
        self.started = self.recorded = False
        self.reason = ""
        self._record: dict[str, Any] = {}
        self._unread = b""
        self._clock = processes.StopClock()
        for suffix in (".result", ".error", ".error.json", ".stacks"):
            Path(f"{prefix}{suffix}").unlink(missing_ok=True)  # of the round before
        log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        page_fd = RankState.create_file(f"rank-{rank}")
        self.news, news_fd = os.pipe()
        os.set_blocking(self.news, False)
        self.state = RankState(page_fd)
        self.tail = LogTail(log, level=level, start=os.fstat(log_fd).st_size)
        self._fds = [log_fd, page_fd, news_fd]
        self.pidfd = -1

    @property
    def alive(self) -> bool:
        """Whether the process was started and has not ended."""
        return self.pid > 0 and self.code is None

    def child(self, spec: dict[str, Any], environment: dict[str, str], directory: str) -> Child:
        return Child(target="rank", spec=spec, environment=environment, directory=directory, fds=self._fds)

    def watch(self, pid: int) -> None:
        """Take over the process that was forked for this rank."""
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.close_files()

    def close_files(self) -> None:
        """Close what only the rank itself needs open."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def read_news(self) -> bool:
        """Take in what the rank said on its pipe; False when the pipe is at its end."""
        try:
            data = os.read(self.news, 4096)
        except BlockingIOError:
            return True
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            word, _, at = line.decode().partition(" ")
            match word:
                case "start":
                    self.started = True
                case "returned":
                    self.returned_at = float(at)
                case "raised":
                    self.failed_at = float(at)
                case "recorded":
                    self.recorded = True
                case "lost":  # the disk is full: the record comes this way
                    self._record = json.loads(at)
                case _:
                    pass
        return bool(data)

    def reap(self) -> bool:
        """Take the exit status if the rank has ended."""
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            pid, status = self.pid, 255 << 8
        if not pid:
            return False
        self.code = os.waitstatus_to_exitcode(status)
        while self.news >= 0 and is_readable(self.news, 0.0):
            if not self.read_news():
                break
        if self.returned_at is None and self.failed_at is None:
            self.failed_at = time.monotonic()
        return True

    def info(self) -> RankInfo:
        """Return where the rank lives."""
        return RankInfo(
            rank=self.rank,
            local_rank=self.local_rank,
            node_rank=self.node_rank,
            pid=self.pid,
            log=str(self.tail.path),
        )

    def forget(self) -> None:
        """Close everything of a rank that has ended."""
        for fd in (self.news, self.pidfd):
            if fd >= 0:
                os.close(fd)
        self.news = self.pidfd = -1
        self.close_files()
        self.state.close()

    def stopped_seconds(self) -> float:
        """How long the process has been held by SIGSTOP or a debugger."""
        return self._clock.seconds(self.pid) if self.alive else 0.0

    def ask_to_stop(self, reason: StopReason) -> None:
        """Tell the rank on its page, then by SIGTERM; a stopped one is continued so that it can obey."""
        self.told_at = time.monotonic()
        self.state.request_stop(reason)
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)

    def send(self, number: int) -> None:
        if self.pidfd >= 0 and self.alive:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """SIGKILL the rank and the process group that it leads; what it leaves is adopted by the agent."""
        if self.alive:  # the number of a reaped leader may be somebody else's by now
            processes.kill_group(self.pid)
            self.send(signal.SIGKILL)

    def evidence(self, *, oom_killed: bool | None, memory_limit_bytes: int | None) -> RankEvidence:
        """Return what is known about the rank, after it has ended."""
        record = self._read_record() or self._record
        failed = self.returned_at is None and self.failed_at is not None
        told = self.told_at is not None and failed and (self.failed_at or 0.0) >= self.told_at
        stacks = Path(f"{self.prefix}.stacks")
        return RankEvidence(
            rank=self.rank,
            local_rank=self.local_rank,
            node_rank=self.node_rank,
            pid=self.pid,
            failed_at=self.failed_at if failed else None,
            exit_code=self.code if self.code is not None and self.code >= 0 else None,
            signal=-self.code if self.code is not None and self.code < 0 and not record else None,
            told_to_stop=told and not self.reason,
            stage=record.get("stage", "run" if self.started else "start"),
            reason=self.reason,
            exc_type=record.get("exc_type"),
            exc_message=record.get("exc_message", ""),
            traceback=record.get("traceback", ""),
            non_retryable=record.get("non_retryable", False),
            oom_killed=oom_killed,
            memory_limit_bytes=memory_limit_bytes,
            step=self.state.read().step,
            log=str(self.tail.path),
            stacks=str(stacks) if stacks.exists() and stacks.stat().st_size else "",
            error=record.get("parcel", ""),
            last_lines=self.tail.last_lines(),
        )

    def _read_record(self) -> dict[str, Any]:
        try:
            return json.loads(Path(f"{self.prefix}.error.json").read_text())
        except (OSError, ValueError):
            return {}


def dump_stacks(ranks: list[RankProcess]) -> None:
    """Let living ranks write the stacks of all their threads, before anything is killed; bounded.

    faulthandler writes from C without the GIL, so ranks in a collective answer too. It leaves no end mark:
    a file that stopped growing is taken for complete.
    """
    waiting = {rank: -1 for rank in ranks if rank.alive and rank.started}
    for rank in waiting:
        rank.send(signal.SIGUSR1)
    deadline = time.monotonic() + _DUMP_SECONDS
    while waiting and time.monotonic() < deadline:
        time.sleep(0.01)
        for rank, before in list(waiting.items()):
            try:
                size = Path(f"{rank.prefix}.stacks").stat().st_size
            except OSError:
                size = 0
            if size and size == before:
                del waiting[rank]
            else:
                waiting[rank] = size
