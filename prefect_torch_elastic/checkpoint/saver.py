"""This rank's part in saves: what it holds, a staged copy of it, and the one save that is on its way."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from prefect_torch_elastic.checkpoint.blocks import Arena, LiveBlocks
from prefect_torch_elastic.checkpoint.ledger import Contents, Place
from prefect_torch_elastic.checkpoint.manifest import Signed, TensorEntry, render_folder
from prefect_torch_elastic.checkpoint.peers import Board, Word
from prefect_torch_elastic.checkpoint.plan import (
    LocalPlan,
    Offer,
    find_unequal,
    fingerprint,
    make_offer,
    share_out,
)
from prefect_torch_elastic.checkpoint.saving import SaveOrder, SaveResult, carry_out, wait_for_result
from prefect_torch_elastic.checkpoint.state import Snapshot, take_snapshot
from prefect_torch_elastic.checkpoint.tensors import is_dtensor
from prefect_torch_elastic.checkpoint.writer import Share
from prefect_torch_elastic.errors import CheckpointError

_log = logging.getLogger("prefect_torch_elastic.checkpoint")
STALL_SECONDS = 300.0  # more than the store's own deadline for a block
_LOOK_SECONDS = 1.0
_PRUNE_SECONDS = 60.0
_RESULT_SECONDS = 1800.0  # for rank 0's word about a save that training waits for


@dataclass(frozen=True, kw_only=True)
class SaveMode:
    """What a save waits for.

    Attributes:
        after_last: Wait for the save before; otherwise this one is left out while that is on its way.
        until_saved: Return when the checkpoint exists, straight from the tensors, instead of from a copy.
        prune: Remove older checkpoints behind it; not when time is short.
    """

    after_last: bool
    until_saved: bool
    prune: bool


class Saver:
    """Saves of one rank, one at a time.

    Args:
        place: Where checkpoints go.
        connect: Returns a board of its own for the thread behind the training; None for a gang of one.
        announce: Called on rank 0 when a checkpoint exists, also from the thread behind the training.
    """

    def __init__(
        self,
        place: Place,
        connect: Callable[[], Board] | None,
        announce: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._place, self._connect, self._announce = place, connect, announce
        self._begun_at = 0.0  # when training stood still for the last save
        self._board: Board | None = None
        self._arena = Arena()
        self._plan: LocalPlan | None = None
        self._fingerprint: tuple[Any, ...] | None = None  # of the plan that all ranks agreed on
        self._offered: tuple[Any, ...] | None = None  # of the one that this rank came with last
        self._kept: list[int] = []
        self._number = 0  # of the last save
        self._offers: dict[int, Offer] = {}
        self._tensors: Mapping[str, TensorEntry] = {}
        self._running: Future[SaveResult] | None = None
        self._thread: threading.Thread | None = None
        self._leader_only: set[str] = set()
        self._written_at = 0.0  # when something of the save on its way was written last

    @property
    def busy(self) -> bool:
        """Whether a save is on its way."""
        return self._running is not None and not self._running.done()

    @property
    def stalled(self) -> bool:
        """Whether a save is on its way and does not come on: longer than the store's own deadlines allow."""
        return self.busy and time.monotonic() - self._written_at > STALL_SECONDS

    def take_result(self) -> SaveResult | None:
        """Return how the last save behind the training ended, once; None while there is nothing to tell."""
        if self._running is None or self.busy:
            return None
        running, self._running = self._running, None
        return running.result()

    def join(self, *, within_seconds: float = math.inf) -> None:
        """Wait until this rank's share of the save that is on its way is written, or for so long.

        Raises:
            CheckpointError: If it does not come on.
        """
        until = time.monotonic() + within_seconds
        while self._running is not None and self.busy and (left := until - time.monotonic()) > 0:
            wait([self._running], timeout=min(_LOOK_SECONDS, left))
            if self.stalled:
                raise CheckpointError(
                    f"nothing of the save on its way could be written for {STALL_SECONDS:.0f} s: "
                    f"`{self._place.store.url}` does not answer. See whether it is mounted and reachable."
                )

    def finish(self) -> None:
        """Wait until older checkpoints are removed, for a while; what is left goes another time."""
        if self._thread is not None:
            self._thread.join(_PRUNE_SECONDS)

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        metrics: dict[str, float],
        mode: SaveMode,
        news: Callable[[Sequence[int]], Word],
    ) -> tuple[dict[str, Any], SaveResult | None]:
        """Save with all ranks.

        Args:
            state: What to save.
            step: Completed optimizer steps.
            metrics: Of this checkpoint.
            mode: What to wait for.
            news: Called on rank 0 with the ranks that do not end writing a save: what it passes on with its
                answer.

        Returns:
            Rank 0's answer, and the result of a save that was waited for.
        """
        self._begun_at = time.monotonic()
        snapshots: list[Snapshot] = []

        def say() -> Word:
            if mode.after_last:
                self.join()
            snapshots.append(take_snapshot(state))
            return {"busy": self.busy, "stalled": self.stalled, "offer": self._make_offer(snapshots[0])}

        answer = self._place.peers.meet(f"save(step={step})", say, lambda words: self._decide(words, news))
        self._fingerprint = self._offered
        if answer["kept"] is not None:
            self._kept = answer["kept"]
        if not answer["go"]:
            return answer, None
        number = self._place.peers.number
        order = SaveOrder(number=number, previous=self._number, step=step, uuid=answer["uuid"])
        self._number = number
        return answer, self._carry_out(order, snapshots[0], metrics, mode)

    def _make_offer(self, snapshot: Snapshot) -> Offer | None:
        """Return what this rank could write, None while rank 0 knows it."""
        self._offered = fingerprint(snapshot.tensors), tuple(snapshot.values)
        if self._plan is not None and self._offered == self._fingerprint:
            self._plan.rebind(snapshot.tensors)
            return None
        self._fingerprint = None  # until all ranks have agreed: a refused save's plan is nobody's
        self._plan = LocalPlan(snapshot.tensors)
        self._leader_only = snapshot.leader_only
        equal = {name for name, tensor in snapshot.tensors.items() if not is_dtensor(tensor)}
        equal -= snapshot.leader_only
        return make_offer(self._plan, snapshot.tensors, values=snapshot.values, equal=equal)

    def _decide(self, words: Sequence[Word], news: Callable[[Sequence[int]], Word]) -> Sequence[Word]:
        """On rank 0: whether to save now, where, and which rank writes what."""
        epoch = self._place.need_ledger().enter_to_save()
        busy = [rank for rank, word in enumerate(words) if word["busy"]]
        stuck = [rank for rank in busy if words[rank]["stalled"]]
        if 0 not in busy:  # rank 0 has told the end of the save that these still write
            stuck = busy
        offers = {rank: word["offer"] for rank, word in enumerate(words) if word["offer"] is not None}
        kept: Sequence[list[int] | None] = [None] * len(words)
        if offers:
            self._offers |= offers
            kept = self._share_out([self._offers[rank] for rank in range(len(words))])
        uuid = f"{epoch:06}-{secrets.token_hex(8)}"
        told = news(stuck)  # last: what was taken has to be told
        return [{**told, "go": not busy, "uuid": uuid, "kept": mine} for mine in kept]

    def _share_out(self, offers: Sequence[Offer]) -> list[list[int]]:
        unequal = find_unequal(offers)
        # not those alone: a model of two ranks' parts is nobody's
        whole = offers[0]["heads"].keys() if unequal else set[str]()
        kept, self._tensors = share_out(offers, leader_only=self._leader_only | whole)
        if unequal:
            name, rank = next(iter(unequal.items()))
            _log.warning(
                "`%s` is another one on rank %d than on rank 0 (%d such tensors): rank 0's are saved. Train "
                "with DistributedDataParallel or FSDP, or mark what belongs to each rank with `per_rank`.",
                *(name, rank, len(unequal)),
            )
        return kept

    def _carry_out(
        self, order: SaveOrder, snapshot: Snapshot, metrics: dict[str, float], mode: SaveMode
    ) -> SaveResult | None:
        assert self._plan is not None, "a plan was shared"
        parts = self._plan.parts(self._kept)
        blocks = LiveBlocks(parts) if mode.until_saved else self._arena.stage(parts)
        share = Share(parts=parts, blocks=blocks, values=snapshot.rank_values)
        contents = Contents(tensors=self._tensors, values=snapshot.values, metrics=metrics)
        begun_at, self._written_at = self._begun_at, time.monotonic()
        if not mode.until_saved:
            stall = self._written_at - begun_at
            self._run_behind(lambda: self._write(order, share, contents, begun_at, stall))
            return None
        result = self._write(order, share, contents, begun_at, None)
        if self._place.peers.rank == 0:
            if mode.prune:
                self._place.need_ledger().prune()
            return result
        if result.problem:
            return result
        assert self._board is not None, "a gang of several ranks has a board"
        return wait_for_result(order, self._board, timeout_seconds=_RESULT_SECONDS)

    def _write(
        self, order: SaveOrder, share: Share, contents: Contents, begun_at: float, stall: float | None
    ) -> SaveResult:
        """Write this rank's share; `stall` is None for a save that training waits for to the end."""

        def commit(ranks: Sequence[Signed], seconds: float) -> None:
            self._place.need_ledger().commit(order, contents, ranks, seconds)
            if self._announce:
                took = time.monotonic() - begun_at
                self._announce(_render_saved(order, contents, took, took if stall is None else stall))

        try:
            if self._board is None and self._connect:
                self._board = self._connect()
            return carry_out(
                order,
                share,
                store=self._place.store,
                run_folder=self._place.run_folder,
                rank=self._place.peers.rank,
                world_size=self._place.peers.world_size,
                board=self._board,
                commit=commit,
                beat=self._beat,
            )
        except Exception as error:  # noqa: BLE001  (the gang's store is gone: told at the next meeting)
            problem = f"rank {self._place.peers.rank}: {type(error).__name__}: {error}"
            return SaveResult(step=order.step, problem=problem)

    def _beat(self) -> None:
        self._written_at = time.monotonic()

    def _run_behind(self, work: Callable[[], SaveResult]) -> None:
        """Run `work` in a thread; older checkpoints are removed behind it, which holds up no other save."""
        future: Future[SaveResult] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  (whoever takes the result raises it)
                future.set_exception(error)
            if self._place.ledger is not None:
                self._place.ledger.prune()

        self._running = future
        self._thread = threading.Thread(target=run, name="checkpoint-save", daemon=True)
        self._thread.start()


def _render_saved(order: SaveOrder, contents: Contents, seconds: float, stall: float) -> dict[str, Any]:
    return {
        "step": order.step,
        "uuid": order.uuid,
        "key": render_folder(order.step, order.uuid),
        "size_bytes": contents.size_bytes,
        "seconds": seconds,
        "stall_seconds": stall,
        "metrics": dict(contents.metrics),
    }
