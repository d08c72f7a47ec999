"""A store that is away: the task's log says so, and nobody waits for it in vain."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from prefect_torch_elastic import patience
from prefect_torch_elastic.errors import StoreError
from prefect_torch_elastic.local import GangCancelled
from prefect_torch_elastic.patience import Patience

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def back() -> Iterator[threading.Event]:
    """Set when the store answers again."""
    event = threading.Event()
    yield event
    event.set()


def make_patience(*, cancelled: bool = False, warnings: list[str] | None = None) -> Patience:
    def warn(text: str, *args: Any) -> None:
        if warnings is not None:
            warnings.append(text % args)

    return Patience(url="s3://bucket/runs", warn=warn, cancelled=lambda: cancelled)


def test_answer_is_returned_and_an_error_raised():
    assert make_patience(cancelled=True).wait_for(lambda: 7) == 7
    with pytest.raises(StoreError, match="no such bucket"):
        make_patience().wait_for(lambda: (_ for _ in ()).throw(StoreError("no such bucket")))


def test_long_wait_is_said_once_in_the_log_of_the_task(monkeypatch, back):
    monkeypatch.setattr(patience, "SAY_AFTER_SECONDS", 0.0)
    warnings: list[str] = []

    def answer() -> int:
        while not warnings:
            back.wait(0.01)
        back.wait(1.0)  # some looks more
        return 7

    assert make_patience(warnings=warnings).wait_for(answer) == 7
    (warning,) = warnings
    assert "`s3://bucket/runs` has not answered for" in warning


def test_cancelled_task_does_not_wait_for_its_store(back):
    with pytest.raises(GangCancelled):
        make_patience(cancelled=True).wait_for(back.wait)


def test_short_deadline_holds_for_a_cancelled_task_too(back):
    with pytest.raises(StoreError, match="has not answered for 0 s"):
        make_patience(cancelled=True).wait_for(back.wait, seconds=0.1)
