"""How saves behind the training ended: rank 0 knows it first, and all ranks act on it in the same way."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from prefect_torch_elastic.checkpoint.peers import Word, name_ranks
from prefect_torch_elastic.checkpoint.saving import SaveResult
from prefect_torch_elastic.checkpoint.schedule import SaveClock
from prefect_torch_elastic.errors import CheckpointError, Superseded

STUCK_SECONDS = 300.0  # more than the store's own deadline for a block
_log = logging.getLogger("prefect_torch_elastic.checkpoint")


class SaveNews:
    """The ends of saves, one after the other.

    Args:
        max_failures: So many saves in a row may not fail.
        is_leader: Whether this is rank 0, which speaks for all in the log.

    Attributes:
        clock: How long saves take, on rank 0.
        last_problem: Why the last save failed, the same on all ranks; empty if it did not.
    """

    def __init__(self, *, max_failures: int, is_leader: bool) -> None:
        self._max_failures, self._is_leader = max_failures, is_leader
        self._failures = 0
        self._told_at = -math.inf
        self.clock = SaveClock()
        self.last_problem = ""

    def tell(self, result: SaveResult) -> dict[str, Any]:
        """Return a save's end as rank 0 passes it on with its next answer."""
        self._told_at = time.monotonic()
        if result.problem:
            self._failures += 1
        else:
            self._failures = 0
            self.clock.add(result.seconds)
        return {
            "problem_of_save": result.problem,
            "step_of_save": result.step,
            "superseded": result.superseded,
            "failures": self._failures,
        }

    def tell_stuck(self, ranks: Sequence[int], *, step: int) -> dict[str, Any]:
        """Return that ranks do not end writing a save; it counts as a failure once in `STUCK_SECONDS`.

        Whatever was told last is theirs too until then: they may be about to end the save that it was about.
        """
        if not ranks or time.monotonic() - self._told_at < STUCK_SECONDS:
            return {}
        return self.tell(SaveResult(step=step, problem=f"{name_ranks(ranks)} did not end writing"))

    def hear(self, word: Word) -> None:
        """Act on what rank 0 passed on, if it did.

        Raises:
            Superseded: If a newer gang has taken the run over.
            CheckpointError: If too many saves in a row have failed.
        """
        problem = word.get("problem_of_save")
        if problem is None:
            return
        self.last_problem = problem
        if word["superseded"]:
            raise Superseded(problem)
        if not problem:
            return
        count = word["failures"]
        how_often = f"{count} of {self._max_failures} in a row"
        text = f"The save of step {word['step_of_save']} failed ({how_often}): {problem}"
        if count >= self._max_failures:
            raise CheckpointError(text)
        if self._is_leader:
            _log.warning("%s", text)
