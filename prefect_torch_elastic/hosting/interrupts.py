"""How a body that has to stop is ended: first by an exception, after its grace together with the process."""

from __future__ import annotations

import contextvars
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from prefect.exceptions import TerminationSignal

from prefect_torch_elastic import compat
from prefect_torch_elastic.hosting import leftovers
from prefect_torch_elastic.hosting.ownrun import SIGNALS, OwnRun
from prefect_torch_elastic.hosting.stops import StopCause
from prefect_torch_elastic.pod import GRACE_VARIABLE

# A process worker sends SIGKILL 30 s after SIGTERM, and so does a plain pod: keep 5 s to report how it ended.
SIGNAL_GRACE_SECONDS = 25.0
_REPORT_SECONDS = 10.0
_HARD_MARGIN_SECONDS = 30.0  # reporting and flushing are done long before
_TICK_SECONDS = 0.1


class Interrupter(AbstractContextManager["Interrupter"]):
    """Ends a body in the main thread when its run has to stop.

    Args:
        own: The run, watched.
        grace_seconds: Between the exception in the body and the end of the process.
    """

    def __init__(self, own: OwnRun, *, grace_seconds: float) -> None:
        self._own, self._grace_seconds = own, grace_seconds
        self._born = leftovers.start_tick(os.getpid())
        self._main = threading.main_thread().ident or 0
        self._over = threading.Event()
        self._before: dict[signal.Signals, Any] = {}
        self._listening = False
        self._raised = False
        self._sent = self._sent_cancellation = False
        context = contextvars.copy_context()  # of Prefect's settings, for the last report
        self._thread = threading.Thread(target=context.run, args=[self._serve], name="stopper", daemon=True)

    def __enter__(self) -> Interrupter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self._sent_cancellation:
            compat.forget_cancellation()

    def listen(self) -> None:
        """From now on raise TerminationSignal in the main thread, once, when the run has to stop."""
        assert threading.current_thread() is threading.main_thread(), "signals interrupt the main thread only"
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._listening = True

    def deafen(self) -> None:
        """Raise nothing any more; may be called twice."""
        self._listening = False
        while self._before:
            signal.signal(*self._before.popitem())

    def _handle(self, number: int, _: Any) -> None:
        if self._sent:
            self._sent = False
        else:
            self._own.note_signal()
        if self._listening and not self._raised:  # a second one would break into the body's `finally`
            self._raised = True
            raise TerminationSignal(signal=number)

    def _serve(self) -> None:
        while not self._own.stop_requested():
            if self._over.wait(_TICK_SECONDS):
                return
        began = time.monotonic()
        self._arm(self._deadline(began) - began)
        while not self._over.wait(_TICK_SECONDS):
            self._interrupt()
            if time.monotonic() >= self._deadline(began):
                self._end_process(time.monotonic() - began)
        faulthandler.cancel_dump_traceback_later()

    def _interrupt(self) -> None:
        """Wake the main thread with a signal, unless it was woken already."""
        if self._listening and not self._raised and not self._sent:
            self._sent = True
            if self._own.stop and self._own.stop.cause is StopCause.CANCELLED:
                self._sent_cancellation = True
                compat.note_cancellation()  # for the tasks of the body
            signal.pthread_kill(self._main, signal.SIGTERM)

    def _deadline(self, began: float) -> float:
        deadline = began + self._grace_seconds
        if self._own.signalled_at is None:
            return deadline
        if GRACE_VARIABLE in os.environ:  # a pod of ours has its whole grace, and more to report
            return min(deadline, self._own.signalled_at + self._grace_seconds)
        return min(deadline, self._own.signalled_at + SIGNAL_GRACE_SECONDS)

    def _arm(self, seconds: float) -> None:
        """End the process even if the body never lets go of the interpreter's lock."""
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(
                max(seconds, 0) + _HARD_MARGIN_SECONDS, exit=True, file=sys.__stderr__
            )

    def _end_process(self, waited: float) -> None:
        """Kill what the body started, report, and leave; the main thread is in the body and stays there."""
        own = self._own
        own.logger.warning(
            "The function did not end within %.0f s and is killed with its processes. It was here:\n%s",
            waited,
            describe_stack(self._main),
        )
        leftovers.kill_started(str(own.id), since=self._born, until=leftovers.now_tick())
        own.end(own.stopped_state(), patience_seconds=_REPORT_SECONDS)
        own.flush()
        os._exit(0 if own.reported else 1)


def describe_stack(thread: int) -> str:
    """Return where a thread is, its innermost call first."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        stacks = file.read().split("\n\n")
    mine = next((stack for stack in stacks if f"0x{thread:016x}" in stack.partition("\n")[0]), "")
    return "\n".join(mine.splitlines()[1:]) or "(unknown)"
