"""Which gangs there are in a cluster, and what each is doing: said whenever that changes.

Level-triggered: a watch says that something of a gang changed, and its status is read from its whole objects,
never from the event, so whatever is missed is only late. What one gang costs the API does not depend on how
many there are: the watches are shared, and questions about single gangs are asked at transitions.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from prefect_torch_elastic.kubernetes.client import Cluster
from prefect_torch_elastic.kubernetes.gangcache import GangCache
from prefect_torch_elastic.kubernetes.listwatch import Source, SourceWatcher
from prefect_torch_elastic.kubernetes.looking import Looks, Notes
from prefect_torch_elastic.kubernetes.podfailures import PodFailure
from prefect_torch_elastic.kubernetes.resources import Kind
from prefect_torch_elastic.kubernetes.status import GangReading, read_status

SETTLE_SECONDS = 0.1  # one step of a controller changes several objects
OPEN_SECONDS = 0.5  # so long nothing is said while an answer is awaited; then it is seen whether it is still
LONGEST_WAIT_SECONDS = 3600.0
CLOSE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """One gang as it is now.

    Attributes:
        namespace: Where its JobSet is.
        name: The name of the JobSet.
        uid: The uid of the JobSet, by which the gang is known.
        flow_run_id: The flow run that it was created for, empty if it does not say.
        jobset: The JobSet without its pod template, None if it is gone.
        status: What the gang is doing.
        failure: What went wrong with a pod since all of them ran last, None if nothing did.
    """

    namespace: str
    name: str
    uid: str
    flow_run_id: str
    jobset: dict[str, Any] | None
    status: GangReading
    failure: PodFailure | None = None


class Observer:
    """Tells what the gangs of some namespaces are doing.

    Args:
        cluster: Where they are.
        namespaces: Which ones to look into; `add_namespace` adds more later.
        labels: Label selector of our JobSets and Jobs.
        listen: Called with each change, in the observer's thread; it must not block.
        warn: Called with a sentence for people when something cannot be seen, and when it can again.
        clock: Seconds that only go forward.
        now: The time of day that conditions of objects are compared with.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespaces: Sequence[str],
        labels: str,
        listen: Callable[[Sighting], None],
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._cluster, self._labels = cluster, labels
        self._listen, self._warn = listen, warn
        self._clock, self._now = clock, now
        # Held for moments only. It guards all but the notes and the looks, which are one thread's alone.
        self._changed = threading.Condition()
        self._cache = GangCache()
        self._watchers: list[SourceWatcher] = []
        self._listed: set[Source] = set()
        self._due: dict[str, float] = {}
        self._sightings: dict[str, Sighting] = {}
        self._threads: list[threading.Thread] = []
        self._is_started = self._is_closed = False
        self._notes: dict[str, Notes] = {}
        self._looks = Looks(
            cluster, find=self._notes.get, take_workload=self._take_missed, warn=warn, clock=clock
        )
        for namespace in namespaces:
            self.add_namespace(namespace)

    def start(self) -> None:
        """Begin to watch, in threads."""
        with self._changed:
            self._is_started = True
            self._start_thread("gangs", self._run)
            for watcher in self._watchers:
                self._start_watcher(watcher)

    def close(self) -> None:
        """End the threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            watchers, threads = list(self._watchers), list(self._threads)
        for watcher in watchers:
            watcher.stop()
        for thread in threads:
            thread.join(CLOSE_SECONDS)

    def add_namespace(self, namespace: str) -> None:
        """Look into one more namespace; nothing happens if it is one already."""
        with self._changed:
            if self._is_closed or any(watcher.source.namespace == namespace for watcher in self._watchers):
                return
            watchers = [self._make_watcher(source) for source in _list_sources(namespace, self._labels)]
            self._watchers += watchers
            for watcher in watchers if self._is_started else ():
                self._start_watcher(watcher)

    def sighting(self, uid: str) -> Sighting | None:
        """Return what was said last of a gang, None if nothing was or if it is gone."""
        with self._changed:
            return self._sightings.get(uid)

    def step(self) -> float:
        """Say what is due, and ask one question if one is; return when the next step is due by the clock.

        The observer's thread does nothing else. Questions come after all that can be said without one: they
        may take seconds.
        """
        now = self._clock()
        with self._changed:
            uids = [uid for uid, due in self._due.items() if due <= now]
        for uid in uids:
            self._evaluate(uid)
        if (asked := self._looks.ask_one()) is not None:
            self._evaluate(asked)
        with self._changed:
            return self._next_due()

    def _next_due(self) -> float:
        return min(min(self._due.values(), default=math.inf), self._looks.next_due())

    def _run(self) -> None:
        while True:
            try:
                self.step()
            except Exception as error:  # noqa: BLE001  (there are other gangs to tell of)
                self._warn(f"A gang could not be told of: {error!r}. It is again when it changes.")
            with self._changed:
                wait_seconds = self._next_due() - self._clock()
                if wait_seconds > 0 and not self._is_closed:
                    self._changed.wait(min(wait_seconds, LONGEST_WAIT_SECONDS))
                if self._is_closed:
                    return

    def _start_watcher(self, watcher: SourceWatcher) -> None:
        self._start_thread(f"{watcher.source.kind}s in {watcher.source.namespace}", watcher.run)

    def _start_thread(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"observer: {name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _make_watcher(self, source: Source) -> SourceWatcher:
        return SourceWatcher(
            self._cluster,
            source,
            replace=self._replace,
            put=self._put,
            remove=self._remove,
            warn=self._warn,
            clock=self._clock,
        )

    def _replace(self, source: Source, items: Sequence[dict[str, Any]]) -> None:
        with self._changed:
            uids = self._cache.replace(source.kind, source.namespace, items)
            if source not in self._listed:
                self._listed.add(source)
                uids |= set(self._cache.list_gangs(source.namespace))
            self._mark(uids)

    def _is_whole(self, namespace: str) -> bool:
        return self._listed.issuperset(_list_sources(namespace, self._labels))

    def _put(self, source: Source, thing: dict[str, Any]) -> None:
        with self._changed:
            self._mark(self._cache.put(source.kind, thing))

    def _remove(self, source: Source, thing: dict[str, Any]) -> None:
        with self._changed:
            self._mark(self._cache.remove(source.kind, thing))

    def _take_missed(self, namespace: str, workload: dict[str, Any]) -> None:
        """Take in a Workload that was asked for; if no watch has told of it, that watch is deaf."""
        source = _list_sources(namespace, self._labels)[-1]
        with self._changed:
            uids = self._cache.put(Kind.WORKLOAD, workload)
            self._mark(uids)
            deaf = [watcher for watcher in self._watchers if uids and watcher.source == source]
        for watcher in deaf:
            watcher.refresh()

    def _mark(self, uids: Iterable[str], *, seconds: float = SETTLE_SECONDS) -> None:
        due = self._clock() + seconds
        for uid in uids:
            self._due[uid] = min(due, self._due.get(uid, math.inf))
        self._changed.notify_all()

    def _evaluate(self, uid: str) -> None:
        with self._changed:
            self._due.pop(uid, None)
            gang = self._cache.find(uid)
            is_whole = gang is not None and self._is_whole(gang.namespace)
        notes = self._notes.get(uid)
        if gang is None:
            if notes is not None:
                self._end(notes)
            return
        if not is_whole:  # the first lists have not all come: what is not there may only be unknown
            return
        if notes is None:
            notes = self._notes[uid] = Notes(gang=gang)
        notes.see(gang)
        status = self._read(notes)
        self._looks.plan(notes, status)
        again_seconds = status.look_again_seconds
        if self._looks.is_open(notes, status):
            again_seconds = OPEN_SECONDS
        else:
            self._say(notes, status, jobset=gang.jobset)
        if again_seconds is not None:
            with self._changed:
                self._mark([uid], seconds=max(again_seconds, SETTLE_SECONDS))

    def _read(self, notes: Notes) -> GangReading:
        return read_status(
            jobset=notes.gang.jobset,
            workload=notes.gang.workload,
            job=notes.gang.job,
            pods=notes.pods,
            now=self._now(),
            position=notes.position,
            sees_workloads=not notes.hides_workload,
        )

    def _end(self, notes: Notes) -> None:
        uid = notes.gang.uid
        self._looks.forget(uid)
        del self._notes[uid]
        gone = read_status(jobset=None, workload=notes.gang.workload, job=None, now=self._now())
        self._say(notes, gone, jobset=None)
        with self._changed:
            del self._sightings[uid]

    def _say(self, notes: Notes, status: GangReading, *, jobset: dict[str, Any] | None) -> None:
        gang = notes.gang
        sighting = Sighting(
            namespace=gang.namespace,
            name=gang.name,
            uid=gang.uid,
            flow_run_id=gang.flow_run_id,
            jobset=jobset,
            status=replace(status, look_again_seconds=None),
            failure=notes.failure,
        )
        with self._changed:
            last = self._sightings.get(gang.uid)
            self._sightings[gang.uid] = sighting
        if last is None or (last.status, last.failure) != (sighting.status, sighting.failure):
            self._listen(sighting)


def _list_sources(namespace: str, labels: str) -> list[Source]:
    return [
        Source(kind=Kind.JOBSET, namespace=namespace, labels=labels),
        Source(kind=Kind.JOB, namespace=namespace, labels=labels),
        # Kueue puts none of our labels on its Workloads.
        Source(kind=Kind.WORKLOAD, namespace=namespace, is_optional=True),
    ]
