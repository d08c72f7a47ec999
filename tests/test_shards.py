"""Shards: read by other ranks and workers after a resume, each sample once."""

from __future__ import annotations

import json
import random
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_torch_elastic.errors import CheckpointError, CheckpointMismatch

pytest.importorskip("torch")
import torch

from prefect_torch_elastic.checkpoint.progress import ShardProgress
from prefect_torch_elastic.checkpoint.shard_loader import ElasticShardLoader
from prefect_torch_elastic.checkpoint.shards import ElasticShards


def read(name):
    """Shard `3:5` has the samples 300 to 304."""
    number, length = (int(part) for part in name.split(":"))
    return (100 * number + place for place in range(length))


def gang(names, world_size, states=None, workers=0, batch_size: Any = 2, shuffle=True, **options):
    made = []
    for rank in range(world_size):
        shards = ElasticShards(names, read, shuffle=shuffle)
        loader = ElasticShardLoader(
            shards,
            rank=rank,
            world_size=world_size,
            collate_fn=torch.tensor,
            batch_size=batch_size,
            num_workers=workers,
            **options,
        )
        if states is not None:
            loader.load_rank_states(states)
        made.append(loader)
    return made


def save(loaders):
    return [json.loads(json.dumps(loader.state_dict())) for loader in loaders]


def take(loaders, batches):
    return [x for loader in loaders for batch in islice(loader.endless(), batches) for x in batch.tolist()]


def names_of(lengths):
    return [f"{number}:{length}" for number, length in enumerate(lengths)]


def samples_of(names):
    return [sample for name in names for sample in read(name)]


def follow(names, dice, *, workers=0, most=6):
    """Change the world size until every rank is past epoch 1; return what was seen as (epoch, sample)."""
    seen, states = [], None
    while states is None or min(state["epoch"] for state in states) < 2:
        loaders = gang(names, dice.randint(1, 3), states, workers, dice.randint(1, 3))
        for loader in loaders:
            batches = dice.randint(0, most)
            while batches > 0 and loader.epoch < 2:
                epoch = loader.epoch
                for batch in loader:
                    seen += [(epoch, x) for x in batch.tolist()]
                    batches -= 1
                    if batches == 0:
                        break
        states = save(loaders)
    return seen


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 12), min_size=3, max_size=9), seed=st.integers(0, 2**32))
def test_shards_give_each_sample_once_over_any_world_sizes(lengths, seed):
    names = names_of(lengths)
    seen = follow(names, random.Random(seed))
    assert sorted(seen) == sorted((epoch, sample) for epoch in range(2) for sample in samples_of(names))


def test_shards_give_each_sample_once_with_workers():
    dice = random.Random(3)
    for _ in range(5):
        names = names_of([dice.randint(0, 9) for _ in range(6)])
        seen = follow(names, dice, workers=2, most=9)
        assert sorted(seen) == sorted((epoch, sample) for epoch in range(2) for sample in samples_of(names))


def test_workers_that_persist_follow_the_position():
    names = names_of([5, 7, 2, 6])
    (loader,) = gang(names, 1, workers=2, persistent_workers=True)
    before = [x for batch in islice(loader, 3) for x in batch.tolist()]
    states = save([loader])
    for _ in range(2):
        rest = [x for batch in loader for x in batch.tolist()]
        assert sorted(before + rest) == samples_of(names)
        assert sorted(x for batch in loader for x in batch.tolist()) == samples_of(names)
        loader.load_rank_states(states)


def test_save_on_the_last_batch_of_an_epoch_is_the_beginning_of_the_next():
    names = names_of([4, 4])
    loaders = gang(names, 2, batch_size=2)
    take(loaders, 2)
    (again,) = gang(names, 1, save(loaders))
    assert again.epoch == 1
    assert sorted(x for batch in again for x in batch.tolist()) == samples_of(names)


def test_save_before_the_first_batch_is_the_position_that_was_loaded():
    names = names_of([9, 9, 9])
    loaders = gang(names, 2)
    before = take(loaders, 2)
    states = save(loaders)
    for world_size in (3, 1, 2):
        states = save(gang(names, world_size, states))
    (last,) = gang(names, 1, states)
    assert sorted(before + [x for batch in last for x in batch.tolist()]) == samples_of(names)


def test_rank_that_is_an_epoch_ahead_repeats_nothing():
    names = names_of([2, 12])
    ahead, behind = loaders = gang(names, 2, batch_size=1, shuffle=False)
    seen = take([ahead], 3) + take([behind], 3)
    assert (ahead.epoch, behind.epoch) == (1, 0)
    (again,) = gang(names, 1, save(loaders), batch_size=1, shuffle=False)
    rest = [int(x) for _ in range(2) for x in again]
    assert sorted(seen + rest) == sorted(2 * samples_of(names))
    assert again.epoch == 2


def test_older_loop_does_not_move_the_position():
    (loader,) = gang(names_of([9, 9]), 1)
    old = iter(loader)
    next(old)
    states = save([loader])
    iter(loader)
    next(old)
    assert save([loader])[0]["taken"] == states[0]["taken"]


def test_samples_one_by_one_are_counted():
    (loader,) = gang(names_of([3, 3]), 1, batch_size=None, shuffle=False)
    assert [int(x) for x in islice(loader, 4)] == [0, 1, 2, 100]
    assert [int(x) for x in loader] == [101, 102]


def test_order_of_shards_differs_between_epochs_only_when_shuffled():
    names = names_of([1] * 12)
    for shuffle in (True, False):
        (loader,) = gang(names, 1, shuffle=shuffle)
        first, second = ([x for batch in loader for x in batch.tolist()] for _ in range(2))
        assert sorted(first) == sorted(second)
        assert (first != second) == shuffle


def test_shards_outside_a_prepared_loader_give_plain_samples():
    shards = ElasticShards(names_of([2, 3]), read)
    assert list(shards) == [0, 1, 100, 101, 102]
    plain = torch.utils.data.DataLoader(shards, batch_size=None, num_workers=2)
    assert sorted(plain) == [0, 1, 100, 101, 102]


def test_fewer_shards_than_ranks_are_refused():
    with pytest.raises(ValueError, match="2 shards cannot be dealt to 3 ranks"):
        gang(names_of([1, 1]), 3)


def test_shard_that_is_named_twice_is_refused():
    with pytest.raises(ValueError, match="`b` more than once"):
        ElasticShards(["a", "b", "b"], read)


def test_endless_batches_of_nothing_are_refused():
    (loader,) = gang(names_of([0, 0]), 1)
    with pytest.raises(ValueError, match="rank 0 got no batch from a whole epoch of 2 shards"):
        next(loader.endless())


@pytest.mark.parametrize("workers", [0, 1])
def test_error_of_a_shard_names_it(workers):
    def fail(name):
        yield 1
        raise OSError("truncated")

    shards = ElasticShards(["part-7"], fail)
    loader = ElasticShardLoader(
        shards, rank=0, world_size=1, batch_size=1, collate_fn=list, num_workers=workers
    )
    with pytest.raises(OSError, match="truncated") as failed:
        list(loader)
    assert "while reading shard `part-7`" in "".join(
        [str(failed.value), *getattr(failed.value, "__notes__", [])]
    )


def test_other_shards_than_those_of_the_checkpoint_are_refused():
    states = save(gang(names_of([1, 2]), 1))
    with pytest.raises(CheckpointMismatch, match="one of 2 shards, and there are 3 now"):
        gang(names_of([1, 2, 3]), 1, states)
    with pytest.raises(CheckpointMismatch, match="other names or another order"):
        gang(names_of([2, 2]), 1, states)
    with pytest.raises(CheckpointMismatch, match="`shuffle=True`, and the shards have `shuffle=False`"):
        gang(names_of([1, 2]), 1, states, shuffle=False)


def test_position_without_every_rank_is_refused():
    states = save(gang(names_of([1, 2]), 2))
    with pytest.raises(CheckpointMismatch, match="of 2 ranks was saved, and 1 are here"):
        gang(names_of([1, 2]), 1, states[:1])


def test_changed_global_batch_is_said_once(caplog):
    states = save(gang(names_of([1, 2]), 1, batch_size=4))
    gang(names_of([1, 2]), 2, states, batch_size=4)
    assert len(caplog.records) == 1
    assert "the global batch is 8 samples now (2 ranks x 4), it was 4" in caplog.text


@settings(deadline=None)
@given(
    finished=st.sets(st.integers(0, 40)), partial=st.dictionaries(st.integers(0, 40), st.just(7), max_size=3)
)
def test_progress_survives_its_written_form(finished, partial):
    progress = ShardProgress(finished=finished, partial=partial)
    assert ShardProgress.parse(json.loads(json.dumps(progress.dump()))) == progress


def test_position_of_many_shards_stays_small():
    progress = ShardProgress(finished=set(range(0, 100_000, 2)))
    assert len(json.dumps(progress.dump())) < 26_000


def test_loop_that_began_before_the_load_is_refused():
    (loader,) = gang(names_of([4, 4, 4]), 1)
    take([loader], 2)
    states = save([loader])
    (again,) = gang(names_of([4, 4, 4]), 1)
    batches = iter(again)
    again.load_rank_states(states)
    with pytest.raises(CheckpointError) as refused:
        next(batches)
    assert "began before `checkpoint.load` set its position to epoch 0" in str(refused.value)
    assert len(list(again)) == 4
