"""How the objects of one kind in one namespace are kept current: list, watch, and list again.

A watch is only a fast way to learn that something changed. It may end, break, go silent or talk nonsense, and
then nobody knows what was missed: so every watch begins with a list, and after every end there is a new one.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prefect_torch_elastic.kubernetes.answers import ClusterError
from prefect_torch_elastic.kubernetes.client import Cluster, Watch
from prefect_torch_elastic.kubernetes.resources import KINDS, Kind

WATCH_SECONDS = 240.0  # then all is listed again, whatever the watch told
STEADY_SECONDS = 30.0  # a watch that lived for so long was no failure
FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 30.0
REFUSED_SECONDS = 60.0  # a role, or Kueue itself, may come later
MOST_FAILURES = 3  # in a row, before it is said; an API server that restarts is no news

Object = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Objects that are kept current.

    Attributes:
        kind: Which ones.
        namespace: Of which namespace.
        labels: Only those that this label selector takes; empty for all.
        is_optional: Whether gangs can be told without them: no role, and no such kind, count as none.
    """

    kind: Kind
    namespace: str
    labels: str = ""
    is_optional: bool = False


class SourceWatcher:
    """Keeps the objects of one source current, in a thread of its own.

    Args:
        cluster: Where they are.
        source: Which objects.
        replace: Called with all objects of the source, after each list; with none for an optional one that
            is refused.
        put: Called with an object that is new, or changed.
        remove: Called with an object that was deleted.
        warn: Called with a sentence for people when the source cannot be seen, and when it can again.
        clock: Seconds that only go forward.
        jitter: Numbers between 0 and 1.

    Attributes:
        source: Which objects.
    """

    def __init__(
        self,
        cluster: Cluster,
        source: Source,
        *,
        replace: Callable[[Source, Sequence[Object]], None],
        put: Callable[[Source, Object], None],
        remove: Callable[[Source, Object], None],
        warn: Callable[[str], None],
        clock: Callable[[], float],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.source = source
        self._cluster, self._replace, self._put, self._remove = cluster, replace, put, remove
        self._warn, self._clock, self._jitter = warn, clock, jitter
        self._stopped = threading.Event()
        self._watch: Watch | None = None
        self._failures = self._list_failures = 0
        self._is_settled = self._is_said = False

    def run(self) -> None:
        """List and watch until `stop` is called."""
        while not self._stopped.is_set():
            self._stopped.wait(self.run_once())

    def stop(self) -> None:
        """End it from another thread."""
        self._stopped.set()
        self.refresh()

    def refresh(self) -> None:
        """List again soon: somebody saw what the watch did not tell."""
        if (watch := self._watch) is not None:
            watch.close()

    def run_once(self) -> float:
        """List, and watch until that ends; return for how many seconds to wait before the next time."""
        began = self._clock()
        try:
            self._follow(self._list())
        except ClusterError as error:
            if error.forbidden or error.not_installed:
                self._do_without(error)
                return REFUSED_SECONDS * (0.5 + self._jitter())
        except Exception as error:  # noqa: BLE001  (a watcher that dies is an observer that is blind)
            self._say(f"Watching {self._name()} broke, and begins again: {error!r}.")
        self._failures = 0 if self._clock() - began >= STEADY_SECONDS else self._failures + 1
        delay = FIRST_DELAY_SECONDS * 2 ** min(max(self._failures - 1, 0), 10)
        # The watches of many workers end together when an API server does.
        return min(delay, LONGEST_DELAY_SECONDS) * (0.5 + self._jitter())

    def _list(self) -> str:
        source = self.source
        try:
            listing = self._cluster.list(source.kind, source.namespace, labels=source.labels)
        except ClusterError as error:
            self._list_failures += 1
            if self._list_failures >= MOST_FAILURES:
                self._say(f"Gangs are not seen now: {error}")
            raise
        self._list_failures = 0
        if self._is_said:
            self._is_said = False
            self._warn(f"{self._name()} are seen again.")
        self._is_settled = True
        self._replace(source, listing.items)
        return listing.resource_version

    def _follow(self, resource_version: str) -> None:
        source = self.source
        self._watch = watch = self._cluster.watch(
            source.kind,
            source.namespace,
            labels=source.labels,
            resource_version=resource_version,
            timeout_seconds=WATCH_SECONDS,
        )
        try:
            if self._stopped.is_set():  # `stop` may have come before there was a watch to close
                return
            for event, thing in watch:
                self._take(event, thing)
                if self._stopped.is_set():
                    return
        finally:
            self._watch = None
            watch.close()

    def _take(self, event: str, thing: Object) -> None:
        match event:
            case "ADDED" | "MODIFIED":
                self._put(self.source, thing)
            case "DELETED":
                self._remove(self.source, thing)
            case _:
                pass  # a bookmark: where a watch could go on, and the next one begins with a list

    def _do_without(self, error: ClusterError) -> None:
        """Take in that there is no such kind, or no role for it: that does not pass by itself."""
        if self.source.is_optional and not self._is_settled:
            self._is_settled = True
            self._replace(self.source, [])
        if error.forbidden or not self.source.is_optional:
            self._say(f"Gangs are not seen well: {error}")

    def _name(self) -> str:
        return f"`{KINDS[self.source.kind].qualified}` in '{self.source.namespace}'"

    def _say(self, text: str) -> None:
        if not self._is_said:
            self._is_said = True
            self._warn(text)
