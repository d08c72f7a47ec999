"""When each controller looks at what: writes become keys, keys wait until they are due, one at a time.

Without a thread, `step()` runs everything that is due by the clock, until nothing is; with `start()` a thread
does so as writes arrive. One queue for all controllers keeps the order of a run the same every time.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from enum import IntEnum

from tests.simulators.kubernetes import garbage, jobs, jobsets, kueue, kueue_quota
from tests.simulators.kubernetes.history import Change
from tests.simulators.kubernetes.jobpods import is_deleted
from tests.simulators.kubernetes.kueue_evictions import PodsReadyPolicy
from tests.simulators.kubernetes.objects import Obj
from tests.simulators.kubernetes.refusals import ApiError
from tests.simulators.kubernetes.storage import Key, Storage

STEPS_AT_MOST = 100_000


class Turn(IntEnum):
    """Who goes first when several are due: the scheduler last, so that it sees a whole wave at once."""

    JOB = 0
    JOBSET = 1
    WORKLOAD = 2
    GARBAGE = 3
    QUOTA = 4


Work = tuple[Turn, Key]
_QUOTA: Work = (Turn.QUOTA, ("", "", ""))
_QUEUE_KINDS = ("clusterqueues", "localqueues", "workloadpriorityclasses")


class Controllers:
    """The control plane of the simulated cluster: garbage collector, Job, JobSet and Kueue.

    Args:
        storage: What they read and write.
        clock: Seconds since the epoch.
        batch_seconds: How long the Job controller collects news of pods before it looks (1 s in Kubernetes).
        pods_ready: Kueue's `waitForPodsReady`; None leaves it off, as Kueue does.
    """

    def __init__(
        self,
        storage: Storage,
        clock: Callable[[], float] = time.time,
        *,
        batch_seconds: float = 1.0,
        pods_ready: PodsReadyPolicy | None = None,
    ) -> None:
        self.storage = storage
        self._clock = clock
        self._batch_seconds = batch_seconds
        self._pods_ready = pods_ready
        self._changes = storage.subscribe()
        self._ready: dict[Turn, dict[Key, None]] = {turn: {} for turn in Turn}
        self._later: dict[Work, float] = {}
        self._heap: list[tuple[float, int, Work]] = []
        self._order = itertools.count()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.errors: list[ApiError] = []
        for plural in ("jobsets", "jobs", "workloads", *_QUEUE_KINDS):
            for obj in storage.list(plural):
                self._note(Change("ADDED", plural, obj, None, 0))

    def step(self) -> float | None:
        """Run everything that is due, and what follows from it.

        Returns:
            Seconds until the next thing is due; None when nothing waits for the clock.

        Raises:
            AssertionError: If the controllers chase each other without end.
        """
        for _ in range(STEPS_AT_MOST):
            self._read_changes()
            if not self._run_next():
                return self._tell_next_due()
        raise AssertionError(f"no rest after {STEPS_AT_MOST} steps; next: {self._heap[:5]}")

    def start(self) -> None:
        """Run in a thread of our own until `close`."""
        self._thread = threading.Thread(target=self._run, name="simulated-controllers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and hear no more."""
        self._closing.set()
        self._changes.close()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._read_changes()
            if self._run_next():
                continue
            change = self._changes.take(self._tell_next_due())
            if change is not None:
                self._note(change)

    def _read_changes(self) -> None:
        while (change := self._changes.take(0)) is not None:
            self._note(change)

    def _tell_next_due(self) -> float | None:
        while self._heap and self._later.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)  # due earlier by now, or done
        return max(0.0, self._heap[0][0] - self._clock()) if self._heap else None

    def _run_next(self) -> bool:
        while self._tell_next_due() == 0.0:
            _, _, work = heapq.heappop(self._heap)
            del self._later[work]
            self._ready[work[0]][work[1]] = None
        turn = next((turn for turn in Turn if self._ready[turn]), None)
        if turn is None:
            return False
        key = next(iter(self._ready[turn]))
        del self._ready[turn][key]
        try:
            wait = self._reconcile(turn, key, self._clock())
        except ApiError as error:  # somebody else wrote or deleted meanwhile: look again, as all of them do
            self.errors.append(error)
            wait = 0.05
        if wait is not None:
            self._put((turn, key), wait)
        return True

    def _reconcile(self, turn: Turn, key: Key, now: float) -> float | None:
        match turn:
            case Turn.GARBAGE:
                return garbage.reconcile(self.storage, key, now)
            case Turn.JOB:
                return jobs.reconcile(self.storage, key, now)
            case Turn.JOBSET:
                return jobsets.reconcile(self.storage, key, now)
            case Turn.WORKLOAD:
                return kueue.reconcile(self.storage, key, now, pods_ready=self._pods_ready)
            case Turn.QUOTA:
                return kueue_quota.reconcile(self.storage, key, now)

    def _put(self, work: Work, wait_seconds: float) -> None:
        turn, key = work
        if key in self._ready[turn]:
            return
        if wait_seconds <= 0:
            self._later.pop(work, None)
            self._ready[turn][key] = None
            return
        due = self._clock() + wait_seconds
        if self._later.get(work, float("inf")) > due:
            self._later[work] = due
            heapq.heappush(self._heap, (due, next(self._order), work))

    def _note(self, change: Change) -> None:
        for work, wait_seconds in self._route(change):
            self._put(work, wait_seconds)

    def _route(self, change: Change) -> Iterator[tuple[Work, float]]:
        plural, obj = change.plural, change.object
        if plural == "events":
            return
        key = garbage.make_key(obj)
        yield from ((work, 0.0) for work in self._route_garbage(change, key))
        match plural:
            case "pods":
                yield from ((work, self._batch_seconds) for work in _route_to_owner(obj, "Job", Turn.JOB))
            case "jobs":
                yield (Turn.JOB, key), 0.0
                yield from ((work, 0.0) for work in _route_to_owner(obj, "JobSet", Turn.JOBSET))
            case "jobsets":
                yield (Turn.JOBSET, key), 0.0
                yield (Turn.WORKLOAD, key), 0.0
                if change.type == "DELETED" or is_deleted(obj):
                    label = {kueue.JOB_UID: obj["metadata"]["uid"]}
                    for workload in self.storage.list("workloads", key[1], label):
                        yield (Turn.WORKLOAD, garbage.make_key(workload)), 0.0
            case "workloads":
                yield from ((work, 0.0) for work in _route_to_owner(obj, "JobSet", Turn.WORKLOAD))
                if is_deleted(obj):
                    yield (Turn.WORKLOAD, key), 0.0
                yield _QUOTA, 0.0
            case "clusterqueues" | "localqueues" | "workloadpriorityclasses":
                yield _QUOTA, 0.0
                for jobset in self.storage.list("jobsets"):
                    yield (Turn.WORKLOAD, garbage.make_key(jobset)), 0.0
            case _:
                return

    def _route_garbage(self, change: Change, key: Key) -> Iterator[Work]:
        metadata = change.object["metadata"]
        owners = metadata.get("ownerReferences") or ()
        if garbage.needs_collector(change.object) or (owners and change.type == "ADDED"):
            yield Turn.GARBAGE, key
        if change.type == "DELETED":
            for dependent in self.storage.owned_by(metadata["uid"]):
                yield Turn.GARBAGE, garbage.make_key(dependent)
            for owner in owners:
                if plural := garbage.PLURAL_OF_KIND.get(owner["kind"]):
                    yield Turn.GARBAGE, (plural, key[1], owner["name"])


def _route_to_owner(obj: Obj, kind: str, turn: Turn) -> Iterator[Work]:
    for owner in obj["metadata"].get("ownerReferences") or ():
        if owner["kind"] == kind and owner.get("controller"):
            yield turn, (garbage.PLURAL_OF_KIND[kind], obj["metadata"]["namespace"], owner["name"])
