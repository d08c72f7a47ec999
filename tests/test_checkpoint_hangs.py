"""A store that is slow or never answers: what counts as a failure, how often, and what waits for what."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from prefect_torch_elastic.checkpoint import news, saver, saving
from prefect_torch_elastic.checkpoint import session as sessions
from prefect_torch_elastic.checkpoint.news import SaveNews
from prefect_torch_elastic.checkpoint.saving import SaveResult
from prefect_torch_elastic.checkpoint.session import CheckpointSession
from prefect_torch_elastic.errors import CheckpointError, StoreError
from tests.checkpoint_gangs import Seat, open_rank, run_ranks
from tests.checkpoint_stores import (
    Gate,
    MemoryStore,
    WatchedStore,
    assert_is,
    committed_steps,
    load_fresh,
    make_state,
    open_session,
    wait_until_idle,
)

DEADLINE_SECONDS = 20.0


pytestmark = pytest.mark.usefixtures("checkpoint_log")


class Clock:
    """A `time` whose seconds pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (news, saver):
        monkeypatch.setattr(module, "time", clock)
    return clock


# ------------------------------------------------------------ what counts


def test_failed_save_counts_once_while_another_rank_still_uploads_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, failed, go_on = MemoryStore(), threading.Event(), threading.Event()

    def before(verb: str, key: str) -> None:
        if verb != "put" or "/checkpoints/" not in key:
            return
        if "/r00001/" in key:
            assert go_on.wait(DEADLINE_SECONDS)
        elif not failed.is_set():
            failed.set()
            raise StoreError("away")

    def make(value: float) -> dict[str, Any]:
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, value)
        return {"model": model}

    def work(seat: Seat) -> list[int]:
        session = open_rank(seat, WatchedStore(store, before), every_steps=1, max_failures=3)
        saved: list[int] = []
        for step in range(1, 21):  # quick steps, each of which is due
            if session.save_if_due(make(step), step=step):
                saved.append(step)
            if seat.rank == 0:
                wait_until_idle(session)
        go_on.set()
        wait_until_idle(session)
        session.wait()
        assert session.save(make(21.0), step=21)
        session.close()
        return saved

    assert run_ranks(work) == [[1], [1]]
    told = [message for message in caplog.messages if "failed (" in message]
    assert told == ["The save of step 1 failed (1 of 3 in a row): rank 0: StoreError: away"]
    assert committed_steps(store) == [21]


def test_rank_that_is_about_to_end_a_save_that_was_told_is_no_failure(clock: Clock) -> None:
    """Rank 0 knows of the end of a save a moment before the others have put theirs away."""
    told = SaveNews(max_failures=3, is_leader=True)
    assert told.tell(SaveResult(step=1, seconds=1.0))["failures"] == 0
    assert told.tell_stuck([1], step=1) == {}
    clock.now += news.STUCK_SECONDS
    assert told.tell_stuck([1], step=1)["problem_of_save"] == "rank 1 did not end writing"


def test_save_that_hangs_counts_once_in_a_while_and_ends_the_run(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    session = open_session(WatchedStore(MemoryStore(), gate), max_failures=3)
    assert session.save(make_state(1.0), step=1)
    assert gate.reached.wait(DEADLINE_SECONDS)
    assert not session.save(make_state(2.0), step=2)  # slow is not hung
    assert "failed (" not in caplog.text
    for count in (1, 2):
        clock.now += max(saver.STALL_SECONDS, news.STUCK_SECONDS) + 1.0
        for step in (3, 4, 5):
            assert not session.save(make_state(3.0), step=step)
        told = [message for message in caplog.messages if "failed (" in message]
        assert len(told) == count
        assert told[-1] == (f"The save of step 1 failed ({count} of 3 in a row): rank 0 did not end writing")
    clock.now += news.STUCK_SECONDS + 1.0
    with pytest.raises(CheckpointError, match=r"\(3 of 3 in a row\): rank 0 did not end writing"):
        session.save(make_state(6.0), step=6)
    gate.is_open.set()
    wait_until_idle(session)


# ------------------------------------------------------------ waits that end

WAITS: list[Any] = [
    pytest.param(lambda session: session.wait(), id="wait"),
    pytest.param(lambda session: session.close(), id="close"),
    pytest.param(lambda session: session.load(make_state(-1.0)), id="load"),
    pytest.param(lambda session: session.save(make_state(2.0), step=2, wait=True), id="save"),
]


@pytest.fixture
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(saver, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(saving, "_LEAST_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(saving, "_PATIENCE", 0.0)


@pytest.mark.usefixtures("_short_waits")
@pytest.mark.parametrize("call", WAITS)
def test_wait_for_a_write_that_hangs_ends_and_names_the_store(
    call: Callable[[CheckpointSession], Any],
) -> None:
    gate = Gate()
    session = open_session(WatchedStore(MemoryStore(), gate))
    session.save(make_state(1.0), step=1)
    assert gate.reached.wait(DEADLINE_SECONDS)
    with pytest.raises(CheckpointError, match="`memory://test` does not answer") as caught:
        call(session)
    assert "nothing of the save on its way could be written" in str(caught.value)
    gate.is_open.set()
    wait_until_idle(session)


@pytest.mark.usefixtures("_short_waits")
@pytest.mark.parametrize("call", WAITS[:3])
def test_wait_for_a_write_of_one_rank_that_hangs_ends_on_all(
    call: Callable[[CheckpointSession], Any],
) -> None:
    store, go_on, over = MemoryStore(), threading.Event(), threading.Barrier(2)

    def hang(verb: str, key: str) -> None:
        if verb == "put" and "/r00001.json" in key:
            assert go_on.wait(DEADLINE_SECONDS)

    def work(seat: Seat) -> str:
        session = open_rank(seat, WatchedStore(store, hang))
        session.save(make_state(1.0), step=1)
        with pytest.raises(CheckpointError) as caught:
            call(session)
        over.wait(DEADLINE_SECONDS)
        go_on.set()
        wait_until_idle(session)
        return str(caught.value)

    for text in run_ranks(work):
        assert "`memory://test` does not answer" in text


# ------------------------------------------------------------ a board that is gone


def test_save_behind_whose_board_cannot_be_reached_is_a_problem_that_all_hear_of() -> None:
    store = MemoryStore()

    def fail() -> Any:
        raise ConnectionError("the gang's store is gone")

    def work(seat: Seat) -> str:
        session = open_rank(seat, store)
        if seat.rank == 0:
            session._saver._connect = fail
        assert session.save(make_state(1.0), step=1)
        with pytest.raises(CheckpointError) as caught:
            session.close()
        return str(caught.value)

    wanted = "the last save failed: rank 0: ConnectionError: the gang's store is gone"
    assert run_ranks(work) == [wanted, wanted]
    assert committed_steps(store) == []


# ------------------------------------------------------------ a long upload


def test_end_of_a_run_waits_for_an_upload_that_takes_longer_than_a_meeting_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "_ROUND_SECONDS", 0.2)
    store, gate = MemoryStore(), Gate()
    threading.Timer(8.0, gate.is_open.set).start()

    def work(seat: Seat) -> None:
        session = open_rank(seat, WatchedStore(store, gate), meeting_timeout_seconds=1.0)
        assert session.save(make_state(1.0), step=1)
        session.close()  # rank 1 has written its share long before

    assert run_ranks(work) == [None, None]
    assert committed_steps(store) == [1]


# ------------------------------------------------------------ removals


def is_removal(verb: str, key: str) -> bool:
    return verb == "delete" and "/checkpoints/" in key


def test_save_that_waits_returns_on_other_ranks_before_older_ones_are_removed() -> None:
    store, returned, in_time = MemoryStore(), threading.Event(), list[bool]()

    def before(verb: str, key: str) -> None:
        if is_removal(verb, key):
            in_time.append(returned.wait(DEADLINE_SECONDS if not in_time else 0.0))

    def work(seat: Seat) -> None:
        session = open_rank(seat, WatchedStore(store, before), keep_last=1)
        session.save(make_state(1.0), step=1, wait=True)
        session.save(make_state(2.0), step=2, wait=True)
        if seat.rank:
            returned.set()

    assert run_ranks(work) == [None, None]
    assert in_time
    assert all(in_time)
    assert committed_steps(store) == [2]


def test_removal_that_is_slow_neither_holds_up_a_wait_nor_the_next_save() -> None:
    store, removing, go_on = MemoryStore(), threading.Event(), threading.Event()

    def before(verb: str, key: str) -> None:
        if is_removal(verb, key):
            removing.set()
            go_on.wait(DEADLINE_SECONDS)

    session = open_session(WatchedStore(store, before), keep_last=1)
    session.save(make_state(1.0), step=1, wait=True)
    assert session.save(make_state(2.0), step=2)
    session.wait()
    assert removing.wait(DEADLINE_SECONDS)
    assert session.save(make_state(3.0), step=3)  # it is not left out
    session.wait()
    assert committed_steps(store)[0] == 3
    assert not go_on.is_set()
    go_on.set()
    session.close()  # waits for the removals
    assert committed_steps(store) == [3]
    assert [int(name) for name in store.list_folders("run/checkpoints")] == [3]
    assert_is(load_fresh(store)[1], 3.0)


def test_removal_that_fails_costs_no_checkpoint_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()

    def before(verb: str, key: str) -> None:
        if is_removal(verb, key):
            raise StoreError("no permission to delete")

    session = open_session(WatchedStore(store, before), keep_last=1)
    for step in (1, 2, 3):
        session.save(make_state(float(step)), step=step)
        session.wait()
    session.close()
    assert "Older checkpoints could not be removed: StoreError: no permission to delete" in caplog.text
    assert load_fresh(store)[0] == 3
