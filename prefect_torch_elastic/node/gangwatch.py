"""Looks at all ranks of a gang from its head: when to ask for evidence, who has answered, what it shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from prefect_torch_elastic.evidence import RankEvidence
from prefect_torch_elastic.hangwatch import Finding, HangWatch
from prefect_torch_elastic.incidents import Witness
from prefect_torch_elastic.observations import EvidenceTaken, NodeSample, RankSample, RankSnapshot
from prefect_torch_elastic.wire import RankInfo, TakeEvidence

ANSWER_SECONDS = 3.5  # an agent takes 2.5 s at most


class GangWatch:
    """The eyes of a gang's head.

    Args:
        limit_seconds: `progress_timeout_seconds` as the user set it.
        ask: Sends a request to these nodes, or to all for None, and returns whom it asked.
    """

    def __init__(
        self,
        *,
        limit_seconds: float | None,
        ask: Callable[[TakeEvidence, Sequence[int] | None], Sequence[int]],
    ) -> None:
        self._limit, self._ask = limit_seconds, ask
        self._watch: HangWatch | None = None
        self._round = self._number = 0
        self._false_alarm_seconds = 0.0
        self._awaited = set[int]()
        self._asked_at = -math.inf
        self._is_judged = True
        self._samples: dict[int, RankSample] = {}
        self._snapshots: dict[int, RankSnapshot] = {}

    # ------------------------------------------------------------ what comes in

    def begin(self, number: int, *, world_size: int, now: float) -> None:
        """All ranks of a round run: watch them."""
        self.end()
        self._round, self._samples, self._snapshots = number, {}, {}
        self._watch = HangWatch(
            world_size=world_size,
            limit_seconds=self._limit,
            now=now,
            false_alarm_seconds=self._false_alarm_seconds,
        )

    def end(self) -> None:
        """The round is over, or about to be."""
        if self._watch is not None:
            self._false_alarm_seconds = self._watch.false_alarm_seconds
        self._watch, self._is_judged = None, True

    def see(self, sample: NodeSample, now: float) -> float | None:
        """Take in what a node says; return the seconds of a stall that was suspected and is over now."""
        if sample.round != self._round:
            return None
        self._samples |= {rank.rank: rank for rank in sample.ranks}
        for rank in sample.ranks:  # a look at a rank that has made steps since tells nothing any more
            if (seen := self._snapshots.get(rank.rank)) is not None and rank.step != seen.step:
                del self._snapshots[rank.rank]
        return self._watch.see(sample, now) if self._watch else None

    def say_left(self, number: int, now: float) -> None:
        """Take in that the ranks of some node have returned."""
        if self._watch and number == self._round:
            self._watch.say_left(now)

    def take(self, evidence: EvidenceTaken) -> None:
        """Take in the answer of a node."""
        if evidence.number != self._number:
            return  # it comes too late
        self._awaited.discard(evidence.node)
        self._snapshots |= {rank.rank: rank for rank in evidence.ranks}

    # ------------------------------------------------------------ looks

    def look(self, reason: str, now: float, *, nodes: Sequence[int] | None = None) -> None:
        """Ask for evidence, of all nodes or these; the answers replace those to the question before."""
        self._number += 1
        self._asked_at, self._snapshots = now, {}
        self._awaited = set(self._ask(TakeEvidence(number=self._number, reason=reason), nodes))

    @property
    def is_answered(self) -> bool:
        """Whether every node that was asked has answered."""
        return not self._awaited

    def next_at(self) -> float:
        """Return when `act` has something to do; infinite if that depends on others."""
        if not self._is_judged:
            return self._asked_at if self.is_answered else self._asked_at + ANSWER_SECONDS
        return self._watch.next_look() if self._watch else math.inf

    def act(self, now: float) -> Finding | None:
        """Ask if it is time to, and judge what was answered."""
        if self._watch is None or now < self.next_at():
            return None
        if self._is_judged:
            self._watch.asked(now)
            self.look("the gang is looked at", now)
            self._is_judged = False
            return None
        self._is_judged = True
        return self._watch.judge(list(self._snapshots.values()), now)

    def forget(self, nodes: Iterable[int]) -> None:
        """These nodes will not answer any more."""
        self._awaited.difference_update(nodes)

    def witnesses(self, infos: Iterable[RankInfo], evidence: Iterable[RankEvidence] = ()) -> list[Witness]:
        """Return what is known about these ranks."""
        ended = {rank.rank: rank for rank in evidence}
        return [
            Witness(
                info=info,
                sample=self._samples.get(info.rank),
                snapshot=self._snapshots.get(info.rank),
                evidence=ended.get(info.rank),
            )
            for info in infos
        ]
