"""Who is waited for: when each rank came to the collectives that all ranks of a gang take part in. Pure.

Ranks that wait for each other in every step take equally long, the slow one and those that wait for it. What
differs is when they call the same collective. In a step a rank may be late for many that are under way at the
same time, and the others wait for it once: the longest counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_low

LOOK_SECONDS = 20.0  # of the wall clock: all ranks look at the same moments
KEPT = 128  # collectives of a look
_LEAST_STEPS = 8  # that have to be seen
_LEAST_LATE_US = 20_000  # clocks of machines differ by a few milliseconds, and busy machines dither
_NOTABLE = 0.2
_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """When a rank came to its newest collectives, as of one look.

    Attributes:
        look: Number of the look: unix seconds over `LOOK_SECONDS`.
        first: Number of the first collective in its process group.
        offsets_us: Of that one and those after it: microseconds before (negative) or after the look's moment.
    """

    look: int
    first: int
    offsets_us: list[int] = field(default_factory=list[int])


def find_delays(arrivals: Mapping[int, Arrivals], *, step_seconds: float) -> dict[int, float]:
    """Return for each rank for which share of a usual step the others wait for it.

    Usual is the median: an evaluation or a save of one rank now and then is no slowness.

    Args:
        arrivals: Of all ranks, at the same look.
        step_seconds: What a step takes.

    Returns:
        Nothing if too little is known: no steps, or too few that all ranks have in common.
    """
    if len(arrivals) < 2 or step_seconds <= 0:
        return {}
    first = max(one.first for one in arrivals.values())
    end = min(one.first + len(one.offsets_us) for one in arrivals.values())
    common = [one.offsets_us[first - one.first : max(first, end) - one.first] for one in arrivals.values()]
    latest: dict[int, list[int]] = {}  # by step: how late each rank was at most
    begin: int | None = None
    for column in zip(*common, strict=True):
        usual = median_low(column)  # of two ranks, the earlier one
        begin = usual if begin is None else begin
        late = [max(0, at - usual) for at in column]
        step = int((usual - begin) / 1e6 / step_seconds)
        latest[step] = [max(pair) for pair in zip(latest.get(step, late), late, strict=True)]
    if len(latest) < _LEAST_STEPS:
        return {}
    typical = [median_low(mine) for mine in zip(*latest.values(), strict=True)]
    shares = [late / 1e6 / step_seconds if late >= _LEAST_LATE_US else 0.0 for late in typical]
    return dict(zip(arrivals, shares, strict=True))


def is_notable(delay: float, delays: Mapping[int, float]) -> bool:
    """Whether a rank with this delay holds up the others, and is not just one of many that do."""
    return delay >= _NOTABLE and delay >= _FACTOR * median_low(delays.values())


class Delays:
    """Follows the ranks of one round; a delay is what two looks one after the other have shown at least.

    Args:
        world_size: How many ranks there are.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._look = 0
        self._arrivals: dict[int, Arrivals] = {}
        self._before: dict[int, float] = {}

    def see(self, rank: int, arrivals: Arrivals, *, step_seconds: float) -> dict[int, float]:
        """Take in what a rank says; return the delays of all ranks if that completes a look."""
        if arrivals.look > self._look:
            self._look, self._arrivals = arrivals.look, {}
        if arrivals.look < self._look:
            return {}
        self._arrivals[rank] = arrivals
        if len(self._arrivals) < self._world_size:
            return {}
        before, self._before = self._before, find_delays(self._arrivals, step_seconds=step_seconds)
        return {rank: min(delay, before.get(rank, 0.0)) for rank, delay in self._before.items()}
