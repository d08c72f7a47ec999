"""The position in a dataset: over any sequence of world sizes each sample of an epoch is seen once."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_torch_elastic.errors import CheckpointMismatch

pytest.importorskip("torch")
from prefect_torch_elastic.checkpoint.sampler import (
    ElasticSampler,
    Share,
    derive_seed,
    draw_order,
)


class Gang:
    """Ranks in step, each with a sampler that was restored from what the last gang saved."""

    def __init__(self, length, *, world_size, state=None, **options):
        self.samplers = [
            ElasticSampler(length, rank=rank, world_size=world_size, **options) for rank in range(world_size)
        ]
        for sampler in self.samplers:
            if state is not None:
                sampler.load_state_dict(state)

    def run(self, batches=None):
        """Take `batches` on each rank in one loop, all of them if None; return the samples."""
        seen = []
        for sampler in self.samplers:
            begun = sampler.begin_pass()
            taken = 0
            for batch in islice(_chunks(list(sampler), sampler.batch_size), batches):
                seen.append(batch)
                sampler.advance(begun)
                taken += 1
            if taken == begun.share.batches:
                sampler.end_pass(begun)
        return [sample for batch in seen for sample in batch]

    def save(self):
        states = [json.loads(json.dumps(sampler.state_dict())) for sampler in self.samplers]
        assert all(state == states[0] for state in states), "the ranks disagree"
        return states[0]


def _chunks(rows, size):
    return [rows[start : start + size] for start in range(0, len(rows), size)]


segments = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(0, 8)), min_size=1, max_size=40
)


def follow(length, schedule, **options):
    """Run a schedule of `(world_size, batch_size, batches)` until the epoch is over."""
    seen, state = [], None
    for world_size, batch_size, batches in [*schedule, (*schedule[-1][:2], None)]:
        gang = Gang(length, world_size=world_size, batch_size=batch_size, state=state, **options)
        seen += gang.run(batches)
        state = gang.save()
        if state["epoch"] == 1:
            return Counter(seen), state, world_size, batch_size
    raise AssertionError(f"the epoch does not end: {state}")


@settings(max_examples=300, deadline=None)
@given(length=st.integers(1, 200), schedule=segments, shuffle=st.booleans(), seed=st.integers(0, 2**40))
def test_position_gives_each_sample_once_over_any_world_sizes(length, schedule, shuffle, seed):
    seen, state, world_size, _ = follow(length, schedule, shuffle=shuffle, seed=seed)
    assert set(seen) == set(range(length))
    assert seen.total() - length < world_size, "more than the last round was filled up"
    assert (state["epoch"], state["consumed"]) == (1, 0)


@settings(max_examples=300, deadline=None)
@given(length=st.integers(1, 200), schedule=segments, shuffle=st.booleans())
def test_position_repeats_nothing_when_the_tail_is_dropped(length, schedule, shuffle):
    seen, state, world_size, batch_size = follow(length, schedule, shuffle=shuffle, drop_last=True)
    assert set(seen.values()) <= {1}
    assert length - seen.total() < world_size * batch_size
    assert (state["epoch"], state["consumed"]) == (1, 0)


@given(
    length=st.integers(0, 50), consumed=st.integers(0, 50), world=st.integers(1, 9), batch=st.integers(1, 9)
)
def test_share_gives_all_ranks_equally_many_samples(length, consumed, world, batch):
    share = Share(
        length=length, consumed=min(consumed, length), world_size=world, batch_size=batch, drop_last=False
    )
    assert {len(share.places(rank)) for rank in range(world)} == {share.samples}


def test_tail_is_filled_up_when_fewer_samples_are_left_than_half_the_ranks():
    """One sample for six ranks: each of them gets one, though there are not six to repeat."""
    gang = Gang(1, world_size=6)
    assert gang.run() == [0] * 6


def test_save_on_the_last_batch_of_an_epoch_is_the_beginning_of_the_next():
    gang = Gang(12, world_size=2, batch_size=2, shuffle=True)
    first = gang.run(3)
    state = gang.save()
    assert (state["epoch"], state["consumed"]) == (1, 0)
    second = Gang(12, world_size=3, batch_size=2, shuffle=True, state=state).run()
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def test_save_before_the_first_batch_is_the_position_that_was_loaded():
    gang = Gang(20, world_size=2, batch_size=2, shuffle=True)
    gang.run(2)
    state = gang.save()
    for world_size in (3, 1, 2):
        again = Gang(20, world_size=world_size, batch_size=2, shuffle=True, state=state)
        assert again.save() == {**state, "global_batch": 2 * world_size}
        for sampler in again.samplers:
            sampler.begin_pass()  # workers read ahead from here on
        assert again.save() == {**state, "global_batch": 2 * world_size}


def test_second_loop_after_a_resume_is_a_whole_epoch():
    gang = Gang(20, world_size=2, batch_size=2, shuffle=True)
    before = gang.run(3)
    again = Gang(20, world_size=2, batch_size=2, shuffle=True, state=gang.save())
    assert sorted(before + again.run()) == list(range(20))
    assert sorted(again.run()) == list(range(20))
    assert again.save()["epoch"] == 2


def test_loop_over_a_range_of_epochs_needs_no_change_to_resume():
    gang = Gang(10, world_size=1, batch_size=2, shuffle=True)
    for epoch in range(3):
        gang.samplers[0].set_epoch(epoch)
        before = gang.run(None if epoch < 2 else 2)
    again = Gang(10, world_size=2, batch_size=2, shuffle=True, state=gang.save())
    epochs = []
    for epoch in range(4):
        for sampler in again.samplers:
            sampler.set_epoch(epoch)
        epochs.append(again.run())
    assert epochs[:2] == [[], []]
    assert sorted(before + epochs[2]) == sorted(epochs[3]) == list(range(10))


def test_epoch_can_be_chosen_again_once_training_went_on():
    gang = Gang(10, world_size=1, shuffle=True)
    first = gang.run()
    gang.run(4)
    again = Gang(10, world_size=1, shuffle=True, state=gang.save())
    again.run(1)
    again.samplers[0].set_epoch(0)
    assert again.run() == first


def test_epoch_that_is_chosen_has_one_order_however_it_is_reached():
    by_itself = Gang(10, world_size=1, shuffle=True)
    by_itself.run()
    chosen = Gang(10, world_size=1, shuffle=True)
    chosen.samplers[0].set_epoch(1)
    assert by_itself.run() == chosen.run()


def test_loop_that_was_left_goes_on_when_shuffled_and_begins_again_otherwise():
    shuffled = Gang(10, world_size=1, shuffle=True)
    assert sorted(shuffled.run(4) + shuffled.run()) == list(range(10))
    stored = Gang(10, world_size=1)
    assert (stored.run(4), stored.run(4)) == ([0, 1, 2, 3], [0, 1, 2, 3])


def test_loop_that_was_left_begins_again_where_the_checkpoint_left_it():
    gang = Gang(10, world_size=1)
    gang.run(4)
    again = Gang(10, world_size=1, state=gang.save())
    assert (again.run(2), again.run()) == ([4, 5], [4, 5, 6, 7, 8, 9])
    assert again.run() == list(range(10))


def test_older_loop_does_not_move_the_position():
    sampler = ElasticSampler(10, shuffle=True)
    old = sampler.begin_pass()
    sampler.advance(old)
    new = sampler.begin_pass()
    sampler.advance(old)
    assert (sampler.consumed, new.share.consumed) == (1, 1)


def test_tail_too_small_for_more_ranks_is_left_out():
    gang = Gang(10, world_size=1, batch_size=2, drop_last=True)
    gang.run(3)
    state = gang.save()
    bigger = Gang(10, world_size=3, batch_size=2, drop_last=True, state=state)
    assert bigger.save()["consumed"] == 6, "nothing moves before the loop"
    assert bigger.run() == []
    assert (bigger.save()["epoch"], bigger.save()["consumed"]) == (1, 0)


def test_seed_comes_from_the_checkpoint():
    gang = Gang(30, world_size=1, shuffle=True, seed=5)
    before = gang.run(10)
    after = Gang(30, world_size=2, shuffle=True, seed=6, state=gang.save()).run()
    assert sorted(before + after) == list(range(30))


def test_orders_of_seeds_and_epochs_differ():
    orders = {
        tuple(draw_order(20, seed=seed, epoch=epoch).tolist()) for seed in range(9) for epoch in range(9)
    }
    assert len(orders) == 81


def test_order_stays_the_same_with_a_new_torch():
    """A checkpoint's position means samples only as long as the order is the same as when it was saved."""
    assert derive_seed(1, 2) == 7777801250388762567
    assert draw_order(10, seed=1, epoch=2).tolist() == [9, 5, 1, 2, 7, 0, 6, 4, 8, 3]


def test_position_in_a_dataset_of_another_length_is_refused():
    state = Gang(20, world_size=2).save()
    with pytest.raises(CheckpointMismatch) as refused:
        Gang(24, world_size=2, state=state)
    assert "one of 20 samples, and the dataset has 24 now" in str(refused.value)


def test_position_is_refused_when_shuffle_changed():
    state = Gang(20, world_size=2, shuffle=True).save()
    with pytest.raises(
        CheckpointMismatch, match="saved with `shuffle=True`, and the loader has `shuffle=False`"
    ):
        Gang(20, world_size=2, state=state)


def test_state_of_another_kind_of_loader_is_refused():
    with pytest.raises(CheckpointMismatch, match="no `consumed`, so another kind of loader wrote it"):
        ElasticSampler(4).load_state_dict({"_num_yielded": 3})


def test_changed_global_batch_is_said_once(caplog):
    gang = Gang(40, world_size=2, batch_size=4)
    Gang(40, world_size=3, batch_size=4, state=gang.save())
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "the global batch is 12 samples now (3 ranks x 4), it was 8 when the checkpoint was saved"
    ]
