"""Checkpoints as user code sees them: `load`, `save`, `save_if_due`, `should_stop`.

All ranks call them, in the same order. What the ranks must agree on goes through `peers`; what is written
behind the training goes through `saver`.
"""

from __future__ import annotations

import logging
import operator
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, SupportsIndex

from prefect_torch_elastic.checkpoint import loading, schedule
from prefect_torch_elastic.checkpoint.ledger import Ledger, Place
from prefect_torch_elastic.checkpoint.manifest import STEPS_LIMIT
from prefect_torch_elastic.checkpoint.news import SaveNews
from prefect_torch_elastic.checkpoint.peers import Board, Peers, StoreBoard, Word
from prefect_torch_elastic.checkpoint.saver import SaveMode, Saver
from prefect_torch_elastic.checkpoint.votes import StopVotes
from prefect_torch_elastic.errors import CheckpointError, StopTraining
from prefect_torch_elastic.rankstate import Busy, RankState
from prefect_torch_elastic.spec import CheckpointPolicy
from prefect_torch_elastic.store import Store, open_store

if TYPE_CHECKING:
    from prefect_torch_elastic.context import ElasticContext

_ROUND_SECONDS = 30.0  # of waiting for an upload, before the ranks tell each other that it goes on
_log = logging.getLogger("prefect_torch_elastic.checkpoint")


class CheckpointSession:
    """This rank's checkpoints; `get_context().checkpoint`."""

    def __init__(
        self,
        store: Store,
        folder: str,
        *,
        rank: int = 0,
        world_size: int = 1,
        address: tuple[str, int] | None = None,
        policy: CheckpointPolicy | None = None,
        state: RankState | None = None,
        attempt: int = 1,
        by: str = "",
        call: str = "",
        announce: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._policy = policy or CheckpointPolicy()
        self._page = state

        def connect() -> Board:
            assert address is not None, "a gang of several ranks has a store"
            return StoreBoard.connect(*address)

        several = world_size > 1
        self._peers = Peers(
            rank=rank,
            world_size=world_size,
            board=connect() if several else None,
            timeout_seconds=self._policy.meeting_timeout_seconds,
        )
        ledger = None
        if rank == 0:
            ledger = Ledger(store, folder, policy=self._policy, attempt=attempt, by=by, call=call)
        self._place = Place(store=store, run_folder=folder, peers=self._peers, ledger=ledger)
        self._saver = Saver(self._place, connect if several else None, announce)
        self._news = SaveNews(max_failures=self._policy.max_failures, is_leader=rank == 0)
        self._votes = StopVotes(self._peers, state, self._settle_vote)
        self._unsettled = False  # whether a save was started whose end is not known yet
        self._saved_step = 0
        self._due_after, self._due_since = 0, time.monotonic()  # what the policy counts from
        self._is_time = self._too_late = False

    @classmethod
    def open(
        cls,
        context: ElasticContext,
        storage: Mapping[str, Any],
        state: RankState | None,
        *,
        announce: Callable[[dict[str, Any]], None] | None = None,
    ) -> CheckpointSession:
        """Return the session of a rank; outside of a gang (no `storage`), one on a folder that goes away."""
        thrown_away = ""
        if not storage:
            thrown_away = tempfile.mkdtemp(prefix="prefect-torch-elastic-")
            storage = {"url": thrown_away, "folder": context.run_key}
        policy: dict[str, Any] = storage.get("policy") or {}
        session = cls(
            open_store(storage["url"], storage.get("credentials")),
            storage["folder"],
            rank=context.rank,
            world_size=context.world_size,
            address=(context.master_addr, context.master_port),
            policy=CheckpointPolicy(**policy),
            state=state,
            attempt=context.attempt,
            by=storage.get("by", ""),
            call=storage.get("call", ""),
            announce=announce,
        )
        if thrown_away:  # with the session, or when the program ends
            weakref.finalize(session, shutil.rmtree, thrown_away, ignore_errors=True)
        return session

    # ------------------------------------------------------------ load and save

    def load(self, state: Mapping[str, Any], *, fresh_if_damaged: bool = False) -> int:
        """Fill `state` in place from the newest whole checkpoint of the run; all ranks call it.

        Args:
            state: Objects with `state_dict` and `load_state_dict`, tensors and plain values by name, as given
                to `save`. A part of them loads that part: `{"model": model}` loads weights only.
            fresh_if_damaged: Start from step 0 if all checkpoints are damaged, instead of an error.

        Returns:
            The number of completed optimizer steps, where `range()` starts; 0 if there is no checkpoint yet.

        Raises:
            CheckpointError: If all checkpoints are damaged, or the ranks do not all call this.
            CheckpointMismatch: If `state` has other parameters than the checkpoint; nothing was changed.
            StoreError: If the store cannot be read.
        """
        self._settle()
        with self._busy(Busy.LOAD):
            step = loading.load(state, self._place, fresh_if_damaged=fresh_if_damaged)
        self._saved_step = step
        self._due_after, self._due_since = step, time.monotonic()
        self._votes.start_at(step)  # the run before says nothing about how long a step takes now
        return step

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        metrics: Mapping[str, Any] | None = None,
        wait: bool = False,
    ) -> bool:
        """Save the run as of `step` completed optimizer steps; all ranks call it.

        Returns when a copy is taken; the upload goes on behind the training. If the save before is still on
        its way, this one is left out and the log says so, unless the policy's `when_busy` is `wait`.

        Args:
            state: What to save by name: modules, optimizers, anything with `state_dict` and
                `load_state_dict`, tensors, plain values.
            step: Completed optimizer steps: call it after a step, with `step + 1`.
            metrics: Numbers of this checkpoint; the policy's `metric` decides by them which one is best.
            wait: Return when the checkpoint exists. Nothing is copied and nothing is left out then. A save
                after a stop was asked for always waits.

        Returns:
            Whether it was saved or is on its way.

        Raises:
            CheckpointError: If saves failed as often in a row as the policy's `max_failures`, if one that was
                waited for failed, or if the ranks do not all call this with the same step.
            Superseded: If a newer gang has taken the run over.
        """
        step = _check_step(step)
        self._votes.leave_if_broken()
        with self._busy(Busy.SAVE):
            return self._save(state, step=step, metrics=metrics or {}, wait=wait or self.stop_seen)

    def _save(self, state: Mapping[str, Any], *, step: int, metrics: Mapping[str, Any], wait: bool) -> bool:
        mode = SaveMode(
            after_last=wait or self._policy.when_busy == "wait", until_saved=wait, prune=not self.stop_seen
        )
        numbers = {name: float(value) for name, value in metrics.items()}
        self._due_after, self._due_since = step, time.monotonic()
        answer, result = self._saver.save(state, step=step, metrics=numbers, mode=mode, news=self._take_news)
        self._news.hear(answer)
        if not answer["go"]:
            if self._peers.rank == 0:
                _log.warning("Step %d is not saved: the save before it is still on its way.", step)
            return False
        self._saved_step = step
        self._unsettled = result is None
        if result is not None:
            self._news.hear(self._news.tell(result))
            if result.problem:
                raise CheckpointError(f"step {step} could not be saved: {result.problem}")
        return True

    def save_if_due(
        self, state: Mapping[str, Any], *, step: int, metrics: Mapping[str, Any] | None = None
    ) -> bool:
        """Save if the policy says so; after a stop was asked for, save and leave the training loop.

        Args:
            state: As for `save`.
            step: Completed optimizer steps.
            metrics: As for `save`.

        Returns:
            Whether it was saved or is on its way.

        Raises:
            StopTraining: After the last save, when a stop was asked for.
            CheckpointError: As `save`.
        """
        step = _check_step(step)
        if self._vote(f"save_if_due(step={step})", step):
            if self._too_late:
                if self._peers.rank == 0:
                    _log.warning("Step %d is not saved: it takes longer than the time that is left.", step)
            elif step > self._saved_step or self._unsettled:
                self.save(state, step=step, metrics=metrics)
            raise StopTraining(f"stopped after step {step}")
        by_step = schedule.is_due_by_step(self._policy, step=step, last_step=self._due_after)
        if not by_step and not self._is_time:
            return False
        self._is_time = False
        return self.save(state, step=step, metrics=metrics)

    def wait(self) -> None:
        """Wait until the save that is on its way has ended; all ranks call it.

        Raises:
            CheckpointError: If it failed, and with it as many in a row as the policy's `max_failures`.
            Superseded: If a newer gang has taken the run over.
        """
        self._settle()

    # ------------------------------------------------------------ stop

    def should_stop(self, *, step: int) -> bool:
        """Whether the ranks have agreed to stop; all ranks call it, after each step or every few.

        About once a second the ranks ask each other; between two votes a call costs nothing. After True, save
        what you need and return; what the function returns is no result then.

        Args:
            step: Completed optimizer steps.

        Raises:
            StopTraining: If a peer is lost: there is nobody left to agree or to save with.
        """
        step = _check_step(step)
        return self._vote(f"should_stop(step={step})", step)

    @property
    def stop_seen(self) -> bool:
        """Whether the ranks agreed to stop. What the function returns then is no result."""
        return self._votes.stop_seen

    def _vote(self, purpose: str, step: int) -> bool:
        if answer := self._votes.vote(purpose, step):
            self._is_time, self._too_late = answer["due"], answer["too_late"]
            self._news.hear(answer)
        return self.stop_seen

    def _settle_vote(self, seconds_left: float | None) -> dict[str, Any]:
        """On rank 0: what it tells with the result of a vote."""
        return {
            **self._take_news(),
            "too_late": seconds_left is not None and not self._news.clock.fits(seconds_left),
            "due": schedule.is_due_by_time(self._policy, seconds=time.monotonic() - self._due_since),
        }

    # ------------------------------------------------------------ end

    def close(self) -> None:
        """Wait for the save that is on its way; called when the function has returned on all ranks.

        Raises:
            CheckpointError: On all ranks: it failed.
            Superseded: On all ranks: a newer gang has taken the run over.
        """
        self._settle()
        if not self.stop_seen:  # the time after a stop is for saves
            with self._busy(Busy.SAVE):
                self._saver.finish()
        problem, self._news.last_problem = self._news.last_problem, ""
        if problem:
            raise CheckpointError(f"the last save failed: {problem}")

    def _settle(self) -> None:
        """Learn together how the save on its way ended, if there is one."""
        if self._unsettled:
            with self._busy(Busy.SAVE):
                answer: dict[str, Any] = {"goes_on": True}
                while answer.get("goes_on"):  # in rounds: nobody misses a meeting for its own long upload
                    answer = self._peers.meet("the end of a save", self._join, self._decide_end)
            self._unsettled = False
            self._news.hear(answer)

    def _busy(self, what: Busy) -> AbstractContextManager[None]:
        """Let the outside know that training stands still for the library."""
        return self._page.busy(what) if self._page else nullcontext()

    def _join(self) -> Word:
        self._saver.join(within_seconds=_ROUND_SECONDS)
        return {"busy": self._saver.busy}

    def _decide_end(self, words: Sequence[Word]) -> dict[str, Any]:
        return {"goes_on": True} if any(word["busy"] for word in words) else self._take_news()

    def _take_news(self, stuck: Sequence[int] = ()) -> dict[str, Any]:
        """On rank 0: how a save behind the training ended, for all ranks.

        Args:
            stuck: Ranks that do not end writing a save: no other can be made meanwhile.
        """
        result = self._saver.take_result()
        return self._news.tell(result) if result else self._news.tell_stuck(stuck, step=self._saved_step)


def _check_step(step: SupportsIndex) -> int:
    """Return the step as Python's own number: numpy's and torch's would not survive as text."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < STEPS_LIMIT:
        raise CheckpointError(f"`step={step!r}` is not a number of completed steps. Pass 0, 1, 2 and so on.")
    return number
