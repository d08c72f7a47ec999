"""This process's own flow run in the Prefect API: its begin, its stop, and its final state."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas import OrchestrationResult
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import SetStateStatus
from prefect.exceptions import ObjectNotFound
from prefect.logging.loggers import flow_run_logger
from prefect.settings import get_current_settings
from prefect.states import Cancelled, Crashed, Pending, Running

from prefect_torch_elastic.dispatch.mirror import MOST_MESSAGE
from prefect_torch_elastic.dispatch.phases import Phase
from prefect_torch_elastic.dispatch.polling import open_client
from prefect_torch_elastic.dispatch.stopping import STOP_LABEL
from prefect_torch_elastic.hosting.asking import PATIENCE_SECONDS, Outage, ask_api
from prefect_torch_elastic.hosting.leftovers import RUN_VARIABLE
from prefect_torch_elastic.hosting.runlines import flush_lines, show_lines_on_task
from prefect_torch_elastic.hosting.stops import DELETED, SIGNALLED, Stop, StopCause, decide_stop
from prefect_torch_elastic.hosting.watching import RunWatcher

SIGNALS = (signal.SIGTERM, signal.SIGINT)  # a worker that shuts down or cancels; Ctrl-C in its terminal
_WAIT_SECONDS = 1.0
_SHOW_SECONDS = 5.0
_WORD_SECONDS = 2.0  # how long the final state waits for a phase that is being shown
_LAST_LOOK_SECONDS = 3.0  # of the seconds before SIGKILL most are for the report


class OwnRun:
    """The flow run that this process carries out.

    Attributes:
        id: Of the flow run.
        run: The flow run as it was read last, None before `begin`.
        stop: Why it has to stop, None while it goes on.
        signalled_at: When this process was asked to end by a signal (`time.monotonic()`), None if it was not.
        reported: Whether the API needs no final state from here any more, so that the process may leave with
            code 0. A worker takes any other code for a crash.
        outage: Tells the log when the API goes away and when it is back.
    """

    def __init__(self, run_id: UUID) -> None:
        self.id = run_id
        self.run: FlowRun | None = None
        self.stop: Stop | None = None
        self.signalled_at: float | None = None
        self.reported = False
        self.outage = Outage(lambda sentence: self.logger.warning("%s", sentence))
        self._begun = self._ending = False
        self._word = threading.Lock()  # of what is told about the run's state
        self._watcher: RunWatcher | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> OwnRun:
        """Return the flow run that a worker started this process for; asks nobody.

        Raises:
            SystemExit: If no worker has; the message says what is missing.
        """
        text = environment.get(RUN_VARIABLE, "")
        try:
            run_id = UUID(text)
        except ValueError:
            raise SystemExit(
                f"`{RUN_VARIABLE}={text}` is not the id of a flow run. This program is a job of a Prefect "
                "work pool: a worker starts it and sets that variable."
            ) from None
        if not get_current_settings().api.url:
            raise SystemExit(
                f"`PREFECT_API_URL` is not set, so nobody can be told how flow run `{run_id}` goes. "
                "Set it in the environment of the worker, or in the job variables of its pool."
            )
        return cls(run_id)

    @property
    def name(self) -> str:
        """Name of the run; its id before `begin`."""
        return self.run.name if self.run else str(self.id)

    @property
    def logger(self) -> logging.LoggerAdapter[Any]:
        """Logger of the run: its lines show on the run's page, and on the task's after `show_on_task`."""
        return flow_run_logger(flow_run=self.run, flow_run_id=self.id)

    def show_on_task(self, task_run_id: str, task_run_name: str) -> None:
        """From now on every line of this run's log, the body's too, shows on this task run's page as well."""
        show_lines_on_task(str(self.id), task_run_id, task_run_name)

    def begin(self) -> bool:
        """Report Running; False when the run is cancelled or over already, and there is nothing to do."""
        state = ask_api(self._begin, outage=self.outage)
        return state is not None and state.is_running()

    @contextmanager
    def watch(self) -> Generator[None]:
        """Learn of stops meanwhile, from the API and by signals, and send heartbeats.

        Only for the main thread, after `begin`. Keep `end` and `flush` inside: a worker that cancels sends
        SIGTERM some time later, and takes a process that dies of it for a crash.
        """
        assert self.run, "begin() comes first"
        before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            with RunWatcher(self.run, look=self._look, outage=self.outage) as self._watcher:
                yield
        finally:
            self._watcher = None
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop_requested(self) -> bool:
        """Whether the run has to stop: cancelled, over, deleted, or this process was asked to end."""
        return self.stop is not None

    @property
    def stop_reason(self) -> str:
        """Why, as half a sentence; empty while the run goes on."""
        return self.stop.reason if self.stop else ""

    def note_signal(self) -> None:
        """Take note of a signal from outside; does nothing that a signal handler must not do."""
        self.signalled_at = self.signalled_at or time.monotonic()
        self.stop = self.stop or SIGNALLED
        if self._watcher:
            self._watcher.look_now()  # a worker that cancels sends SIGTERM too, and the API knows which it is

    def stopped_state(self) -> State[Any]:
        """Return the final state of a run that was stopped: Cancelled, or Crashed after a signal."""
        assert self.stop, "the run goes on"
        if self.stop.cause is StopCause.SIGNAL:
            try:
                with open_client(timeout_seconds=_LAST_LOOK_SECONDS) as client:
                    self._look(client)
            except Exception as error:  # noqa: BLE001  (then the signal is all that is known)
                self.logger.debug("Who sent the signal cannot be asked: %s", error)
        make = Crashed if self.stop.cause is StopCause.SIGNAL else Cancelled
        return make(message=f"Stopped: {self.stop.reason}.")

    def show(self, phase: Phase, message: str) -> None:
        """Name the state of the run after a phase as long as it runs; raises what the client raises.

        Not forced: the server keeps a run that is being cancelled, or is over, as it is.
        """
        with self._word, open_client(timeout_seconds=_SHOW_SECONDS) as client:
            if not self._ending and self.stop is None:
                client.set_flow_run_state(self.id, Running(name=str(phase), message=message[:MOST_MESSAGE]))

    def end(
        self,
        state: State[Any],
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Report the final state; repeats while the API is away. A run that is over already stays as it is.

        A run that is being cancelled becomes Cancelled, whatever `state` says. When the API stays away longer
        than the patience, or refuses, the log has an error and `reported` stays False.

        Args:
            state: The final state.
            patience_seconds: How long to repeat.
            give_up: Whether to stop repeating; it is asked several times a second.
        """
        self._ending = True
        if self._word.acquire(timeout=_WORD_SECONDS):  # no phase after the end; the server keeps the end too
            self._word.release()
        try:
            held = ask_api(
                lambda client: self._end(client, state),
                outage=self.outage,
                patience_seconds=patience_seconds,
                give_up=give_up,
            )
        except Exception as error:  # noqa: BLE001  (the way out of the process does not depend on it)
            self.logger.error(
                "The final state `%s` cannot be reported: %s: %s", state.name, type(error).__name__, error
            )
            return
        self.reported = True
        if held is not None and held.type != state.type:
            self.logger.info("The run stays `%s`; `%s` was not reported.", held.name, state.name)

    def flush(self) -> None:
        """Hand logs and events to the API before the process leaves; gives up after some seconds."""
        flush_lines()

    def _handle(self, number: int, frame: Any) -> None:  # noqa: ARG002  (the signature of a handler)
        self.note_signal()

    def _look(self, client: SyncPrefectClient) -> None:
        """Take note of what the API says about a stop; it knows more than a signal."""
        state = self._fetch_state(client)
        stop = DELETED if state is None else decide_stop(state, asked=self._asked_to_stop())
        if stop and not self._ending and (self.stop is None or self.stop.cause is StopCause.SIGNAL):
            self.stop = stop
            self.logger.warning("Stopping: %s.", stop.reason)

    def _asked_to_stop(self) -> str:
        return str(self.run.labels.get(STOP_LABEL, "")) if self.run else ""

    def _fetch_state(self, client: SyncPrefectClient) -> State[Any] | None:
        """Return the state that the API has, None for a run that was deleted."""
        try:
            self.run = client.read_flow_run(self.id)
        except ObjectNotFound:
            return None
        return self.run.state or Pending()

    def _begin(self, client: SyncPrefectClient) -> State[Any] | None:
        state = self._fetch_state(client)
        if state is None:
            return None
        if state.is_cancelling():
            self._propose(client, Cancelled(message="Cancelled before it started."))
            return None
        if state.is_final() or (state.is_running() and self._begun):  # our own word, whose answer was lost
            return state
        self._begun = True
        answer = self._propose(client, Running())
        if answer.status is not SetStateStatus.ACCEPT:
            self.logger.warning("The Prefect API does not let this run start: %s", answer.details)
        return self._fetch_state(client)

    def _end(self, client: SyncPrefectClient, wanted: State[Any]) -> State[Any] | None:
        """Bring the run to its final state and return that one; None when the run was deleted."""
        for force in (False, False, True):  # somebody may be quicker than we are, or a rule may refuse
            held = self._fetch_state(client)
            if held is None or held.is_final():
                return held
            state = wanted
            if held.is_cancelling() and not wanted.is_cancelled():
                state = Cancelled(message=held.message)
            if self._propose(client, state, force=force).status is SetStateStatus.ACCEPT:
                return state
        return held

    def _propose(
        self, client: SyncPrefectClient, state: State[Any], *, force: bool = False
    ) -> OrchestrationResult[Any]:
        while True:
            answer = client.set_flow_run_state(self.id, state, force=force)
            if answer.status is not SetStateStatus.WAIT:
                return answer
            time.sleep(_WAIT_SECONDS)
