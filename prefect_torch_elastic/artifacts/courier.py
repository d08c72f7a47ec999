"""A thread that brings what is to be published, so that whoever has it to say waits for nobody.

It is a daemon, and nothing that fails in it reaches the gang: an API that is away costs one line of the log,
and gets the newest of everything when it is back.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable

from prefect_torch_elastic.artifacts.schedule import Schedule

MAX_OUTAGES = 3  # of one piece of work while others are taken: the fault is in it
RETRY_SECONDS = 15.0
LAST_RETRY_SECONDS = 0.25  # while somebody waits for the last word
_NEVER = float("inf")

Work = Callable[[], None]
_logger = logging.getLogger(__name__)


class Courier:
    """Does pieces of work one after the other in its own thread, which starts with the first one.

    Args:
        name: Of the thread.
        tell: Called with a sentence when the other side is away, or does not accept something.
        name_outage: Returns what an error met if the other side was away, empty if it means something else.
        leave: Called in the thread when it ends.
        retry_seconds: How long to wait after an outage.
    """

    def __init__(
        self,
        name: str,
        *,
        tell: Callable[[str], object],
        name_outage: Callable[[BaseException], str],
        leave: Work = lambda: None,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._name, self._tell, self._name_outage, self._leave = name, tell, name_outage, leave
        self._retry_seconds = retry_seconds
        self._change = threading.Condition()
        self._schedule: Schedule[Work] = Schedule()
        self._thread: threading.Thread | None = None
        self._pause_until = 0.0
        self._deadline = _NEVER  # set when it closes
        self._is_away = False
        self._refused: set[str] = set()
        self._done = 0
        self._outages: dict[str, tuple[int, int]] = {}  # of each slot: how many, and `_done` at the last

    def post(self, slot: str, work: Work, *, every_seconds: float = 0.0) -> None:
        """Let a piece of work be done; it replaces one of the same slot that was not begun yet.

        Args:
            slot: What it is about.
            work: It; errors of it are reported and end there.
            every_seconds: Not more often than this.
        """
        with self._change:
            if self._deadline < _NEVER:
                return
            is_new = self._schedule.put(slot, work, now=time.monotonic(), every_seconds=every_seconds)
            if self._thread is None:
                context = contextvars.copy_context()  # Prefect's settings are in there
                serve = threading.Thread(target=context.run, args=[self._serve], name=self._name, daemon=True)
                serve.start()
                self._thread = serve  # not of one that could not start: the next post tries again
            if is_new:  # a newer version is due when the one before was
                self._change.notify()

    def drop(self, slot: str) -> None:
        """Forget work that was not begun yet."""
        with self._change:
            self._schedule.drop(slot)

    def close(self, *, within_seconds: float) -> bool:
        """Do what waits now, and end; what takes longer than this is given up.

        Returns:
            Whether all of it was done.
        """
        with self._change:
            self._deadline = time.monotonic() + within_seconds
            self._pause_until = 0.0
            self._schedule.hurry()
            self._change.notify()
            thread = self._thread
        if thread is not None:
            thread.join(within_seconds)
        return thread is None or (not thread.is_alive() and not len(self._schedule))

    def _serve(self) -> None:
        try:
            while (order := self._next()) is not None:
                self._do(*order)
        finally:
            self._leave()

    def _next(self) -> tuple[str, Work] | None:
        """Wait for something that is due; None when it is time to leave."""
        with self._change:
            while True:
                now = time.monotonic()
                if now >= self._deadline or (self._deadline < _NEVER and not len(self._schedule)):
                    return None
                paused = self._pause_until - now
                if paused <= 0 and (order := self._schedule.take(now)) is not None:
                    return order
                due = self._schedule.wait_seconds(now)
                waits = [due if due is not None else _NEVER, self._deadline - now]
                wait = max(min(waits), paused)
                self._change.wait(None if wait == _NEVER else wait)

    def _do(self, slot: str, work: Work) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  (the gang goes on whatever is wrong with its pages)
            self._note_error(slot, work, error)
        else:
            self._is_away = False
            self._done += 1
            self._outages.pop(slot, None)

    def _note_error(self, slot: str, work: Work, error: Exception) -> None:
        _logger.debug("`%s` failed", slot, exc_info=error)
        outage = self._name_outage(error)
        if outage and (count := self._count_outages(slot)) < MAX_OUTAGES:
            with self._change:
                closing = self._deadline < _NEVER
                pause = LAST_RETRY_SECONDS if closing else self._retry_seconds
                self._pause_until = time.monotonic() + pause
                self._schedule.put_back(slot, work)
            if count > 1:  # others are taken: nobody is away
                return
            if not self._is_away and not closing:
                self._tell(f"{outage}. The newest is sent when that is over; training goes on meanwhile.")
            self._is_away = True
        elif slot not in self._refused:
            self._refused.add(slot)
            self._tell(f"`{slot}` is not shown: {type(error).__name__}: {str(error)[:500]}")

    def _count_outages(self, slot: str) -> int:
        """Count an outage, unless nothing at all was taken since the slot's last one: then it still lasts."""
        count, done = self._outages.get(slot, (0, -1))
        count += self._done > done
        self._outages[slot] = count, self._done
        return count
