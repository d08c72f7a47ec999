"""What tests of work pools share: a driver that runs the flows of a file, and what the API knows of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, TaskRun

    from prefect_torch_elastic.dev.stack import DevStack

POOLED = Path(__file__).parent / "e2e" / "pooled"
SETTLE_SECONDS = 20.0  # logs and events go in batches, and two busy cores take their time
FLOW_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Driver:
    """A process that runs flows, one after the other.

    Attributes:
        process: Itself.
        folder: Where it leaves `<flow>.json`.
        log: What it says.
    """

    process: subprocess.Popen[bytes]
    folder: Path
    log: Path

    def read(self, flow: str) -> dict[str, Any]:
        """Return what a flow returned, once it has."""
        answer = self.folder / f"{flow}.json"
        deadline = time.monotonic() + FLOW_SECONDS
        while not answer.exists():
            if self.process.poll() is not None and not answer.exists():
                raise AssertionError(f"the driver ended before `{flow}` did:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"`{flow}` did not end:\n{self.tail()}")
            time.sleep(0.1)
        value = json.loads(answer.read_text())
        assert "raised" not in value, f"`{flow}` raised:\n{value['raised']}\n{self.tail()}"
        return value

    def tail(self) -> str:
        """Return the last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-80:])


@contextmanager
def drive(
    stack: DevStack, folder: Path, script: str, *flows: str, env: Mapping[str, str | None] | None = None
) -> Iterator[Driver]:
    """Run flows of a script in `e2e/pooled`; what runs at the end is killed. None takes a variable away."""
    folder.mkdir(parents=True, exist_ok=True)
    given = {**stack.child_environment(), **(env or {})}
    log = folder / "driver.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, script, str(folder), *flows],
            cwd=POOLED,
            env={name: value for name, value in given.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Driver(process=process, folder=folder, log=log)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(frozen=True, kw_only=True)
class Api:
    """What a person would look for on Prefect's pages."""

    client: SyncPrefectClient

    def children(self, flow_run_id: str, task: str = "") -> list[FlowRun]:
        """Return the child runs of a flow run, oldest first, those of one task if it is named."""
        from prefect.client.schemas.filters import FlowRunFilter
        from prefect.client.schemas.sorting import FlowRunSort

        chosen = FlowRunFilter.model_validate({"parent_flow_run_id": {"any_": [flow_run_id]}})
        runs = self.client.read_flow_runs(flow_run_filter=chosen, sort=FlowRunSort.START_TIME_ASC)
        return [run for run in runs if run.name.startswith(task)]

    def child(self, flow_run_id: str, task: str) -> FlowRun:
        """Return the one child run of a task."""
        (run,) = self.children(flow_run_id, task)
        return run

    def task_runs(self, flow_run_id: str, task: str) -> list[TaskRun]:
        """Return the task runs of a flow run by the name of the task, oldest first."""
        from prefect.client.schemas.filters import FlowRunFilter
        from prefect.client.schemas.sorting import TaskRunSort

        chosen = FlowRunFilter.model_validate({"id": {"any_": [flow_run_id]}})
        runs = self.client.read_task_runs(
            flow_run_filter=chosen, sort=TaskRunSort.EXPECTED_START_TIME_ASC, limit=200
        )
        return [run for run in runs if run.name.startswith(f"{task}-")]

    def task_run(self, task_run_id: str) -> TaskRun:
        """Return a task run."""
        return self.client.read_task_run(UUID(task_run_id))

    def history(self, task_run_id: str) -> list[tuple[str, str]]:
        """Return name and message of the states of a task run, once it has ended."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            answer = self.client.request("GET", "/task_run_states/", params={"task_run_id": task_run_id})
            states = sorted(answer.json(), key=lambda state: state["timestamp"])
            is_over = states and states[-1]["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
            if is_over or time.monotonic() > deadline:
                return [(state["name"], state["message"] or "") for state in states]
            time.sleep(0.2)

    def graph(self, flow_run_id: str) -> list[dict[str, Any]]:
        """Return the nodes of the graph of a flow run."""
        answer = self.client.request("GET", "/flow_runs/{id}/graph-v2", path_params={"id": flow_run_id})
        return [node for _, node in answer.json()["nodes"]]

    def logs(
        self, *, flow_run: str | UUID | None = None, task_run: str | UUID | None = None, has: str = ""
    ) -> list[str]:
        """Return the lines on the page of a flow run or of a task run, once one of them contains `has`."""
        from prefect.client.schemas.filters import LogFilter
        from prefect.client.schemas.sorting import LogSort

        ids = {"flow_run_id": flow_run, "task_run_id": task_run}
        chosen = LogFilter.model_validate({name: {"any_": [one]} for name, one in ids.items() if one})
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            page = self.client.read_logs(log_filter=chosen, limit=200, sort=LogSort.TIMESTAMP_ASC)
            lines = [line.message for line in page]
            if any(has in line for line in lines) or time.monotonic() > deadline:
                return lines
            time.sleep(0.2)


@contextmanager
def open_api(stack: DevStack) -> Iterator[Api]:
    """Give the API of a stack, whatever the settings of this process are."""
    from prefect.client.orchestration import SyncPrefectClient

    with SyncPrefectClient(api=stack.api_url) as client:
        yield Api(client=client)
