"""What user code sees inside a rank: its share of the data, and what cannot be shared out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prefect_torch_elastic.context import get_context

torch = pytest.importorskip("torch")
data = torch.utils.data

ROWS = list(range(12))
HALF = replace(get_context(), rank=1, world_size=2)


class Stream(data.IterableDataset):
    def __iter__(self):
        return iter(ROWS)


class OwnBatches(data.Sampler):
    def __iter__(self):
        return iter([[0, 1], [2, 3]])

    def __len__(self):
        return 2


def test_loader_of_a_lone_rank_stays_as_it_is():
    loader = data.DataLoader(Stream())
    assert get_context().prepare_data_loader(loader) is loader


def test_loader_goes_over_this_ranks_share_in_order():
    loader = HALF.prepare_data_loader(data.DataLoader(ROWS, batch_size=2))
    assert [batch.tolist() for batch in loader] == [[1, 3], [5, 7], [9, 11]]


def test_shuffled_loader_stays_shuffled_and_ranks_share_all_samples():
    shares = []
    for rank in range(2):
        loader: Any = replace(HALF, rank=rank).prepare_data_loader(data.DataLoader(ROWS, shuffle=True))
        loader.sampler.set_epoch(3)
        shares.append([int(batch) for batch in loader])
    assert sorted(shares[0] + shares[1]) == ROWS
    assert shares[0] != sorted(shares[0])


REFUSED = {
    "subset": lambda: data.DataLoader(ROWS, sampler=data.SubsetRandomSampler([0, 1, 2])),
    "weighted": lambda: data.DataLoader(ROWS, sampler=data.WeightedRandomSampler([1.0] * 12, 12)),
    "with-replacement": lambda: data.DataLoader(ROWS, sampler=data.RandomSampler(ROWS, replacement=True)),
    "some-samples": lambda: data.DataLoader(ROWS, sampler=data.RandomSampler(ROWS, num_samples=5)),
    "stream": lambda: data.DataLoader(Stream()),
    "own-batches": lambda: data.DataLoader(ROWS, batch_sampler=OwnBatches()),
    "batches-of-a-subset": lambda: data.DataLoader(
        ROWS, batch_sampler=data.BatchSampler(data.SubsetRandomSampler([0, 1]), 2, drop_last=False)
    ),
    "batches-of-all": lambda: data.DataLoader(
        ROWS, batch_sampler=data.BatchSampler(data.SequentialSampler(ROWS), 4, drop_last=False)
    ),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=list(REFUSED))
def test_loader_that_chooses_its_samples_itself_is_refused(make):
    with pytest.raises(TypeError) as refused:
        HALF.prepare_data_loader(make())
    assert "Split a stream, a sampler or batches of your own by `get_context().rank`" in str(refused.value)


def collate(rows):
    return torch.tensor(rows) * 10


def test_loader_keeps_its_options(recwarn):
    generator = torch.Generator()
    options = {
        "batch_size": 3,
        "num_workers": 1,
        "collate_fn": collate,
        "drop_last": True,
        "timeout": 7,
        "worker_init_fn": print,
        "generator": generator,
        "prefetch_factor": 4,
        "persistent_workers": True,
        "in_order": False,
    }
    loader = HALF.prepare_data_loader(data.DataLoader(ROWS, **options))
    assert {name: getattr(loader, name) for name in options} == options
    assert [str(warning.message) for warning in recwarn] == []


def test_loader_without_batches_stays_without():
    loader = HALF.prepare_data_loader(data.DataLoader(ROWS, batch_size=None))
    assert list(loader) == ROWS[1::2]
