"""The data loader of a rank: workers read ahead, and the position counts what the loop got."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

import pytest

from prefect_torch_elastic.errors import CheckpointError

pytest.importorskip("torch")
import torch

from prefect_torch_elastic.checkpoint.data import ElasticDataLoader


class Numbers(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


def loaders(length, world_size, state=None, **options):
    gang = [
        ElasticDataLoader(Numbers(length), rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]
    for loader in gang:
        if state is not None:
            loader.load_state_dict(state)
    return gang


def take(gang, batches=None):
    """Take `batches` on each rank in one loop; return the samples and the position of all ranks."""
    seen, states = [], []
    for loader in gang:
        for batch in islice(loader, batches):
            seen += batch.tolist()
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    return seen, states[0]


def test_position_gives_each_sample_once_over_any_world_sizes_with_workers():
    dice = random.Random(7)
    for _ in range(20):
        length, seen, state = dice.randint(10, 40), [], None
        while state is None or state["epoch"] == 0:
            world_size = dice.randint(1, 3)
            gang = loaders(
                length,
                world_size,
                state,
                batch_size=dice.randint(1, 3),
                shuffle=True,
                num_workers=2,
                prefetch_factor=dice.randint(1, 4),
            )
            samples, state = take(gang, dice.randint(3, 6))
            seen += samples
        counts = Counter(seen)
        assert set(counts) == set(range(length))
        assert counts.total() - length < world_size


@pytest.mark.parametrize("workers", [0, 2])
def test_save_in_the_loop_includes_the_batch_of_the_step(workers):
    (loader,) = loaders(12, 1, batch_size=2, num_workers=workers)
    consumed = [loader.state_dict()["consumed"] for _ in loader]
    assert consumed == [2, 4, 6, 8, 10, 0], "the last batch is the beginning of the next epoch"
    assert loader.epoch == 1


def test_workers_that_persist_follow_the_position():
    options = {"batch_size": 2, "shuffle": True, "num_workers": 2, "persistent_workers": True}
    (loader,) = loaders(20, 1, **options)
    before, state = take([loader], 3)
    assert sorted(before + take([loader])[0]) == list(range(20))
    assert sorted(take([loader])[0]) == list(range(20))
    loader.load_state_dict(state)
    assert sorted(before + take([loader])[0]) == list(range(20))


def test_samples_one_by_one_are_counted():
    (loader,) = loaders(6, 1, batch_size=None)
    assert [loader.state_dict()["consumed"] for _ in loader] == [1, 2, 3, 4, 5, 0]


def test_length_is_that_of_a_whole_epoch():
    gang = loaders(20, 2, batch_size=3)
    assert len(gang[0]) == 4
    _, state = take(gang, 2)
    (again,) = loaders(20, 1, state, batch_size=3)
    assert len(again) == 7
    assert len(list(again)) == 3


def test_length_leaves_out_a_tail_that_is_dropped():
    (loader,) = loaders(20, 1, batch_size=3, drop_last=True)
    assert len(loader) == len(list(loader)) == 6


@pytest.mark.parametrize("workers", [0, 1])
def test_loop_draws_nothing_from_the_random_state(workers):
    """A resumed run begins a loop more than an undisturbed one, and their dropout has to be the same."""
    (loader,) = loaders(8, 1, shuffle=True, num_workers=workers)
    before = torch.get_rng_state()
    list(loader)
    assert torch.equal(before, torch.get_rng_state())


class Noise(torch.utils.data.Dataset):
    """A dataset that draws a random number for each sample."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(())


def test_workers_of_each_rank_and_epoch_draw_other_numbers():
    drawn = set()
    for rank in range(2):
        loader = ElasticDataLoader(Noise(), rank=rank, world_size=2, num_workers=1)
        drawn |= {float(x) for _ in range(2) for x in loader}
    assert len(drawn) == 8


def test_order_of_batches_is_kept_when_the_loader_gives_it_up(caplog):
    (loader,) = loaders(8, 1, num_workers=1, in_order=False)
    assert loader.in_order
    assert "`in_order=False` is set aside" in caplog.text


def test_loader_is_a_data_loader():
    (loader,) = loaders(8, 1, batch_size=2, shuffle=True)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert loader.batch_size == 2
    assert isinstance(loader.dataset, Numbers)
    loader.sampler.set_epoch(4)
    assert loader.epoch == 4
    loader.set_epoch(5)
    assert loader.sampler.epoch == 5


def test_empty_dataset_has_no_batches():
    (loader,) = loaders(0, 1)
    assert (list(loader), len(loader), loader.epoch) == ([], 0, 1)


def test_loop_that_began_before_the_load_is_refused():
    """Its batches are those of another position, and would not be counted."""
    _, state = take(loaders(12, 1, batch_size=2, shuffle=True), 2)
    (loader,) = loaders(12, 1, batch_size=2, shuffle=True)
    batches = iter(loader)
    loader.load_state_dict(state)
    with pytest.raises(CheckpointError) as refused:
        next(batches)
    assert "began before `checkpoint.load` set its position to epoch 0, sample 4" in str(refused.value)
    assert "Call `iter(loader)` after `load`" in str(refused.value)
    assert len(list(loader)) == 4
    assert loader.epoch == 1


def test_loop_that_was_left_before_the_load_does_no_harm():
    _, state = take(loaders(12, 1, batch_size=2, shuffle=True), 2)
    (loader,) = loaders(12, 1, batch_size=2, shuffle=True)
    take([loader], 1)
    loader.load_state_dict(state)
    assert len(list(loader)) == 4
