"""A plain function as the body of this process's flow run: called in Prefect's context, its end kept."""

from __future__ import annotations

import asyncio
import inspect
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

from prefect import Flow
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext
from prefect.states import Completed, Crashed, Failed, Running

from prefect_torch_elastic.dispatch.childruns import render_flow_name
from prefect_torch_elastic.hosting.asking import PATIENCE_SECONDS, rest
from prefect_torch_elastic.hosting.engine import run_in_async_engine, run_in_engine
from prefect_torch_elastic.hosting.interrupts import Interrupter
from prefect_torch_elastic.hosting.ownrun import OwnRun
from prefect_torch_elastic.hosting.settling import settle

LoadedCall = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class BodyEnd:
    """How a body ended.

    Attributes:
        value: What it returned. Futures and generators are what they give; a State that is completed stays.
        error: What it raised, SystemExit included; or the exception of a State that it returned.
        begun: Whether the function was loaded; if not, `error` says why.
        stopped: Whether the run had to stop meanwhile: a value or an error is not the function's own then.
        state: The final state that fits.
    """

    value: Any = None
    error: BaseException | None = None
    begun: bool = True
    stopped: bool = False
    state: State[Any]


def run_body(
    own: OwnRun,
    load: Callable[[], LoadedCall],
    *,
    task_name: str,
    grace_seconds: float,
    log_prints: bool | None = None,
) -> BodyEnd:
    """Call a function, sync or async, as the body of a run that has begun and is watched. Main thread only.

    Subtasks, subflows, `get_run_logger` and artifacts belong to the run. When the run has to stop, the body
    gets Prefect's TerminationSignal. One that has not ended after its grace ends with the whole process: what
    it started is killed, the state is reported, and this does not return.

    Args:
        own: The run.
        load: Returns the user's function and its arguments; it may be interrupted as the function may.
        task_name: Name of the task, for the log.
        grace_seconds: Between the signal in the body and the end of the process.
        log_prints: Whether printed lines go to the run's log; None leaves it to Prefect's settings.
    """
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "watch() comes first"
    if own.stop_requested():
        return BodyEnd(stopped=True, state=own.stopped_state())
    with Interrupter(own, grace_seconds=grace_seconds) as interrupter:
        try:
            interrupter.listen()
            function, args, kwargs = load()
            interrupter.deafen()
        except BaseException as error:  # noqa: BLE001  (it is handed out)
            interrupter.deafen()
            return _end_unloaded(own, error)
        if own.stop_requested():  # a module that is imported may have caught the signal
            return BodyEnd(stopped=True, state=own.stopped_state())
        body = _Body(own, function, args, kwargs, interrupter)
        flow = Flow(
            fn=body.call_async if body.is_async else body.call,
            name=render_flow_name(task_name),
            retries=0,
            persist_result=False,
            log_prints=log_prints,
            validate_parameters=False,
        )
        _drive(own, flow, body)
        return body.conclude()


def _end_unloaded(own: OwnRun, error: BaseException) -> BodyEnd:
    if own.stop_requested():
        return BodyEnd(begun=False, stopped=True, state=own.stopped_state())
    return BodyEnd(begun=False, error=error, state=render_failure(error))


def _drive(own: OwnRun, flow: Flow[Any, Any], body: _Body) -> None:
    """Run the body in the engine, which asks the API before it calls it: again, while that is away."""
    assert own.run, "begin() comes first"
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            run = own.run.model_copy()  # the watcher may have seen another state by now
            run.state, run.state_type, run.state_name = Running(), StateType.RUNNING, "Running"
            if body.is_async:
                asyncio.run(run_in_async_engine(flow, run, body.show_state))
            else:
                run_in_engine(flow, run, body.show_state)
        except BaseException as error:
            if body.over or own.stop_requested():  # the value is at hand, or nobody asks for it
                own.logger.debug("Prefect's engine ended with %s", type(error).__name__, exc_info=error)
                return
            if body.called or not own.outage.begins(error) or time.monotonic() >= until:
                raise
            rest(own.outage.next_pause(), own.stop_requested)
        else:
            return


@dataclass(eq=False)
class _Body:
    """The call of the function, and what came of it."""

    own: OwnRun
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    interrupter: Interrupter
    called: bool = False
    over: bool = False
    stopped: bool = False
    value: Any = None
    error: BaseException | None = None
    state: State[Any] | None = None

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function) or inspect.isasyncgenfunction(self.function)

    def call(self) -> None:
        self.called = True
        try:
            self.interrupter.listen()
            self.value = settle(self.function(*self.args, **self.kwargs))
            self.interrupter.deafen()
        except BaseException as error:  # noqa: BLE001  (it is handed out)
            self._fail(error)
        self._finish()

    async def call_async(self) -> None:
        self.called = True
        try:
            self.interrupter.listen()
            made = self.function(*self.args, **self.kwargs)
            self.value = settle([one async for one in made] if inspect.isasyncgen(made) else await made)
            self.interrupter.deafen()
        except BaseException as error:  # noqa: BLE001  (it is handed out)
            self._fail(error)
        self._finish()

    def _fail(self, error: BaseException) -> None:
        self.interrupter.deafen()
        self.error = error.with_traceback(_without_our_frames(error.__traceback__))

    def _finish(self) -> None:
        self.over, self.stopped = True, self.own.stop_requested()
        if self.stopped and (context := FlowRunContext.get()):
            cast("Any", context.task_runner).cancel_all()  # its tasks that have not begun
        elif self.error:
            self.own.logger.error(
                "Encountered exception during execution: %r", self.error, exc_info=self.error
            )
        self.state = self._choose_state()

    def _choose_state(self) -> State[Any]:
        if self.stopped:
            return self.own.stopped_state()
        return render_failure(self.error) if self.error else Completed()

    def show_state(self, proposed: State[Any]) -> State[Any]:
        """Return what the run's log shows as the end: the engine knows only that nothing was raised."""
        return self.state or proposed

    def conclude(self) -> BodyEnd:
        self.stopped = self.stopped or not self.over
        state = self.state or self._choose_state()  # a signal may have come right after the function's end
        if self.stopped:
            return BodyEnd(stopped=True, state=state)
        return BodyEnd(value=self.value, error=self.error, state=state)


def render_failure(error: BaseException) -> State[Any]:
    """Return the final state of a body that raised: Failed, or Crashed where Prefect says so too."""
    what = "".join(traceback.format_exception_only(error)).strip()
    match error:
        case SystemExit():
            return Crashed(
                message=f"The function called `sys.exit({error.code!r})`. "
                "Return from it instead, or raise an exception."
            )
        case Exception():
            return Failed(message=f"Flow run encountered an exception: {what}")
        case _:
            return Crashed(message=f"Execution was interrupted by an unexpected exception: {what}")


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the user's function on, all of it if nothing is left."""
    inner = trace
    while inner and inner.tb_frame.f_code.co_filename == __file__:
        inner = inner.tb_next
    return inner or trace
