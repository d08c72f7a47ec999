"""The end of a gang, once something has decided it: the outcome, and the grace that its nodes have."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace

from prefect_torch_elastic.diagnosis import diagnose_lost_node, diagnose_setup
from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.evidence import Diagnosis
from prefect_torch_elastic.node.crew import Crew
from prefect_torch_elastic.node.rankset import FAILURE_GRACE_SECONDS
from prefect_torch_elastic.rankstate import StopReason
from prefect_torch_elastic.wire import GangEnded, GangStatus, StopGang

KILL_MARGIN_SECONDS = 8.0  # an agent needs its ranks' grace, and a moment to reap and report


class Ending:
    """How one gang ends.

    Args:
        crew: Its nodes.
        grace_seconds: Of the gang.

    Attributes:
        is_decided: Whether the gang is about to end; what comes later changes only how soon.
        kill_at: When nodes that are left are killed; infinite before an end is decided.
    """

    def __init__(self, crew: Crew, *, grace_seconds: float) -> None:
        self._crew, self._grace_seconds = crew, grace_seconds
        self._outcome: GangEnded | None = None
        self._stop: StopGang | None = None
        self._killed = set[int]()
        self.kill_at = math.inf

    @property
    def is_decided(self) -> bool:
        return self._outcome is not None

    def succeed(self, result: str) -> None:
        """All ranks have returned."""
        self._decide(GangEnded(status=GangStatus.SUCCEEDED, result=result))
        self.kill_at = time.monotonic() + KILL_MARGIN_SECONDS

    def stop(self, order: StopGang, *, status: GangStatus) -> bool:
        """Ask the nodes to end; a second order can only shorten the grace. True for the first one."""
        is_first = self._stop is None
        if self._stop and order.grace_seconds >= self._stop.grace_seconds:
            return False
        self._stop = order
        self._decide(self._outcome or GangEnded(status=status))
        self.kill_at = min(self.kill_at, time.monotonic() + order.grace_seconds + KILL_MARGIN_SECONDS)
        self._crew.send(order, interrupt=True)
        return is_first

    def fail(self, diagnosis: Diagnosis) -> None:
        """End the gang for this failure."""
        self._decide(GangEnded(status=GangStatus.FAILED, diagnosis=asdict(diagnosis), error=diagnosis.error))
        # ranks of a failed gang cannot save anything together, but their own handlers get the grace
        grace = min(self._grace_seconds, FAILURE_GRACE_SECONDS)
        self.kill_at = time.monotonic() + grace + KILL_MARGIN_SECONDS
        self._crew.send(StopGang(reason=StopReason.FAILED, grace_seconds=grace), interrupt=True)

    def note_killed(self, ranks: list[int]) -> None:
        """Take in which ranks outstayed their grace."""
        self._killed.update(ranks)

    def act(self, now: float) -> None:
        """Kill what is left when the time is over."""
        if now >= self.kill_at:
            self.kill_at = math.inf
            self._crew.kill()

    def conclude(self, *, restarts: int) -> GangEnded:
        """Return the end of the gang; no node is left."""
        outcome = self._outcome or GangEnded(
            status=GangStatus.FAILED,
            diagnosis=asdict(
                diagnose_lost_node(0, reason="every node left without a verdict", pods_remain=True)
            ),
        )
        return replace(outcome, restarts=restarts, killed=sorted(self._killed))

    def _decide(self, outcome: GangEnded) -> None:
        self._outcome = outcome
        self._crew.shut()


def refuse_gang(error: Exception) -> GangEnded:
    """Return the end of a gang that could not start here."""
    diagnosis = diagnose_setup(str(error), may_pass=not isinstance(error, SpecError))
    return GangEnded(status=GangStatus.FAILED, diagnosis=asdict(diagnosis))
