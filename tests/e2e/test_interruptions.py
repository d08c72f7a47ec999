"""A gang is stopped, or its flow sleeps or dies, at an awkward moment: nothing is lost, nothing is left.

While the other tests of this file run, the process of one flow is stopped; the last test wakes it up.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.conftest import ScriptRunner
from tests.gangs import Driver, Job, find_gang, kill, lives, read_marks, serve_driver, wait_until_gone

ASLEEP_SECONDS = 40.0
STOP_SECONDS = 6.0  # to end what has no ranks yet, on two busy cores

# `heard` has the lines of all task runs, with the task's name.
EAR = """
import logging

class Ear(logging.Handler):
    def emit(self, record):
        heard.append((record.task_name, record.getMessage()))

heard, ear = [], Ear()
logging.getLogger("prefect.task_runs").addHandler(ear)
"""


# ---------------------------------------------------------------- the flow's process sleeps

FLOOD = """
@elastic_task(name="long", nproc_per_node=2, max_restarts=1, grace_seconds=2)
def train_long():
    context = get_context()
    mark_rank()
    wait_for("asleep")
    while not (FOLDER / "awake").exists():
        if context.rank == 0:
            logging.getLogger("flood").warning("x" * 2000)
        time.sleep(0.005)
        if context.rank == 1 and context.restart_count == 0:
            time.sleep(2.0)  # the channel is full by now
            raise ValueError("once")
    return context.restart_count

@elastic_task(name="short", nproc_per_node=1, max_restarts=0)
def train_short():
    mark("short")
    wait_for("asleep")
    for _ in range(400):
        logging.getLogger("flood").warning("x" * 2000)
        time.sleep(0.005)
    return "ended while nobody read"

@flow
def main():
    runs = [train_long.submit(), train_short.submit()]
    return [run.result() for run in runs]

def missed(name):
    lines = [line for task_name, line in heard if task_name == name and "are missing here" in line]
    return sum(int(line.split()[0]) for line in lines)

RESULT = main(), missed("long"), missed("short")
logging.getLogger("prefect.task_runs").removeHandler(ear)
"""


@dataclass(frozen=True, kw_only=True)
class Sleeper:
    """A flow whose process is stopped while its gangs go on."""

    job: Job
    stopped_at: float


@pytest.fixture(scope="module", autouse=True)
def sleeper(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sleeper]:
    """A stopped flow of two gangs: the ranks of one have started again since, those of the other returned."""
    folder = tmp_path_factory.mktemp("sleeper")
    with serve_driver(ScriptRunner(folder=folder), folder) as driver:
        job = driver.submit(EAR + FLOOD)
        job.pids("rank-0-*", 2)
        short = job.pids("short", 1)
        kill(driver.pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        (job.folder / "asleep").write_text("")
        job.pids("rank-1-*", 2, timeout_seconds=20.0)
        wait_until_gone(short, 20.0)
        yield Sleeper(job=job, stopped_at=stopped_at)
        kill(driver.pid, signal.SIGCONT)


# ---------------------------------------------------------------- a stop before there are ranks


def test_stop_right_after_the_order_ends_the_gang(driver: Driver):
    text = """
@elastic_task(nproc_per_node=2, grace_seconds=60, timeout_seconds=0.2)
def train():
    mark_rank()

@flow
def main():
    started = time.monotonic()
    state = train(return_state=True)
    return state.name, time.monotonic() - started, pids_of("rank-*")

RESULT = main()
"""
    name, seconds, ranks = driver.run(text)
    assert (name, ranks) == ("TimedOut", [])
    assert seconds < 4.0 + STOP_SECONDS, "a launcher needs seconds to import torch, and then ends at once"


def test_slow_import_is_named_after_a_while_and_can_be_cancelled(driver: Driver):
    text = """
module = f"slow_{os.getpid()}_{int(time.time())}"
(FOLDER / f"{module}.py").write_text(f'''
import os, time
from pathlib import Path

def scale(x):
    return 2 * x

if os.getpid() != {os.getpid()}:
    Path({str(FOLDER)!r}, f"importing-{{os.getpid()}}").write_text(str(os.getpid()))
    time.sleep(25)
''')

@elastic_task(nproc_per_node=2, grace_seconds=60)
async def train(scale):
    mark_rank()
    return scale(1)

async def cancel(run):
    started = time.monotonic()
    run.cancel()
    try:
        await run
    except asyncio.CancelledError:
        return time.monotonic() - started

async def until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, heard
        await asyncio.sleep(0.05)

@flow
async def main():
    import importlib
    scale = importlib.import_module(module).scale
    early, late = [asyncio.create_task(train(scale)) for _ in range(2)]
    await until(lambda: len(list(FOLDER.glob("importing-*"))) == 2, 30)
    importing_at = time.monotonic()
    await asyncio.sleep(1.0)
    stops = [await cancel(early)]
    await until(lambda: any("Still importing" in line for _, line in heard), 20)
    warned = time.monotonic() - importing_at
    stops.append(await cancel(late))
    return stops, warned, [line for _, line in heard if "Still importing" in line], pids_of("rank-*")

sys.path.insert(0, str(FOLDER))
try:
    RESULT = module, asyncio.run(main())
finally:
    sys.path.remove(str(FOLDER))
    logging.getLogger("prefect.task_runs").removeHandler(ear)
"""
    module, (stops, warned, warnings, ranks) = driver.run(EAR + text)
    assert 8.0 < warned < 15.0
    assert warnings == [f"Still importing `{module}`, ahead of the ranks."]
    assert max(stops) < STOP_SECONDS
    assert ranks == []


# ---------------------------------------------------------------- the flow's process dies

HELD = """
@elastic_task(nproc_per_node=2, grace_seconds=1, store=str(FOLDER / "store"))
def train(argument):
    mark_rank()
    time.sleep(300)

@flow
def main():
    run = train.submit("argument")
    wait_for("rank-0-0")
    wait_for("rank-0-1")
    if (child := os.fork()) == 0:
        time.sleep(300)
        os._exit(0)
    mark("holder", child)
    run.result()

RESULT = main()
"""


def test_kill_of_the_flow_process_leaves_nothing_when_a_child_of_it_holds_the_channel(driver: Driver):
    job = driver.submit(HELD)
    (holder,) = job.pids("holder", 1)
    gang = find_gang(job.pids("rank-0-*", 2))
    assert len(list((job.folder / "store").rglob("call"))) == 1
    kill(driver.pid)
    try:
        wait_until_gone([*gang.ranks, *gang.agents, *gang.servers, gang.launcher], STOP_SECONDS)
        assert lives(holder)
    finally:
        kill(holder)
    assert list((job.folder / "store").rglob("call")) == []


# ---------------------------------------------------------------- the sleeping flow wakes up


def test_flow_that_slept_gets_the_result_and_the_number_of_lines_that_it_missed(sleeper: Sleeper):
    time.sleep(max(0.0, sleeper.stopped_at + ASLEEP_SECONDS - time.monotonic()))
    ranks = read_marks(sleeper.job.folder, "rank-1-*", 2)
    assert all(lives(rank) for rank in ranks)
    kill(sleeper.job.driver.pid, signal.SIGCONT)
    (sleeper.job.folder / "awake").write_text("")
    results, missed_long, missed_short = sleeper.job.wait()
    assert results == [1, "ended while nobody read"]
    assert missed_long > 100
    assert missed_short > 100
