"""What the nodes of a gang have said about its rounds: who runs, who returned, who failed, what was decided.

A round begins with a rendezvous and ends with a verdict. Nodes report one after the other, so at any moment
some may be a round behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prefect_torch_elastic.evidence import RankEvidence
from prefect_torch_elastic.wire import RankInfo, RanksFailed, RanksReturned, RanksStarted, Verdict


@dataclass
class Rounds:
    """The books of one gang.

    Attributes:
        started: The newest start of each node that is there.
        newest: Number of the newest round that any node has started.
        verdicts: By round.
        broken: Rounds that lost a node, or that one left.
    """

    started: dict[int, RanksStarted] = field(default_factory=dict[int, RanksStarted])
    newest: int = 0
    verdicts: dict[int, Verdict] = field(default_factory=dict[int, Verdict])
    broken: set[int] = field(default_factory=set[int])
    _returned: dict[int, int] = field(default_factory=dict[int, int])
    _failed: dict[int, dict[int, list[RankEvidence]]] = field(
        default_factory=dict[int, dict[int, list[RankEvidence]]]
    )

    @property
    def current(self) -> int:
        """The newest round of the nodes that are there, 0 before the first."""
        return max((started.round for started in self.started.values()), default=0)

    def members(self, number: int) -> list[int]:
        """Return the nodes whose ranks run in this round."""
        return [index for index, started in self.started.items() if started.round == number]

    def ranks(self, number: int) -> list[RankInfo]:
        """Return the ranks of a round, as far as their nodes are there."""
        return [info for index in self.members(number) for info in self.started[index].ranks]

    def world_size(self, number: int) -> int:
        """Return the ranks of a round that is whole; 0 while nodes are missing."""
        members = self.members(number)
        if not members or len(self.ranks(number)) < self.started[members[0]].world_size:
            return 0
        return self.started[members[0]].world_size

    def start(self, message: RanksStarted) -> None:
        """Take in that the ranks of a node run."""
        self.started[message.node] = message
        self.newest = max(self.newest, message.round)

    def give_back(self, message: RanksReturned) -> None:
        """Take in that the ranks of a node have returned."""
        self._returned[message.node] = message.round

    def have_all_returned(self, number: int) -> bool:
        """Whether the round is whole and all its ranks have returned."""
        is_whole = number == self.current and self.world_size(number) > 0
        return is_whole and all(self._returned.get(index) == number for index in self.members(number))

    def fail(self, message: RanksFailed) -> None:
        """Take in the evidence of a node whose ranks failed."""
        evidence = [RankEvidence(**fields) for fields in message.ranks]
        self._failed.setdefault(message.round, {})[message.node] = evidence

    def newest_failed(self) -> int:
        """Return the newest round in which ranks failed."""
        return max(self._failed)

    def silent_members(self, number: int) -> list[int]:
        """Return the nodes of a failed round that have not failed themselves, so far."""
        return [index for index in self.members(number) if index not in self._failed.get(number, {})]

    def evidence(self, number: int) -> list[RankEvidence]:
        """Return what is known about the ranks of a failed round, also those that returned on other nodes."""
        failed = self._failed.get(number, {})
        known = [rank for ranks in failed.values() for rank in ranks]
        returned = [index for index in self.silent_members(number) if self._returned.get(index) == number]
        return known + [
            RankEvidence(
                rank=info.rank,
                local_rank=info.local_rank,
                node_rank=info.node_rank,
                exit_code=0,
                returned_at=0.0,  # the clocks of two machines cannot be compared; it was before the verdict
                log=info.log,
            )
            for index in returned
            for info in self.started[index].ranks
        ]
