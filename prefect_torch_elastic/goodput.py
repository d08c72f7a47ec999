"""What the wall time of a run went into: parts that add up to it exactly, because each moment goes into one.

Pure. Time is counted in whole milliseconds, and a cursor moves through the facts from the begin of the run to
its end: clocks of two machines that disagree shorten a part, they never count a moment twice.

- queue: the gang held no machines. Between two gangs that is so unless a cluster's phases say otherwise.
- start-up: from there to the first reported step of a round: images, imports, rendezvous, loading, compiling.
- productive: from the first report to the last one, as far as the steps were new.
- repeated: the same for steps that an earlier round had done, and the begun step that a failure undid.
- checkpoint: training stood still for a save.
- hang: from the last report to the failure, where nothing moved any more.
- teardown: from the failure, the order to stop or the last step until the ranks, and the gang, were gone.
- other: `phase(...)` blocks such as evaluations, and rounds of a run that never reports a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from prefect_torch_elastic.runfacts import GangFacts, PhaseFacts, RoundEnd, RoundFacts, RunFacts


class Part(StrEnum):
    """The parts of the wall time, in the order in which reports show them."""

    PRODUCTIVE = "productive"
    REPEATED = "repeated"
    CHECKPOINT = "checkpoint"
    HANG = "hang"
    STARTUP = "startup"
    TEARDOWN = "teardown"
    QUEUE = "queue"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Span:
    """A piece of the wall time that went into one part."""

    part: Part
    begin_ms: int
    end_ms: int


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The parts of a run's wall time; they add up to `wall_ms`.

    Attributes:
        wall_ms: From the begin of the run to its end, or to its newest facts.
        parts_ms: All parts, empty ones too.
        spans: The same in the order of time; inside a round parts are shown one after the other.
    """

    wall_ms: int
    parts_ms: dict[Part, int]
    spans: tuple[Span, ...]

    def seconds(self, part: Part) -> float:
        """Return what went into a part."""
        return self.parts_ms[part] / 1000

    def share(self, part: Part) -> float:
        """Return a part of the whole, from 0 to 1."""
        return self.parts_ms[part] / self.wall_ms if self.wall_ms else 0.0


def count_goodput(facts: RunFacts) -> Goodput:
    """Return what the run's wall time went into."""
    begin = _ms(facts.began_at)
    end = max(begin, _ms(facts.seen_at if facts.ended_at is None else facts.ended_at))
    ledger = _Ledger(begin, end)
    for gang in facts.gangs:
        _count_wait(ledger, facts.phases, until=gang.began_at)
        _count_gang(ledger, gang, reports=facts.has_steps)
    if facts.ended_at is None or not facts.gangs:
        _count_wait(ledger, facts.phases, until=None)
    ledger.fill(None, Part.TEARDOWN)
    parts = dict.fromkeys(Part, 0)
    for span in ledger.spans:
        parts[span.part] += span.end_ms - span.begin_ms
    return Goodput(wall_ms=end - begin, parts_ms=parts, spans=tuple(ledger.spans))


class _Ledger:
    """Gives each moment to a part, from `begin` to `end`; all in milliseconds."""

    def __init__(self, begin: int, end: int) -> None:
        self.spans: list[Span] = []
        self._at, self._end = begin, end

    def fill(self, until: float | None, rest: Part, *wants: tuple[Part, float]) -> None:
        """Give the time until then to `wants`, as far as it lasts, and what is left of it to `rest`."""
        stop = self._end if until is None else min(_ms(until), self._end)
        for part, seconds in wants:
            self._give(part, min(stop, self._at + _ms(max(0.0, seconds))))
        self._give(rest, stop)

    def until(self, end: float | None) -> float:
        """Return how many seconds are left until then."""
        stop = self._end if end is None else min(_ms(end), self._end)
        return max(0, stop - self._at) / 1000

    def _give(self, part: Part, stop: int) -> None:
        if stop <= self._at:
            return
        if self.spans and self.spans[-1].part is part:
            self.spans[-1] = Span(part=part, begin_ms=self.spans[-1].begin_ms, end_ms=stop)
        else:
            self.spans.append(Span(part=part, begin_ms=self._at, end_ms=stop))
        self._at = stop


def _count_wait(ledger: _Ledger, phases: tuple[PhaseFacts, ...], *, until: float | None) -> None:
    """Count the time in which no gang is there: in a queue, or on machines that start."""
    part = Part.QUEUE
    for phase in phases:
        if until is not None and phase.at >= until:
            break
        ledger.fill(phase.at, part)
        part = Part.QUEUE if phase.is_queue else Part.STARTUP
    ledger.fill(until, part)


def _count_gang(ledger: _Ledger, gang: GangFacts, *, reports: bool) -> None:
    for current in gang.rounds:
        ledger.fill(current.started_at, Part.STARTUP)
        if current.first_report_at is None:
            begun = Part.STARTUP if reports else Part.OTHER
            ledger.fill(current.detected_at or current.ended_at, begun)
        else:
            _count_steps(ledger, current)
            _count_tail(ledger, current)
        ledger.fill(current.ended_at, Part.TEARDOWN)
    restarts = not gang.rounds or (gang.ended_at is None and gang.rounds[-1].end is RoundEnd.FAILED)
    ledger.fill(gang.ended_at, Part.STARTUP if restarts else Part.TEARDOWN)


def _count_steps(ledger: _Ledger, current: RoundFacts) -> None:
    """Count from the begin of a round to its last report; its first step belongs to its start."""
    ledger.fill(current.first_report_at, Part.STARTUP)
    steps = (current.last_step or 0) - (current.first_step or 0)
    moving = ledger.until(current.last_report_at) - current.save_seconds - current.phase_seconds
    ledger.fill(
        current.last_report_at,
        Part.PRODUCTIVE,
        (Part.REPEATED, moving * (current.repeated_steps - 1) / steps if steps > 0 else 0.0),
        (Part.CHECKPOINT, current.save_seconds),
        (Part.OTHER, current.phase_seconds),
    )


def _count_tail(ledger: _Ledger, current: RoundFacts) -> None:
    """Count from the last report of a round until it is clear that no other one comes."""
    pauses = (Part.CHECKPOINT, current.late_save_seconds), (Part.OTHER, current.late_phase_seconds)
    known_at = current.detected_at or current.ended_at
    if current.is_hang:
        ledger.fill(known_at, Part.HANG)
        return
    match current.end:
        case None if current.detected_at is None:
            ledger.fill(None, Part.PRODUCTIVE, *pauses)
        case RoundEnd.FINISHED | RoundEnd.REGROUPED:
            ledger.fill(current.ended_at, Part.TEARDOWN, *pauses)
        case RoundEnd.STOPPED:
            if current.detected_at is not None:
                ledger.fill(current.detected_at, Part.REPEATED)
            ledger.fill(current.ended_at, Part.TEARDOWN, *pauses)
        case None | RoundEnd.FAILED | RoundEnd.LOST:
            ledger.fill(known_at, Part.REPEATED, *pauses)
        case _:
            assert_never(current.end)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
