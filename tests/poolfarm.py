"""A Prefect server and a worker that a test may kill, stop and start again, and flow runs that live on them.

`DevStack` ends as a whole when one of its parts does, which is right for it and of no use here.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from prefect_torch_elastic.dev.plan import (
    StackPlan,
    add_python_path,
    render_addresses,
    render_environment,
    scrub_environment,
)
from prefect_torch_elastic.dispatch.childruns import NUMBER_LABEL
from tests.conftest import RunningScript, ScriptRunner
from tests.leftovers import describe, marked_processes
from tests.poolruns import Api

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

POOL = "train"
START_SECONDS = 120.0
STEP_SECONDS = 90.0  # two busy cores need half a minute to start a gang
SETTLE_SECONDS = 15.0

_WORKER = f"""
import asyncio, signal
from prefect.workers.process import ProcessWorker

async def main():
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    for number in (signal.SIGTERM, signal.SIGINT):  # `prefect worker start` makes SIGINT of SIGTERM
        loop.add_signal_handler(number, task.cancel)
    options = dict(work_pool_name={POOL!r}, prefetch_seconds=1, heartbeat_interval_seconds=10)
    await ProcessWorker(name="worker", **options).start()

asyncio.run(main())
"""


@dataclass
class Farm:
    """A server that keeps its port, and a worker of the pool `train`.

    Attributes:
        plan: Their folders.
        port: Of the server; 0 takes a free one at the first start.
        parts: The processes that run, `server` and `worker`.
    """

    plan: StackPlan
    port: int = 0
    parts: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict[str, Any])

    @property
    def environment(self) -> dict[str, str]:
        """The variables that point a process here."""
        given = add_python_path(scrub_environment(os.environ))
        return {**given, **render_environment(self.plan, self.port, given)}

    def open_client(self) -> SyncPrefectClient:
        from prefect.client.orchestration import SyncPrefectClient

        return SyncPrefectClient(api=render_addresses(self.port)[0])

    def start_server(self) -> None:
        """Start the server, and return when it answers."""
        reading, writing = os.pipe()
        with socket.socket() as listening:  # then it is the server's alone: a dead one refuses connections
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(("127.0.0.1", self.port))
            listening.listen(128)
            self.port = listening.getsockname()[1]
            arguments = [str(listening.fileno()), str(writing), str(os.getpid())]
            program = ["-m", "prefect_torch_elastic.dev.programs.server", *arguments]
            self._start("server", program, fds=(listening.fileno(), writing))
        os.close(writing)
        answered = bool(select.select([reading], [], [], START_SECONDS)[0]) and os.read(reading, 4096)
        os.close(reading)
        assert answered, (self.plan.logs / "server.log").read_text()[-4000:]

    def start_worker(self) -> None:
        """Start the worker; some seconds later it takes what waits in the pool."""
        self._start("worker", ["-c", _WORKER])

    def end(self, part: str, number: int) -> None:
        """Send a signal to the server or to the worker, and wait for its end."""
        self.parts[part].send_signal(number)
        self.parts.pop(part).wait(30)

    def host(self) -> psutil.Process:
        """Return the first process of the one job that runs."""
        (found,) = [process for process in self.job_processes() if "--call" in describe(process)]
        return found

    def job_processes(self, driver: RunningScript | None = None) -> list[psutil.Process]:
        """Return all processes of jobs: what is of this farm, and neither a part nor the driver."""
        known = {part.pid for part in self.parts.values()} | ({driver.process.pid} if driver else set())
        ours = [process for process in marked_processes().values() if self._has(process)]
        return [process for process in ours if process.pid not in known]

    def leftovers(self) -> list[str]:
        """Return what must not be there when no flow runs: processes, calls in the store, private folders."""
        passing = ("call-", "code-", "order-", "alive-")
        left = [f"{process.pid}: {describe(process)[:300]}" for process in self.job_processes()]
        left += [str(path) for path in self.plan.home.rglob("calls/*/*") if path.name.startswith(passing)]
        return left + [str(path) for path in (self.plan.home / "prefect/torch-elastic-jobs").glob("*")]

    def close(self) -> None:
        for process in self.parts.values():
            process.kill()
            process.wait()

    def _has(self, process: psutil.Process) -> bool:
        """Whether a process is one of this farm, and not of a stack that other tests share."""
        with suppress(psutil.Error):
            return process.environ().get("PREFECT_HOME") == str(self.plan.home / "prefect")
        return False

    def _start(self, part: str, program: list[str], fds: tuple[int, ...] = ()) -> None:
        with (self.plan.logs / f"{part}.log").open("ab") as log:
            self.parts[part] = subprocess.Popen(
                [sys.executable, "-P", *program],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self.plan.home,
                pass_fds=fds,
                start_new_session=True,
            )


@dataclass
class Story:
    """One flow run of a script: its drivers, one after the other, and what its steps note.

    The script gets the flow's name, the id of the flow run, a folder, and the limits. Its steps append
    documents to `<folder>/notes`, and end when there is a file `<folder>/end-<name>`.

    Attributes:
        still, lost: Seconds for which a sign of life may stand still (`dispatch.verdicts`).
    """

    farm: Farm
    script: Path
    folder: Path
    flow: str
    still: float = 30.0
    lost: float = 120.0
    run_id: str = ""
    driver: RunningScript | None = None

    def start(self) -> None:
        """Start a driver; the second one runs the same flow run again."""
        self.run_id = self.run_id or self._create_run()
        self._runner = ScriptRunner(folder=self.folder / f"driver-{time.monotonic_ns()}")
        args = [self.flow, self.run_id, str(self.folder), str(self.still), str(self.lost)]
        self.driver = self._runner.start(self.script.read_text(), args=args, env=self.farm.environment)

    def kill_driver(self) -> None:
        """Kill the driver with -9."""
        assert self.driver
        self.driver.process.kill()
        self.driver.process.wait()
        self.driver = None

    def let_end(self, *names: str) -> None:
        """Let steps end."""
        for name in names:
            (self.folder / f"end-{name}").touch()

    def notes(self, what: str, name: str) -> list[dict[str, Any]]:
        """Return what a step has noted of one kind."""
        path = self.folder / "notes"
        notes = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [note for note in notes if (note["what"], note["name"]) == (what, name)]

    def wait_for(self, what: str, name: str, *, more: int = 1) -> list[dict[str, Any]]:
        """Wait until a step notes something, again if it has done so before."""
        count = len(self.notes(what, name)) + more
        self.until(lambda: len(self.notes(what, name)) >= count, f"`{what}` of `{name}`")
        return self.notes(what, name)

    def children(self, step: str = "") -> list[FlowRun]:
        """Return the child runs, of one step if it is named, in the order of their calls."""
        with self.farm.open_client() as client:
            runs = Api(client=client).children(self.run_id, step)
        return sorted(runs, key=lambda run: (run.name, run.labels[NUMBER_LABEL]))

    def wait_for_child(self, number: int) -> float:
        """Wait for the child with this number, and return how many seconds that took."""
        began = time.monotonic()
        self.until(lambda: len(self.children()) > number, f"child {number}")
        return time.monotonic() - began

    def until(self, look: Callable[[], object], what: str) -> None:
        """Wait until `look` is true, or fail with what the driver said."""
        deadline = time.monotonic() + STEP_SECONDS
        while not look():
            is_over = self.driver is not None and self.driver.process.poll() is not None
            if time.monotonic() > deadline or (is_over and not look()):
                raise AssertionError(f"{what} did not come:\n{self.said()[-6000:]}")
            time.sleep(0.1)

    def said(self) -> str:
        """Return what the driver has said."""
        return self.driver.stderr if self.driver else ""

    def result(self) -> Any:
        """Return what the flow returned."""
        assert self.driver
        ended = self.driver.wait(STEP_SECONDS)
        assert "RESULT" in ended.stdout, ended.stderr[-6000:]
        return json.loads(ended.stdout.split("RESULT", 1)[1])

    def close(self) -> None:
        if self.driver:
            self.driver.end()

    def _create_run(self) -> str:
        from prefect import Flow

        with self.farm.open_client() as client:
            return str(client.create_flow_run(Flow(fn=lambda: None, name=self.flow)).id)
