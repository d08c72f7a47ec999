"""The ranks of one node in one round: waited for together, dumped, ended, and reaped to the last orphan."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from prefect_torch_elastic.evidence import RankEvidence
from prefect_torch_elastic.node import memory, processes
from prefect_torch_elastic.node.rankprocess import RankProcess
from prefect_torch_elastic.node.stackdump import dump_stacks
from prefect_torch_elastic.rankstate import StopReason
from prefect_torch_elastic.wire import LogLines, Message, Notice, Progress, StopGang

TICK_SECONDS = 0.1
FAILURE_GRACE_SECONDS = 5.0  # ranks whose gang has failed already cannot save anything together
PROGRESS_SECONDS = 1.0
SETTLE_SECONDS = 0.1  # for victims to write their own error records
RECORD_SECONDS = 2.0
SIGTERM_SECONDS = 5.0  # before SIGKILL, for ranks that poll for a stop: they know of it from their pages
ORDER_SECONDS = 10.0  # ranks of another node may see a stop before this node's agent hears of it
LEFTOVER_SECONDS = 5.0  # threads that still run after the function returned
STOPPED_SECONDS = 8.0  # a pause of some seconds (a snapshot of the machine, a short look) harms nobody
REAP_SECONDS = 5.0
KILL_SECONDS = 5.0  # the kernel needs a moment to take a big process apart


class RankSet:
    """Ranks that started together.

    Attributes:
        ranks: The ranks; after `end` none of them lives.
        killed: Ranks, over all rounds, that did not leave within their grace.
    """

    def __init__(
        self,
        channel: Any,
        *,
        read_channel: Callable[[], None],
        offer: Callable[[Message], bool],
        keep: Callable[[], set[int]],
    ) -> None:
        self.ranks: list[RankProcess] = []
        self.killed: list[int] = []
        self._read_channel, self._offer, self._keep = read_channel, offer, keep
        self._channel_fd = channel.fileno()
        self._watched: dict[int, RankProcess] = {}
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._ended = True
        self._oom_kills: int | None = None
        self._progress_at = self._reaped_at = 0.0
        self._progress_seen: tuple[int | None, str] = (None, "")

    # ------------------------------------------------------------ start

    def add(self, rank: RankProcess) -> None:
        """Take in a rank that is about to start."""
        if self._ended:
            self._oom_kills = memory.count_oom_kills()
        self._ended = False
        self.ranks.append(rank)

    def watch(self) -> None:
        """Listen to all ranks, which have been started."""
        for rank in self.ranks:
            for fd in (rank.pidfd, rank.news):
                self._watched[fd] = rank
                self._poll.register(fd, select.POLLIN)

    def release(self) -> None:
        """Close the files of ranks that have ended; what they wrote stays readable."""
        for rank in self.ranks:
            self._unwatch(rank.pidfd, rank.news)
            rank.forget()
        self.ranks = []

    # ------------------------------------------------------------ watch

    @property
    def failed(self) -> list[RankProcess]:
        """Ranks that raised, or ended before their function returned."""
        return [rank for rank in self.ranks if rank.failed_at is not None and rank.returned_at is None]

    @property
    def all_returned(self) -> bool:
        """Whether every function returned and every process has ended."""
        return all(rank.returned_at is not None and not rank.alive for rank in self.ranks)

    def pump(self, timeout_seconds: float) -> bool:
        """Wait for one batch of events and take them in; True when a rank did something."""
        news = False
        for fd, _ in self._poll.poll(max(0.0, timeout_seconds) * 1000):
            if fd == self._channel_fd:
                self._read_channel()
                continue
            rank = self._watched.get(fd)
            if rank is None:  # it ended earlier in this batch
                continue
            if fd == rank.pidfd:
                if rank.reap():
                    self._unwatch(rank.pidfd, rank.news)
                    news = True
            elif rank.read_news():
                news = True
            else:
                self._unwatch(rank.news)
        return news

    def look_after(self) -> None:
        """End ranks that hold up the gang: held by SIGSTOP, done but not ending, gone for no known stop."""
        now = time.monotonic()
        if now - self._reaped_at > REAP_SECONDS:
            self._reaped_at = now
            processes.reap_orphans(keep=self._keep() | {rank.pid for rank in self.ranks})
        for rank in self.ranks:
            if (seconds := rank.stopped_seconds()) > STOPPED_SECONDS:
                rank.reason = f"was stopped (SIGSTOP or a debugger) for {seconds:.0f} s and held up the gang"
                rank.failed_at = now
                rank.ask_for_evidence(0)
                dump_stacks([rank])  # the signals wake it for that
                rank.kill()
            if rank.stopped_at is not None and now - rank.stopped_at > ORDER_SECONDS:
                rank.disown_stop()
            if rank.alive and rank.left_at is not None and now - rank.left_at > LEFTOVER_SECONDS:
                dump_stacks([rank])
                text = (
                    f"rank {rank.rank} returned but did not end within {LEFTOVER_SECONDS:.0f} s: a thread or "
                    f"an exit handler still ran. It was ended; stacks: {rank.prefix}.stacks"
                )
                self._offer(Notice(level=logging.WARNING, text=text))
                rank.kill()

    def send_logs(self, *, last: bool = False) -> None:
        """Send up the new lines of all logs, what ranks told, and what rank 0 reported."""
        for rank in self.ranks:
            lines = rank.tail.finish() if last else rank.tail.read()
            if lines and not self._offer(LogLines(rank=rank.rank, lines=lines)):
                rank.tail.count_cut(len(lines))
            while rank.told and self._offer(rank.told[0]):
                del rank.told[0]
            if rank.rank == 0:
                self._send_progress(rank, last=last)

    # ------------------------------------------------------------ end

    def take_evidence(self) -> None:
        """Let every rank write down what it knows, before any of them is asked to stop."""
        self._wait_for_records()
        others = [rank for rank in self.ranks if rank not in self.failed]
        for rank in others:
            if rank.alive:
                rank.ask_for_evidence(0)
        dump_stacks(others)
        deadline = time.monotonic() + SETTLE_SECONDS
        while (left := deadline - time.monotonic()) > 0 and any(rank.alive for rank in self.ranks):
            self.pump(left)
        self._wait_for_records()

    def evidence(self) -> list[RankEvidence]:
        """Return what is known about each rank, after `end`."""
        limit, oom_killed = memory.read_memory_limit(), self._oom_kills_rose()
        return [rank.evidence(oom_killed=oom_killed, memory_limit_bytes=limit) for rank in self.ranks]

    def end(self, order: Callable[[], StopGang]) -> None:
        """Ask the living ranks to stop, wait, kill the rest and whatever they left; nothing remains.

        Args:
            order: Asked again while waiting, because a later order may shorten the grace.
        """
        if self._ended:
            return
        self._ended = True
        late = self._wait_for_stop(order)
        dump_stacks(late)
        self.killed += [rank.rank for rank in late]
        for rank in self.ranks:
            rank.kill()
        deadline = time.monotonic() + KILL_SECONDS
        while any(rank.alive for rank in self.ranks) and time.monotonic() < deadline:
            self.pump(TICK_SECONDS)
        processes.kill_children(keep=self._keep())
        self.send_logs(last=True)

    def _wait_for_stop(self, order: Callable[[], StopGang]) -> list[RankProcess]:
        """Ask until the grace is over, and return the ranks that live on.

        Ranks that poll get the word on their pages first: SIGTERM would end those that have no handler for it
        in the middle of their last save. One poller is enough, because ranks save together.
        """
        living = [rank for rank in self.ranks if rank.alive]
        started_at = time.monotonic()
        asked, terminated = StopGang(reason=StopReason.NONE, grace_seconds=0.0), False
        while any(rank.alive for rank in living):
            now = order()
            if self.failed:
                now = replace(now, reason=StopReason.FAILED)
            left = started_at + now.grace_seconds - time.monotonic()
            early = _sigterm_seconds(now, living)
            if now != asked:
                # SIGTERM ends most ranks: those that get it late may save until then, not until SIGKILL
                until = left if early == now.grace_seconds else left - early
                for rank in living:
                    rank.ask_to_stop(now.reason, seconds_left=until)
                asked = now
            if not terminated and left <= early:
                for rank in living:
                    rank.terminate()
                terminated = True
            if left <= 0:
                break
            self.pump(min(left, TICK_SECONDS))
            self.send_logs()
        return [rank for rank in living if rank.alive]

    def _wait_for_records(self) -> None:
        deadline = time.monotonic() + RECORD_SECONDS
        while time.monotonic() < deadline:
            if all(rank.recorded for rank in self.failed if rank.alive):
                return
            self.pump(0.05)

    def _oom_kills_rose(self) -> bool | None:
        if self._oom_kills is None:
            return None
        return (memory.count_oom_kills() or 0) > self._oom_kills

    def _send_progress(self, rank: RankProcess, *, last: bool) -> None:
        now = time.monotonic()
        if not last and now - self._progress_at < PROGRESS_SECONDS:
            return
        progress = rank.state.read()
        seen = (progress.step, progress.phase)
        if progress.step is None or seen == self._progress_seen:
            return
        self._progress_at, self._progress_seen = now, seen
        self._offer(
            Progress(
                step=progress.step,
                total_steps=progress.total_steps,
                metrics=progress.metrics,
                phase=progress.phase,
            )
        )

    def _unwatch(self, *fds: int) -> None:
        for fd in fds:
            if self._watched.pop(fd, None) is not None:
                self._poll.unregister(fd)


def _sigterm_seconds(order: StopGang, ranks: list[RankProcess]) -> float:
    """Return how long before SIGKILL the ranks get SIGTERM: at once, unless they may still save together."""
    if order.reason.lets_ranks_save and any(rank.state.polls for rank in ranks):
        return min(SIGTERM_SECONDS, order.grace_seconds / 4)
    return order.grace_seconds
