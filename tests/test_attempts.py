"""The three budgets: restarts, attempts, and what no budget helps against."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_elastic.attempts import Action, decide_attempt, decide_restart
from prefect_torch_elastic.diagnosis import INFRASTRUCTURE
from prefect_torch_elastic.evidence import Category, Diagnosis

FAILURE = Diagnosis(
    category=Category.USER_ERROR,
    summary="rank 1 failed at step 7: ValueError: loss is nan",
    cure="",
    rank=1,
    exc_type="ValueError",
    exc_message="loss is nan",
    step=7,
)


def restart(diagnosis=FAILURE, previous=None, *, restarts=0, max_restarts=3):
    return decide_restart(diagnosis, previous, restarts=restarts, max_restarts=max_restarts)


def attempt(category, *, number=1, max_attempts=3, non_retryable=False):
    diagnosis = replace(FAILURE, category=category, non_retryable=non_retryable)
    return decide_attempt(diagnosis, attempt=number, max_attempts=max_attempts)


def test_first_failure_is_restarted():
    decision = restart()
    assert (decision.action, decision.reason) == (Action.RESTART, "restart 1 of 3")


def test_restarts_end_with_their_budget():
    decision = restart(restarts=3)
    assert (decision.action, decision.reason) == (Action.FAIL, "3 of 3 restarts are spent")


def test_budget_of_zero_restarts_nothing():
    assert restart(max_restarts=0).action is Action.FAIL


def test_non_retryable_failure_is_not_restarted():
    decision = restart(replace(FAILURE, category=Category.NON_RETRYABLE, non_retryable=True))
    assert decision.action is Action.FAIL
    assert "NonRetryable" in decision.reason


def test_same_failure_at_the_same_step_is_not_restarted():
    decision = restart(previous=FAILURE, restarts=1)
    assert (decision.action, decision.reason) == (
        Action.FAIL,
        "the same failure came back at the same step 7",
    )


@pytest.mark.parametrize(
    "change",
    [
        {"step": 8},
        {"rank": 0},
        {"exc_type": "KeyError"},
        {"exc_message": "loss is inf"},
        {"category": Category.KILLED},
        {"signal": 9},
        {"exit_code": 3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_failure_is_restarted(change):
    assert restart(previous=replace(FAILURE, **change), restarts=1).action is Action.RESTART


def test_failure_without_a_step_is_restarted_as_often_as_the_budget_says():
    unknown = replace(FAILURE, step=None)
    assert restart(unknown, unknown, restarts=1).action is Action.RESTART
    assert restart(unknown, unknown, restarts=3).action is Action.FAIL


def test_same_failure_ignores_what_differs_from_run_to_run():
    later = replace(FAILURE, summary="other", traceback="other", victims=[0], last_lines=["x"], log="/b")
    assert restart(later, FAILURE, restarts=1).action is Action.FAIL


@pytest.mark.parametrize("category", sorted(INFRASTRUCTURE))
def test_infrastructure_failure_forms_a_new_gang(category):
    decision = attempt(category, number=2)
    assert (decision.action, decision.reason) == (Action.NEW_ATTEMPT, "attempt 3 of 3")


@pytest.mark.parametrize("category", sorted(INFRASTRUCTURE))
def test_attempts_end_with_their_budget(category):
    decision = attempt(category, number=3)
    assert (decision.action, decision.reason) == (Action.FAIL, "3 of 3 attempts are spent")


@pytest.mark.parametrize("category", sorted(set(Category) - INFRASTRUCTURE))
def test_failure_of_the_function_forms_no_new_gang(category):
    assert attempt(category).action is Action.FAIL


def test_infrastructure_failure_that_cannot_be_mended_forms_no_new_gang():
    assert attempt(Category.NODE_LOST, non_retryable=True).action is Action.FAIL


@given(
    restarts=st.integers(0, 20),
    max_restarts=st.integers(0, 20),
    category=st.sampled_from(sorted(Category)),
    step=st.none() | st.integers(0, 5),
)
def test_decision_never_exceeds_the_budget(restarts, max_restarts, category, step):
    diagnosis = replace(FAILURE, category=category, step=step)
    decision = restart(diagnosis, restarts=restarts, max_restarts=max_restarts)
    assert (decision.action is Action.RESTART) == (restarts < max_restarts)
