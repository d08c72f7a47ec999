"""What goes wrong on purpose: refused and lost answers, missing rights, and watches that break."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from tests.simulators.kubernetes.refusals import ApiError

ANY = "*"


class Break(StrEnum):
    """How a watch breaks."""

    DROP = "drop"
    """The connection is reset in the middle of a chunk."""
    STALL = "stall"
    """It stays open, and nothing comes any more."""
    GARBAGE = "garbage"
    """A line that is no JSON comes; then it goes on."""
    GONE = "gone"
    """An ERROR event with 410, then the end."""


@dataclass
class _Planned:
    verb: str
    plural: str
    times: int
    error: ApiError | None = None
    loses_answer: bool = False


_REASONS = {
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


class Faults:
    """Faults by verb (`get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, `deletecollection`) and
    plural (with the subresource: `pods/log`); `*` stands for all. All is well until told otherwise.
    """  # noqa: D205

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planned: list[_Planned] = []
        self._denied: set[tuple[str, str]] = set()
        self._breaks: list[tuple[str, Break]] = []
        self.wake_watches: Callable[[], None] = lambda: None
        """Set by the server: watches look for their break now."""

    def fail(
        self,
        verb: str,
        plural: str,
        *,
        status: int = 500,
        times: int = 1,
        text: str = "",
        reason: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        """Refuse the next `times` requests, before anything is done."""
        error = ApiError(
            text or f"simulated fault of {verb} {plural}",
            status=status,
            reason=reason or _REASONS.get(status, "InternalError"),
            retry_after_seconds=retry_after_seconds,
        )
        with self._lock:
            self._planned.append(_Planned(verb, plural, times, error=error))

    def lose_answers(self, verb: str, plural: str, *, times: int = 1) -> None:
        """Do what the next requests ask, and close the connection instead of answering."""
        with self._lock:
            self._planned.append(_Planned(verb, plural, times, loses_answer=True))

    def deny(self, verb: str, plural: str) -> None:
        """Take a right away: requests are forbidden, and access reviews say so."""
        with self._lock:
            self._denied.add((verb, plural))

    def break_watches(self, plural: str, how: Break | str, *, times: int = 1) -> None:
        """Break `times` watches of a kind: open ones now, else those that come next."""
        with self._lock:
            self._breaks += [(plural, Break(how))] * times
        self.wake_watches()

    def is_denied(self, verb: str, plural: str) -> bool:
        """Return whether a right is taken away."""
        with self._lock:
            return any((v, p) in self._denied for v in (verb, ANY) for p in (plural, ANY))

    def take_break(self, plural: str) -> Break | None:
        """Return how the asking watch breaks now, if it does; it counts as one of the `times`."""
        with self._lock:
            for index, (wanted, how) in enumerate(self._breaks):
                if wanted in (plural, ANY):
                    del self._breaks[index]
                    return how
        return None

    def take(self, verb: str, plural: str) -> tuple[ApiError | None, bool]:
        """Return what happens to a request: an error, and whether its answer gets lost."""
        with self._lock:
            for planned in self._planned:
                if planned.verb in (verb, ANY) and planned.plural in (plural, ANY):
                    planned.times -= 1
                    if planned.times <= 0:
                        self._planned.remove(planned)
                    return planned.error, planned.loses_answer
        return None, False
