"""What makes a gang suspected, and what proves that it hangs. Pure: the clock is passed in.

A suspicion is a word; a proof ends the round. A gang is suspected when none of its ranks has finished a
step for 3 of its own median steps and 10 s. Nobody suspects what is known to take its time: the first
step, the library's saves and loads, `phase(...)` blocks, and what comes after the last of `total_steps`.

Proof is one of these, the same in looks that lie some seconds apart (a look is the evidence of all
ranks):

1. *Ranks that cannot come together again*: a rank has returned while all others wait in a collective; two
   operations at one number; for half a minute, a rank that waits in a collective that the others have left,
   or ranks that wait for each other, if all are inside the call of a collective. How long training takes does
   not matter, so this is looked for in silent gangs and first steps too.
2. *A rank that stands still while others wait for it*, in a gang that is suspected: it has not entered
   the collective in which they wait, and its stack and its collectives are the same in each look. A slow
   evaluation of all ranks is none: nobody waits, or not for long. A slow one of a single rank is none as
   long as its stack moves, or one of its processes computes, reads, writes or waits for a disk; once it has
   moved in a stall, half a minute of standing still is asked of it. After a suspicion that was wrong, the
   gang is given twice that time.
3. *No progress for `progress_timeout_seconds`*, the last resort. The default is the larger of 10 minutes
   and 5 times the longest gap seen, leaves out what is known to take its time, and asks for a sign: some
   rank, even one that waits for others, has stood still for all that time. Ranks that all compute are only
   suspected. A value that the user set is hard, and counts in saves and loads too. `phase(...)` says that
   something else is going on, however long. In a first step, after the last one, and in a gang that reports
   nothing, progress is a new collective, and some rank must be waiting in one for ranks that move no more:
   a gang that does not communicate owes nobody anything.

Of collectives that are only started less is known (`async_op=True`, and all of NCCL, which go into the queue
of a GPU): the rank goes on. That one rank is ahead of another in them is no proof of the first kind.

Ranks that died or were stopped need no watcher: their agents see that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from prefect_torch_elastic.collectives import (
    Memberships,
    Split,
    SplitKind,
    describe_common_wait,
    find_split,
    list_memberships,
    say_of_ranks,
)
from prefect_torch_elastic.evidence import Category
from prefect_torch_elastic.observations import NodeSample, RankSnapshot
from prefect_torch_elastic.stacks import find_place, read_main_thread
from prefect_torch_elastic.stalls import StallClock, Work
from prefect_torch_elastic.standstill import is_blocked, is_same_place

SAME_SECONDS = 4.0  # between looks that show the same, for a proof
MOVED_SECONDS = 30.0  # the same, for a rank that has moved in this stall
SILENT_SUSPICION_SECONDS = 60.0
_TANGLES = (SplitKind.PASSED, SplitKind.CROSSED)  # told by the newest collectives alone: looked at for longer
SLACK_SECONDS = 3.0  # what a look may take: so much younger is the stall in its evidence
# The innermost frame of a rank that waits for others in a save or a load.
_MEETINGS = ("/checkpoint/peers.py", "/checkpoint/saving.py")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a look has shown.

    Attributes:
        category: Of a proof; None for a suspicion.
        sentence: The cause, with a full stop at its end.
        ranks: The culprits, empty if nobody is to blame.
        waiting: Their victims.
    """

    category: Category | None
    sentence: str
    ranks: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()


class HangWatch:
    """Watches one round of a gang; arguments as of `StallClock`."""

    def __init__(
        self, *, world_size: int, limit_seconds: float | None, now: float, false_alarm_seconds: float = 0.0
    ) -> None:
        self._world_size = world_size
        self._clock = StallClock(
            world_size=world_size,
            limit_seconds=limit_seconds,
            now=now,
            false_alarm_seconds=false_alarm_seconds,
        )
        self._looks = _Looks()
        self._memberships: Memberships = frozenset()

    @property
    def false_alarm_seconds(self) -> float:
        """The longest stall that was suspected and was none."""
        return self._clock.false_alarm_seconds

    def see(self, sample: NodeSample, now: float) -> float | None:
        """Take in what a node says; return the seconds of a stall that was suspected and is over now."""
        clock = self._clock
        since = clock.since if clock.is_suspected else 0.0  # of all ranks, for each word of each node
        if not clock.see(sample, now):
            return None
        self._looks = _Looks()
        if not clock.is_suspected:
            return None
        clock.is_suspected = False
        clock.false_alarm_seconds = max(clock.false_alarm_seconds, stall := now - since)
        return stall

    def say_left(self, now: float) -> None:
        """Take in that some ranks have returned."""
        self._clock.say_left(now)

    def next_look(self) -> float:
        """Return when the next look is due, in monotonic seconds; infinite if none is."""
        split = self._looks.split
        is_apart = split is not None and split.is_final
        return self._clock.next_look(has_looked=self._looks.has_any, is_apart=is_apart)

    def asked(self, now: float) -> None:
        """Take in that a look was asked for."""
        self._clock.asked(now)

    def judge(self, snapshots: Sequence[RankSnapshot], now: float) -> Finding | None:
        """Return what the look shows together with those before it in this stall; None for nothing new.

        Args:
            snapshots: Of all ranks that have answered; nothing is proven by halves.
            now: Monotonic seconds.
        """
        looks = self._looks
        self._memberships |= list_memberships(snapshots)
        is_whole = len(snapshots) == self._world_size and all(map(_is_known, snapshots))
        looks.add(snapshots, now, find_split(snapshots, memberships=self._memberships) if is_whole else None)
        if looks.split and looks.split.is_final:
            needed = MOVED_SECONDS if looks.split.kind in _TANGLES else SAME_SECONDS
            if looks.apart_seconds >= needed:
                return _blame(Category.COLLECTIVES_APART, looks.split)
        work = self._clock.work
        match work:
            case Work.STEPS:
                return self._judge_steps(now, is_whole=is_whole)
            case Work.SILENT:
                return self._judge_silence()
            case Work.SAVE | Work.LOAD:
                return self._judge_busy(work, now)
            case Work.PHASE:
                return None
            case _:
                assert_never(work)

    def _judge_steps(self, now: float, *, is_whole: bool) -> Finding | None:
        clock, split, stalled = self._clock, self._looks.split, now - self._clock.since
        if stalled < clock.patience_seconds or self._makes_steps():
            return None
        words = f"no step for {stalled:.0f} s, where a step takes {clock.median_seconds:.2g} s"
        if split and split.kind is SplitKind.BEHIND:
            needed = MOVED_SECONDS if self._looks.have_moved(split.ranks) else SAME_SECONDS
            if self._looks.standing_seconds(split) >= needed:
                return _blame(Category.HANG, split, words)
        if stalled < clock.limit_seconds or not (is_whole or clock.users_limit_seconds is not None):
            return self._suspect(words)
        # the first look comes when the patience ends, at the latest
        standing = clock.limit_seconds - clock.patience_seconds
        if clock.users_limit_seconds is None and self._looks.longest_seconds < standing:
            return self._suspect(words)
        words += f", longer than `progress_timeout_seconds={clock.limit_seconds:g}`"
        if split:
            return _blame(Category.HANG, split, words)
        return Finding(category=Category.HANG, sentence=f"{words}{self._looks.describe_place()}.")

    def _judge_silence(self) -> Finding | None:
        looks, split = self._looks, self._looks.split
        wait = describe_common_wait(list(looks.newest.values()))
        if split is None and not wait:
            return None
        seconds = looks.standing_seconds(split) if split else looks.calling_seconds
        words = f"for {seconds:.0f} s"
        if seconds + self._clock.pause_seconds >= self._clock.limit_seconds:  # it began before the first look
            if split:
                return _blame(Category.HANG, split, words)
            return Finding(category=Category.HANG, sentence=f"{wait} {words}.")
        return self._suspect(words) if seconds >= SILENT_SUSPICION_SECONDS else None

    def _judge_busy(self, work: Work, now: float) -> Finding | None:
        """A save or a load beyond the user's limit: those that do not wait in its meeting keep the others."""
        clock, snapshots, stalled = self._clock, self._looks.newest, now - self._clock.since
        if clock.users_limit_seconds is None or stalled < clock.users_limit_seconds:
            return None
        stuck = tuple(rank for rank, one in snapshots.items() if one.busy and not _waits_in_meeting(one))
        ranks = stuck if len(stuck) < len(snapshots) else ()
        who = say_of_ranks(ranks, "has", "have") if ranks else "all ranks have"
        place = find_place(snapshots[stuck[0]].stacks) if stuck else ""
        limit = f"longer than `progress_timeout_seconds={clock.users_limit_seconds:g}`"
        return Finding(
            category=Category.STUCK_SAVE if work is Work.SAVE else Category.HANG,
            sentence=f"{who} been in a {work} of a checkpoint for {stalled:.0f} s, {limit}"
            f"{f'; it is in {place}' if place else ''}.",
            ranks=ranks,
            waiting=tuple(rank for rank in snapshots if rank not in ranks) if ranks else (),
        )

    def _suspect(self, words: str) -> Finding | None:
        if self._clock.is_suspected:
            return None
        self._clock.is_suspected = True
        if split := self._looks.split:
            return _blame(None, split, words)
        wait = describe_common_wait(list(self._looks.newest.values()))
        return Finding(
            category=None, sentence=f"{wait}: {words}." if wait else f"{words}{self._looks.describe_place()}."
        )

    def _makes_steps(self) -> bool:
        """Whether the evidence is newer than the samples, of which some may have been lost."""
        idle = [one.idle_seconds for rank, one in self._looks.newest.items() if self._clock.reports(rank)]
        return min(idle, default=math.inf) < self._clock.patience_seconds - SLACK_SECONDS


def _is_known(snapshot: RankSnapshot) -> bool:
    """Whether it is clear where the rank is: in no collective, if it is silent and busy elsewhere."""
    return snapshot.has_answered or not snapshot.is_alive or not is_blocked(snapshot)


def _waits_in_meeting(snapshot: RankSnapshot) -> bool:
    innermost = read_main_thread(snapshot.stacks).partition("\n")[0]
    return any(meeting in innermost for meeting in _MEETINGS)


def _blame(category: Category | None, split: Split, words: str = "") -> Finding:
    sentence = f"{split.sentence}: {words}." if words else f"{split.sentence}."
    return Finding(category=category, sentence=sentence, ranks=split.ranks, waiting=split.waiting)


class _Looks:
    """The looks of one stall: the newest one, and since when they have shown the same."""

    def __init__(self) -> None:
        self.newest: dict[int, RankSnapshot] = {}
        self.split: Split | None = None
        self.has_any = False
        self._at = self._apart_since = self._calling_since = 0.0
        self._known: dict[int, RankSnapshot] = {}  # the last one of each rank, answered it this time or not
        self._placed_since: dict[int, float] = {}
        self._moved = set[int]()

    def add(self, snapshots: Sequence[RankSnapshot], now: float, split: Split | None) -> None:
        """Take in one look and what it shows; without all ranks that is nothing, not even that of before."""
        before, split_before = self.newest, self.split
        self.newest = {snapshot.rank: snapshot for snapshot in sorted(snapshots, key=lambda one: one.rank)}
        self.split = split
        self._at = now
        if not (self.split and split_before and self.split.mark == split_before.mark):
            self._apart_since = now
        if not self.has_any or _calls(before) != _calls(self.newest):
            self._calling_since = now
        for rank, snapshot in self.newest.items():
            if rank in self._known and is_same_place(self._known[rank], snapshot):
                continue
            self._placed_since[rank] = now
            if rank in self._known:
                self._moved.add(rank)
        self._known |= self.newest
        self.has_any = True

    @property
    def apart_seconds(self) -> float:
        """How long the ranks have been apart in the same way."""
        return self._at - self._apart_since

    @property
    def calling_seconds(self) -> float:
        """How long no rank has entered or left a collective."""
        return self._at - self._calling_since

    def standing_seconds(self, split: Split) -> float:
        """How long the culprits have been where they are, with the others waiting."""
        return self._at - max([self._apart_since, *(self._placed_since[rank] for rank in split.ranks)])

    @property
    def longest_seconds(self) -> float:
        """How long the rank that has stood still for longest has done so."""
        return self._at - min((self._placed_since[rank] for rank in self.newest), default=self._at)

    def have_moved(self, ranks: Sequence[int]) -> bool:
        """Whether one of them was somewhere else at an earlier look."""
        return bool(self._moved & set(ranks))

    def describe_place(self) -> str:
        """Return where a rank is, for a stall in which no rank waits for another."""
        for rank, snapshot in self.newest.items():
            if place := find_place(snapshot.stacks):
                return f"; rank {rank} is in {place}"
        return ""


def _calls(snapshots: dict[int, RankSnapshot]) -> object:
    return {rank: snapshot.collectives for rank, snapshot in snapshots.items()}
