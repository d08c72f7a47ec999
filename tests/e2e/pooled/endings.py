"""The flows of `test_pool_endings.py`: steps that go on until somebody stops them.

python endings.py FOLDER FLOW...
"""

import asyncio
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from answers import describe
from prefect import flow, task
from prefect.runtime import flow_run

from prefect_torch_elastic import elastic_task, pool_task

GRACE_SECONDS = 3
LIMIT_SECONDS = 60  # two busy cores take their time to start a driver and its step
NOBODY = "nobody"  # a pool without a worker


def mark(folder: str, name: str) -> None:
    """Leave the pid of this process, as a whole file."""
    part = Path(folder, f"{name}.part")
    part.write_text(str(os.getpid()))
    part.rename(Path(folder, name))


def read(folder: str, name: str) -> None:
    """Wait for a mark."""
    deadline = time.monotonic() + 120
    while not Path(folder, name).exists():
        assert time.monotonic() < deadline, f"`{name}` did not come"
        time.sleep(0.1)


def last(folder: str, name: str, *, stubborn: bool) -> None:
    """Go on for ever; a stubborn one ignores whatever it is told."""
    mark(folder, name)
    while True:
        try:
            time.sleep(300)
        except BaseException:
            if not stubborn:
                raise
            mark(folder, f"{name}-was-asked")


@elastic_task(nproc_per_node=1, work_pool="train", grace_seconds=GRACE_SECONDS, retries=1)
def train(folder: str, name: str = "rank", stubborn: bool = False) -> None:
    """Be a gang that trains."""
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a body is interrupted by an exception
    last(folder, name, stubborn=stubborn)


@pool_task(work_pool="data", grace_seconds=GRACE_SECONDS, retries=1)
def work(folder: str, name: str = "body", stubborn: bool = False) -> str:
    """Be a data step."""
    last(folder, name, stubborn=stubborn)
    return "worked"


@pool_task(work_pool="data", grace_seconds=GRACE_SECONDS, retries=1)
async def work_async(folder: str) -> None:
    """Be one that waits."""
    mark(folder, "body")
    await asyncio.sleep(300)


@pool_task(work_pool="data", grace_seconds=4 * GRACE_SECONDS)
def nest(folder: str) -> None:
    """Be a step that calls a gang."""
    mark(folder, "body")
    train(folder)


@flow
def direct(folder: str) -> None:
    """Call a gang."""
    mark(folder, f"flow-{flow_run.id}")
    train(folder, stubborn=True)
    mark(folder, "went-on")


@flow
def both(folder: str) -> None:
    """Submit a gang, a body that does not stop, and a step that nobody runs; look at none of them."""
    mark(folder, f"flow-{flow_run.id}")
    futures = [
        train.submit(folder),
        work.submit(folder, stubborn=True),
        work.with_options(work_pool=NOBODY, name="late").submit(folder),
    ]
    mark(folder, "submitted")
    time.sleep(300)
    mark(folder, "went-on")
    for future in futures:
        future.wait()


@flow
async def awaited(folder: str) -> None:
    """Await a body."""
    mark(folder, f"flow-{flow_run.id}")
    await work_async(folder)
    mark(folder, "went-on")


@flow
def outer(folder: str) -> None:
    """Call a flow that calls a step which calls a gang."""
    mark(folder, f"flow-{flow_run.id}")
    inner(folder)
    mark(folder, "went-on")


@flow
def inner(folder: str) -> None:
    """Be the flow between."""
    nest(folder)


def outcome_of(future: Any) -> dict[str, Any]:
    """Return how a task run ended."""
    future.wait()
    value = future.result(raise_on_failure=False)
    return {
        "state": future.state.name,
        "task_run_id": str(future.task_run_id),
        "error": describe(value),
    }


@flow
def timeouts(folder: str) -> dict[str, Any]:
    """Let a gang and a body take too long; somebody cancels the runs of the other two."""
    mark(folder, f"flow-{flow_run.id}")
    limit: dict[str, Any] = {"timeout_seconds": LIMIT_SECONDS, "retries": 0}
    futures = {
        "train": train.with_options(**limit).submit(folder),
        "work": work.with_options(**limit).submit(folder, stubborn=True),
        "submitted": train.with_options(name="submitted").submit(folder, name="submitted"),
    }
    try:
        work.with_options(name="called")(folder, name="called")
        called: Any = "went on"
    except Exception as error:  # noqa: BLE001  (the tests look at it)
        called = describe(error)
    return {"called": called, **{name: outcome_of(future) for name, future in futures.items()}}


@task
def fail(folder: str) -> None:
    """Be the step that fails while another one trains."""
    read(folder, "sibling")
    raise ValueError("on purpose")


@flow
def failing(folder: str) -> None:
    """Fail while a gang trains."""
    mark(folder, f"flow-{flow_run.id}")
    train.submit(folder, name="sibling")
    fail.submit(folder).result()


@flow(timeout_seconds=LIMIT_SECONDS)
def limited(folder: str) -> None:
    """Take too long."""
    mark(folder, f"flow-{flow_run.id}")
    train(folder)
    mark(folder, "went-on")


if __name__ == "__main__":
    by_name: dict[str, Any] = {
        one.name: one for one in (direct, both, awaited, outer, timeouts, failing, limited)
    }
    for name in sys.argv[2:]:
        print(f"--- {name}")
        own = Path(sys.argv[1], name)
        own.mkdir()
        try:
            made = by_name[name](str(own))
            value = asyncio.run(made) if asyncio.iscoroutine(made) else made
        except Exception:  # noqa: BLE001  (the next one runs)
            traceback.print_exc()
            value = None
        part = Path(sys.argv[1], f"{name}.part")
        part.write_text(json.dumps(value))
        part.rename(Path(sys.argv[1], f"{name}.json"))
