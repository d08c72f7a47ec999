"""Gangs under test: a driver that stays warm between scripts, and a gang's processes by their role.

A fresh driver imports Prefect for seconds. Tests that do not harm the driver share one.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from tests.conftest import RunningScript, ScriptRunner

# What every script of these tests starts with. A rank's mark is a file with its pid.
PREAMBLE = """
import asyncio, json, os, signal, subprocess, sys, threading, time
from pathlib import Path
from prefect import flow, task
from prefect_torch_elastic import GangFailed, GangTimedOut, elastic_task, get_context

FOLDER = Path({folder!r})

def mark(name, text=None):
    target = FOLDER / name
    temporary = target.with_suffix(".part")
    temporary.write_text(str(os.getpid() if text is None else text))
    temporary.rename(target)

def mark_rank(name="rank"):
    context = get_context()
    mark(f"{{name}}-{{context.restart_count}}-{{context.rank}}")

def wait_for(name, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (FOLDER / name).exists():
        assert time.monotonic() < deadline, f"{{name}} did not come"
        time.sleep(0.01)

def pids_of(pattern):
    return [int(path.read_text()) for path in sorted(FOLDER.glob(pattern)) if path.suffix != ".part"]

def lives(pid):
    try:
        return Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

def start_children():
    context = get_context()
    sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
    pids = [subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid]
    forked = os.fork()
    if forked == 0:
        time.sleep(300)
        os._exit(0)
    for kind, pid in zip(("execed", "setsid", "forked"), [*pids, forked]):
        mark(f"child-{{context.restart_count}}-{{context.rank}}-{{kind}}", pid)
"""

_SERVE = """
import gc, json, os, runpy, sys, time, traceback
from pathlib import Path
import prefect.main, prefect_torch_elastic.launch
folder, number, parent = Path(sys.argv[1]), 0, os.getppid()
while os.getppid() == parent:
    script = folder / f"{number}.py"
    if not script.exists():
        time.sleep(0.02)
        continue
    try:
        answer = {"value": runpy.run_path(str(script), run_name="__main__").get("RESULT")}
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    part = folder / f"{number}.part"
    part.write_text(json.dumps(answer))
    part.rename(folder / f"{number}.answer")
    number += 1
"""


def write_script(text: str, folder: Path) -> str:
    """Return the text of a script whose marks go to `folder`."""
    return PREAMBLE.format(folder=str(folder)) + text


@dataclass(kw_only=True)
class Job:
    """A script that a warm driver runs or has run."""

    driver: Driver
    number: int
    folder: Path

    def wait(self, timeout_seconds: float = 60.0) -> Any:
        """Return the script's `RESULT`, or fail the test with what it raised."""
        answer = self.wait_for_answer(timeout_seconds)
        if "error" in answer:
            pytest.fail(f"The script raised.\n{answer['traceback']}\n{self.driver.tail()}", pytrace=False)
        return answer["value"]

    def wait_for_answer(self, timeout_seconds: float = 60.0) -> dict[str, Any]:
        """Return `{"value": ...}` or `{"error": ..., "traceback": ...}`."""
        path = self.driver.jobs / f"{self.number}.answer"
        try:
            wait_until(lambda: path.exists() or not self.driver.alive, timeout_seconds)
        except TimeoutError:
            self.driver.script.end()
            pytest.fail(f"No answer after {timeout_seconds:g} s.\n{self.driver.tail()}", pytrace=False)
        if not path.exists():
            pytest.fail(f"The driver died.\n{self.driver.tail()}", pytrace=False)
        return json.loads(path.read_text())

    def pids(self, pattern: str, count: int, timeout_seconds: float = 60.0) -> list[int]:
        """Return the pids in the marks that match, once there are `count`."""
        return read_marks(self.folder, pattern, count, timeout_seconds=timeout_seconds)


@dataclass(kw_only=True)
class Driver:
    """A process that runs one script after the other, as a long-lived flow server does."""

    runner: ScriptRunner
    jobs: Path
    script: RunningScript = field(init=False)
    _count: int = 0

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start the process, again if it was ended."""
        self._count = 0
        self.jobs = self.jobs.with_name(f"{self.jobs.name}x")
        self.jobs.mkdir(parents=True)
        self.script = self.runner.start(_SERVE, args=[str(self.jobs)])

    @property
    def pid(self) -> int:
        return self.script.process.pid

    @property
    def alive(self) -> bool:
        return self.script.process.poll() is None

    def revive(self) -> None:
        """Start the process again if a test has ended it."""
        if not self.alive:
            self.start()

    def end_unfinished(self) -> None:
        """End the process if its last script still runs: the test that gave it has failed."""
        if self._count and not (self.jobs / f"{self._count - 1}.answer").exists():
            self.script.end()

    def submit(self, text: str) -> Job:
        """Give the driver a script and return at once; its marks go to a folder of its own."""
        self.revive()
        folder = self.jobs / f"marks-{self._count}"
        folder.mkdir()
        part = self.jobs / f"{self._count}.new"
        part.write_text(write_script(text, folder))
        part.rename(self.jobs / f"{self._count}.py")
        self._count += 1
        return Job(driver=self, number=self._count - 1, folder=folder)

    def run(self, text: str, timeout_seconds: float = 60.0) -> Any:
        """Run a script to its end and return its `RESULT`."""
        return self.submit(text).wait(timeout_seconds)

    def tail(self) -> str:
        """Return the last words of the driver and of the newest gang's launcher and agents."""
        logs = Path(os.environ["PREFECT_HOME"]).glob("torch-elastic/*/attempts/*/launcher.log")
        newest = max(logs, key=lambda log: log.stat().st_mtime, default=None)
        said = newest.read_text(errors="replace")[-4000:] if newest else ""
        return f"stderr:\n{self.script.stderr[-6000:]}\n{newest}:\n{said}"


@contextmanager
def serve_driver(runner: ScriptRunner, folder: Path) -> Iterator[Driver]:
    """A warm driver for the tests of one file."""
    driver = Driver(runner=runner, jobs=folder / "jobs")
    try:
        yield driver
    finally:
        driver.script.end()


@dataclass(frozen=True, kw_only=True)
class GangProcesses:
    """The pids of a running gang by role, found from its ranks upwards."""

    ranks: list[int]
    agents: list[int]
    servers: list[int]
    launcher: int


def find_gang(ranks: Iterable[int]) -> GangProcesses:
    """Return the processes around these ranks."""
    ranks = list(ranks)
    agents = sorted({psutil.Process(rank).ppid() for rank in ranks})
    return GangProcesses(
        ranks=ranks,
        agents=agents,
        servers=[
            child.pid
            for agent in agents
            for child in psutil.Process(agent).children()
            if child.pid not in ranks
        ],
        launcher=psutil.Process(agents[0]).ppid(),
    )


def read_marks(folder: Path, pattern: str, count: int, *, timeout_seconds: float = 60.0) -> list[int]:
    """Return the pids in the marks that match, once there are `count`."""

    def marks() -> list[Path]:
        return [path for path in sorted(folder.glob(pattern)) if path.suffix != ".part"]

    try:
        wait_until(lambda: len(marks()) >= count, timeout_seconds)
    except TimeoutError:
        names = [path.name for path in folder.iterdir()]
        pytest.fail(f"{count} marks `{pattern}` did not come in {timeout_seconds:g} s; there are {names}.")
    return [int(path.read_text()) for path in marks()]


def wait_until(condition: Callable[[], bool], timeout_seconds: float) -> float:
    """Return the seconds after which the condition held.

    Raises:
        TimeoutError: If it did not hold in time.
    """
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > timeout_seconds:
            raise TimeoutError
        time.sleep(0.01)
    return time.monotonic() - started


def wait_until_gone(pids: Iterable[int], timeout_seconds: float) -> float:
    """Return the seconds after which none of the processes ran any more, or fail the test."""
    pids = list(pids)
    try:
        return wait_until(lambda: not any(lives(pid) for pid in pids), timeout_seconds)
    except TimeoutError:
        left = [pid for pid in pids if lives(pid)]
        what = "\n".join(f"{pid}: {_describe(pid)}" for pid in left)
        pytest.fail(f"Alive after {timeout_seconds:g} s:\n{what}", pytrace=False)


def lives(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _describe(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{process.status()}, child of {process.ppid()}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error as error:
        return str(error)
