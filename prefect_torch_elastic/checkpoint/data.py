"""The data loader of a rank: it counts the batches that the training loop got, so they are not seen again.

Workers read ahead of the loop; a batch counts when the loop gets it, in the process of the rank.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from prefect_torch_elastic.checkpoint.sampler import ElasticSampler, Pass, derive_seed

_log = logging.getLogger(__name__)


def give_generator(options: dict[str, Any]) -> torch.Generator | None:
    """Give a loader a generator of its own for its workers' seeds; None if the user gave one.

    A loader without one draws from the global random state at each `iter()`. A resumed run has one more
    `iter()` than an undisturbed one, and its dropout would differ from there on.
    """
    if options.get("generator") is not None:
        return None
    options["generator"] = torch.Generator()
    return options["generator"]


def use_host_memory(seeds: torch.Generator | None) -> AbstractContextManager[Any]:
    """While a loop begins, torch draws on the default device, where the loader's own generator is not."""
    return nullcontext() if seeds is None else torch.device("cpu")


class ElasticDataLoader(DataLoader[Any]):
    """A `DataLoader` over this rank's share of a dataset, whose position can be saved and loaded.

    Put it into the `state` of `checkpoint.save` and `checkpoint.load`. A batch counts when the loop gets it,
    so save after the step that used it; a prefetcher of your own that takes batches ahead makes the position
    run ahead too. `len()` is the number of batches in a whole epoch at this number of ranks, also when the
    current one goes on from a checkpoint. Random numbers that workers draw are not part of the position.

    Args:
        dataset: A dataset with a length and items.
        rank: This rank.
        world_size: Ranks that share the samples.
        shuffle: Draw a new order for each epoch.
        seed: What the orders are drawn from, the same on all ranks.
        batch_size: Samples in one rank's batch; None for samples one by one.
        drop_last: Leave out what does not fill one batch of every rank.
        options: Other options of `DataLoader`.
    """

    sampler: ElasticSampler  # pyright: ignore[reportIncompatibleVariableOverride]  (never replaced)

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        batch_size: int | None = 1,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        if options.pop("in_order", True) is False and rank == 0:
            _log.warning("`in_order=False` is set aside: batches out of order have no position to save")
        self._seeds = give_generator(options)
        sampler = ElasticSampler(
            len(cast("Sized", dataset)),
            rank=rank,
            world_size=world_size,
            batch_size=batch_size or 1,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        super().__init__(  # pyright: ignore[reportUnknownMemberType]  (torch leaves parts untyped)
            dataset, batch_size=batch_size, sampler=sampler, drop_last=drop_last, **options
        )

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0: where `range()` over epochs starts after a resume."""
        return self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`; see `ElasticSampler.set_epoch`."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the position behind the last batch that the loop got."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; see `ElasticSampler.load_state_dict`."""
        self.sampler.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]  (torch names its class)
        sampler = self.sampler
        begun = sampler.begin_pass()
        if self._seeds is not None:
            self._seeds.manual_seed(
                derive_seed(sampler.seed, begun.epoch, begun.share.consumed, sampler.rank)
            )
        with use_host_memory(self._seeds):
            return _CountedBatches(super().__iter__(), sampler, begun)


class _CountedBatches(Iterator[Any]):
    """The batches of one pass, each counted before the loop gets it: a save in the loop includes it."""

    def __init__(self, batches: Iterator[Any], sampler: ElasticSampler, begun: Pass) -> None:
        self._batches = batches
        self._sampler = sampler
        self._pass = begun

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._sampler.end_pass(self._pass)
            raise
        self._sampler.advance(self._pass)
        return batch

    def __len__(self) -> int:
        return self._pass.share.batches
