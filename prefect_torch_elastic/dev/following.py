"""The log of a flow run and of all its descendants, as one stream in the order of time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, LogFilter
from prefect.client.schemas.objects import FlowRun, Log
from prefect.client.schemas.sorting import LogSort
from prefect.exceptions import ObjectNotFound

_PAGE_LINES = 200  # what a server gives at most for one request
# Each process sends its lines in batches (every 0.5 s in a stack): what is younger waits for the others.
_HOLD_BACK = timedelta(seconds=1.5)
# A line that is older than the newest by more than this does not come any more.
_OVERLAP = timedelta(seconds=15)
_SETTLE_SECONDS = 2.0


class TreeFollower:
    """Prints what a run and its descendants log, in order, each line once.

    Args:
        client: Asks the API.
        root: The run.
        show: Takes a line.
    """

    def __init__(self, client: SyncPrefectClient, root: FlowRun, show: Callable[[str], None]) -> None:
        self._client, self._show = client, show
        self._runs: dict[UUID, str] = {root.id: root.name}
        self._tasks: dict[UUID, str] = {}
        self._waiting: list[Log] = []
        self._seen: dict[UUID, datetime] = {}
        self._after = datetime.fromtimestamp(0, UTC)

    def poll(self, *, flush: bool = False) -> int:
        """Print what is new and old enough, or all of it; return how many lines arrived."""
        self._find_descendants()
        new = self._read_new()
        self._waiting = sorted([*self._waiting, *new], key=lambda line: line.timestamp)
        limit = datetime.now(UTC) - _HOLD_BACK
        while self._waiting and (flush or self._waiting[0].timestamp <= limit):
            self._print(self._waiting.pop(0))
        return len(new)

    def finish(self) -> None:
        """Print the rest: the last lines arrive after the last state."""
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < _SETTLE_SECONDS:
            if self.poll():
                quiet_since = time.monotonic()
            time.sleep(0.25)
        self.poll(flush=True)

    def _find_descendants(self) -> None:
        asked: set[UUID] = set()
        while parents := [run for run in self._runs if run not in asked]:
            asked.update(parents)
            wanted = FlowRunFilter.model_validate({"parent_flow_run_id": {"any_": parents}})
            offset = 0
            while page := self._client.read_flow_runs(
                flow_run_filter=wanted, limit=_PAGE_LINES, offset=offset
            ):
                self._runs.update({run.id: run.name for run in page})
                offset += len(page)

    def _read_new(self) -> list[Log]:
        wanted = LogFilter.model_validate(
            {"flow_run_id": {"any_": list(self._runs)}, "timestamp": {"after_": self._after}}
        )
        lines: dict[UUID, Log] = {}  # one that arrives meanwhile shifts those behind it to the next page
        offset = 0
        while page := self._client.read_logs(
            log_filter=wanted, limit=_PAGE_LINES, offset=offset, sort=LogSort.TIMESTAMP_ASC
        ):
            lines.update({line.id: line for line in page})
            offset += len(page)
        new = [line for id, line in lines.items() if id not in self._seen]
        self._seen.update({line.id: line.timestamp for line in new})
        if self._seen:
            self._after = max(self._seen.values()) - _OVERLAP
            self._seen = {key: at for key, at in self._seen.items() if at >= self._after}
        return new

    def _print(self, line: Log) -> None:
        clock = line.timestamp.astimezone().strftime("%H:%M:%S.%f")[:-3]
        level = logging.getLevelName(line.level)
        self._show(f"{clock} | {level:<7} | {self._describe(line)} - {line.message}")

    def _describe(self, line: Log) -> str:
        if line.task_run_id is not None and (name := self._find_task(line.task_run_id)):
            return f"Task run {name!r}"
        return f"Flow run {self._runs.get(line.flow_run_id, '') if line.flow_run_id else ''!r}"

    def _find_task(self, task_run_id: UUID) -> str:
        """Return a task run's name; it becomes known to the API a little after its first line."""
        if task_run_id not in self._tasks:
            try:
                self._tasks[task_run_id] = self._client.read_task_run(task_run_id).name
            except ObjectNotFound:
                return ""
        return self._tasks[task_run_id]
