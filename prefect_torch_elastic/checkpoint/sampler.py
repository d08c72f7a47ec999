"""Where training is in a dataset: a position that any number of ranks can go on from.

All ranks draw the same order of an epoch from `(seed, epoch)` and take turns in it. What a gang has seen is
then the beginning of that order, so `(seed, epoch, consumed)` says it all, whatever the number of ranks was.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import Sampler

from prefect_torch_elastic.errors import CheckpointError, CheckpointMismatch

_CHUNK = 4096  # indices that become Python integers at once; the rest of an epoch stays a tensor

_log = logging.getLogger(__name__)


def derive_seed(*parts: int) -> int:
    """Return a seed that differs wherever one of `parts` does, such as `(0, 1)` and `(1, 0)`."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch takes 63 bits


def draw_order(length: int, *, seed: int, epoch: int) -> torch.Tensor:
    """Return the shuffled order of an epoch: `[length] int64`, the same in every process."""
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
    return torch.randperm(length, generator=generator, device="cpu")


def say_global_batch(saved: int, batch_size: int, *, rank: int, world_size: int) -> None:
    """Log once per gang that an optimizer step sees another number of samples than before the resume."""
    if rank == 0 and saved != batch_size * world_size:
        _log.warning(
            "the global batch is %d samples now (%d ranks x %d), it was %d when the checkpoint was saved: "
            "scale the learning rate or accumulate gradients if the run depends on it",
            batch_size * world_size,
            world_size,
            batch_size,
            saved,
        )


def refuse_old_loop(position: str) -> CheckpointError:
    """Return the error for a loop over a loader whose position was loaded meanwhile."""
    return CheckpointError(
        f"This loop over the data loader began before `checkpoint.load` set its position to {position}: it "
        "gives other batches than those, and nobody counts them. Call `iter(loader)` after `load`."
    )


@dataclass(frozen=True, kw_only=True)
class Share:
    """How the rest of an epoch is dealt: one sample to each rank in turn, and to all ranks equally many.

    Without `drop_last`, the last round is filled up with samples from the beginning of the order, at most
    `world_size - 1` of them. With it, what does not fill one batch of every rank is left out instead.

    Attributes:
        length: Samples in the dataset.
        consumed: Samples of this epoch that were seen before, by all ranks together.
        world_size: Ranks that share the rest.
        batch_size: Samples in one rank's batch.
        drop_last: Leave an incomplete last batch out.
    """

    length: int
    consumed: int
    world_size: int
    batch_size: int
    drop_last: bool

    @property
    def samples(self) -> int:
        """Samples that each rank gets."""
        rest = self.length - self.consumed
        if self.drop_last:
            return rest // (self.world_size * self.batch_size) * self.batch_size
        return -(-rest // self.world_size)

    @property
    def batches(self) -> int:
        """Batches that each rank gets."""
        return -(-self.samples // self.batch_size)

    def consumed_after(self, batches: int) -> int:
        """Samples of the epoch that were seen once each rank has taken `batches` of its batches."""
        return min(self.consumed + batches * self.batch_size * self.world_size, self.length)

    def places(self, rank: int) -> range:
        """Places of a rank's samples in the order; modulo `length` they fill up the last round."""
        first = self.consumed + rank
        return range(first, first + self.samples * self.world_size, self.world_size)


@dataclass(kw_only=True)
class Pass:
    """One run over the rest of an epoch: how many batches were taken, and after how many loads it began."""

    epoch: int
    share: Share
    loads: int
    taken: int = 0


class ElasticSampler(Sampler[int]):
    """This rank's share of the samples of each epoch, with a position that fits any number of ranks.

    The position moves on by itself: after the last batch of an epoch it is the beginning of the next one,
    which has another order. `set_epoch` may be called as with torch's `DistributedSampler`, but need not be.
    A loop that was left early goes on where it was left if the order is shuffled, as training wants it; an
    unshuffled one begins again, as evaluation wants it.

    The seed is an argument and not drawn, because all ranks need the same one and ranks have different
    random states; a checkpoint's seed replaces it.

    Args:
        length: Samples in the dataset.
        rank: This rank.
        world_size: Ranks that share the samples.
        batch_size: Samples in one rank's batch.
        shuffle: Draw the order of each epoch; otherwise samples come as they are stored.
        seed: What the orders are drawn from, the same on all ranks.
        drop_last: Leave out what does not fill one batch of every rank.
    """

    def __init__(
        self,
        length: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        batch_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.length = length
        self.rank = rank
        self.world_size = world_size
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self._epoch = 0
        self._consumed = 0
        self._begun_at = 0  # where the loop over an unshuffled epoch begins again
        self._current: Pass | None = None
        self._prepared: Pass | None = None
        self._restored = False
        self._passes_over = False
        self._loads = 0

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0: where `range()` over epochs starts after a resume."""
        return self._epoch

    @property
    def consumed(self) -> int:
        """Samples of this epoch that all ranks together have seen."""
        return self._consumed

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`; in the current one it changes nothing.

        After a resume, the epochs before the checkpoint's are done: a loop over them gets no batches. So
        `for epoch in range(epochs)` with `set_epoch(epoch)` needs no change to resume.
        """
        self._passes_over = self._restored and epoch < self._epoch
        if self._passes_over:
            if self.rank == 0:
                _log.info("epoch %d was done before the checkpoint: no batches of it", epoch)
            return
        self._restored = False
        if epoch != self._epoch:
            self._move(epoch, 0)

    def begin_pass(self) -> Pass:
        """Prepare a run over the rest of this epoch; the next `iter()` follows it."""
        if self._passes_over:
            self._passes_over = False
            self._prepared = self._make_pass(self.length)
            return self._prepared  # not the current one, so its end moves nothing
        if not self.shuffle:
            self._consumed = self._begun_at
        self._current = self._prepared = self._make_pass(self._consumed)
        return self._current

    def advance(self, of: Pass) -> None:
        """Count one batch that the training loop got; only the newest pass counts.

        Raises:
            CheckpointError: If the pass began before `load_state_dict`.
        """
        if of.loads != self._loads:
            raise refuse_old_loop(f"epoch {self._epoch}, sample {self._consumed}")
        if of is not self._current:
            return
        self._restored = False
        of.taken += 1
        if of.taken == of.share.batches:
            self._move(of.epoch + 1, 0)
        else:
            self._consumed = of.share.consumed_after(of.taken)

    def end_pass(self, of: Pass) -> None:
        """The loop got all batches of a pass; one without any, of a tail that was left out, ends here."""
        if of is self._current and not of.share.batches:
            self._move(of.epoch + 1, 0)

    def state_dict(self) -> dict[str, int]:
        """Return the position, the same on all ranks that took the same number of batches."""
        return {
            "seed": self.seed,
            "epoch": self._epoch,
            "consumed": self._consumed,
            "length": self.length,
            "shuffle": int(self.shuffle),
            "global_batch": self.batch_size * self.world_size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; the number of ranks and the batch size may differ from then.

        Raises:
            CheckpointMismatch: If the dataset has another length now, or `shuffle` changed.
        """
        self._check(state)
        self.seed = int(state["seed"])
        self._move(int(state["epoch"]), int(state["consumed"]))
        self._restored, self._passes_over = True, False
        self._loads += 1
        saved = int(state["global_batch"])
        say_global_batch(saved, self.batch_size, rank=self.rank, world_size=self.world_size)

    def __iter__(self) -> Iterator[int]:
        share, epoch = self._take_prepared()
        places = share.places(self.rank)
        if not self.shuffle:
            yield from (place % self.length for place in places)
        elif places:
            order = draw_order(self.length, seed=self.seed, epoch=epoch)
            mine = order[torch.arange(places.start, places.stop, places.step, device="cpu") % self.length]
            del order  # a worker-less epoch may last for days
            for start in range(0, len(mine), _CHUNK):
                yield from cast("Any", mine[start : start + _CHUNK]).tolist()

    def __len__(self) -> int:
        """Samples of a whole epoch for this rank, also when fewer are left of the current one."""
        return self._deal(0).samples

    def _take_prepared(self) -> tuple[Share, int]:
        # Alone, in a loader that is not ours, the sampler begins its pass itself and nothing is counted.
        prepared, self._prepared = self._prepared or self.begin_pass(), None
        return prepared.share, prepared.epoch

    def _check(self, state: Mapping[str, Any]) -> None:
        if missing := sorted(self.state_dict().keys() - state.keys()):
            raise CheckpointMismatch(
                f"The loader's saved state has no `{missing[0]}`, so another kind of loader wrote it. "
                f"Use that one, or leave the loader out of `state` to begin anew."
            )
        if state["length"] != self.length:
            raise CheckpointMismatch(
                f"The checkpoint's data position is one of {state['length']} samples, and the dataset has "
                f"{self.length} now. Load the same data, or leave the loader out of `state` to begin anew."
            )
        if bool(state["shuffle"]) != self.shuffle:
            raise CheckpointMismatch(
                f"The checkpoint's data position was saved with `shuffle={bool(state['shuffle'])}`, and the "
                f"loader has `shuffle={self.shuffle}` now. Set it back, or leave the loader out of `state`."
            )

    def _make_pass(self, consumed: int) -> Pass:
        return Pass(epoch=self._epoch, share=self._deal(consumed), loads=self._loads)

    def _deal(self, consumed: int) -> Share:
        return Share(
            length=self.length,
            consumed=consumed,
            world_size=self.world_size,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
        )

    def _move(self, epoch: int, consumed: int) -> None:
        self._epoch = epoch
        self._consumed = self._begun_at = consumed
        self._current = self._prepared = None
