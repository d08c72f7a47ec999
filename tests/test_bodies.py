"""A function as the body of this process's flow run: what it returns, raises, logs, and belongs to."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from tests.hosted import begin_run, client, read_logs, read_state, set_state, wait_for
from tests.proxy import ClosableProxy

pytestmark = pytest.mark.usefixtures("prefect_server")


def carry_out(function: Callable[..., Any], *args: Any, own: Any = None, **options: Any) -> Any:
    """Run a body as the host does, on a new flow run, and return how it ended."""
    from prefect_torch_elastic.hosting.bodies import run_body

    own = own or begin_run()
    with own.watch():
        return run_body(
            own, lambda: (function, args, {}), **{"task_name": "tokenize", "grace_seconds": 5.0, **options}
        )


def test_body_hands_out_the_value_of_a_sync_function():
    assert carry_out(lambda a, b: a + b, 2, 3).value == 5


def test_body_hands_out_the_value_of_an_async_function():
    async def add(a: int, b: int) -> int:
        await asyncio.sleep(0)
        return a + b

    end = carry_out(add, 2, 3)
    assert (end.value, end.error, end.stopped, end.state.type.value) == (5, None, False, "COMPLETED")


def test_body_hands_out_what_the_function_raised():
    def fail() -> None:
        raise ValueError("no tokens")

    end = carry_out(fail)
    assert (type(end.error), str(end.error), end.stopped) == (ValueError, "no tokens", False)
    assert end.error.__traceback__.tb_frame.f_code.co_name == "fail"
    assert (end.state.type.value, end.state.message) == (
        "FAILED",
        "Flow run encountered an exception: ValueError: no tokens",
    )


def test_body_hands_out_what_an_async_function_raised():
    async def fail() -> None:
        raise ValueError("no tokens")

    end = carry_out(fail)
    assert (type(end.error), end.state.type.value) == (ValueError, "FAILED")


def test_body_is_crashed_when_the_function_calls_exit():
    end = carry_out(lambda: sys.exit(3))
    assert (type(end.error), end.error.code, end.state.type.value) == (SystemExit, 3, "CRASHED")
    assert "sys.exit(3)" in end.state.message


def test_body_reports_no_state_itself():
    own = begin_run()
    carry_out(lambda: 1, own=own)
    assert read_state(own.id).name == "Running"


def test_body_collects_what_an_async_generator_yields():
    async def count():
        for number in range(3):
            yield number

    assert carry_out(count).value == [0, 1, 2]


def test_body_runs_subtasks_in_the_run():
    from prefect import task
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    @task(name="shard")
    def shard(number: int) -> int:
        return number * 2

    own = begin_run()
    assert carry_out(lambda: shard(1) + sum(shard.map([2, 3]).result()), own=own).value == 12

    def names() -> list[str]:
        with client() as api:
            runs = api.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[own.id])))
        done = sorted(run.name.partition("-")[0] for run in runs if run.state_name == "Completed")
        return done if len(done) == 3 else []

    assert wait_for(names) == ["shard"] * 3


def test_body_runs_subflows_below_the_run():
    from prefect import flow
    from prefect.runtime import flow_run

    @flow(name="inner")
    def inner() -> str:
        return str(flow_run.parent_flow_run_id)

    own = begin_run()
    assert carry_out(inner, own=own).value == str(own.id)


def test_body_creates_artifacts_of_the_run():
    from prefect.artifacts import create_markdown_artifact
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    own = begin_run()
    carry_out(lambda: create_markdown_artifact("# tokens", key="tokens"), own=own)
    with client() as api:
        found = api.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[own.id]))
        )
    assert [artifact.key for artifact in found] == ["tokens"]


def test_body_logs_to_the_pages_of_run_and_task():
    from prefect.logging import get_run_logger

    def work() -> None:
        get_run_logger().info("from the logger")
        print("printed")

    own, task_run = begin_run(), uuid4()
    own.show_on_task(str(task_run), "tokenize-0")
    carry_out(work, own=own, log_prints=True)
    own.flush()

    for page in ({"flow_run": own.id}, {"task_run": task_run}):
        lines = {line.message for line in read_logs(**page)}
        assert {"from the logger", "printed"} <= lines


def test_body_prints_nothing_to_the_log_when_the_task_does_not():
    own = begin_run()
    carry_out(lambda: print("kept"), own=own, log_prints=False)
    own.flush()
    assert "kept" not in {line.message for line in read_logs(flow_run=own.id)}


def test_body_shows_its_failure_in_the_log():
    def fail() -> None:
        raise ValueError("no tokens")

    own = begin_run()
    carry_out(fail, own=own)
    own.flush()
    lines = [line.message for line in read_logs(flow_run=own.id)]
    assert any("no tokens" in line and "Traceback" in line for line in lines)
    assert lines[-1].startswith("Finished in state Failed(")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_body_is_interrupted_when_the_run_is_cancelled(is_async: bool):
    from prefect.states import Cancelling

    own = begin_run()
    cleaned = threading.Event()

    def work() -> None:
        set_state(own.id, Cancelling())
        try:
            threading.Event().wait(60)
        finally:
            cleaned.set()

    async def work_async() -> None:
        await asyncio.to_thread(set_state, own.id, Cancelling())
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            cleaned.set()

    end = carry_out(work_async if is_async else work, own=own)
    assert (end.stopped, end.value, end.error, end.state.type.value) == (True, None, None, "CANCELLED")
    assert cleaned.is_set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_body_is_interrupted_inside_a_subflow(number: signal.Signals):
    from prefect import flow

    cleaned = threading.Event()

    @flow
    def inner() -> None:
        try:
            os.kill(os.getpid(), number)
            threading.Event().wait(60)
        finally:
            cleaned.set()

    end = carry_out(inner)
    assert (end.stopped, end.state.name, cleaned.is_set()) == (True, "Crashed", True)


def test_loading_of_a_body_is_interrupted():
    from prefect_torch_elastic.hosting.bodies import run_body

    cleaned = threading.Event()

    def load() -> Any:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(60)  # a module that waits for something when it is imported
        finally:
            cleaned.set()

    own = begin_run()
    with own.watch():
        end = run_body(own, load, task_name="tokenize", grace_seconds=5.0)
    assert (end.begun, end.stopped, end.state.name, cleaned.is_set()) == (False, True, "Crashed", True)


def test_body_that_cannot_be_loaded_does_not_begin():
    from prefect_torch_elastic.hosting.bodies import run_body

    def load() -> Any:
        raise ImportError("no tokens")

    own = begin_run()
    with own.watch():
        end = run_body(own, load, task_name="tokenize", grace_seconds=5.0)
    assert (end.begun, end.stopped, type(end.error)) == (False, False, ImportError)


def test_body_is_interrupted_once():
    rounds: list[int] = []

    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(60)
        finally:
            for number in range(3):
                os.kill(os.getpid(), signal.SIGTERM)
                rounds.append(number)

    assert carry_out(work).stopped
    assert rounds == [0, 1, 2]


def test_body_that_returns_after_a_stop_was_stopped():
    from prefect.states import Cancelled

    own = begin_run()

    def work() -> str:
        set_state(own.id, Cancelled())
        try:
            threading.Event().wait(60)
        except BaseException:  # noqa: BLE001  (what users write)
            return "partial"
        return "whole"

    end = carry_out(work, own=own)
    assert (end.stopped, end.value) == (True, None)


def test_body_is_crashed_when_a_signal_ends_it():
    def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(60)

    end = carry_out(work)
    assert (end.stopped, end.state.type.value) == (True, "CRASHED")
    assert "its worker shuts down" in end.state.message


def test_body_is_cancelled_when_the_signal_came_for_a_cancelled_run():
    from prefect.states import Cancelling

    own = begin_run()

    def work() -> None:
        set_state(own.id, Cancelling())
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(60)

    end = carry_out(work, own=own)
    assert (end.stopped, end.state.type.value) == (True, "CANCELLED")


def test_body_is_not_called_when_the_run_stops_before():
    own = begin_run()
    own.note_signal()
    called: list[int] = []
    end = carry_out(lambda: called.append(1), own=own)
    assert (end.stopped, called) == (True, [])


def test_body_waits_for_an_api_that_is_away_before_it(prefect_server: str):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    way = ClosableProxy(prefect_server)
    own = begin_run()
    with temporary_settings({PREFECT_API_URL: way.url}):
        way.close()
        threading.Timer(2.0, way.open).start()
        assert carry_out(lambda: "value", own=own).value == "value"
        own.flush()
    way.close()


def test_body_that_waits_for_the_api_is_given_up_after_a_signal(prefect_server: str):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    way = ClosableProxy(prefect_server)
    own = begin_run()
    called: list[int] = []
    with temporary_settings({PREFECT_API_URL: way.url}):
        way.close()
        threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGTERM]).start()
        end = carry_out(lambda: called.append(1), own=own)
        way.open()
        own.flush()
    way.close()
    assert (end.stopped, end.state.name, called) == (True, "Crashed", [])


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_body_hands_out_its_value_when_the_api_goes_away_meanwhile(prefect_server: str, is_async: bool):
    from prefect import task
    from prefect.settings import PREFECT_API_URL, temporary_settings

    way = ClosableProxy(prefect_server)
    shard = task(lambda: "value")

    def work() -> str:
        way.close()
        return shard()

    async def work_async() -> str:
        way.close()
        return await asyncio.to_thread(shard)

    with temporary_settings({PREFECT_API_URL: way.url}):
        own = begin_run()
        assert carry_out(work_async if is_async else work, own=own).value == "value"
        way.open()
        own.flush()
    way.close()


def test_body_leaves_the_signal_handlers_as_they_were():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    carry_out(lambda: 1)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_body_accepts_a_task_name_that_no_flow_may_have():
    assert carry_out(lambda: 1, task_name="a/b & c").value == 1
