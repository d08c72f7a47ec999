"""How long a gang has finished no step, what it does meanwhile, and when to look closer. Pure.

Times are monotonic seconds that are passed in; they are the head's, which has one clock for all nodes.
"""

from __future__ import annotations

import math
import statistics
from enum import StrEnum

from prefect_torch_elastic.observations import NodeSample, RankSample

MEDIANS = 3.0
PATIENCE_SECONDS = 9.0  # a look takes up to a second more, so that the word is out after 10
EARLY_SECONDS = (5.0, 2.5)  # looks before the patience is over, to compare with
FALSE_ALARMS = 2.0  # times the longest stall that was suspected and was none
LIMIT_SECONDS, LIMIT_GAPS = 600.0, 5.0
PAUSE_SECONDS, LONG_PAUSE_SECONDS = 10.0, 30.0  # between looks at a gang that says nothing: at first, later
FIRST_SECONDS = 120.0
AGAIN_SECONDS = 5.0
LEFT_SECONDS = 2.0
LEAST_SECONDS = 1.0  # between two looks


class Work(StrEnum):
    """What the ranks do, as far as they say; `silent` is a gang without steps yet, or after its last one."""

    STEPS = "steps"
    SILENT = "silent"
    SAVE = "save"
    LOAD = "load"
    PHASE = "phase"


class StallClock:
    """Knows the stall of one round of a gang from what its nodes say.

    Args:
        world_size: Ranks of the round.
        limit_seconds: `progress_timeout_seconds` as the user set it.
        now: When the ranks had started.
        false_alarm_seconds: The longest stall of the rounds before that was suspected and was none.

    Attributes:
        is_suspected: Whether the present stall was suspected.
        false_alarm_seconds: As above, with this round.
    """

    def __init__(
        self,
        *,
        world_size: int,
        limit_seconds: float | None,
        now: float,
        false_alarm_seconds: float = 0.0,
    ) -> None:
        self.is_suspected = False
        self.false_alarm_seconds = false_alarm_seconds
        self.users_limit_seconds = limit_seconds
        self._world_size, self._began_at = world_size, now
        self._samples: dict[int, RankSample] = {}
        self._idle_since: dict[int, float] = {}
        self._asked_at = -math.inf
        self._left_at: float | None = None

    # ------------------------------------------------------------ what comes in

    def see(self, sample: NodeSample, now: float) -> bool:
        """Take in what a node says; return whether its ranks have done something since."""
        has_moved = False
        for rank in sample.ranks:
            has_moved |= _progress(rank) != _progress(self._samples.get(rank.rank))
            self._samples[rank.rank] = rank
            self._idle_since[rank.rank] = now - rank.idle_seconds
        return has_moved

    def say_left(self, now: float) -> None:
        """Take in that some ranks have returned; a second word changes nothing."""
        self._left_at = now if self._left_at is None else self._left_at

    def asked(self, now: float) -> None:
        """Take in that a look was asked for."""
        self._asked_at = now

    # ------------------------------------------------------------ the stall

    @property
    def since(self) -> float:
        """When some rank last finished a step, a phase, a save or a load, or began one."""
        ranks = [rank for rank in self._samples.values() if rank.steps or rank.busy or rank.phase]
        return max((self._idle_since[rank.rank] for rank in ranks), default=self._began_at)

    @property
    def median_seconds(self) -> float:
        """Of the gang's steps, 0 while it is not known."""
        known = [rank.step_seconds for rank in self._samples.values() if rank.step_seconds]
        return statistics.median(known) if known else 0.0

    @property
    def work(self) -> Work:
        """What goes on; one rank is enough to make it known that it takes its time."""
        ranks = self._samples.values()
        if any(rank.phase for rank in ranks):
            return Work.PHASE
        for work in (Work.LOAD, Work.SAVE):
            if any(rank.busy == work for rank in ranks):
                return work
        is_over = any(rank.total_steps and (rank.step or 0) >= rank.total_steps for rank in ranks)
        return Work.SILENT if is_over or not self.median_seconds else Work.STEPS

    @property
    def patience_seconds(self) -> float:
        """How long the ranks may be without a step until they are suspected."""
        return max(MEDIANS * self.median_seconds + PATIENCE_SECONDS, FALSE_ALARMS * self.false_alarm_seconds)

    @property
    def limit_seconds(self) -> float:
        """How long the gang may make no progress at all; unless the user said so, it takes a sign too."""
        if self.users_limit_seconds is not None:
            return self.users_limit_seconds
        longest = max((rank.longest_seconds for rank in self._samples.values()), default=0.0)
        return max(LIMIT_SECONDS, LIMIT_GAPS * max(longest, self.false_alarm_seconds))

    @property
    def pause_seconds(self) -> float:
        """Between two looks at a gang that says nothing."""
        is_young = self._asked_at < self._began_at + FIRST_SECONDS
        pause = PAUSE_SECONDS if is_young else LONG_PAUSE_SECONDS
        return pause if self.users_limit_seconds is None else min(pause, self.users_limit_seconds / 3)

    def reports(self, rank: int) -> bool:
        """Whether the rank has reported a step in this round."""
        sample = self._samples.get(rank)
        return sample is not None and sample.steps > 0

    # ------------------------------------------------------------ when to look

    def next_look(self, *, has_looked: bool, is_apart: bool) -> float:
        """Return when the next look is due; infinite if none is.

        Args:
            has_looked: Whether there was a look in this stall.
            is_apart: Whether it showed ranks that cannot come together again.
        """
        last, points = self._asked_at, self._points()
        if self._left_at is not None:
            points += [self._left_at + LEFT_SECONDS, last + AGAIN_SECONDS]
        if has_looked and (self.is_suspected or is_apart):
            points.append(last + AGAIN_SECONDS)
        ahead = [point for point in points if point > last]
        if points and not ahead:
            ahead = [last + self._pause_after_all()]
        return max(min(ahead, default=math.inf), last + LEAST_SECONDS)

    def _points(self) -> list[float]:
        since = self.since
        match self.work:
            case Work.STEPS:
                return [*self._early_points(), since + self.limit_seconds]
            case Work.SILENT if self._world_size > 1:
                pause = max(self._asked_at, self._began_at, since) + self.pause_seconds
                return [*(self._early_points() if self.median_seconds else ()), pause]
            case Work.SAVE | Work.LOAD if self.users_limit_seconds is not None:
                return [since + self.users_limit_seconds]
            case _:
                return []

    def _early_points(self) -> list[float]:
        at = self.since + self.patience_seconds
        return [*(at - seconds for seconds in EARLY_SECONDS), at]

    def _pause_after_all(self) -> float:
        is_young = self._asked_at < self.since + FIRST_SECONDS
        return AGAIN_SECONDS if is_young else LONG_PAUSE_SECONDS


def _progress(rank: RankSample | None) -> tuple[object, ...]:
    return (rank.steps, rank.phase, rank.busy) if rank else ()
