"""What Prefect's retries may repeat."""

from __future__ import annotations

from typing import Any

import pytest

from prefect_torch_elastic.diagnosis import diagnose_lost_launcher, diagnose_setup
from prefect_torch_elastic.errors import GangFailed, MissingExtraError, SpecError, TransferError
from prefect_torch_elastic.retrying import RetryCondition


class Failed:
    """A task run's state, as far as a condition looks."""

    def __init__(self, data: object) -> None:
        self.data = data


def ask(condition: Any, error: object) -> Any:
    return condition(None, None, Failed(error))


NEVER = [
    TransferError("a lock"),
    SpecError("nnodes"),
    MissingExtraError("torch"),
    GangFailed("no torch", diagnose_setup("no torch.")),
]


@pytest.mark.parametrize("error", NEVER, ids=lambda error: type(error).__name__)
def test_what_would_only_come_back_is_not_retried_whatever_the_user_says(error):
    assert ask(RetryCondition.around(None), error) is False
    assert ask(RetryCondition.around(lambda *_: True), error) is False


AGAIN = [
    ValueError("of the user"),
    GangFailed("by hand"),
    GangFailed("killed", diagnose_lost_launcher(-9)),
    GangFailed("devices are taken", diagnose_setup("0 GPUs are free.", may_pass=True)),
]


@pytest.mark.parametrize("error", AGAIN, ids=str)
def test_everything_else_is_retried_unless_the_user_says_otherwise(error):
    assert ask(RetryCondition.around(None), error) is True
    assert ask(RetryCondition.around(lambda *_: False), error) is False


def test_users_condition_gets_what_prefect_passes():
    got = []
    condition = RetryCondition.around(lambda *args: got.append(args) or True)
    state = Failed(ValueError())
    assert condition("task", "task run", state) is True
    assert got == [("task", "task run", state)]


def test_condition_is_put_around_once_and_taken_off_again():
    def own(*_: object) -> bool:
        return True

    around = RetryCondition.around(own)
    assert RetryCondition.around(around) is around
    assert RetryCondition.inside(around) is own
    assert RetryCondition.inside(own) is own
    assert RetryCondition.inside(None) is None
