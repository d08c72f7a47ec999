"""What a function returned, made fit to leave its process."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest

from prefect_torch_elastic.hosting.settling import settle

Pair = namedtuple("Pair", ["first", "second"])


def resolved(value: Any) -> Any:
    """Return a future of Prefect's that has its result."""
    from prefect.futures import PrefectFuture

    class Resolved(PrefectFuture[Any]):
        def __init__(self) -> None:
            return None

        def wait(self, timeout: float | None = None) -> None:
            return None

        def result(self, timeout: float | None = None, raise_on_failure: bool = True) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

        def add_done_callback(self, fn: Any) -> None:
            raise NotImplementedError

    return Resolved()


def count() -> Iterator[int]:
    yield from range(3)


@pytest.mark.parametrize(
    ("returned", "settled"),
    [
        pytest.param({"a": [1, 2]}, {"a": [1, 2]}, id="plain"),
        pytest.param(resolved(1), 1, id="future"),
        pytest.param([resolved(1), 2], [1, 2], id="list"),
        pytest.param((resolved(1), 2), (1, 2), id="tuple"),
        pytest.param({"a": resolved(1)}, {"a": 1}, id="dict"),
        pytest.param(count(), [0, 1, 2], id="generator"),
        pytest.param(Pair(1, 2), Pair(1, 2), id="named-tuple"),
    ],
)
def test_settle_gives_what_can_leave_the_process(returned: Any, settled: Any):
    assert settle(returned) == settled
    assert type(settle(settled)) is type(settled)


def test_settle_keeps_the_very_object_when_there_is_nothing_to_do():
    value = [1, 2, 3]
    assert settle(value) is value


def test_settle_raises_what_a_future_raises():
    with pytest.raises(ValueError, match="no tokens"):
        settle([1, resolved(ValueError("no tokens"))])


def test_settle_keeps_a_state_that_is_completed():
    from prefect.states import Completed

    state = Completed(message="cached upstream", data=5)
    assert settle(state) is state


def test_settle_raises_the_message_of_a_failed_state():
    from prefect.exceptions import FailedRun
    from prefect.states import Failed

    with pytest.raises(FailedRun, match="no tokens"):
        settle(Failed(message="no tokens"))


def test_settle_raises_the_exception_of_a_failed_state():
    from prefect.states import Failed

    with pytest.raises(ValueError, match="no tokens"):
        settle(Failed(data=ValueError("no tokens")))


def test_settle_raises_a_cancelled_state():
    from prefect.exceptions import CancelledRun
    from prefect.states import Cancelled

    with pytest.raises(CancelledRun):
        settle(Cancelled(message="enough"))


def test_settle_raises_one_failed_state_among_others():
    from prefect.exceptions import FailedRun
    from prefect.states import Completed, Failed

    with pytest.raises(FailedRun, match="no tokens"):
        settle([Completed(data=1), Failed(message="no tokens")])


def test_settle_refuses_a_state_that_is_not_final():
    from prefect.exceptions import UnfinishedRun
    from prefect.states import Running

    with pytest.raises((UnfinishedRun, RuntimeError)):
        settle(Running())
