"""What is to be published: when it is due, and that nobody waits for it when the API is away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from prefect_torch_elastic.artifacts.courier import Courier
from prefect_torch_elastic.artifacts.schedule import MAX_WAITING, Schedule

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def schedule() -> Schedule[str]:
    return Schedule()


def test_schedule_gives_the_first_at_once_and_the_next_one_later(schedule):
    schedule.put("report", "first", now=100.0, every_seconds=15.0)
    assert schedule.take(100.0) == ("report", "first")
    schedule.put("report", "second", now=101.0, every_seconds=15.0)
    assert schedule.take(114.9) is None
    assert schedule.wait_seconds(114.0) == 1.0
    assert schedule.take(115.0) == ("report", "second")


def test_schedule_keeps_the_newest_which_is_due_when_the_older_was(schedule):
    schedule.put("report", "first", now=0.0, every_seconds=15.0)
    schedule.take(0.0)
    schedule.put("report", "old", now=1.0, every_seconds=15.0)
    schedule.put("report", "new", now=14.0, every_seconds=15.0)
    assert schedule.take(15.0) == ("report", "new")
    assert len(schedule) == 0


def test_schedule_takes_what_was_due_first(schedule):
    schedule.put("late", "b", now=2.0)
    schedule.put("early", "a", now=1.0)
    assert [schedule.take(9.0), schedule.take(9.0)] == [("late", "b"), ("early", "a")][::-1]


def test_schedule_forgets_what_came_back_when_there_is_a_newer_one(schedule):
    schedule.put("report", "old", now=0.0)
    slot, item = schedule.take(0.0) or ("", "")
    schedule.put("report", "new", now=1.0)
    schedule.put_back(slot, item)
    assert schedule.take(1.0) == ("report", "new")
    assert schedule.take(99.0) is None


def test_schedule_has_a_bound(schedule):
    for number in range(MAX_WAITING + 10):
        schedule.put(f"slot {number}", "x", now=0.0)
    assert len(schedule) == MAX_WAITING


class Desk:
    """A courier and what it has done and said; it is closed after the test."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.said: list[str] = []
        self.tried = threading.Semaphore(0)
        self.away = False
        self.courier = Courier(
            "test",
            tell=self.said.append,
            name_outage=lambda error: "it is away" if isinstance(error, ConnectionError) else "",
            retry_seconds=0.01,
        )

    def work(self, name: str) -> Callable[[], None]:
        def do() -> None:
            try:
                if self.away:
                    raise ConnectionError
                self.done.append(name)
            finally:
                self.tried.release()

        return do


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.away = False
    desk.courier.close(within_seconds=5.0)


def test_courier_brings_the_last_version_when_it_closes(desk):
    desk.courier.post("report", desk.work("first"), every_seconds=1000.0)
    desk.tried.acquire()
    for name in ("second", "third"):
        desk.courier.post("report", desk.work(name), every_seconds=1000.0)
    assert desk.courier.close(within_seconds=5.0)
    assert desk.done == ["first", "third"]


def test_courier_says_an_outage_once_and_brings_the_newest_after_it(desk):
    desk.away = True
    desk.courier.post("report", desk.work("old"))
    for _ in range(3):
        desk.tried.acquire()
    desk.courier.post("report", desk.work("new"))
    desk.tried.acquire()
    desk.away = False
    assert desk.courier.close(within_seconds=5.0)
    assert desk.done in (["new"], ["old", "new"])  # the old one was on its way perhaps
    assert len(desk.said) == 1
    assert "it is away" in desk.said[0]


def test_courier_closes_in_time_when_the_other_side_is_away(desk):
    desk.away = True
    desk.courier.post("report", desk.work("lost"))
    assert not desk.courier.close(within_seconds=0.1)
    assert desk.done == []


def test_courier_closes_in_time_when_an_answer_never_comes(desk):
    never = threading.Event()
    desk.courier.post("report", lambda: bool(never.wait(20.0)) and None)
    assert not desk.courier.close(within_seconds=0.1)
    never.set()


def test_courier_gives_up_what_is_refused_and_goes_on(desk):
    def refuse() -> None:
        raise ValueError("no such thing")

    desk.courier.post("odd", refuse)
    desk.courier.post("report", desk.work("kept"))
    assert desk.courier.close(within_seconds=5.0)
    assert desk.done == ["kept"]
    assert desk.said == ["`odd` is not shown: ValueError: no such thing"]


def test_courier_refuses_what_alone_is_never_taken(desk):
    tries = threading.Semaphore(0)

    def fail() -> None:
        tries.release()
        raise ConnectionError

    for number in range(6):
        desk.courier.post("odd", fail)
        tries.acquire()
        desk.courier.post("report", desk.work(f"{number}"))
        desk.tried.acquire()
    assert desk.courier.close(within_seconds=5.0)
    assert [text.partition(":")[0] for text in desk.said] == [
        "it is away. The newest is sent when that is over; training goes on meanwhile.",
        "`odd` is not shown",
    ]


def test_courier_never_refuses_while_the_other_side_is_away(desk):
    desk.away = True
    desk.courier.post("report", desk.work("kept"))
    for _ in range(6):
        desk.tried.acquire()
    desk.away = False
    assert desk.courier.close(within_seconds=5.0)
    assert desk.done == ["kept"]


def test_courier_starts_with_the_next_piece_when_no_thread_could_start(desk, monkeypatch):
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError):
            desk.courier.post("report", desk.work("first"))
    desk.courier.post("metrics", desk.work("second"))
    assert desk.courier.close(within_seconds=5.0)
    assert desk.done == ["first", "second"]


def test_courier_takes_nothing_after_its_end(desk):
    desk.courier.close(within_seconds=1.0)
    desk.courier.post("report", desk.work("late"))
    assert desk.done == []
