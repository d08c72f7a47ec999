"""How the rounds of a gang are followed: when its ranks started, moved, stood still and ended. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, assert_never

from prefect_torch_elastic.evidence import Category
from prefect_torch_elastic.incidents import Incident, IncidentKind
from prefect_torch_elastic.observations import RankSample
from prefect_torch_elastic.runfacts import GangEnd, GangFacts, RoundEnd, RoundFacts
from prefect_torch_elastic.wire import RanksStarted

MAX_ROUNDS = 100  # of a gang
MAX_GANGS = 1000  # the time of older ones counts as queue
MAX_CAUSE = 500  # characters
PACE_POINTS = 30
_HANGS = {  # failures that a time without any step comes before
    Category.HANG,
    Category.COLLECTIVES_APART,
    Category.STUCK_SAVE,
    Category.STOPPED_RESPONDING,
    Category.COLLECTIVE_TIMEOUT,
}


class GangRecord:
    """Follows the gangs of a run one after the other; `gangs` are its facts."""

    def __init__(self, gangs: Sequence[GangFacts]) -> None:
        self.gangs = list(gangs)
        self._nodes: set[int] = set()
        self._pace: deque[tuple[float, int]] = deque(maxlen=PACE_POINTS)
        self._summed_until: int | None = None

    def begin(self, gang: GangFacts) -> None:
        """Note that a gang is being formed."""
        self.gangs.append(gang)
        del self.gangs[:-MAX_GANGS]

    def end(self, end: GangEnd, *, at: float, reason: str) -> None:
        """Note how the gang ended, unless that is known already."""
        if not self.gangs or self.gangs[-1].end is not None:
            return
        rounds = {
            GangEnd.SUCCEEDED: RoundEnd.FINISHED,
            GangEnd.FAILED: RoundEnd.FAILED,
            GangEnd.LOST: RoundEnd.LOST,
        }
        self.end_round(rounds.get(end, RoundEnd.STOPPED), at=at)
        self.gangs[-1] = replace(self.gangs[-1], ended_at=at, end=end, reason=reason[:MAX_CAUSE])

    def start_round(self, message: RanksStarted, at: float) -> None:
        """Note that the ranks of a node run; those of the other nodes belong to the same round."""
        if (current := self.current(message.round)) is not None:
            self._nodes.add(message.node)
            self._change(nodes=max(current.nodes, len(self._nodes)))
            return
        self.end_round(RoundEnd.REGROUPED, at=at)
        self._nodes = {message.node}
        self._pace.clear()
        self._summed_until = None
        reached = [r.last_step for gang in self.gangs for r in gang.rounds if r.last_step is not None]
        new = RoundFacts(
            number=message.round,
            world_size=message.world_size,
            nodes=1,
            started_at=at,
            lost_before=max(reached, default=-1),
        )
        gang = self.gangs[-1]
        self.gangs[-1] = replace(gang, rounds=(*gang.rounds, new)[-MAX_ROUNDS:])

    def end_round(self, end: RoundEnd, *, at: float) -> None:
        """Note that the ranks are gone, unless they were gone before."""
        if self.current() is not None:
            self._change(end=end, ended_at=at)
        self._pace.clear()

    def current(self, number: int | None = None) -> RoundFacts | None:
        """Return the round that runs, None between rounds, or if it is not the one with this number."""
        if not self.gangs or self.gangs[-1].end is not None or not self.gangs[-1].rounds:
            return None
        newest = self.gangs[-1].rounds[-1]
        return newest if newest.end is None and number in (None, newest.number) else None

    def see_report(self, step: int, at: float) -> None:
        """Note that rank 0 reported a step then; more than one message says so, in any order."""
        current = self.current()
        if current is None or (current.last_step is not None and step <= current.last_step):
            return
        at = max(at, current.started_at, current.last_report_at or 0.0)
        if current.first_step is None:
            self._change(first_step=step, first_report_at=at)
        self._change(last_step=step, last_report_at=at, is_hang=False)
        self._pace.append((at, step))

    def see_sample(self, sample: RankSample, at: float) -> None:
        """Note what rank 0 does."""
        if self.current() is None or sample.step is None or not sample.steps:
            return
        self.see_report(sample.step, at - sample.idle_seconds)
        if self._summed_until is None:
            self._see_earlier_reports(sample)
        # its sums are of the time until its last report; what comes on top later is of the time after it
        if self._summed_until != sample.step:
            self._summed_until = sample.step
            self._change(save_seconds=sample.save_seconds, phase_seconds=sample.phase_seconds)
        current = self.gangs[-1].rounds[-1]
        self._change(
            step_seconds=sample.step_seconds or current.step_seconds,
            late_save_seconds=max(0.0, sample.save_seconds - current.save_seconds),
            late_phase_seconds=max(0.0, sample.phase_seconds - current.phase_seconds),
        )

    def _see_earlier_reports(self, sample: RankSample) -> None:
        """Note when the first steps of a round were done: a rank may do a thousand before it is seen."""
        current = self.gangs[-1].rounds[-1]
        if current.first_step is None or current.last_step is None or current.last_report_at is None:
            return
        earlier = sample.steps - 1
        since = current.last_report_at - earlier * sample.step_seconds
        self._change(
            first_step=min(current.first_step, max(0, current.last_step - earlier)),
            first_report_at=max(current.started_at, min(current.first_report_at or since, since)),
        )

    def see_incident(self, incident: Incident, at: float) -> None:
        """Note that something is wrong with the round."""
        if (current := self.current()) is None:
            return
        match incident.kind:
            case IncidentKind.SUSPICION:
                self._change(is_hang=True)  # until the next step
            case IncidentKind.HANG:
                self._change(is_hang=True, detected_at=at)
            case IncidentKind.FAILURE | IncidentKind.NODE:
                self._change(is_hang=current.is_hang or incident.category in _HANGS, detected_at=at)
            case IncidentKind.PREEMPTION:
                self._change(is_hang=False, detected_at=at)
            case _:
                assert_never(incident.kind)

    def blame(self, diagnosis: Mapping[str, Any], at: float) -> None:
        """Note why the round ends, as a `Diagnosis` says; an incident may have said before that it will."""
        current, category = self.current(), str(diagnosis.get("category", ""))
        if current is None or not category:
            return
        self._change(
            detected_at=at if current.detected_at is None else current.detected_at,
            is_hang=current.is_hang or category in _HANGS,
            category=category,
            cause=str(diagnosis.get("summary", ""))[:MAX_CAUSE],
        )

    def speed(self) -> float:
        """Return steps per second over the last reports, 0 if unknown."""
        if len(self._pace) < 2:
            return 0.0
        (first_at, first), (last_at, last) = self._pace[0], self._pace[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0

    def _change(self, **changes: Any) -> None:
        gang = self.gangs[-1]
        self.gangs[-1] = replace(gang, rounds=(*gang.rounds[:-1], replace(gang.rounds[-1], **changes)))
