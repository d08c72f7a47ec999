"""When a save is due, and what a stop does: the last save, the vote, and the way out of the loop."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prefect_torch_elastic.checkpoint.session import CheckpointSession
from prefect_torch_elastic.errors import StopTraining
from prefect_torch_elastic.rankstate import RankState, StopReason
from tests.checkpoint_stores import (
    Gate,
    MemoryStore,
    WatchedStore,
    committed_steps,
    load_fresh,
    make_state,
    open_session,
    save_steps,
    wait_until_idle,
)

pytestmark = pytest.mark.usefixtures("checkpoint_log")


@pytest.fixture
def page() -> Iterator[RankState]:
    file = RankState.create_file("test")
    state = RankState(file)
    os.close(file)
    yield state
    state.close()


def train(session: CheckpointSession, steps: Iterator[int]) -> None:
    for step in steps:
        session.save_if_due(make_state(float(step)), step=step)


def test_save_if_due_saves_every_so_many_steps() -> None:
    store = MemoryStore()
    session = open_session(store, every_steps=4, keep_last=10)
    saved: list[int] = []
    for step in range(1, 14):
        if session.save_if_due(make_state(float(step)), step=step):
            saved.append(step)
            wait_until_idle(session)
    assert saved == [4, 8, 12]
    session.close()
    assert load_fresh(store)[0] == 12


def test_save_if_due_saves_late_when_the_step_was_missed() -> None:
    session = open_session(MemoryStore(), every_steps=4)
    saved = [step for step in range(3, 30, 3) if session.save_if_due(make_state(1.0), step=step, metrics={})]
    session.close()
    assert saved[0] == 6  # the first call behind step 4


def test_save_if_due_saves_after_so_many_seconds() -> None:
    session = open_session(MemoryStore(), every_seconds=0.2)
    started, saved = time.monotonic(), []
    for step in range(1, 1000):
        if session.save_if_due(make_state(1.0), step=step):
            saved.append(time.monotonic() - started)
        if len(saved) == 2:
            break
        time.sleep(0.05)
    session.close()
    assert saved[0] >= 0.2
    assert saved[1] >= 0.4


def test_save_if_due_goes_on_after_a_resume_where_the_run_was() -> None:
    store = MemoryStore()
    save_steps(store, 8)
    session = open_session(store, every_steps=4)
    assert session.load(make_state(-1.0)) == 8
    saved = [step for step in range(9, 14) if session.save_if_due(make_state(1.0), step=step)]
    session.close()
    assert saved == [12]


def test_save_if_due_leaves_a_slow_store_alone_until_the_next_one_is_due(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = Gate()
    session = open_session(WatchedStore(MemoryStore(), gate), every_steps=10)
    for step in range(1, 40):
        assert session.save_if_due(make_state(1.0), step=step) == (step == 10)
    gate.is_open.set()
    wait_until_idle(session)
    assert session.save_if_due(make_state(1.0), step=40)
    session.close()
    left_out = [message for message in caplog.messages if "is still on its way" in message]
    assert [message.split()[1] for message in left_out] == ["20", "30"]


def test_stop_that_was_asked_for_saves_and_leaves_the_loop(page: RankState) -> None:
    store = MemoryStore()
    session = open_session(store, every_steps=100, state=page)
    assert not session.save_if_due(make_state(1.0), step=1)
    assert page.polls
    page.request_stop(StopReason.PREEMPTED, seconds_left=30.0)
    steps = iter(range(2, 10**6))
    with pytest.raises(StopTraining, match="stopped after step"):
        train(session, steps)
    stopped = next(steps) - 1
    assert session.stop_seen
    assert load_fresh(store)[0] == stopped
    assert session.should_stop(step=stopped)


def test_stop_waits_for_the_save_that_is_on_its_way(page: RankState) -> None:
    store, gate = MemoryStore(), Gate()
    session = open_session(WatchedStore(store, gate), state=page)
    session.save(make_state(1.0), step=1)
    page.request_stop(StopReason.CANCELLED, seconds_left=30.0)
    threading.Timer(0.1, gate.is_open.set).start()
    with pytest.raises(StopTraining):
        session.save_if_due(make_state(2.0), step=2)
    assert committed_steps(store) == [2, 1]


def test_stop_right_after_a_save_saves_nothing_twice(page: RankState) -> None:
    store = MemoryStore()
    session = open_session(store, state=page)
    session.save(make_state(2.0), step=2, wait=True)
    page.request_stop(StopReason.PREEMPTED, seconds_left=30.0)
    with pytest.raises(StopTraining):
        session.save_if_due(make_state(2.0), step=2)
    assert committed_steps(store) == [2]


def test_stop_that_leaves_no_time_saves_nothing_and_says_so(
    page: RankState, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    session = open_session(store, state=page)
    session.save(make_state(1.0), step=1, wait=True)
    session._news.clock.add(20.0)  # measured
    page.request_stop(StopReason.PREEMPTED, seconds_left=3.0)
    with pytest.raises(StopTraining):
        session.save_if_due(make_state(2.0), step=2)
    assert "Step 2 is not saved: it takes longer than the time that is left." in caplog.messages
    assert load_fresh(store)[0] == 1


@pytest.mark.parametrize("reason", [StopReason.FAILED, StopReason.REGROUP])
def test_stop_after_a_lost_peer_neither_votes_nor_saves(page: RankState, reason: StopReason) -> None:
    store = MemoryStore()
    session = open_session(store, state=page, every_steps=1)
    page.request_stop(reason, seconds_left=30.0)
    calls: list[Callable[[], Any]] = [
        lambda: session.save_if_due(make_state(1.0), step=1),
        lambda: session.save(make_state(1.0), step=1),
        lambda: session.should_stop(step=1),
    ]
    for call in calls:
        with pytest.raises(StopTraining, match=f"without a save: {reason.name.lower()}"):
            call()
    assert not store.objects
    assert not session.stop_seen


def test_should_stop_asks_about_once_a_second_and_stays_true(page: RankState) -> None:
    session = open_session(MemoryStore(), state=page)
    assert not session.should_stop(step=0)
    first = session._peers.number
    started = time.monotonic()
    step = 0
    while time.monotonic() - started < 0.5:
        step += 1
        time.sleep(0.005)
        assert not session.should_stop(step=step)
    assert session._peers.number - first <= 8  # the distance doubles until it is a second
    page.request_stop(StopReason.TIMED_OUT, seconds_left=30.0)
    asked = time.monotonic()
    while not session.should_stop(step=step):
        step += 1
        time.sleep(0.005)
        assert time.monotonic() - asked < 5.0
    assert session.should_stop(step=step)
    assert session.should_stop(step=0)


def test_should_stop_sees_a_stop_soon_after_a_resume_at_a_late_step(page: RankState) -> None:
    """The steps of the run before say nothing about how fast this one's are."""
    store = MemoryStore()
    save_steps(store, 100_000)
    session = open_session(store, state=page)
    step = session.load(make_state(-1.0))
    assert not session.should_stop(step=step + 1)
    page.request_stop(StopReason.PREEMPTED, seconds_left=30.0)
    time.sleep(0.3)  # a slow step
    seen = [session.should_stop(step=step + 2 + more) for more in range(3)]
    assert seen[-1], "a hundred slow steps would pass before the ranks look again"


def test_stop_saves_and_removes_nothing_and_close_does_not_wait_for_a_removal(page: RankState) -> None:
    store, removing, go_on = MemoryStore(), threading.Event(), threading.Event()

    def hold(verb: str, key: str) -> None:
        if verb == "delete" and "/checkpoints/" in key:
            removing.set()
            assert go_on.wait(50.0)

    watched = WatchedStore(store, hold)
    session = open_session(watched, keep_last=1, state=page)
    session.save(make_state(1.0), step=1, wait=True)
    session.save(make_state(2.0), step=2)
    assert removing.wait(20.0)  # step 1 goes, behind the training
    page.request_stop(StopReason.PREEMPTED, seconds_left=30.0)
    before = len(watched.operations)
    with pytest.raises(StopTraining):
        session.save_if_due(make_state(3.0), step=3)
    asked = time.monotonic()
    session.close()
    assert time.monotonic() - asked < 20.0
    assert not [key for verb, key in watched.operations[before:] if verb == "delete"]
    assert committed_steps(store) == [3, 2]
    go_on.set()
    session._saver.finish()
