"""When what is to be published is due: the newest of each kind, not too often, and never too much. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

MAX_WAITING = 100  # kinds; whoever makes more of them than this has gone wild

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Entry(Generic[T]):
    item: T
    due: float


class Schedule(Generic[T]):
    """Items that wait, one for each slot; all times come from one clock, in seconds."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Entry[T]] = {}
        self._taken_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, slot: str, item: T, *, now: float, every_seconds: float = 0.0) -> bool:
        """Let an item wait; it replaces the one that waits in its slot, and is due when that was.

        Args:
            slot: What it is a version of.
            item: It.
            now: The time.
            every_seconds: It is due that long after the slot's last one was taken; the first one at once.

        Returns:
            Whether one more waits now.
        """
        if (waiting := self._waiting.get(slot)) is not None:
            self._waiting[slot] = replace(waiting, item=item)
            return False
        if len(self._waiting) >= MAX_WAITING:
            return False
        last = self._taken_at.get(slot)
        due = now if last is None else max(now, last + every_seconds)
        self._waiting[slot] = _Entry(item=item, due=due)
        return True

    def take(self, now: float) -> tuple[str, T] | None:
        """Remove and return the item that has been due for longest, with its slot; None if none is."""
        due = [slot for slot, entry in self._waiting.items() if entry.due <= now]
        if not due:
            return None
        slot = min(due, key=lambda one: self._waiting[one].due)
        self._taken_at[slot] = now
        return slot, self._waiting.pop(slot).item

    def put_back(self, slot: str, item: T) -> None:
        """Return an item that was taken, due at once, unless a newer one waits by now."""
        if slot not in self._waiting:
            self._waiting[slot] = _Entry(item=item, due=self._taken_at[slot])

    def drop(self, slot: str) -> None:
        """Forget the item that waits in a slot."""
        self._waiting.pop(slot, None)

    def hurry(self) -> None:
        """Make all that waits due now, in the order in which it would have been."""
        ordered = sorted(self._waiting.items(), key=lambda pair: pair[1].due)
        self._waiting = {slot: replace(entry, due=-math.inf) for slot, entry in ordered}

    def wait_seconds(self, now: float) -> float | None:
        """Return how long it is until something is due, None if nothing waits."""
        if not self._waiting:
            return None
        return max(0.0, min(entry.due for entry in self._waiting.values()) - now)
