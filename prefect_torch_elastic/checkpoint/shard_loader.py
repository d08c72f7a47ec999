"""The data loader over shards: it carries with each batch what the shards have given, and counts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from prefect_torch_elastic.checkpoint.data import give_generator, use_host_memory
from prefect_torch_elastic.checkpoint.sampler import derive_seed
from prefect_torch_elastic.checkpoint.shards import Delivered, ElasticShards


class ElasticShardLoader(DataLoader[Any]):
    """A `DataLoader` over this rank's shards, whose position can be saved and loaded.

    Put it, or its `ElasticShards`, into the `state` of `checkpoint.save` and `checkpoint.load`. A batch
    counts when the loop gets it, so save after the step that used it.

    Args:
        shards: The stream.
        rank: This rank.
        world_size: Ranks that share the shards.
        collate_fn: Makes a batch of a list of samples; of one sample if `batch_size` is None.
        batch_size: Samples in one rank's batch; None for samples one by one.
        options: Other options of `DataLoader`.
    """

    def __init__(
        self,
        shards: ElasticShards,
        *,
        rank: int,
        world_size: int,
        collate_fn: Callable[[Any], Any],
        batch_size: int | None = 1,
        **options: Any,
    ) -> None:
        shards.bind(rank=rank, world_size=world_size, batch_size=batch_size or 1)
        self._shards = shards
        self._seeds = give_generator(options)
        collate = _Collate(collate_fn, one=batch_size is None)
        super().__init__(  # pyright: ignore[reportUnknownMemberType]  (torch leaves parts untyped)
            shards, batch_size=batch_size, collate_fn=collate, **options
        )

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._shards.epoch

    def endless(self) -> Iterator[Any]:
        """Give batches of epoch after epoch, each rank at its own pace: for loops that end by steps.

        Raises:
            ValueError: If this rank's shards of a whole epoch have no batch.
        """
        empty = 0
        while empty < 2 + self._shards.leftover_epochs:
            empty += 1
            for batch in self:
                empty = 0
                yield batch
        raise ValueError(
            f"rank {self._shards.rank} got no batch from a whole epoch of {len(self._shards.shards)} shards. "
            f"Look at what `read` gives, and at `drop_last`."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the position; see `ElasticShards.state_dict`."""
        return self._shards.state_dict()

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go to a saved position; see `ElasticShards.load_rank_states`."""
        self._shards.load_rank_states(states)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]  (torch names its class)
        shards = self._shards
        number = shards.begin_pass()
        if self._seeds is not None:
            self._seeds.manual_seed(derive_seed(shards.seed, shards.epoch, shards.rank))
        with use_host_memory(self._seeds):
            return _CountedBatches(super().__iter__(), shards, number)


class _Collate:
    """Makes a batch in the worker and keeps with it what the shards have given up to here."""

    def __init__(self, collate_fn: Callable[[Any], Any], *, one: bool) -> None:
        self._collate_fn = collate_fn
        self._one = one

    def __call__(self, rows: Any) -> tuple[list[tuple[int, int, bool]], Any]:
        delivered: list[Delivered] = [rows] if self._one else rows
        newest = {row.shard: (row.shard, row.samples, row.finished) for row in delivered}
        samples = [row.sample for row in delivered]
        return list(newest.values()), self._collate_fn(samples[0] if self._one else samples)


class _CountedBatches(Iterator[Any]):
    """The batches of one pass, each counted before the loop gets it: a save in the loop includes it."""

    def __init__(self, batches: Iterator[Any], shards: ElasticShards, number: int) -> None:
        self._batches = batches
        self._shards = shards
        self._number = number

    def __next__(self) -> Any:
        try:
            delivered, batch = next(self._batches)
        except StopIteration:
            self._shards.end_pass(self._number)
            raise
        self._shards.advance(self._number, delivered)
        return batch
