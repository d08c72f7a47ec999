"""One task run that launches its body elsewhere, from its arguments to its result: the driver's part."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from prefect.context import TaskRunContext
from prefect.exceptions import TerminationSignal
from prefect.logging import get_run_logger

from prefect_torch_elastic.aging import tidy
from prefect_torch_elastic.calls import Call, prepare_call, probe_result_storage
from prefect_torch_elastic.cancelling import conclude_stop
from prefect_torch_elastic.conclusions import conclude, find_value
from prefect_torch_elastic.errors import StoreError
from prefect_torch_elastic.formation import run_attempts
from prefect_torch_elastic.local import GangCancelled
from prefect_torch_elastic.payload import PythonPayload

FORGET_SECONDS = 10.0  # the result is there: nobody waits minutes for what can go later


def launch(
    run: TaskRunContext, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the body of a task in a gang, or in a work pool, and return its value (of a gang rank 0's).

    Raises:
        GangFailed: If the gang ended without one; `__cause__` is the rank's own exception.
        PoolRunFailed: If a pool's job ended without one.
        TransferError: If function, arguments or result cannot travel.
    """
    try:
        return _launch(run, function, args, kwargs)
    except (GangCancelled, TerminationSignal) as error:
        return conclude_stop(error)


async def launch_async(
    run: TaskRunContext, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`launch` for async tasks: waits in a thread, and ends the gang before a cancellation goes on."""
    stop = threading.Event()

    def work() -> Any:
        return _launch(run, function, args, kwargs, also_stop=stop.is_set)

    # A thread of its own: the loop's few shared ones are for short calls, and a gang runs for hours.
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefect-torch-elastic gang")
    waiting = asyncio.get_running_loop().run_in_executor(thread, contextvars.copy_context().run, work)
    try:
        return await asyncio.shield(waiting)
    except GangCancelled as error:
        return conclude_stop(error)
    except BaseException as error:
        stop.set()
        while not waiting.done():  # a timeout cancels this again and again; the gang's end comes first
            with suppress(asyncio.CancelledError):
                await asyncio.shield(asyncio.wait([waiting]))
        with suppress(BaseException):
            waiting.result()
        if isinstance(error, asyncio.CancelledError):
            return conclude_stop(error)
        raise
    finally:
        thread.shutdown(wait=False)


def _launch(
    run: TaskRunContext,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    also_stop: Callable[[], bool] = lambda: False,
) -> Any:
    payload = PythonPayload(function=function, args=args, kwargs=kwargs, warn=get_run_logger().warning)
    with prepare_call(run, payload, also_stop=also_stop) as call:
        if found := find_value(call):
            _forget_sent(call)
            return found.value
        probe_result_storage(run)
        try:
            value = _run(run, call, payload)
        finally:
            own = call.record.store if call.place.is_default else None
            # not a daemon: the flow may end right after its only gang
            threading.Thread(target=tidy, args=[call.place.local], kwargs={"own": own}).start()
        if run.persist_result:
            call.log.info(
                "The result is kept in `%s` too: a retry finds it there if Prefect cannot persist it.",
                f"{call.record.store.url}/{call.identity.folder}",
            )
        return value


def _run(run: TaskRunContext, call: Call, payload: PythonPayload) -> Any:
    if call.spec.work_pool is None:
        return run_attempts(call, lambda ended, attempt: conclude(call, ended, attempt))
    from prefect_torch_elastic.dispatch.driver import run_in_pool

    return run_in_pool(run, call, payload)


def _forget_sent(call: Call) -> None:
    """Remove what a driver that was killed had sent to a pool: function and arguments, of no use any more."""
    if call.spec.work_pool is not None:
        from prefect_torch_elastic.dispatch.sending import forget_call

        with suppress(StoreError):  # what is left is removed with the run
            call.patience.wait_for(lambda: forget_call(call), seconds=FORGET_SECONDS)
