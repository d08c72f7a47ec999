"""What decides whether an elastic task's result is reused."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import prefect.logging
import pytest
from prefect import Task
from prefect.cache_policies import INPUTS, NO_CACHE, TASK_SOURCE

from prefect_torch_elastic import elastic_task
from prefect_torch_elastic.caching import choose_cache_policy, source_without_decorators

LOCK = threading.Lock()


def train(x: int, lock: object = None) -> int:
    return x


@pytest.fixture
def warnings(monkeypatch):
    """What a policy says in the task run's log."""
    said: list[str] = []
    monkeypatch.setattr(prefect.logging, "get_run_logger", lambda: SimpleNamespace(warning=said.append))
    return said


def key_of(policy: Any, source: str = "x = 1", **inputs: object) -> str | None:
    return policy.compute_key(SimpleNamespace(task=SimpleNamespace(source_code=source)), inputs, {})


def test_task_without_a_policy_caches_nothing_and_with_persistence_prefects_default():
    assert choose_cache_policy(Task(train)) == NO_CACHE
    chosen = choose_cache_policy(Task(train, persist_result=True))
    assert chosen.policy == Task(train, persist_result=True).cache_policy


def test_argument_that_cannot_be_hashed_is_named_and_the_call_is_not_cached(warnings):
    policy = choose_cache_policy(Task(train, cache_policy=INPUTS))
    assert key_of(policy, x=1, lock=LOCK) is None
    (warning,) = warnings
    assert warning.startswith(
        "argument `lock` (`_thread.lock`) cannot be hashed, so this call is not cached."
    )
    assert "`cache_policy=INPUTS - 'lock'`" in warning


def test_default_of_prefect_says_nothing_of_what_it_cannot_hash(warnings):
    policy = choose_cache_policy(Task(train, persist_result=True))
    run = SimpleNamespace(
        task=SimpleNamespace(source_code="x"), task_run=SimpleNamespace(flow_run_id=None, id="1")
    )
    assert policy.compute_key(run, {"lock": LOCK}, {}) is None
    assert warnings == []


def test_policy_minus_an_argument_leaves_it_out_and_still_names_others(warnings):
    policy = choose_cache_policy(Task(train, cache_policy=INPUTS)) - "lock"
    assert key_of(policy, x=1, lock=LOCK) == key_of(policy, x=1, lock=threading.Lock())
    assert key_of(policy, x=1) != key_of(policy, x=2)
    assert key_of(policy, x=LOCK) is None
    assert "argument `x`" in warnings[0]


def test_policy_plus_another_depends_on_both_and_still_names_arguments(warnings):
    policy = choose_cache_policy(Task(train, cache_policy=INPUTS)) + TASK_SOURCE
    keys = {key_of(policy, source, x=x) for source in ("x = 1", "x = 2") for x in (1, 2)}
    assert len(keys) == 4
    assert key_of(policy, x=LOCK) is None
    assert "argument `x`" in warnings[0]


def test_policy_that_was_chosen_is_kept_when_it_is_chosen_again():
    policy = choose_cache_policy(Task(train, cache_policy=INPUTS))
    assert choose_cache_policy(Task(train, cache_policy=policy)) is policy
    changed = elastic_task(train).with_options(cache_policy=policy - "lock")
    assert key_of(changed.cache_policy, x=1, lock=LOCK)


def test_source_is_the_function_without_its_decorators():
    @elastic_task(nproc_per_node=2)
    def decorated(x):
        return x

    assert source_without_decorators(decorated.user_fn) == "def decorated(x):\n    return x"


def test_source_of_what_has_none_is_unknown():
    assert source_without_decorators(eval("lambda: 1")) is None
    assert source_without_decorators(len) is None
