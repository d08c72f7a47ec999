"""What is known of a run over all its gangs, as plain data: `chronicle` gathers it, reports are made from it.

Pure. Times are unix seconds. A gang here is one incarnation: formed, and ended by whatever ended it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from prefect_torch_elastic.arrivals import is_notable
from prefect_torch_elastic.incidents import IncidentKind

SLOW_FACTOR = 1.25  # a rank is slow when its median step takes that much longer than the gang's
SLOW_STEPS = 20  # and has done so for this many steps


class GangEnd(StrEnum):
    """How a gang ended, in the words of the reports."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"
    LOST = "lost"  # nobody said: the next gang found it gone


class RoundEnd(StrEnum):
    """How a round of a gang ended: its ranks from their start to their end."""

    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    REGROUPED = "regrouped"  # nodes came or went
    LOST = "lost"


@dataclass(frozen=True, kw_only=True)
class RoundFacts:
    """One round of a gang; what is counted is rank 0's, in whose step all others move.

    Attributes:
        number: As the gang counts them.
        world_size: Ranks.
        nodes: Nodes.
        started_at: Its first ranks ran.
        first_report_at, last_report_at: Of steps; None before.
        first_step, last_step: The numbers that they had.
        lost_before: Steps up to this number had been done by an earlier round already; -1 if none.
        step_seconds: Median step.
        save_seconds: In which training stood still for a save, until the last report.
        phase_seconds: In `phase(...)` blocks, until the last report.
        late_save_seconds, late_phase_seconds: The same since the last report.
        detected_at: When it was clear that it fails.
        ended_at: Its last ranks were gone.
        end: How; None while it runs.
        is_hang: Nothing moves any more, or it failed of that.
        cause: One sentence, empty if nothing went wrong.
        category: Name of the `Category`, empty if nothing went wrong.
    """

    number: int
    world_size: int
    nodes: int
    started_at: float
    first_report_at: float | None = None
    last_report_at: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    lost_before: int = -1
    step_seconds: float = 0.0
    save_seconds: float = 0.0
    phase_seconds: float = 0.0
    late_save_seconds: float = 0.0
    late_phase_seconds: float = 0.0
    detected_at: float | None = None
    ended_at: float | None = None
    end: RoundEnd | None = None
    is_hang: bool = False
    cause: str = ""
    category: str = ""

    @property
    def repeated_steps(self) -> int:
        """How many of its steps had been done before."""
        if self.first_step is None or self.last_step is None:
            return 0
        return max(0, min(self.lost_before, self.last_step) - self.first_step + 1)


@dataclass(frozen=True, kw_only=True)
class GangFacts:
    """One gang of the run.

    Attributes:
        attempt: Its number, from 1; a gang that was preempted comes back with the same one.
        began_at: Somebody began to form it.
        ended_at, end: None while it is there.
        reason: One sentence on its end, empty if nothing went wrong.
        nodes: How many it holds.
        places: Names of its machines, in the order of the nodes, as far as they are known.
        rounds: From the first one.
    """

    attempt: int
    began_at: float
    nodes: int
    places: tuple[str, ...] = ()
    ended_at: float | None = None
    end: GangEnd | None = None
    reason: str = ""
    rounds: tuple[RoundFacts, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PhaseFacts:
    """A phase in which a cluster had the gang from `at` on; `is_queue` says that it held no machines."""

    at: float
    name: str
    message: str
    is_queue: bool


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One rank: its steps and its delay as of its newest round with steps, its memory as of the whole run.

    The delay is the share of a usual step for which the others wait for it, see `arrivals`.
    """

    rank: int
    node: int
    step: int | None = None
    steps: int = 0
    step_seconds: float = 0.0
    step_p95_seconds: float = 0.0
    longest_seconds: float = 0.0
    delay: float = 0.0
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """A checkpoint that exists, or existed: old ones are removed by the retention. `key` as in the store."""

    at: float
    step: int
    key: str
    size_bytes: int
    seconds: float
    stall_seconds: float


@dataclass(frozen=True, kw_only=True)
class IncidentFacts:
    """An incident in one line, `number` in the run; its page is at `url` once it is published."""

    at: float
    number: int
    kind: IncidentKind
    category: str
    sentence: str
    rank: int | None = None
    node: int | None = None
    step: int | None = None
    url: str = ""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A metric over steps, thinned out to what a chart can show; it has finite values only."""

    name: str
    points: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """All of it, as of `seen_at`.

    Attributes:
        run_key: Name of the run.
        title: What people call it.
        place: Where it runs, such as `this machine` or a work pool.
        price_per_node_hour: As given, None without.
        began_at: The run began to wait or to start.
        seen_at: When the newest of these facts was taken in.
        ended_at: None while it runs.
        gangs: All, in order.
        phases: Of a cluster, in order.
        ranks: All that were seen, in order.
        checkpoints: The newest ones, in order.
        checkpoint_count, checkpoint_bytes, checkpoint_stall_seconds: Over all.
        incidents: The newest ones, in order.
        incident_count: Over all.
        step, total_steps, phase, metrics: As rank 0 reported last.
        steps_per_second: Over its last reports, 0 if unknown.
        curves: Of the metrics that are numbers.
    """

    run_key: str
    title: str
    place: str = ""
    price_per_node_hour: float | None = None
    began_at: float
    seen_at: float
    ended_at: float | None = None
    gangs: tuple[GangFacts, ...] = ()
    phases: tuple[PhaseFacts, ...] = ()
    ranks: tuple[RankFacts, ...] = ()
    checkpoints: tuple[CheckpointFacts, ...] = ()
    checkpoint_count: int = 0
    checkpoint_bytes: int = 0
    checkpoint_stall_seconds: float = 0.0
    incidents: tuple[IncidentFacts, ...] = ()
    incident_count: int = 0
    step: int | None = None
    total_steps: int | None = None
    phase: str = ""
    metrics: dict[str, float | str] = field(default_factory=dict[str, float | str])
    steps_per_second: float = 0.0
    curves: tuple[Curve, ...] = ()

    @property
    def resumed_at_steps(self) -> tuple[int, ...]:
        """The first step of each round but the first one with steps, for marks in charts."""
        firsts = [r.first_step for gang in self.gangs for r in gang.rounds if r.first_step is not None]
        return tuple(firsts[1:])

    @property
    def has_steps(self) -> bool:
        """Whether its ranks have reported a step at all."""
        return any(r.first_step is not None for gang in self.gangs for r in gang.rounds)

    @property
    def end(self) -> GangEnd | None:
        """How the run ended, None while it runs."""
        return self.gangs[-1].end if self.gangs and self.ended_at is not None else None

    @property
    def restarts(self) -> int:
        """How often ranks started again in a gang that stayed."""
        return sum(max(0, len(gang.rounds) - 1) for gang in self.gangs)

    @property
    def preemptions(self) -> int:
        """How often its machines were taken away."""
        return sum(gang.end is GangEnd.PREEMPTED for gang in self.gangs)

    @property
    def node_hours(self) -> float:
        """For how long it held nodes, in all."""
        held = ((gang.ended_at or self.seen_at) - gang.began_at for gang in self.gangs)
        return sum(max(0.0, s) * gang.nodes for s, gang in zip(held, self.gangs, strict=True)) / 3600

    @property
    def cost(self) -> float | None:
        """Of the node hours, None without a price."""
        return None if self.price_per_node_hour is None else self.node_hours * self.price_per_node_hour


def find_slow_ranks(ranks: Sequence[RankFacts]) -> list[RankFacts]:
    """Return the ranks that others wait for, and those whose median step takes clearly longer, slowest first.

    Ranks that wait for each other in every step take equally long: there the delays tell.
    """
    delays = {rank.rank: rank.delay for rank in ranks}
    slow = [rank for rank in ranks if len(ranks) > 1 and is_notable(rank.delay, delays)]
    known = [rank for rank in ranks if rank.steps >= SLOW_STEPS and rank.step_seconds > 0]
    if len(known) > 1:
        usual = median(rank.step_seconds for rank in known)
        slow += [rank for rank in known if rank.step_seconds > usual * SLOW_FACTOR and rank not in slow]
    return sorted(slow, key=lambda rank: (-rank.delay, -rank.step_seconds))


def describe_slowness(rank: RankFacts) -> str:
    """Return how slow a rank is, as the end of a sentence about it."""
    if rank.delay:
        return f"the others wait for it {rank.delay:.0%} of a step"
    return f"its median step takes {rank.step_seconds:.3g} s"
