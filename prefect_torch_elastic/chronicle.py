"""What is kept of a run's messages: the facts of the run, over all its gangs and all who listen to them.

Pure: times come with the messages, in unix seconds. A chronicle goes to the store as JSON and continues from
there, so a gang that comes back, or a driver, adds to the facts of those before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, assert_never

from prefect_torch_elastic.arrivals import Delays
from prefect_torch_elastic.chronicledoc import parse_facts, render_facts
from prefect_torch_elastic.curves import CurveBuilder
from prefect_torch_elastic.gangrecord import MAX_CAUSE, GangRecord
from prefect_torch_elastic.incidents import Incident, IncidentKind, parse_incident
from prefect_torch_elastic.observations import CheckpointSaved, NodeSample, RankSample
from prefect_torch_elastic.runfacts import (
    CheckpointFacts,
    Curve,
    GangEnd,
    GangFacts,
    IncidentFacts,
    PhaseFacts,
    RankFacts,
    RoundEnd,
    RunFacts,
)
from prefect_torch_elastic.wire import (
    GangEnded,
    GangStatus,
    IncidentSeen,
    Message,
    Progress,
    RanksStarted,
    RoundEnded,
    VerdictAction,
)

MAX_CHECKPOINTS = 50
MAX_INCIDENTS = 50
MAX_PHASES = 400
MAX_CURVES = 8
MAX_METRICS = 100  # whoever names them by step has more


class Chronicle:
    """Takes in what happens in a run.

    Args:
        facts: What is known so far; of a new run its names, and `began_at` and `seen_at`, both now.
    """

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self._gangs = GangRecord(facts.gangs)
        self._ranks = {rank.rank: rank for rank in facts.ranks}
        self._delays = Delays(0)
        self._curves = {curve.name: CurveBuilder(curve) for curve in facts.curves}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Chronicle:
        """Return the chronicle that `to_json` wrote down.

        Raises:
            ValueError: If a field is missing, unknown or not accepted; it says which.
        """
        return cls(parse_facts(body))

    def to_json(self) -> dict[str, Any]:
        """Return the facts as a mapping of plain values, for `sign_document`."""
        return render_facts(self.facts())

    def facts(self, *, at: float | None = None) -> RunFacts:
        """Return all that is known; what runs is counted until `at`, by default until the newest message."""
        if at is not None:
            self._see(at)
        return replace(
            self._facts,
            gangs=tuple(self._gangs.gangs),
            ranks=tuple(self._ranks[rank] for rank in sorted(self._ranks)),
            curves=tuple(builder.curve() for builder in self._curves.values()),
            steps_per_second=self._gangs.speed(),
        )

    def begin_incarnation(self, *, attempt: int, nodes: int, at: float, places: Sequence[str] = ()) -> None:
        """Note that a gang is being formed; the one before it, of whose end nobody knew, was lost.

        Args:
            attempt: Its number.
            nodes: How many machines it holds from now on.
            at: When.
            places: Their names, as far as they are known.
        """
        self._gangs.end(GangEnd.LOST, at=self._facts.seen_at, reason="Its end was not seen.")
        self._see(at, ended_at=None)
        self._gangs.begin(GangFacts(attempt=attempt, nodes=nodes, began_at=at, places=tuple(places)))

    def end_incarnation(self, end: GangEnd, *, at: float, reason: str = "") -> None:
        """Note how the gang ended.

        Args:
            end: How. A `GangEnded` message says it too, and a stop is a preemption if an incident said that
                before; what is noted first stands.
            at: When.
            reason: One sentence, empty if nothing went wrong.
        """
        self._see(at)
        self._gangs.end(end, at=at, reason=reason)

    def end(self, *, at: float) -> None:
        """Note that the run is over: no other gang will be formed."""
        self._gangs.end(GangEnd.LOST, at=at, reason="Its end was not seen.")
        self._see(at, ended_at=at)

    def note_phase(self, name: str, message: str, at: float, *, is_queue: bool) -> None:
        """Note the phase in which a cluster has the gang; `is_queue` says that it holds no machines there."""
        phases = self._facts.phases
        since = at
        if phases and (phases[-1].name, phases[-1].is_queue) == (name, is_queue):
            since, phases = phases[-1].at, phases[:-1]  # only its words are new
        new = PhaseFacts(at=since, name=name, message=message, is_queue=is_queue)
        self._see(at, phases=(*phases, new)[-MAX_PHASES:])

    def note_link(self, number: int, url: str) -> None:
        """Note where the page of an incident is, by its number in the run."""
        incidents = self._facts.incidents
        linked = tuple(replace(one, url=url) if one.number == number else one for one in incidents)
        self._facts = replace(self._facts, incidents=linked)

    def take(self, message: Message, *, at: float) -> None:
        """Take in what the gang says; messages that say nothing of a run's course are passed over."""
        match message:
            case RanksStarted():
                self._see(at)
                if not self._gangs.gangs or self._gangs.gangs[-1].end is not None:
                    self.begin_incarnation(attempt=1, nodes=1, at=at)
                if self._gangs.current(message.round) is None:
                    self._delays = Delays(message.world_size)
                    self._ranks = {
                        rank: replace(facts, steps=0, delay=0.0) for rank, facts in self._ranks.items()
                    }
                self._gangs.start_round(message, at)
            case NodeSample():
                self._take_samples(message, at)
            case Progress():
                self._gangs.see_report(message.step, at)
                self._take_progress(message, at)
            case CheckpointSaved():
                self._take_checkpoint(message, at)
            case IncidentSeen():
                self._take_incident(parse_incident(message.incident), at)
            case RoundEnded():
                self._take_round_end(message, at)
            case GangEnded():
                self._take_gang_end(message, at)
            case _:
                pass

    def _see(self, at: float, **changes: Any) -> None:
        self._facts = replace(self._facts, seen_at=max(at, self._facts.seen_at), **changes)

    def _take_samples(self, message: NodeSample, at: float) -> None:
        self._see(at)
        if self._gangs.current(message.round) is None:  # late: those ranks are gone
            return
        for sample in message.ranks:
            self._ranks[sample.rank] = _see_rank(self._ranks.get(sample.rank), sample, node=message.node)
            if sample.rank == 0:
                self._gangs.see_sample(sample, at)
            if sample.arrivals is not None:
                step = sample.step_seconds
                for rank, delay in self._delays.see(sample.rank, sample.arrivals, step_seconds=step).items():
                    self._ranks[rank] = replace(self._ranks[rank], delay=delay)

    def _take_progress(self, message: Progress, at: float) -> None:
        metrics = {name: _plain(value) for name, value in message.metrics.items()}
        self._see(
            at,
            step=message.step,
            total_steps=message.total_steps,
            phase=message.phase,
            metrics=_merge_metrics(self._facts.metrics, metrics),
        )
        for name, value in metrics.items():
            if isinstance(value, str):
                continue
            if name not in self._curves and len(self._curves) < MAX_CURVES:
                self._curves[name] = CurveBuilder(Curve(name=name))
            if name in self._curves:
                self._curves[name].add(message.step, value)

    def _take_checkpoint(self, message: CheckpointSaved, at: float) -> None:
        new = CheckpointFacts(
            at=at,
            step=message.step,
            key=message.key,
            size_bytes=message.size_bytes,
            seconds=message.seconds,
            stall_seconds=message.stall_seconds,
        )
        facts = self._facts
        self._see(
            at,
            checkpoints=(*facts.checkpoints, new)[-MAX_CHECKPOINTS:],
            checkpoint_count=facts.checkpoint_count + 1,
            checkpoint_bytes=facts.checkpoint_bytes + new.size_bytes,
            checkpoint_stall_seconds=facts.checkpoint_stall_seconds + new.stall_seconds,
        )

    def _take_incident(self, incident: Incident, at: float) -> None:
        new = IncidentFacts(
            at=at,
            number=self._facts.incident_count + 1,
            kind=incident.kind,
            category=incident.category,
            sentence=incident.sentence[:MAX_CAUSE],
            rank=incident.rank,
            node=incident.node_rank,
            step=incident.step,
        )
        incidents = (*self._facts.incidents, new)[-MAX_INCIDENTS:]
        self._see(at, incidents=incidents, incident_count=new.number)
        self._gangs.see_incident(incident, at)

    def _take_round_end(self, message: RoundEnded, at: float) -> None:
        self._see(at)
        if self._gangs.current(message.round) is None:
            return
        if message.action is VerdictAction.FINISH:
            self._gangs.end_round(RoundEnd.FINISHED, at=at)
        else:
            self._gangs.blame(message.diagnosis, at)
            self._gangs.end_round(RoundEnd.FAILED, at=at)

    def _take_gang_end(self, message: GangEnded, at: float) -> None:
        reason = str(message.diagnosis.get("summary", ""))
        match message.status:
            case GangStatus.SUCCEEDED:
                end = GangEnd.SUCCEEDED
            case GangStatus.FAILED:
                end = GangEnd.FAILED
                self._gangs.blame(message.diagnosis, at)
            case GangStatus.STOPPED:
                preemption = self._find_preemption()
                end = GangEnd.CANCELLED if preemption is None else GangEnd.PREEMPTED
                reason = preemption.sentence if preemption is not None else reason
            case GangStatus.TIMED_OUT:
                end = GangEnd.TIMED_OUT
            case _:
                assert_never(message.status)
        self.end_incarnation(end, at=at, reason=reason)

    def _find_preemption(self) -> IncidentFacts | None:
        """Return the incident that says why the gang leaves its machines."""
        since = self._gangs.gangs[-1].began_at if self._gangs.gangs else 0.0
        found = [i for i in self._facts.incidents if i.kind is IncidentKind.PREEMPTION and i.at >= since]
        return found[-1] if found else None


def _see_rank(before: RankFacts | None, sample: RankSample, *, node: int) -> RankFacts:
    before = before or RankFacts(rank=sample.rank, node=node)
    facts = replace(
        before,
        node=node,
        step=before.step if sample.step is None else sample.step,
        memory_bytes=max(before.memory_bytes, sample.memory_bytes),
        gpu_memory_bytes=max(before.gpu_memory_bytes, sample.gpu_memory_bytes),
    )
    if sample.step_seconds <= 0:
        return facts
    return replace(
        facts,
        steps=sample.steps,
        step_seconds=sample.step_seconds,
        step_p95_seconds=sample.step_p95_seconds,
        longest_seconds=max(before.longest_seconds, sample.longest_seconds),
    )


def _merge_metrics(
    before: Mapping[str, float | str], metrics: Mapping[str, float | str]
) -> dict[str, float | str]:
    """Return the newest value of each metric; of too many those stay that were reported last."""
    merged = {**before, **metrics}
    if len(merged) <= MAX_METRICS:
        return merged
    older = [(name, value) for name, value in before.items() if name not in metrics]
    return dict([*older, *list(metrics.items())[:MAX_METRICS]][-MAX_METRICS:])


def _plain(value: object) -> float | str:
    """Return a metric as JSON can carry it; NaN matters to people, and JSON has no number for it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf if value > 0 else -math.inf
    return number if math.isfinite(number) else str(number)
