"""One elastic task run, from its arguments to its result: the driver's part in a gang on this machine."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, assert_never

from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging import get_run_logger
from prefect.settings import get_current_settings

from prefect_torch_elastic import compat, parcel, pickles
from prefect_torch_elastic.attempts import Action, decide_attempt
from prefect_torch_elastic.diagnosis import diagnose_run_timeout
from prefect_torch_elastic.errors import GangFailed, GangTimedOut, TransferError
from prefect_torch_elastic.evidence import parse_diagnosis
from prefect_torch_elastic.explanations import render_failure
from prefect_torch_elastic.local import GangCancelled, Launcher, launcher_environment, pool, run_gang
from prefect_torch_elastic.narration import Narrator
from prefect_torch_elastic.runfolder import (
    STORE_VARIABLE,
    AttemptFolder,
    create_attempt,
    render_run_key,
    resolve_store,
)
from prefect_torch_elastic.spec import (
    Spec,
    build_spec,
    fields_without_meaning_here,
    render_budgets,
)
from prefect_torch_elastic.wire import GangEnded, GangStatus, RunGang

LARGE_CALL_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What the task run asks for, resolved before anything starts."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spec: Spec
    run_key: str
    flow_run_id: str
    task_run_id: str
    store: Path
    owner: object | None
    cancelled: Callable[[], bool]
    retries: int
    log: Any


def launch_gang(
    run: TaskRunContext, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the body of an elastic task in a gang and return rank 0's value.

    Raises:
        GangFailed: If the gang ended without one; `__cause__` is the rank's own exception.
        TransferError: If function, arguments or result cannot travel.
    """
    return _run_attempts(_prepare(run, function, args, kwargs))


async def launch_gang_async(
    run: TaskRunContext, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`launch_gang` for async tasks: waits in a thread, and ends the gang before a cancellation goes on."""
    stop = threading.Event()

    def work() -> Any:
        return _run_attempts(_prepare(run, function, args, kwargs, also_stop=stop.is_set))

    # A thread of its own: the loop's few shared ones are for short calls, and a gang runs for hours.
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefect-torch-elastic gang")
    waiting = asyncio.get_running_loop().run_in_executor(thread, contextvars.copy_context().run, work)
    try:
        return await asyncio.shield(waiting)
    except BaseException:
        stop.set()
        while not waiting.done():  # a timeout cancels this again and again; the gang's end comes first
            with suppress(asyncio.CancelledError):
                await asyncio.shield(asyncio.wait([waiting]))
        with suppress(BaseException):
            waiting.result()
        raise
    finally:
        thread.shutdown(wait=False)


def _prepare(
    run: TaskRunContext,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    also_stop: Callable[[], bool] = lambda: False,
) -> _Call:
    task: Any = run.task
    fields = task.set_fields()
    spec = build_spec(fields)
    log = get_run_logger()
    if pointless := fields_without_meaning_here(fields, work_pool=None):
        names = ", ".join(f"`{name}`" for name in pointless)
        log.warning("The gang runs on this machine: %s has no effect here.", names)
    flow = FlowRunContext.get()
    runner = flow.task_runner if flow else None

    def cancelled() -> bool:
        return also_stop() or compat.task_cancel_requested(runner, run.task_run.id)

    task_run_id = str(run.task_run.id)
    return _Call(
        function=function,
        args=args,
        kwargs=kwargs,
        spec=spec,
        run_key=render_run_key(task.run_key, _name_arguments(function, args, kwargs)) or task_run_id,
        flow_run_id=str(run.task_run.flow_run_id or ""),
        task_run_id=task_run_id,
        store=resolve_store(
            spec.store, from_environment=os.environ.get(STORE_VARIABLE), home=get_current_settings().home
        ),
        owner=flow,
        cancelled=cancelled,
        retries=task.retries,
        log=log,
    )


def _run_attempts(call: _Call) -> Any:
    """Form gangs until one returns, fails for a reason of its own, or the budget is spent."""
    call.log.info(render_budgets(call.spec, retries=call.retries))
    used = 0
    while True:
        used += 1
        folder = create_attempt(call.store, call.run_key)
        ended, secret = _run_attempt(call, folder)
        try:
            if not (reason := _new_attempt(ended, used, call.spec)):
                return _conclude(call, ended, secret)
            call.log.warning("%s", reason)
        finally:
            folder.tidy()


def _new_attempt(ended: GangEnded, used: int, spec: Spec) -> str:
    """Return why another gang is formed after this one, empty when none is."""
    if ended.status is not GangStatus.FAILED:
        return ""
    diagnosis = parse_diagnosis(ended.diagnosis)
    decision = decide_attempt(diagnosis, attempt=used, max_attempts=spec.max_attempts)
    if decision.action is not Action.NEW_ATTEMPT:
        return ""
    return f"{diagnosis.summary} A new gang is formed: {decision.reason}."


def _run_attempt(call: _Call, folder: AttemptFolder) -> tuple[GangEnded, bytes]:
    secret = secrets.token_bytes(32)
    launcher: Launcher | None = None
    clean = False
    try:
        order = _write_order(call, folder, secret)
        launcher = pool.acquire(
            launcher_environment(order.environment, nproc_per_node=call.spec.nproc_per_node),
            owner=call.owner,
            log=folder.launcher_log,
        )
        ended = run_gang(
            launcher,
            order,
            listen=Narrator(call.log, call.spec, folder=folder.path),
            cancelled=call.cancelled,
            grace_seconds=call.spec.grace_seconds,
        )
        clean = True
        return ended, secret
    finally:
        # the flow's next gang starts warm on it; after an interruption nobody knows whether there is one
        if launcher is not None:
            pool.release(launcher, owner=call.owner if clean else None)
        if not clean:
            folder.tidy()


def _write_order(call: _Call, folder: AttemptFolder, secret: bytes) -> RunGang:
    here = os.getcwd()
    return RunGang(
        run_key=call.run_key,
        attempt=folder.number,
        folder=str(folder.path),
        call=str(folder.call),
        secret=secret.hex(),
        fields=asdict(call.spec),
        environment=launcher_environment({**os.environ, **call.spec.env}, nproc_per_node=1),
        directory=here,
        search_path=[entry or here for entry in sys.path if isinstance(entry, str)],  # pyright: ignore[reportUnnecessaryIsInstance]
        modules=_write_call(call, folder, secret),
        flow_run_id=call.flow_run_id,
        task_run_id=call.task_run_id,
    )


def _write_call(call: _Call, folder: AttemptFolder, secret: bytes) -> list[str]:
    """Write function and arguments for the ranks, once for all of them, and return the modules they name."""
    arguments = _name_arguments(call.function, call.args, call.kwargs)
    if on_gpu := pickles.find_cuda_arguments(arguments):
        names = ", ".join(f"`{name}`" for name in on_gpu)
        call.log.warning("CUDA tensors in %s travel as CPU tensors; move them in the ranks.", names)
    try:
        size, modules = parcel.write_call(folder.call, (call.function, call.args, call.kwargs), key=secret)
    except TransferError as error:
        raise pickles.name_culprit(call.function, arguments) from error
    if size > LARGE_CALL_BYTES:
        call.log.warning(
            "The arguments are %.1f GiB, written to disk for the ranks. Pass a path or a URL instead.",
            size / 2**30,
        )
    return modules


def _conclude(call: _Call, ended: GangEnded, secret: bytes) -> Any:
    match ended.status:
        case GangStatus.SUCCEEDED:
            return _read_result(Path(ended.result), secret)
        case GangStatus.TIMED_OUT:
            diagnosis = diagnose_run_timeout(call.spec.run_timeout_seconds or 0.0)
            raise GangTimedOut(render_failure(diagnosis, restarts=ended.restarts), diagnosis)
        case GangStatus.STOPPED:
            raise GangCancelled("the gang was stopped before it returned")
        case GangStatus.FAILED:
            raise _failure(ended, secret)
        case _:
            assert_never(ended.status)


def _read_result(path: Path, secret: bytes) -> Any:
    try:
        return parcel.read_parcel(path, key=secret)
    except TransferError:
        raise
    except Exception as error:  # any error: loading runs code of the user's classes
        raise TransferError(
            f"the result of rank 0 cannot be loaded in the flow: {type(error).__name__}: {error}. "
            "Install here what it needs, or return a path or plain data."
        ) from error


def _failure(ended: GangEnded, secret: bytes) -> Exception:
    diagnosis = parse_diagnosis(ended.diagnosis)
    cause: BaseException | None = None
    if ended.error:
        with suppress(Exception):  # an exception whose class cannot be made here: its text says it all
            cause = parcel.read_parcel(Path(ended.error), key=secret)
    if isinstance(cause, TransferError) and str(cause) == diagnosis.exc_message:
        return cause
    failure = GangFailed(render_failure(diagnosis, restarts=ended.restarts), diagnosis)
    failure.__cause__ = cause
    return failure


def _name_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
