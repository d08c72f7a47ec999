"""One rank as its agent sees it: a process, its page, its news, its log, and what became of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect_torch_elastic.channel import is_readable
from prefect_torch_elastic.evidence import RankEvidence
from prefect_torch_elastic.node import processes
from prefect_torch_elastic.node.forkserver import Child
from prefect_torch_elastic.node.tail import LogTail
from prefect_torch_elastic.observations import CheckpointSaved
from prefect_torch_elastic.rankstate import RankState, StopReason
from prefect_torch_elastic.wire import Message, RankInfo

_MOST_KEPT = 20  # of a rank and a kind; a gang that reports nothing is looked at for days
# Evidence of a rank besides `.stacks`: what torch's flight recorder, the kernel and py-spy say of it.
EVIDENCE_SUFFIXES = (".collectives.json", ".kernel", ".pyspy")


class RankProcess:
    """A rank from before it is forked until it is reaped.

    Attributes:
        code: Exit code as in `subprocess`, negative for a signal; None while it lives.
        returned_at: When its function returned (monotonic seconds).
        stopped_at: When it left its function because a stop was asked for: neither returned nor failed.
        failed_at: When it raised, or ended without having returned.
        started_at: When its process was there.
        peak_memory: Bytes that it had resident at most, as far as anybody looked.
        told: What it has told since the last look, such as a checkpoint that exists.
        can_dump: Whether it answers `DUMP_SIGNAL` with its stacks; before, the signal would end it.
        dump_start: Where its newest stacks begin in their file.
        evidence_number: The last evidence that it was asked for and has written.
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
        self.stopped_at: float | None = None
        self.failed_at: float | None = None
        self.told_at: float | None = None
        self.started_at = 0.0
        self.peak_memory = 0
        self.told: list[Message] = []
        self.dump_start = self.evidence_number = 0
        self.started = self.can_dump = self.recorded = False
        self.reason = ""
        self._record: dict[str, Any] = {}
        self._unread = b""
        self._clock = processes.StopClock()
        for suffix in (".result", ".error", ".error.json", ".stacks", *EVIDENCE_SUFFIXES):
            Path(f"{prefix}{suffix}").unlink(missing_ok=True)  # of the round before
        log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        page_fd = RankState.create_file(f"rank-{rank}")
        ours, theirs = (
            socket.socketpair()
        )  # a pipe for each way would be an open file more in a fork's message
        self.news, news_fd = ours.detach(), theirs.detach()
        os.set_blocking(self.news, False)
        self.state = RankState(page_fd)
        self.tail = LogTail(log, level=level, start=os.fstat(log_fd).st_size)
        self._fds = [log_fd, page_fd, news_fd]
        self.pidfd = -1

    @property
    def alive(self) -> bool:
        """Whether the process was started and has not ended."""
        return self.pid > 0 and self.code is None

    @property
    def left_at(self) -> float | None:
        """When the rank had nothing more to do, whatever the reason; None while it works or has failed."""
        return self.stopped_at if self.returned_at is None else self.returned_at

    def child(self, spec: dict[str, Any], environment: dict[str, str], directory: str) -> Child:
        return Child(target="rank", spec=spec, environment=environment, directory=directory, fds=self._fds)

    def watch(self, pid: int) -> None:
        """Take over the process that was forked for this rank."""
        self.pid, self.started_at = pid, time.monotonic()
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
        except ConnectionError:  # it ended with a question unread
            return False
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            word, _, at = line.decode().partition(" ")
            match word:
                case "ready":
                    self.can_dump = True
                case "start":
                    self.started = self.can_dump = True
                case "returned" | "stopped" if self.reason:
                    pass  # woken for its stacks it went on for a moment, but it is to be ended
                case "returned":
                    self.returned_at = float(at)
                case "stopped":
                    self.stopped_at = float(at)
                case "raised":
                    self.failed_at = float(at)
                case "recorded":
                    self.recorded = True
                case "lost":  # the disk is full: the record comes this way
                    self._record = json.loads(at)
                case "saved":
                    self.told.append(CheckpointSaved(**json.loads(at)))
                case "evidence":
                    self.evidence_number = int(at)
                case _:
                    pass
        return bool(data)

    def ask_for_evidence(self, number: int) -> None:
        """Ask the rank to write down its collectives; 0 is for what is written when another rank failed."""
        with suppress(OSError):  # it is gone, or so far behind that it will not answer this either
            os.write(self.news, f"{number}\n".encode())

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
        if self.left_at is None and self.failed_at is None:
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

    def ask_to_stop(self, reason: StopReason, *, seconds_left: float) -> None:
        """Tell the rank on its page; one that SIGSTOP holds is continued so that it can read it."""
        self.told_at = self.told_at or time.monotonic()
        self.state.request_stop(reason, seconds_left=seconds_left)
        self.send(signal.SIGCONT)

    def terminate(self) -> None:
        """Tell the rank by SIGTERM."""
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)

    def disown_stop(self) -> None:
        """Take a rank that left because of a stop, while nobody ordered one, for a failed one."""
        self.failed_at = time.monotonic()
        self._record = {
            "exc_type": "StopTraining",
            "exc_message": "the rank left its training because of a stop, but no stop was ordered.",
        }

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
        return RankEvidence(
            rank=self.rank,
            local_rank=self.local_rank,
            node_rank=self.node_rank,
            pid=self.pid,
            failed_at=self.failed_at if failed else None,
            returned_at=self.returned_at,
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
            stacks=keep_evidence(self.prefix, ".stacks"),
            error=record.get("parcel", ""),
            last_lines=self.tail.last_lines(),
        )

    def read_stacks(self) -> str:
        """Return the newest stacks, or what a crash has left."""
        try:
            with Path(f"{self.prefix}.stacks").open("rb") as file:
                file.seek(self.dump_start)
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def _read_record(self) -> dict[str, Any]:
        try:
            return json.loads(Path(f"{self.prefix}.error.json").read_text())
        except (OSError, ValueError):
            return {}


def keep_evidence(prefix: Path, suffix: str) -> str:
    """Return a name under which a file stays when the ranks start again beside it; empty without one."""
    file = Path(f"{prefix}{suffix}")
    try:
        status = file.stat()
        if not status.st_size:
            return ""
        kept = Path(f"{prefix}.{int(status.st_mtime)}{suffix}")
        with suppress(FileExistsError):
            os.link(file, kept)  # what is still written to it stands under both names
        for old in sorted(file.parent.glob(f"{prefix.name}.[0-9]*{suffix}"))[:-_MOST_KEPT]:
            old.unlink(missing_ok=True)
    except FileNotFoundError:
        return ""
    except OSError:  # a disk without links
        return str(file)
    return str(kept)
