"""The log lines of this process's flow run: where they show, and that they reach the API before it leaves."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from prefect_torch_elastic import compat
from prefect_torch_elastic.dispatch.polling import describe_outage
from prefect_torch_elastic.hosting.asking import PATIENCE_SECONDS

_RUN_LOGGER = "prefect.flow_runs"
_FLUSH_SECONDS = 5.0
_PAUSE_SECONDS = 2.0


class TaskStamp(logging.Filter):
    """Puts a task run on the lines of a flow run that name none.

    Prefect's pages find lines by one id each: of the flow run, or of the task run.
    """

    def __init__(self, flow_run_id: str, task_run_id: str, task_run_name: str) -> None:
        super().__init__()
        self._flow_run_id = flow_run_id
        self._task = {"task_run_id": task_run_id, "task_run_name": task_run_name}

    def filter(self, record: logging.LogRecord) -> bool:
        own = str(getattr(record, "flow_run_id", "")) == self._flow_run_id
        if own and not getattr(record, "task_run_id", None):
            record.__dict__.update(self._task)
        return True


def show_lines_on_task(flow_run_id: str, task_run_id: str, task_run_name: str) -> None:
    """From now on show every line of the flow run's log on the page of a task run too."""
    logger = logging.getLogger(_RUN_LOGGER)
    for old in [one for one in logger.filters if isinstance(one, TaskStamp)]:
        logger.removeFilter(old)
    logger.addFilter(TaskStamp(flow_run_id, task_run_id, task_run_name))


class LineKeeper:
    """Sends batches of log lines, and keeps those of an outage until the API is back.

    Args:
        tell: Called with a sentence when lines are missing after all.
        patience_seconds: After this a batch is given up, and counted.
        pause_seconds: Between two tries.
    """

    def __init__(
        self,
        tell: Callable[[str], Any],
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        pause_seconds: float = _PAUSE_SECONDS,
    ) -> None:
        self._tell = tell
        self._patience, self._pause = patience_seconds, pause_seconds
        self._lost = 0
        self.is_leaving = False

    async def send(self, post: Callable[[], Awaitable[Any]], count: int) -> None:
        """Send one batch, again and again while the API is away."""
        until = time.monotonic() + self._patience
        while error := await _try(post):
            if not describe_outage(error) or time.monotonic() >= until or self.is_leaving:
                self._lost += count
                sys.stderr.write(f"{count} lines of the log were not sent: {type(error).__name__}: {error}\n")
                return
            await asyncio.sleep(self._pause)
        if lost := self._lost:
            self._lost = 0
            self._tell(f"{lost} lines of this log are missing: the Prefect API did not take them in time.")


async def _try(post: Callable[[], Awaitable[Any]]) -> Exception | None:
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):  # it would wait for half a minute
            await post()
    except Exception as error:  # noqa: BLE001  (whoever sends log lines has nobody to raise to)
        return error
    return None


_keepers: list[LineKeeper] = []


def keep_lines(tell: Callable[[str], Any]) -> None:
    """From now on no line of this process is lost because the API is away for some minutes.

    Prefect drops what it could not send for a minute, and says nothing.
    """
    _keepers[:] = [LineKeeper(tell)]
    compat.send_log_lines_with(_keepers[0].send)


def flush_lines() -> None:
    """Send the lines and events that wait; gives up after some seconds."""
    drains: list[Callable[..., Any]] = [APILogWorker.drain_all, EventsWorker.drain_all]
    for drain in drains:
        drain(timeout=_FLUSH_SECONDS, at_exit=False)
    for keeper in _keepers:
        keeper.is_leaving = True  # the interpreter waits at its end for what is being sent
