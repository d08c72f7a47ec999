"""Many gangs at once, in threads and in one event loop: none holds up another, and each gets its own call."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from prefect_torch_elastic import TorchElastic, elastic_task, get_context

if TYPE_CHECKING:
    from tests.e2e.conftest import LiveFlow

GANGS = 6
LATEST_TICK_SECONDS = 2.0  # two cores import torch six times meanwhile


async def test_gangs_of_async_tasks_leave_the_event_loop_and_its_threads_alone(
    prefect_server: str, no_leftovers: None
):
    ticks: list[float] = []

    @elastic_task(nproc_per_node=1)
    async def train(x: int) -> int:
        await asyncio.sleep(0.5)
        return 2 * x

    async def tick() -> None:
        while True:
            ticks.append(await asyncio.to_thread(time.monotonic))
            await asyncio.sleep(0.05)

    @flow
    async def main() -> list[int]:
        ticker = asyncio.create_task(tick())
        values = await asyncio.gather(*(train(x) for x in range(GANGS)))
        ticker.cancel()
        return values

    # fewer than gangs, on machines with many cores too
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=GANGS - 2))
    started = time.monotonic()
    assert await main() == [2 * x for x in range(GANGS)]
    moments = [started, *ticks, time.monotonic()]
    assert max(after - before for before, after in itertools.pairwise(moments)) < LATEST_TICK_SECONDS


async def test_async_task_looks_its_saved_block_up(prefect_server: str, no_leftovers: None):
    saving: Any = TorchElastic(nproc_per_node=2).save("async-gang", overwrite=True)
    await saving

    @elastic_task("torch-elastic/async-gang")
    async def train() -> int:
        return get_context().world_size

    @flow
    async def main() -> int:
        return await train()

    assert await main() == 2


def test_submit_runs_the_version_of_with_options(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=1, version="1")
    def train() -> int:
        return get_context().world_size

    def job() -> Any:
        runs = [task.submit() for task in (train, train.with_options(version="2"))]
        return [(run.result(), run.task_run_id) for run in runs]

    from prefect.client.orchestration import get_client

    results = in_flow(job)
    with get_client(sync_client=True) as client:
        versions = [client.read_task_run(task_run_id).task_version for _, task_run_id in results]
    assert [value for value, _ in results] == [1, 1]
    assert versions == ["1", "2"]


# What Prefect's loader and a notebook do: a module that no other process can import.
PRIVATE = """
from prefect_torch_elastic import elastic_task, get_context

FACTOR = 3

def scale(x):
    return FACTOR * x

@elastic_task(nproc_per_node=1)
def train(x, function):
    return scale(function(x)) * get_context().world_size
"""


class Together:
    """An argument that travels as a number, once all calls are about to send theirs."""

    def __init__(self, number: int, barrier: threading.Barrier) -> None:
        self.number, self.barrier = number, barrier

    def __reduce__(self) -> Any:
        self.barrier.wait(30.0)
        time.sleep(0.1 * self.number)  # the first has finished when the others go on
        return int, (self.number,)


def test_threads_send_functions_of_one_private_module_at_once(
    prefect_server: str, no_leftovers: None, monkeypatch: pytest.MonkeyPatch
):
    module: Any = ModuleType("__prefect_loader_4715__")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(PRIVATE, module.__dict__)
    barrier = threading.Barrier(4)
    arguments = [Together(number, barrier) for number in range(4)]

    @flow(task_runner=ThreadPoolTaskRunner(max_workers=4))  # pyright: ignore[reportArgumentType,reportCallIssue]
    def main() -> Any:
        return module.train.map(arguments, [module.scale] * 4).result()

    assert main() == [9 * number for number in range(4)]
