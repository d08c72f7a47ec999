"""How the ranks of a gang agree to stop: about once a second they ask each other, at a step of all of them.

A stop comes to each rank by its page of shared memory, a moment earlier to one than to another. Whoever sees
it does not leave before the others know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from prefect_torch_elastic.checkpoint import schedule
from prefect_torch_elastic.checkpoint.peers import Peers, Word
from prefect_torch_elastic.errors import StopTraining
from prefect_torch_elastic.rankstate import RankState


class StopVotes:
    """One rank's part in the votes.

    Args:
        peers: The seat at the meetings.
        page: The rank's page, None outside of a gang.
        settle: Called on rank 0 with the seconds that are left if a stop was asked for, else None; returns
            what else rank 0 tells with the result.

    Attributes:
        stop_seen: Whether the ranks have agreed to stop.
    """

    def __init__(
        self, peers: Peers, page: RankState | None, settle: Callable[[float | None], dict[str, Any]]
    ) -> None:
        self._peers, self._page, self._settle = peers, page, settle
        self._next = 0  # the step of the next vote
        self._step, self._at = 0, time.monotonic()  # of the last one
        self.stop_seen = False

    def start_at(self, step: int) -> None:
        """Begin with the votes at the first step after this one."""
        self._next, self._step, self._at = 0, step, time.monotonic()

    def vote(self, purpose: str, step: int) -> dict[str, Any] | None:
        """Take part in the vote if there is one at this step, and return what rank 0 tells.

        Raises:
            StopTraining: If a peer is lost: nobody is left to agree with.
        """
        if self._page is not None:
            self._page.poll_for_stop()
        self.leave_if_broken()
        if self.stop_seen or step < self._next:
            return None
        answer = self._peers.meet(purpose, self._say, lambda words: self._decide(step, words))
        self._next, self.stop_seen = answer["next"], answer["stop"]
        return answer

    def leave_if_broken(self) -> None:
        """Raise StopTraining if the ranks cannot agree on anything any more."""
        request = self._page.stop_request if self._page else None
        if request is not None and not request.reason.lets_ranks_save:
            raise StopTraining(f"stopped without a save: {request.reason.name.lower()}")

    def _say(self) -> Word:
        request = self._page.stop_request if self._page else None
        return {"left": None if request is None else request.seconds_left}

    def _decide(self, step: int, words: Sequence[Word]) -> Word:
        """On rank 0: all stop if one was asked to."""
        left = [word["left"] for word in words if word["left"] is not None]
        now = time.monotonic()
        steps, seconds = step - self._step, now - self._at
        self._step, self._at = step, now
        return {
            **self._settle(min(left) if left else None),
            "stop": bool(left),
            "next": schedule.next_vote(step, steps_since=steps, seconds_since=seconds),
        }
