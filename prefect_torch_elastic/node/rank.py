"""The main of a rank: load the call, run it, leave its result or its error, and go.

The same code runs in a process that was forked from a warm server and in a fresh interpreter
(see `coldstart`).
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from prefect_torch_elastic import compat, context, parcel, pickles
from prefect_torch_elastic.errors import ElasticError, NonRetryable, StopTraining, TransferError
from prefect_torch_elastic.node import coldstart, flightrecorder, processes, ranklog
from prefect_torch_elastic.rankstate import DUMP_SIGNAL, RankState

MESSAGE_CHARACTERS = 2_000
TRACEBACK_CHARACTERS = 20_000
HOLD_SECONDS = 2.0
RESULT_PATIENCE_SECONDS = 600.0
RESULT_PAUSE_SECONDS = 5.0
STOPPED_CODE = 143  # as after SIGTERM: never taken for a result
_OUR_FRAMES = os.path.dirname(os.path.abspath(__file__))
_log = logging.getLogger("prefect_torch_elastic.rank")


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """What an agent tells a rank.

    Attributes:
        call: Path of the parcel with function and arguments, verified by the agent.
        secret: HMAC key for the parcels that the rank writes, as hex.
        prefix: Path and file name start of all that the rank writes (`….result`, `….error`, `….stacks`).
        search_path: `sys.path` of the flow.
        threads: Threads for torch's operators; 0 takes the cores that the process may use.
        collective_timeout_seconds: Default timeout of process groups; None leaves torch's.
        non_retryable: Dotted names of exceptions that end all retries.
        storage: Where the run's checkpoints are and what their policy is; empty without a run folder.
    """

    call: str
    secret: str
    prefix: str
    search_path: list[str]
    threads: int
    collective_timeout_seconds: float | None
    non_retryable: list[str]
    storage: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class ErrorRecord:
    """What a rank says about its own exception; a file `….error.json` that exists is complete."""

    stage: str
    exc_type: str
    exc_message: str
    traceback: str
    non_retryable: bool
    raised_at: float
    parcel: str


def run_rank(spec: dict[str, Any], fds: list[int]) -> int:
    """Run one rank; `fds` are its log (stdout and stderr), its page, and the socket for its news.

    Returns:
        The exit code.
    """
    order = RankOrder(**spec)
    log, page, news = fds
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    processes.redirect_output(log)
    state = RankState(page)
    context.bind(state, order.storage, announce=lambda saved: _tell_saved(news, saved))
    os.close(page)
    stacks = open(f"{order.prefix}.stacks", "a", opener=_private)  # noqa: SIM115  (for its last words)
    faulthandler.enable(stacks)
    faulthandler.register(DUMP_SIGNAL, stacks, all_threads=True, chain=False)  # C level: needs no GIL
    _tell(news, "ready")
    flightrecorder.start_listening(news, order.prefix, state)
    ranklog.start_logging(sys.stdout)
    ranklog.patch_get_run_logger()
    _prepare(order)
    code = _run(order, news)
    _finish()
    _tell(news, "exit")
    return code & 0xFF


def _prepare(order: RankOrder) -> None:
    """Undo what a fork shares and a fresh interpreter would not: random state, thread counts, search path."""
    sys.path[:] = order.search_path or sys.path
    sys.argv[:] = ["prefect-torch-elastic rank"]
    random.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(order.threads or len(os.sched_getaffinity(0)))
        torch.default_generator.seed()  # torch seeds once per import: all ranks would draw the same numbers
    if order.collective_timeout_seconds is not None:
        compat.set_default_collective_timeout(order.collective_timeout_seconds)


def _run(order: RankOrder, news: int) -> int:
    stage = "load"
    is_leader = os.environ["RANK"] == "0"  # user code may change its environment
    try:
        function, args, kwargs = parcel.read_parcel(Path(order.call), key=None)
        stage = "run"
        _tell(news, "start")
        value, left_early = _call(function, args, kwargs)
        stage = "checkpoint"
        context.close_checkpoints()  # waits for the last upload
        if left_early or context.stop_was_carried_out():
            if is_leader:
                _log.info("The ranks have stopped as asked. What the function returned is no result.")
            _tell(news, "stopped")
            return STOPPED_CODE
        stage = "result"
        if is_leader:
            _write_result(order, value)
        _tell(news, "returned")
    except BaseException as error:  # noqa: BLE001  (everything that a rank raises is told)
        _tell(news, "raised")
        _write_error(order, error, stage, news)
        _tell(news, "recorded")
        _hold()
        return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    return 0


def _call(function: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
    """Return the function's value, and whether it was left because of a stop."""
    try:
        value = function(*args, **kwargs)
        return (asyncio.run(value) if inspect.iscoroutine(value) else value), False
    except SystemExit as error:  # in a script `sys.exit()` is a normal end; its value is None
        if error.code not in (None, 0):
            raise
        return None, False
    except StopTraining as error:
        if not context.stop_was_requested():
            raise ElasticError(
                "the function raised `StopTraining`, but nobody asked this gang to stop. Return from the "
                "function to end the training early; `save_if_due` raises `StopTraining` itself."
            ) from error
        return None, True


def _write_result(order: RankOrder, value: Any) -> None:
    """Leave the value; a disk that is away is waited for, as all of the training hangs on it."""
    deadline, said = time.monotonic() + RESULT_PATIENCE_SECONDS, False
    while True:
        try:
            parcel.write_parcel(Path(f"{order.prefix}.result"), value, key=bytes.fromhex(order.secret))
            return
        except TransferError as error:
            raise TransferError(
                f"rank 0 returned a value (`{pickles.type_name(value)}`) that cannot be sent to the flow: "
                f"{error}. Return a path or plain data."
            ) from error
        except OSError as error:
            if time.monotonic() >= deadline:
                raise
            if not said:
                _log.warning("The result cannot be written, which is tried again for a while: %s", error)
            said = True
        time.sleep(RESULT_PAUSE_SECONDS)


def _write_error(order: RankOrder, error: BaseException, stage: str, news: int) -> None:
    text = _render_traceback(error)
    with contextlib.suppress(ValueError, OSError):  # user code may have closed them
        sys.stdout.flush()
        sys.stderr.write(text)
    path = f"{order.prefix}.error"
    try:
        parcel.write_parcel(Path(path), error, key=bytes.fromhex(order.secret))
    except Exception:  # noqa: BLE001  (it holds a lock or a socket: its text travels, it does not)
        path = ""
    record = ErrorRecord(
        stage=stage,
        exc_type=type(error).__name__,
        exc_message=_cut(_text_of(error), MESSAGE_CHARACTERS),
        traceback=_cut(text, TRACEBACK_CHARACTERS),
        non_retryable=_is_non_retryable(error, order.non_retryable),
        raised_at=time.monotonic(),
        parcel=path,
    )
    target = Path(f"{order.prefix}.error.json")
    temporary = target.with_suffix(".tmp")
    try:
        with open(temporary, "w", opener=_private) as file:
            file.write(json.dumps(asdict(record)))
        temporary.replace(target)
    except OSError:  # the disk is full: what fits goes to the agent through the pipe
        short = replace(
            record,
            exc_message=_cut(record.exc_message, 500),
            traceback=_cut(record.traceback, 1000),
            parcel="",
        )
        with contextlib.suppress(OSError):
            os.write(news, f"lost {json.dumps(asdict(short))}\n".encode())


def _private(path: str, flags: int) -> int:
    """Open a file that only its owner may read: a traceback may hold values of arguments."""
    return os.open(path, flags, 0o600)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  (a `__str__` of user code)
        return "<str() failed>"


def _cut(text: str, limit: int) -> str:
    """Keep the start and the end: the text becomes part of a state, which Prefect sends to its API."""
    if len(text) <= limit:
        return text
    half = limit // 2
    gap = f"[{len(text) - 2 * half} characters left out, see the log of the rank]"
    return f"{text[:half]}\n{gap}\n{text[-half:]}"


def _is_non_retryable(error: BaseException, names: list[str]) -> bool:
    if isinstance(error, NonRetryable):
        return True
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    kinds |= {kind.__qualname__ for kind in type(error).__mro__ if kind.__module__ == "builtins"}
    return not kinds.isdisjoint(names)


def _render_traceback(error: BaseException) -> str:
    """The traceback without our own frames at its start: the user's code comes first."""
    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_code.co_filename.startswith(_OUR_FRAMES):
        shown = shown.tb_next
    return "".join(traceback.format_exception(type(error), error, shown or error.__traceback__))


class _Released(BaseException):
    pass


def _hold() -> None:
    """Keep the sockets open until the agent has looked at the other ranks (its SIGTERM), a while at most.

    Otherwise their collectives fail at once, and their stacks show the unwinding instead of the wait.
    """

    def release(*_: object) -> None:
        raise _Released

    with contextlib.suppress(_Released, ValueError):
        signal.signal(signal.SIGTERM, release)
        time.sleep(HOLD_SECONDS)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _finish() -> None:
    """End like a script: join threads (the agent bounds that), run exit handlers, flush.

    The interpreter itself is left by `os._exit`: C++ destructors of a process group hang after a fork.
    """
    try:
        compat.run_exit_handlers()
    except BaseException:  # noqa: BLE001  (the result is out already; the log has the reason)
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):
            stream.flush()


def _tell(news: int, word: str) -> None:
    with contextlib.suppress(OSError):
        os.write(news, f"{word} {time.monotonic()}\n".encode())


def _tell_saved(news: int, saved: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.write(news, f"saved {json.dumps(saved)}\n".encode())


if __name__ == "__main__":
    coldstart.run_as_child(run_rank)
