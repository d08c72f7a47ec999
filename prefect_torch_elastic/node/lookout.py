"""What a node's agent tells about its running ranks: a sample each second, and evidence when it is asked."""

from __future__ import annotations

import time
from collections.abc import Callable

from prefect_torch_elastic.node.rankset import RankSet
from prefect_torch_elastic.node.sampling import Sampler
from prefect_torch_elastic.node.snapshots import EvidenceTaking
from prefect_torch_elastic.wire import Message, TakeEvidence

LOOK_SECONDS = 0.02  # while evidence is being written


class Lookout:
    """Looks at the ranks of one node, between other things and without waiting.

    Args:
        ranks: The node's ranks.
        node: The node's number.
        tell: Sends a message that must arrive.
        offer: Sends one that may be lost.
    """

    def __init__(
        self,
        ranks: RankSet,
        *,
        node: int,
        tell: Callable[[Message], None],
        offer: Callable[[Message], bool],
    ) -> None:
        self._ranks, self._node, self._tell, self._offer = ranks, node, tell, offer
        self._sampler = Sampler()
        self._taking: EvidenceTaking | None = None

    def take_evidence(self, request: TakeEvidence) -> None:
        """Begin to take evidence; a request that is still open is answered with what is there."""
        self._finish_taking()
        self._taking = EvidenceTaking(self._ranks.ranks, node=self._node, number=request.number)
        if not any(rank.alive for rank in self._ranks.ranks):
            self._finish_taking()

    def patience(self, seconds: float) -> float:
        """Return how long the agent may wait for something to happen."""
        return min(seconds, LOOK_SECONDS) if self._taking else seconds

    def look(self, round_number: int) -> None:
        """Tell what there is to tell now."""
        if self._taking and (taken := self._taking.look()):
            self._taking = None
            self._tell(taken)
        self._offer_sample(round_number)

    def prepare_end(self) -> None:
        """Answer an open request: the ranks are about to be ended."""
        self._finish_taking()

    def say_last(self, round_number: int) -> None:
        """Tell how far ranks came that have ended, and answer a request that came meanwhile."""
        self._finish_taking()
        self._offer_sample(round_number, last=True)

    def _offer_sample(self, round_number: int, *, last: bool = False) -> None:
        sample = self._sampler.sample(
            self._ranks.ranks, node=self._node, round_number=round_number, now=time.monotonic(), last=last
        )
        if sample:
            self._offer(sample)

    def _finish_taking(self) -> None:
        if self._taking:
            self._tell(self._taking.finish())
            self._taking = None
