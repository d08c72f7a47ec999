"""The workers of a stack: a process for each pool, forked from one that has imported Prefect once.

This process ends as soon as they are forked; the supervisor adopts them, and knows how each of them ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
import traceback
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.plugins import load_prefect_collections
from prefect.settings import get_current_settings
from prefect.workers.base import BaseWorker
from prefect.workers.process import ProcessWorker

from prefect_torch_elastic.dev.plan import name_worker
from prefect_torch_elastic.dev.programs.report import Event, Report, bind_to_supervisor
from prefect_torch_elastic.node.processes import redirect_output

_LOOK_SECONDS = 0.002


@dataclass(frozen=True, kw_only=True)
class _Stack:
    """What all workers of a stack share.

    Attributes:
        logs: Folder of the logs.
        pipe: Where they report.
        supervisor: Who adopts them.
        turn: A pipe with one byte in it; who has read the byte may start. Each start writes to the database
            several times, and SQLite refuses what three workers write at once.
    """

    logs: Path
    pipe: int
    supervisor: int
    turn: tuple[int, int]


def main(pools: Mapping[str, str], logs: Path, pipe: int, supervisor: int) -> None:
    """Fork a worker for each pool."""
    os.set_inheritable(pipe, False)
    kinds = {kind: _find_class(kind) for kind in sorted(set(pools.values()))}
    stack = _Stack(logs=logs, pipe=pipe, supervisor=supervisor, turn=os.pipe())
    os.write(stack.turn[1], b"1")
    forker = os.getpid()
    for pool, kind in pools.items():
        if os.fork() == 0:
            _become_worker(kinds[kind], pool, stack, forker)


def _find_class(kind: str) -> type[BaseWorker[Any, Any, Any]]:
    if kind == ProcessWorker.type:
        return ProcessWorker
    load_prefect_collections()
    if (found := BaseWorker.get_worker_class_from_type(kind)) is None:
        known = ", ".join(f"`{name}`" for name in BaseWorker.get_all_available_worker_types())
        sys.exit(f"no worker of the type `{kind}` is installed. There are: {known}.")
    return found


def _become_worker(kind: type[BaseWorker[Any, Any, Any]], pool: str, stack: _Stack, forker: int) -> None:
    """Turn a forked process into the worker of a pool; never returns."""
    code = 1
    try:
        name = name_worker(pool)
        redirect_output(os.open(stack.logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        os.setsid()  # a signal to the group of a worker reaches what it started, and no other part
        while os.getppid() == forker:
            time.sleep(_LOOK_SECONDS)
        bind_to_supervisor(stack.supervisor)
        random.seed()
        Report(part=name, event=Event.STARTED, pid=os.getpid()).send(stack.pipe)
        _wait_for_api()
        os.read(stack.turn[0], 1)
        asyncio.run(_work(kind, pool, stack))
        code = 0
    except SystemExit as end:
        print(end, file=sys.stderr)  # noqa: T201
    except BaseException:  # noqa: BLE001  (the last frame of a process: nobody above could say it)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


async def _work(kind: type[BaseWorker[Any, Any, Any]], pool: str, stack: _Stack) -> None:
    name = name_worker(pool)
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    settings = get_current_settings()
    worker = kind(
        name=name,
        work_pool_name=pool,
        prefetch_seconds=settings.worker.prefetch_seconds,
        heartbeat_interval_seconds=int(settings.worker.heartbeat_seconds),
    )

    def say(line: str) -> None:
        # Prefect says `started` once the pool exists and the server knows this worker.
        print(line, flush=True)  # noqa: T201
        if line.endswith("started!"):
            os.write(stack.turn[1], b"1")
            Report(part=name, event=Event.READY, pid=os.getpid()).send(stack.pipe)

    try:
        await worker.start(printer=say)
    except asyncio.CancelledError:
        print(f"{name} was asked to stop", flush=True)  # noqa: T201


def _wait_for_api() -> None:
    """Ask once: until the server is up the request waits in its queue, however long that takes."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{get_current_settings().api.url}/health"):
        return


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
