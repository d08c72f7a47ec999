"""Requests to the Prefect API that outlive its absence, with one line in the log before and after."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from prefect.client.orchestration import SyncPrefectClient

from prefect_torch_elastic.dispatch.polling import describe_outage, open_client

PATIENCE_SECONDS = 1800.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 10.0
_TICK_SECONDS = 0.2

T = TypeVar("T")


class Outage:
    """Absences of the API, told once when one begins and once when it is over, whoever of us asks."""

    def __init__(self, tell: Callable[[str], Any]) -> None:
        self._tell = tell
        self._since: float | None = None
        self._pause = _FIRST_PAUSE_SECONDS

    def begins(self, error: BaseException) -> bool:
        """Take note of an error; False when it has nothing to do with an absence."""
        if not (what := _describe(error)):
            return False
        if self._since is None:
            self._since = time.monotonic()
            self._tell(f"The Prefect API is away ({what}). It is asked again and again; the work goes on.")
        return True

    def ends(self) -> None:
        """Take note of an answer."""
        since, self._since, self._pause = self._since, None, _FIRST_PAUSE_SECONDS
        if since is not None:
            self._tell(f"The Prefect API is back after {time.monotonic() - since:.0f} s.")

    def next_pause(self) -> float:
        """Return how long to wait before the next request, longer each time."""
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        return pause


def _describe(error: BaseException | None) -> str:
    """Return what a request met; Prefect may have put an error of its own around it."""
    while error is not None:
        if what := describe_outage(error):
            return what
        error = error.__cause__
    return ""


def ask_api(
    work: Callable[[SyncPrefectClient], T],
    *,
    outage: Outage,
    patience_seconds: float = PATIENCE_SECONDS,
    give_up: Callable[[], bool] = lambda: False,
) -> T:
    """Return what `work` gets from the API, however long that is away.

    Args:
        work: Asks; it may be called several times.
        outage: Tells when the API goes away and when it is back.
        patience_seconds: After this the error of the last request is raised.
        give_up: Whether to raise it now; it is asked several times a second.
    """
    until = time.monotonic() + patience_seconds
    while True:
        try:
            with open_client() as client:
                answer = work(client)
        except Exception as error:
            left = until - time.monotonic()
            if not outage.begins(error) or left <= 0 or give_up():
                raise
            rest(min(outage.next_pause(), left), give_up)
        else:
            outage.ends()
            return answer


def rest(seconds: float, give_up: Callable[[], bool]) -> None:
    """Sleep, but no longer than until `give_up` says so."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and not give_up():
        time.sleep(min(left, _TICK_SECONDS))
