"""What the end-to-end tests share: a flow that stays open, so that its gangs after the first start warm."""

from __future__ import annotations

import contextvars
import gc
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from tests.conftest import ScriptRunner
from tests.gangs import Driver, serve_driver
from tests.leftovers import describe, kill, our_files, our_processes

if TYPE_CHECKING:
    from prefect.client.schemas.objects import Log, State

    from prefect_torch_elastic.dev.stack import DevStack

T = TypeVar("T")

SETTLE_SECONDS = 10.0


class LiveFlow:
    """A flow run that does what tests ask it to, one job after the other, in a thread."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._run,), name="live-flow"
        )
        self._thread.start()

    def __call__(self, job: Callable[[], T]) -> T:
        """Run `job` inside the flow run and return its value, or raise its error."""
        # pytest's own variable differs in each test, and a warm start needs an equal environment
        os.environ.pop("PYTEST_CURRENT_TEST", None)
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future.result()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        from prefect import flow

        @flow(name="live")
        def live() -> None:
            while (entry := self._jobs.get()) is not None:
                job, future = entry
                try:
                    future.set_result(job())
                except BaseException as error:  # noqa: BLE001  (it belongs to the test that asked)
                    future.set_exception(error)

        live()


@pytest.fixture(scope="module")
def in_flow(prefect_server: str) -> Iterator[LiveFlow]:
    """`in_flow(job)` runs a callable in a flow run that all tests of the file share.

    The file fails if a process or a file of ours is left when the flow run is over.
    """
    processes, files = our_processes(), our_files()
    flow = LiveFlow()
    yield flow
    flow.close()
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        gc.collect()  # a session that no gang belongs to takes its folder along when it is collected
        left = {key: process for key, process in our_processes().items() if key not in processes}
        left_files = sorted(our_files() - files)
        if (not left and not left_files) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    lines = [f"process {process.pid}: {describe(process)}" for process in left.values()] + left_files
    for process in left.values():
        kill(process)
    assert not lines, "Left after the flow:\n" + "\n".join(lines)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """The file that `note` writes to."""
    return tmp_path / "notes"


@pytest.fixture
def note(notes: Path) -> Callable[..., None]:
    """`note(text)` adds a line to `notes`. It is a closure: it travels to ranks by value."""

    def note(text: object = "") -> None:
        with notes.open("a") as file:
            file.write(f"{text}\n")

    return note


@pytest.fixture
def read_logs(prefect_server: str) -> Callable[..., list[Log]]:
    """`read_logs(state)` returns all log lines of a task run that the API has."""
    return fetch_logs


def fetch_logs(state: State[Any], *, has: str = "", timeout_seconds: float = 20.0) -> list[Log]:
    """Return the lines of the state's task run in order, once one of them contains `has`.

    Prefect sends lines in batches, so the last ones are seconds late.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import LogFilter, LogFilterTaskRunId
    from prefect.client.schemas.sorting import LogSort
    from prefect.logging.handlers import APILogWorker

    task_run_id = state.state_details.task_run_id
    assert task_run_id is not None
    chosen = LogFilter(task_run_id=LogFilterTaskRunId(any_=[task_run_id]))
    deadline = time.monotonic() + timeout_seconds
    while True:
        APILogWorker.drain_all(timeout=5)
        lines: list[Log] = []
        with get_client(sync_client=True) as client:
            while page := client.read_logs(
                log_filter=chosen, limit=200, offset=len(lines), sort=LogSort.TIMESTAMP_ASC
            ):
                lines += page
        if any(has in line.message for line in lines) or time.monotonic() > deadline:
            return lines
        time.sleep(0.2)


@pytest.fixture(scope="module")
def shared_driver(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """A warm driver process that the tests of a file share, and may kill."""
    folder = tmp_path_factory.mktemp("driver")
    with serve_driver(ScriptRunner(folder=folder), folder) as served:
        yield served


@pytest.fixture
def awake_driver(shared_driver: Driver) -> Driver:
    """The shared driver, started again if a test has ended it."""
    shared_driver.revive()
    return shared_driver


@pytest.fixture
def driver(awake_driver: Driver, no_leftovers: None) -> Iterator[Driver]:
    """The shared driver; after the test nothing else may be left."""
    yield awake_driver
    awake_driver.end_unfinished()


@pytest.fixture(scope="session")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    """A server and a worker for each of the pools `driver`, `data` and `train`, for the whole session.

    Take `stack` in a test. The hunt for leftovers knows these processes from before the test, and finds what
    a run in a pool has left. When the session ends, nothing of the stack may be left.
    """
    from prefect_torch_elastic.dev.ending import find_marked
    from prefect_torch_elastic.dev.plan import StackPlan
    from prefect_torch_elastic.dev.stack import DevStack

    with DevStack(StackPlan(home=tmp_path_factory.mktemp("stack"))) as started:
        token = started.running.token
        yield started
    assert not find_marked(token)


@pytest.fixture
def stack(shared_stack: DevStack, monkeypatch: pytest.MonkeyPatch) -> Iterator[DevStack]:
    """The shared stack, which this process and the scripts of the test use as their Prefect."""
    from prefect.context import use_profile
    from prefect.settings import Profile

    for name, value in shared_stack.environment.items():
        monkeypatch.setenv(name, value)
    # Prefect has read its settings when it was imported; here it reads them again.
    with use_profile(Profile(name="stack", settings={}), include_current_context=False):
        yield shared_stack
