"""The ranks of a node are asked to stop: how and when they hear of it, and what they count as afterwards."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_elastic.node import rankset
from prefect_torch_elastic.node.rankprocess import RankProcess
from prefect_torch_elastic.node.rankset import RankSet
from prefect_torch_elastic.observations import CheckpointSaved
from prefect_torch_elastic.rankstate import DUMP_SIGNAL, RankState, StopReason
from prefect_torch_elastic.wire import Notice, StopGang

Body = Callable[[RankState, Callable[[str], None]], int]
AT_ONCE_SECONDS = 1.0
LONG = StopGang(reason=StopReason.CANCELLED, grace_seconds=30.0)
SHORT = StopGang(reason=StopReason.CANCELLED, grace_seconds=1.0)


class PlayedRank(RankProcess):
    """A rank whose process is a fork of the test; `heard` is how it was asked to stop, and when."""

    def __init__(self, folder: Path, number: int, body: Body) -> None:
        prefix = folder / f"rank-{number}"
        super().__init__(
            rank=number, local_rank=number, node_rank=0, prefix=prefix, log=folder / "log", level=logging.INFO
        )
        self.heard: list[str] = []
        self.terminated_at: float | None = None
        news = self._fds[2]

        def say(word: str) -> None:
            os.write(news, f"{word} {time.monotonic()}\n".encode())

        if (pid := os.fork()) == 0:
            code = 70
            with suppress(BaseException):
                os.setpgid(0, 0)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.signal(DUMP_SIGNAL, lambda *_: None)  # the stacks of a late rank
                say("start")
                code = body(self.state, say)
            os._exit(code)
        self.watch(pid)

    def ask_to_stop(self, reason: StopReason, *, seconds_left: float) -> None:
        self.heard.append(reason.name)
        super().ask_to_stop(reason, seconds_left=seconds_left)

    def terminate(self) -> None:
        self.heard.append("SIGTERM")
        self.terminated_at = time.monotonic()
        super().terminate()

    def wait_until_it_polls(self) -> None:
        deadline = time.monotonic() + 5.0
        while not self.state.polls:
            assert time.monotonic() < deadline
            time.sleep(0.005)


class Ranks:
    """A set of played ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.offered = folder, list[Any]()
        self.channel, self._other_end = socket.socketpair()
        self.set = RankSet(self.channel, read_channel=lambda: None, offer=self._take, keep=lambda: set[int]())

    def start(self, *bodies: Body) -> list[PlayedRank]:
        ranks = [PlayedRank(self.folder, number, body) for number, body in enumerate(bodies)]
        for rank in ranks:
            self.set.add(rank)
        self.set.watch()
        return ranks

    def end(self, order: StopGang | Callable[[], StopGang]) -> float:
        """End the ranks and return the seconds that it took."""
        started = time.monotonic()
        self.set.end(order if callable(order) else lambda: order)
        return time.monotonic() - started

    def close(self) -> None:
        for rank in self.set.ranks:
            if rank.alive:
                os.kill(rank.pid, signal.SIGKILL)
                os.waitpid(rank.pid, 0)
        self.set.release()
        self.channel.close()
        self._other_end.close()

    def _take(self, message: Any) -> bool:
        self.offered.append(message)
        return True


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(rankset.processes, "kill_children", lambda *, keep: None)  # the test has others
    monkeypatch.setattr(rankset.processes, "reap_orphans", lambda *, keep: None)
    made = Ranks(tmp_path)
    yield made
    made.close()


def sleep(_state, _say) -> int:
    time.sleep(60)
    return 0


def poll_and_ignore(state, _say) -> int:
    state.poll_for_stop()
    time.sleep(60)
    return 0


def poll_and_obey(state, say) -> int:
    while state.poll_for_stop() is None:
        time.sleep(0.005)
    say("stopped")
    return 143


def poll_and_fail(state, say) -> int:
    while state.poll_for_stop() is None:
        time.sleep(0.005)
    say("raised")
    say("recorded")
    time.sleep(60)
    return 1


def obey_without_order(_state, say) -> int:
    say("stopped")
    return 143


def obey_and_linger(_state, say) -> int:
    say("stopped")
    time.sleep(60)
    return 143


def test_rank_that_never_polls_gets_sigterm_at_once(ranks):
    (rank,) = ranks.start(sleep)
    assert ranks.end(LONG) < AT_ONCE_SECONDS
    assert rank.heard == ["CANCELLED", "SIGTERM"]
    assert rank.code == -signal.SIGTERM
    assert ranks.set.killed == []


def test_rank_that_polls_leaves_without_a_signal_and_is_no_failure(ranks):
    (rank,) = ranks.start(poll_and_obey)
    rank.wait_until_it_polls()
    assert ranks.end(LONG) < AT_ONCE_SECONDS
    assert rank.heard == ["CANCELLED"]
    assert (rank.code, rank.failed_at) == (143, None)
    assert rank.stopped_at is not None
    assert (ranks.set.failed, ranks.set.all_returned, ranks.set.killed) == ([], False, [])


def test_rank_that_polls_gets_sigterm_when_a_quarter_of_the_grace_is_left(ranks):
    (rank,) = ranks.start(poll_and_ignore)
    rank.wait_until_it_polls()
    seconds = ranks.end(SHORT)
    assert rank.heard == ["CANCELLED", "SIGTERM"]
    assert rank.code == -signal.SIGTERM
    assert 0.75 <= seconds < 1.0 + AT_ONCE_SECONDS
    assert ranks.set.killed == []


def test_sigterm_comes_at_most_five_seconds_before_the_end_of_a_long_grace(ranks):
    (rank,) = ranks.start(poll_and_ignore)
    rank.wait_until_it_polls()
    assert rankset._sigterm_seconds(LONG, [rank]) == 5.0
    assert rankset._sigterm_seconds(SHORT, [rank]) == 0.25


def test_time_on_the_page_of_a_rank_that_polls_ends_with_sigterm(ranks):
    """SIGTERM ends a rank without a handler, so what comes after it is no time for a save."""
    (rank,) = ranks.start(poll_and_ignore)
    rank.wait_until_it_polls()
    left: list[float] = []
    terminate = rank.terminate

    def note() -> None:
        request = rank.state.stop_request
        left.append(request.seconds_left if request else -1.0)
        terminate()

    rank.terminate = note
    ranks.end(SHORT)
    assert left == [pytest.approx(0.0, abs=0.02)]


@pytest.mark.parametrize("reason", [StopReason.CANCELLED, StopReason.FAILED], ids=lambda reason: reason.name)
def test_time_on_the_page_ends_with_sigkill_when_sigterm_comes_at_once(ranks, reason):
    (rank,) = ranks.start(sleep)
    ranks.end(StopGang(reason=reason, grace_seconds=30.0))
    request = rank.state.stop_request
    assert request is not None
    assert request.seconds_left > 25.0


def test_rank_that_has_not_polled_yet_is_spared_while_its_peers_poll(ranks):
    first, second = ranks.start(poll_and_obey, sleep)
    first.wait_until_it_polls()
    ranks.end(SHORT)
    assert second.heard == ["CANCELLED", "SIGTERM"]
    assert first.stopped_at is not None
    assert first.stopped_at < second.terminated_at


@pytest.mark.parametrize("reason", [StopReason.FAILED, StopReason.REGROUP], ids=lambda reason: reason.name)
def test_rank_that_polls_gets_sigterm_at_once_when_its_peers_are_gone(ranks, reason):
    (rank,) = ranks.start(poll_and_ignore)
    rank.wait_until_it_polls()
    assert ranks.end(StopGang(reason=reason, grace_seconds=30.0)) < AT_ONCE_SECONDS
    assert rank.heard == [reason.name, "SIGTERM"]


def test_peers_of_a_rank_that_fails_while_stopping_are_told_so_at_once(ranks):
    failing, other = ranks.start(poll_and_fail, poll_and_ignore)
    failing.wait_until_it_polls()
    other.wait_until_it_polls()
    assert ranks.end(LONG) < AT_ONCE_SECONDS
    assert other.heard == ["CANCELLED", "FAILED", "SIGTERM"]


def test_later_order_shortens_the_time_on_the_page(ranks):
    (rank,) = ranks.start(poll_and_ignore)
    rank.wait_until_it_polls()
    orders = iter([LONG, LONG])
    assert ranks.end(lambda: next(orders, SHORT)) < 1.0 + AT_ONCE_SECONDS
    assert rank.heard == ["CANCELLED", "CANCELLED", "SIGTERM"]
    request = rank.state.stop_request
    assert request is not None
    assert request.seconds_left < 1.0


def test_rank_that_outstays_its_grace_is_killed(ranks):
    def ignore(state, _say) -> int:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return poll_and_ignore(state, _say)

    (rank,) = ranks.start(ignore)
    rank.wait_until_it_polls()
    ranks.end(StopGang(reason=StopReason.TIMED_OUT, grace_seconds=0.4))
    assert rank.code == -signal.SIGKILL
    assert ranks.set.killed == [0]


def test_stop_that_nobody_ordered_becomes_a_failure_after_a_while(ranks, monkeypatch):
    monkeypatch.setattr(rankset, "ORDER_SECONDS", 0.05)
    (rank,) = ranks.start(obey_without_order)
    deadline = time.monotonic() + 5.0
    while not ranks.set.failed:
        assert time.monotonic() < deadline
        ranks.set.pump(0.02)
        ranks.set.look_after()
    ranks.end(StopGang(reason=StopReason.FAILED, grace_seconds=0.1))
    (evidence,) = ranks.set.evidence()
    assert (evidence.exc_type, evidence.exit_code) == ("StopTraining", 143)
    assert "no stop was ordered" in evidence.exc_message
    assert not evidence.told_to_stop
    assert rank.code == 143


def test_stopped_rank_that_does_not_end_is_ended(ranks, monkeypatch):
    monkeypatch.setattr(rankset, "LEFTOVER_SECONDS", 0.05)
    (rank,) = ranks.start(obey_and_linger)
    deadline = time.monotonic() + 5.0
    while rank.alive:
        assert time.monotonic() < deadline
        ranks.set.pump(0.02)
        ranks.set.look_after()
    assert rank.failed_at is None
    assert any(isinstance(message, Notice) and "did not end" in message.text for message in ranks.offered)


# ---------------------------------------------------------------- what ranks tell besides


def test_checkpoint_that_a_rank_tells_of_is_passed_on_once(ranks):
    saved = {"step": 4, "uuid": "u", "key": "checkpoints/4/u", "size_bytes": 9, "seconds": 1.0}
    text = json.dumps({**saved, "stall_seconds": 0.5, "metrics": {"loss": 2.0}})

    def body(_state, say) -> int:
        say(f"saved {text}\nrecorded")
        return 0

    (rank,) = ranks.start(body)
    pump_until(ranks, lambda: not rank.alive)
    ranks.set.send_logs()
    ranks.set.send_logs()
    messages = [message for message in ranks.offered if isinstance(message, CheckpointSaved)]
    assert messages == [CheckpointSaved(**saved, stall_seconds=0.5, metrics={"loss": 2.0})]


def test_checkpoint_waits_until_somebody_has_room_for_the_message(ranks, monkeypatch):
    (rank,) = ranks.start(sleep)
    rank.told.append(Notice(level=20, text="stands for any message"))
    monkeypatch.setattr(ranks.set, "_offer", lambda message: False)
    ranks.set.send_logs()
    monkeypatch.setattr(ranks.set, "_offer", ranks._take)
    ranks.set.send_logs()
    assert [message.text for message in ranks.offered] == ["stands for any message"]


def test_rank_that_ends_with_a_question_unread_has_an_end(ranks):
    def body(_state, _say) -> int:
        signal.pause()
        return 0

    (rank,) = ranks.start(body)
    rank.ask_for_evidence(1)
    rank.kill()
    pump_until(ranks, lambda: not rank.alive)
    assert rank.code == -signal.SIGKILL


def test_rank_that_is_held_for_long_is_woken_for_its_stacks_and_ended(ranks, monkeypatch):
    monkeypatch.setattr(rankset, "STOPPED_SECONDS", 0.05)
    stacks = ranks.folder / "rank-0.stacks"

    def body(state, say) -> int:
        def dump(*_: object) -> None:
            stacks.write_text("here")
            say("returned")

        signal.signal(DUMP_SIGNAL, dump)
        state.poll_for_stop()
        while True:
            time.sleep(0.01)

    (rank,) = ranks.start(body)
    pump_until(ranks, lambda: rank.state.polls)
    rank.send(signal.SIGSTOP)
    deadline = time.monotonic() + 5.0
    while rank.alive:
        assert time.monotonic() < deadline
        ranks.set.pump(0.02)
        ranks.set.look_after()
    assert stacks.read_text() == "here"
    assert ranks.set.failed == [rank]
    assert "SIGSTOP" in rank.reason


def pump_until(ranks: Ranks, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < deadline
        ranks.set.pump(0.02)
