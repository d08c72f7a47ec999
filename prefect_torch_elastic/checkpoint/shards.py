"""Streams made of shards, such as files: how far each shard was read, whichever rank and worker read it.

A shard belongs to one worker of one rank at a time. What a checkpoint keeps is keyed by shard, so the shards
that are not finished can be dealt anew to any number of ranks. Samples count when the training loop gets
them, in the process of the rank; what workers have read ahead does not.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import IterableDataset, get_worker_info

from prefect_torch_elastic.checkpoint.progress import ShardProgress
from prefect_torch_elastic.checkpoint.sampler import draw_order, refuse_old_loop, say_global_batch
from prefect_torch_elastic.errors import CheckpointMismatch


class Delivered(NamedTuple):
    """A sample on its way from a worker to the loop, with what its shard has given up to here."""

    shard: int
    samples: int
    finished: bool
    sample: Any


class ElasticShards(IterableDataset[Any]):
    """A dataset that is read shard by shard, and whose position fits any number of ranks and workers.

    Give it to a `DataLoader`, and that to `get_context().prepare_data_loader`. Ranks get whole shards, so
    they reach the end of an epoch after different numbers of batches, and a rank that steps alone waits for
    the others forever: bound the training by steps, and take batches from `loader.endless()`.

    A shard that was read in part is read again from its beginning after a resume, up to where it was left.
    So `read` has to give the same samples in the same order each time.

    Args:
        shards: Names of the shards, such as paths or URLs; the same list on all ranks.
        read: Opens a shard by its name and gives its samples.
        shuffle: Draw a new order of the shards for each epoch; samples within a shard keep theirs.
        seed: What the orders are drawn from, the same on all ranks; a checkpoint's seed replaces it.
    """

    def __init__(
        self,
        shards: Sequence[str],
        read: Callable[[str], Iterable[Any]],
        *,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if len(set(shards)) < len(shards):
            twice = next(name for place, name in enumerate(shards) if name in shards[:place])
            raise ValueError(f"`shards` has `{twice}` more than once. Name each shard once.")
        self.shards = tuple(shards)
        self.read = read
        self.shuffle = shuffle
        self.seed = seed
        self.rank = 0
        self.world_size = 1
        self.batch_size = 1
        self._epoch = 0
        self._before: dict[int, ShardProgress] = {}  # what earlier gangs took, by epoch; alike on all ranks
        self._taken = ShardProgress()  # what this rank took of its shards in this epoch
        self._pass = 0  # number of the newest run over the rest of an epoch: only this one counts
        self._loaded_at = 0  # runs with a smaller number began before the position was loaded
        # This rank's shards and where each begins, as `[count, shard, start, shard, start, ...]`. In shared
        # memory, because workers that live through several epochs keep the rest of this object as it was.
        self._table: torch.Tensor | None = None

    @property
    def leftover_epochs(self) -> int:
        """Epochs of which other ranks, before the resume, took a part; this rank may find nothing in them."""
        return len(self._before)

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0; each rank goes on to the next one by itself."""
        return self._epoch

    def bind(self, *, rank: int, world_size: int, batch_size: int) -> None:
        """Called by the loader: from now on this is the share of one rank.

        Raises:
            ValueError: If there are fewer shards than ranks.
        """
        if len(self.shards) < world_size:
            raise ValueError(
                f"{len(self.shards)} shards cannot be dealt to {world_size} ranks. "
                f"Write at least {world_size} shards, better several for each rank and worker."
            )
        self.rank, self.world_size, self.batch_size = rank, world_size, batch_size
        self._table = torch.zeros(1 + 2 * len(self.shards), dtype=torch.int64, device="cpu").share_memory_()

    def begin_pass(self) -> int:
        """Deal what this rank has left of its epoch, for the next `iter()`; return the number of the run."""
        before = self._before.get(self._epoch, ShardProgress())
        rows: list[int] = []
        for shard in self._deal(before, self._epoch, self.rank, self.world_size):
            if shard not in self._taken.finished:
                rows += [shard, max(before.partial.get(shard, 0), self._taken.partial.get(shard, 0))]
        table = cast("torch.Tensor", self._table)
        table[1 : 1 + len(rows)] = torch.tensor(rows, dtype=torch.int64, device="cpu")
        table[0] = len(rows) // 2
        self._pass += 1
        return self._pass

    def advance(self, of: int, delivered: Iterable[tuple[int, int, bool]]) -> None:
        """Count what the loop got, as shards, samples of each and whether these were its last.

        Raises:
            CheckpointError: If the run began before `load_rank_states`.
        """
        if of < self._loaded_at:
            raise refuse_old_loop(f"epoch {self._epoch}")
        if of != self._pass:
            return
        for shard, samples, finished in delivered:
            self._taken.take(shard, samples, finished=finished)

    def end_pass(self, of: int) -> None:
        """This rank has all its samples of the epoch."""
        if of == self._pass:
            self._move(self._epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the position; `load_rank_states` needs those of all ranks."""
        return {
            "shards": len(self.shards),
            "names": self._fingerprint(),
            "shuffle": self.shuffle,
            "seed": self.seed,
            "global_batch": self.batch_size * self.world_size,
            "rank": self.rank,
            "world_size": self.world_size,
            "epoch": self._epoch,
            "taken": self._taken.dump(),
            "before": {str(epoch): progress.dump() for epoch, progress in self._before.items()},
        }

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go to a saved position, from the states of all ranks that saved it.

        Raises:
            CheckpointMismatch: If the list of shards or `shuffle` changed, or a rank's state is missing.
        """
        self._check(states)
        self.seed = int(states[0]["seed"])
        before = {int(epoch): ShardProgress.parse(row) for epoch, row in states[0]["before"].items()}
        reached = [int(state["epoch"]) for state in states]
        merged: dict[int, ShardProgress] = {}
        for epoch in range(min(reached), max(*before, *reached, 0) + 1):
            progress = before.get(epoch, ShardProgress())
            through = [state for state in states if state["epoch"] > epoch]
            inside = [state for state in states if state["epoch"] == epoch]
            merged[epoch] = progress.merge(
                done=(self._deal(progress, epoch, state["rank"], state["world_size"]) for state in through),
                taken=(ShardProgress.parse(state["taken"]) for state in inside),
            )
        first = min(reached)
        while first in merged and len(merged[first].finished) == len(self.shards):
            merged.pop(first)
            first += 1
        self._before = merged
        self._move(first)
        self._loaded_at = self._pass
        saved = int(states[0]["global_batch"])
        say_global_batch(saved, self.batch_size, rank=self.rank, world_size=self.world_size)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        if self._table is None:  # not in a prepared loader: all samples, and nothing is counted
            for shard in self._deal(ShardProgress(), self._epoch, number, workers):
                yield from (delivered.sample for delivered in self._deliver(shard, 0))
            return
        rows = cast("list[int]", cast("Any", self._table[1 : 1 + 2 * int(self._table[0])]).tolist())
        for shard, start in list(zip(rows[::2], rows[1::2], strict=True))[number::workers]:
            yield from self._deliver(shard, start)

    def _deliver(self, shard: int, start: int) -> Iterator[Delivered]:
        """Read one shard from `start` on, one sample ahead: the last one has to be known as such."""
        name = self.shards[shard]
        try:
            count = start
            held: list[Any] = []
            for sample in islice(self.read(name), start, None):
                if held:
                    yield Delivered(shard, count, False, held.pop())
                held.append(sample)
                count += 1
            if held:
                yield Delivered(shard, count, True, held.pop())
        except Exception as error:
            error.add_note(f"while reading shard `{name}`")
            raise

    def _deal(self, before: ShardProgress, epoch: int, rank: int, world_size: int) -> list[int]:
        order = cast("Sequence[int]", range(len(self.shards)))
        if self.shuffle:
            order = cast("Any", draw_order(len(self.shards), seed=self.seed, epoch=epoch)).tolist()
        return before.deal(order, rank=rank, world_size=world_size)

    def _move(self, epoch: int) -> None:
        self._epoch = epoch
        self._taken = ShardProgress()
        self._pass += 1

    def _fingerprint(self) -> int:
        return zlib.crc32("\n".join(self.shards).encode())

    def _check(self, states: Sequence[Mapping[str, Any]]) -> None:
        saved = states[0]
        if saved["shards"] != len(self.shards):
            raise CheckpointMismatch(
                f"The checkpoint's data position is one of {saved['shards']} shards, and there are "
                f"{len(self.shards)} now. Pass the same list, or leave the data out of `state` to begin anew."
            )
        if saved["names"] != self._fingerprint():
            raise CheckpointMismatch(
                f"The {len(self.shards)} shards have other names or another order than in the checkpoint; "
                f"`{self.shards[0]}` is the first now. Pass the same list, or leave the data out of `state`."
            )
        if saved["shuffle"] != self.shuffle:
            raise CheckpointMismatch(
                f"The checkpoint's data position was saved with `shuffle={saved['shuffle']}`, and the shards "
                f"have `shuffle={self.shuffle}` now. Set it back, or leave the data out of `state`."
            )
        if sorted(state["rank"] for state in states) != list(range(saved["world_size"])):
            raise CheckpointMismatch(
                f"The data position of {saved['world_size']} ranks was saved, and {len(states)} are here. "
                f"Load a checkpoint that has all of them."
            )
