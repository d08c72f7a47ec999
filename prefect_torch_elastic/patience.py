"""Waiting for a store that may be away: the task's log says so, and a cancelled task gives it up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from prefect_torch_elastic.errors import StoreError
from prefect_torch_elastic.local import GangCancelled

SAY_AFTER_SECONDS = 5.0
_TICK_SECONDS = 0.2  # between two looks whether the task is cancelled

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How a task run waits for its store.

    Attributes:
        url: The store, without secrets.
        warn: The task run's logger.
        cancelled: Whether the task was asked to stop; it is asked several times a second.
    """

    url: str
    warn: Callable[..., Any]
    cancelled: Callable[[], bool]

    def wait_for(self, work: Callable[[], T], *, seconds: float | None = None) -> T:
        """Return what `work` returns, which runs in a thread; one that is given up goes on there.

        Args:
            work: Uses the store, which has deadlines of minutes.
            seconds: Wait no longer than this, cancelled or not; None waits as long as the store does.

        Raises:
            StoreError: If it takes longer than `seconds`, or `work` says so.
            GangCancelled: If the task was asked to stop meanwhile.
        """
        done: Future[T] = Future()
        threading.Thread(target=_carry_out, args=[work, done], name="run-folder", daemon=True).start()
        started, said = time.monotonic(), False
        while not wait([done], timeout=_TICK_SECONDS).done:
            waited = time.monotonic() - started
            if seconds is not None and waited >= seconds:
                raise StoreError(
                    f"`{self.url}` has not answered for {seconds:.0f} s. "
                    "See whether it can be reached from the machine of the flow."
                )
            if seconds is None and self.cancelled():
                raise GangCancelled("the task was asked to stop while it waited for its store")
            if not said and waited >= SAY_AFTER_SECONDS:
                said = True
                self.warn(
                    "The store `%s` has not answered for %.0f s. It is asked for some minutes more; then the "
                    "task goes on without it or fails, and says why.",
                    self.url,
                    waited,
                )
        return done.result()


def _carry_out(work: Callable[[], T], done: Future[T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001  (whatever it is, it belongs to who waits)
        done.set_exception(error)
