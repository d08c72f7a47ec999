"""The order of all writes: what watches read, and how far back they can."""

from __future__ import annotations

import queue
import threading
from collections import deque
from dataclasses import dataclass

from tests.simulators.kubernetes.objects import Obj
from tests.simulators.kubernetes.refusals import GoneError


@dataclass(frozen=True, slots=True)
class Change:
    """One write: what became of an object, and what it was before (None for a new one)."""

    type: str
    plural: str
    object: Obj
    previous: Obj | None
    version: int


class Subscription:
    """All writes from one moment on, in order, for one reader."""

    def __init__(self, history: History, plurals: frozenset[str]) -> None:
        self.plurals = plurals
        self._history = history
        self._changes: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        self.last_version = history.version
        self.skip_to = 0
        """Changes up to this version are already known to the reader (a list of now came first)."""

    def put(self, change: Change | None) -> None:
        """Hand over one write (the history does); None only wakes the reader."""
        self._changes.put(change)

    def take(self, timeout: float | None = None) -> Change | None:
        """Return the next write, or None when there is none within `timeout` seconds or somebody woke us."""
        try:
            change = self._changes.get(timeout=timeout) if timeout != 0 else self._changes.get_nowait()
        except queue.Empty:
            return None
        if change is not None:
            self.last_version = change.version
        return change

    def get(self, timeout: float | None = None) -> tuple[str, str, Obj] | None:
        """Like `take`, in short: type (`ADDED`, `MODIFIED`, `DELETED`), plural and object."""
        change = self.take(timeout)
        return None if change is None else (change.type, change.plural, change.object)

    def read_version(self, newest: int) -> int:
        """Return a version up to which nothing waits here, given the newest one of the storage."""
        return newest if self._changes.empty() else self.last_version

    def wake(self) -> None:
        """Let a waiting `get` or `take` return None now."""
        self.put(None)

    def close(self) -> None:
        """Hear no more."""
        self._history.unsubscribe(self)
        self.wake()


class History:
    """The last writes by version, and who listens. The storage calls it under its lock."""

    def __init__(self, *, kept: int) -> None:
        self.version = 0
        self._changes: deque[Change] = deque(maxlen=kept)
        self._subscriptions: list[Subscription] = []
        self._lock = threading.Lock()

    def append(self, kind: str, plural: str, obj: Obj, previous: Obj | None) -> None:
        """Count a write and tell everybody who listens."""
        change = Change(kind, plural, obj, previous, self.version + 1)
        self._changes.append(change)
        with self._lock:
            for subscription in self._subscriptions:
                if not subscription.plurals or plural in subscription.plurals:
                    subscription.put(change)
        # Last: who reads a version and then finds nothing waiting has seen all writes up to it.
        self.version = change.version

    def since(self, version: int) -> list[Change]:
        """Return the writes after `version`, or refuse with 410."""
        oldest = self._changes[0].version - 1 if self._changes else self.version
        if version < oldest:
            raise GoneError(f"too old resource version: {version} ({oldest})")
        # From the young end: a deque is slow to index in its middle, and most readers are nearly up to date.
        found: list[Change] = []
        for change in reversed(self._changes):
            if change.version <= version:
                break
            found.append(change)
        return found[::-1]

    def forget(self) -> None:
        """Drop all kept writes."""
        self._changes.clear()

    def subscribe(self, *plurals: str, since: int | None) -> Subscription:
        """Return a new listener, with the writes after `since` already in it."""
        subscription = Subscription(self, frozenset(plurals))
        subscription.last_version = self.version if since is None else since
        for change in self.since(since) if since is not None else ():
            if not plurals or change.plural in plurals:
                subscription.put(change)
        with self._lock:
            self._subscriptions.append(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Forget a listener (`Subscription.close` does)."""
        with self._lock:
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)
