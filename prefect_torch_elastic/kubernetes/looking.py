"""What is asked of the API about single gangs, beside the watches, and how often.

Pods are never watched: a gang of a thousand has more events in a minute than all else together. They are
listed where they say more than the other objects do: soon after a change, ever more rarely without one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, assert_never

from prefect_torch_elastic.kubernetes.answers import ClusterError
from prefect_torch_elastic.kubernetes.attempts import read_failure
from prefect_torch_elastic.kubernetes.client import Cluster
from prefect_torch_elastic.kubernetes.conditions import read_condition, text
from prefect_torch_elastic.kubernetes.gangcache import Gang, strip
from prefect_torch_elastic.kubernetes.naming import select_pods, select_workload
from prefect_torch_elastic.kubernetes.phases import GangPhase
from prefect_torch_elastic.kubernetes.podfailures import PodFailure, diagnose_pods
from prefect_torch_elastic.kubernetes.podspec import MARGIN_SECONDS
from prefect_torch_elastic.kubernetes.resources import Kind
from prefect_torch_elastic.kubernetes.status import GangReading, needs_pods

AT_ONCE = -math.inf  # goes before all that is late: the pods of a failed attempt are gone after a second
LEAST_SECONDS = 2.0  # between two lists of one gang's pods
MOST_SECONDS = 60.0  # the same while nothing changes but perhaps a pod that cannot start
LOAD = 10.0  # for so many times as long as a list took, there is no other
POSITION_SECONDS = 60.0
POSITIONS_SPACING_SECONDS = 1.0  # for all gangs together: each answer holds the whole queue


class Look(StrEnum):
    """A question about one gang."""

    PODS = "pods"  # how are its pods?
    WORKLOAD = "workload"  # has Kueue really not made one for it?
    POSITION = "position"  # where in the queue is it?


@dataclass(kw_only=True)
class Notes:
    """What is known of one gang; for one thread.

    Attributes:
        gang: Its objects as last seen.
        pods: Its pods when they were last listed; empty while they say nothing.
        failure: What went wrong with a pod since all of them ran last.
        saw_failing: Whether its pods were looked at since its Job began to fail.
        position: Its place in the queue.
        hides_workload: Whether its Workload could not be looked for, for want of a role.
        answered: At which versions of the objects a question was answered, or refused.
        asked_at: When it was asked last.
        rest_seconds: For how long the pods are not listed again after a change.
        gap_seconds: The same without one.
    """

    gang: Gang
    pods: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    failure: PodFailure | None = None
    saw_failing: bool = False
    position: tuple[int, int] | None = None
    hides_workload: bool = False
    answered: dict[Look, tuple[str, ...]] = field(default_factory=dict[Look, tuple[str, ...]])
    asked_at: dict[Look, float] = field(default_factory=dict[Look, float])
    rest_seconds: float = LEAST_SECONDS
    gap_seconds: float = LEAST_SECONDS

    def see(self, gang: Gang) -> None:
        """Take in the objects as they are now."""
        if text(gang.job, "metadata", "uid") != text(self.gang.job, "metadata", "uid"):
            self.pods = []  # of an attempt that is over
        self.gang = gang

    def has_answer(self, look: Look) -> bool:
        """Whether a question was answered with the objects as they are now."""
        return self.answered.get(look) == self.gang.versions


class Looks:
    """Asks what is to be asked about single gangs, one question at a time.

    Args:
        cluster: Whom to ask.
        find: Returns the notes of a gang.
        take_workload: Called with a Workload that no watch has told of.
        warn: Called with a sentence for people when something may not be asked.
        clock: Seconds that only go forward.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        find: Callable[[str], Notes | None],
        take_workload: Callable[[str, dict[str, Any]], None],
        warn: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._cluster, self._find, self._take_workload = cluster, find, take_workload
        self._warn, self._clock = warn, clock
        self._agenda: dict[tuple[str, Look], float] = {}
        self._positions_from = AT_ONCE
        self._said: set[tuple[str, Look]] = set()

    def plan(self, notes: Notes, status: GangReading) -> None:
        """Decide what is asked about a gang next, and when."""
        for look in Look:
            due = self._decide(look, notes, status)
            if due is None:
                self._agenda.pop((notes.gang.uid, look), None)
            else:
                self._agenda[notes.gang.uid, look] = due

    def is_open(self, notes: Notes, status: GangReading) -> bool:
        """Return whether an answer that is due now decides what is said of a gang."""
        match status.phase:
            case GangPhase.UNMANAGED:
                return not notes.has_answer(Look.WORKLOAD)
            case GangPhase.FAILED | GangPhase.RESTARTING:
                return is_failing(notes.gang) and notes.failure is None and not notes.saw_failing
            case GangPhase.QUEUED:  # of many that came at once, only the first
                is_new = notes.gang.workload is not None and Look.POSITION not in notes.asked_at
                return is_new and self._positions_from <= self._clock()
            case _:
                return False

    def forget(self, uid: str) -> None:
        """Ask nothing more about a gang."""
        for look in Look:
            self._agenda.pop((uid, look), None)

    def next_due(self) -> float:
        """Return when the next question is due; infinity if there is none."""
        return min(map(self._when, self._agenda), default=math.inf)

    def ask_one(self) -> str | None:
        """Ask the question that is due first; return which gang it was about, None if none is due."""
        if self.next_due() > self._clock():
            return None
        uid, look = min(self._agenda, key=self._when)
        del self._agenda[uid, look]
        if (notes := self._find(uid)) is not None:
            self._ask(look, notes)
        return uid

    def _when(self, key: tuple[str, Look]) -> float:
        due = self._agenda[key]
        return max(due, self._positions_from) if key[1] is Look.POSITION else due

    def _decide(self, look: Look, notes: Notes, status: GangReading) -> float | None:
        match look:
            case Look.PODS:
                return self._decide_pods(notes, status)
            case Look.WORKLOAD:
                if status.phase is not GangPhase.UNMANAGED or notes.has_answer(look):
                    return None
                return notes.asked_at.get(look, AT_ONCE) + LEAST_SECONDS
            case Look.POSITION:
                return self._decide_position(notes, status)
            case _:
                assert_never(look)

    def _decide_pods(self, notes: Notes, status: GangReading) -> float | None:
        gang, fails = notes.gang, is_failing(notes.gang)
        notes.saw_failing = notes.saw_failing and fails
        if status.phase in (GangPhase.RUNNING, GangPhase.SUCCEEDED):
            notes.failure = None
        if not fails and not needs_pods(gang.jobset, gang.workload):
            notes.pods = []
            return None
        if fails and not notes.saw_failing:
            return AT_ONCE
        is_news = not notes.has_answer(Look.PODS)
        if status.phase.is_final and not is_news:
            return None
        rest = notes.rest_seconds if is_news else notes.gap_seconds
        return notes.asked_at.get(Look.PODS, AT_ONCE) + rest

    def _decide_position(self, notes: Notes, status: GangReading) -> float | None:
        if status.phase not in (GangPhase.QUEUED, GangPhase.PREEMPTED, GangPhase.REQUEUED):
            notes.position = None
            return None
        if notes.gang.workload is None:
            return None
        return notes.asked_at.get(Look.POSITION, AT_ONCE) + POSITION_SECONDS

    def _ask(self, look: Look, notes: Notes) -> None:
        notes.asked_at[look] = self._clock()
        key = notes.gang.namespace, look
        try:
            match look:
                case Look.PODS:
                    self._look_at_pods(notes)
                case Look.WORKLOAD:
                    self._look_for_workload(notes)
                case Look.POSITION:
                    self._look_at_position(notes)
                case _:
                    assert_never(look)
            self._said.discard(key)
        except ClusterError as error:
            if error.may_pass and look is Look.WORKLOAD:
                return  # nothing is said of the gang before it is known
            if not error.may_pass and not error.not_installed and key not in self._said:
                self._said.add(key)
                self._warn(f"Gangs are not seen well: {error}")
        except Exception as error:  # noqa: BLE001  (what is open would stay open, and the gang's end untold)
            self._warn(f"An answer about gang `{notes.gang.name}` was not understood: {error!r}.")
        notes.answered[look] = notes.gang.versions

    def _look_at_pods(self, notes: Notes) -> None:
        gang, began = notes.gang, self._clock()
        fails = is_failing(gang)
        notes.saw_failing = fails  # also when there is no answer: nobody waits for a second one
        pods = self._cluster.list(Kind.POD, gang.namespace, labels=select_pods(gang.name)).items
        notes.rest_seconds = max(LEAST_SECONDS, LOAD * (self._clock() - began))
        longer = notes.rest_seconds if not notes.has_answer(Look.PODS) else 2 * notes.gap_seconds
        notes.gap_seconds = max(min(longer, MOST_SECONDS), notes.rest_seconds)
        notes.pods = [strip(Kind.POD, pod) for pod in pods]
        grace_seconds = max(gang.pod_stop_seconds - MARGIN_SECONDS, 0.0)
        failure = diagnose_pods(notes.pods, job=gang.job, grace_seconds=grace_seconds)
        # Once the pod that failed first is gone, those that are left tell only of its consequences. One that
        # could not start for a while is no cause any more when it does.
        stays = fails and notes.failure and not notes.failure.blocks_start
        if not stays or (failure and not failure.is_consequence):
            notes.failure = failure

    def _look_for_workload(self, notes: Notes) -> None:
        gang = notes.gang
        try:
            found = self._cluster.list(Kind.WORKLOAD, gang.namespace, labels=select_workload(gang.uid))
        except ClusterError as error:
            notes.hides_workload = not (error.not_installed or error.may_pass)
            raise
        notes.hides_workload = False
        for workload in found.items:
            self._take_workload(gang.namespace, workload)

    def _look_at_position(self, notes: Notes) -> None:
        gang = notes.gang
        self._positions_from = self._clock() + POSITIONS_SPACING_SECONDS
        queue, workload = text(gang.workload, "spec", "queueName"), text(gang.workload, "metadata", "name")
        notes.position = self._cluster.pending_position(gang.namespace, queue, workload)


def is_failing(gang: Gang) -> bool:
    """Return whether an attempt of the gang has failed, and its pods tell why as long as they are there."""
    if read_failure(gang.jobset, gang.job).is_true:
        return True
    return any(read_condition(gang.jobset, type).is_true for type in ("Failed", "RestartingJobSet"))
