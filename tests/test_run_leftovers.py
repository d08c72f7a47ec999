"""The processes of a flow run: found by the mark in their first environment, and killed."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from uuid import uuid4

import pytest

from prefect_torch_elastic.hosting import interrupts, leftovers


@pytest.fixture
def run_id() -> str:
    return str(uuid4())


@pytest.fixture
def sleeper(run_id: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the run, in a session of its own."""
    process = subprocess.Popen(
        ["sleep", "1000"], env={**os.environ, leftovers.RUN_VARIABLE: run_id}, start_new_session=True
    )
    time.sleep(0.1)
    yield process
    process.kill()
    process.wait()


def own_start() -> int:
    return leftovers.start_tick(os.getpid())


def test_kill_started_ends_what_the_run_started(sleeper: subprocess.Popen[bytes], run_id: str):
    assert leftovers.kill_started(run_id, since=own_start(), until=leftovers.now_tick()) == [sleeper.pid]
    assert sleeper.wait(5) == -9


def test_kill_started_spares_another_run(sleeper: subprocess.Popen[bytes]):
    assert leftovers.kill_started(str(uuid4()), since=own_start(), until=leftovers.now_tick()) == []
    assert sleeper.poll() is None


def test_kill_started_spares_what_is_older_than_the_host(sleeper: subprocess.Popen[bytes], run_id: str):
    since = leftovers.start_tick(sleeper.pid) + 1
    assert leftovers.kill_started(run_id, since=since, until=leftovers.now_tick()) == []


def test_kill_started_spares_the_same_run_started_again(sleeper: subprocess.Popen[bytes], run_id: str):
    until = leftovers.start_tick(sleeper.pid) - 1
    assert leftovers.kill_started(run_id, since=own_start(), until=until) == []


def test_kill_started_ends_a_child_that_was_only_forked(run_id: str, run_script):
    ended = run_script(
        """
import multiprocessing, os, time
from prefect_torch_elastic.hosting import leftovers
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=[1000])
child.start()
own = leftovers.start_tick(os.getpid())
print(leftovers.kill_started(os.environ[leftovers.RUN_VARIABLE], since=own, until=leftovers.now_tick()))
child.join()
print(child.exitcode)
""",
        env={leftovers.RUN_VARIABLE: run_id},
    )
    assert ended.stdout.splitlines()[1:] == ["-9"], ended.stderr


def test_start_tick_says_that_a_process_is_gone():
    process = subprocess.Popen(["true"])
    process.wait()
    assert leftovers.start_tick(process.pid) == -1


def test_describe_stack_shows_where_a_thread_is():
    import threading

    ready, end = threading.Event(), threading.Event()

    def linger() -> None:
        ready.set()
        end.wait()

    thread = threading.Thread(target=linger)
    thread.start()
    ready.wait()
    time.sleep(0.05)
    stack = interrupts.describe_stack(thread.ident or 0)
    end.set()
    thread.join()
    assert "in linger" in stack
    assert "test_describe_stack" not in stack
