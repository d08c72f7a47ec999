"""What user code sees inside a rank: its share of the data, and what cannot be shared out."""

from __future__ import annotations

import gc
import tempfile
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_torch_elastic import context
from prefect_torch_elastic.context import get_context
from prefect_torch_elastic.rankstate import StopReason, StopRequest

pytest.importorskip("torch")
import torch

from prefect_torch_elastic.checkpoint.shards import ElasticShards

data = torch.utils.data

ROWS: Any = list(range(12))  # torch reads any sequence
HALF = replace(get_context(), rank=1, world_size=2)


class Stream(data.IterableDataset):
    def __iter__(self):
        return iter(ROWS)


class OwnBatches(data.Sampler):
    def __iter__(self):
        return iter([[0, 1], [2, 3]])

    def __len__(self):
        return 2


def test_loader_that_cannot_be_split_stays_as_it_is_for_a_lone_rank():
    loader = data.DataLoader(Stream())
    assert get_context().prepare_data_loader(loader) is loader


def test_loader_of_a_lone_rank_has_a_position():
    loader = get_context().prepare_data_loader(data.DataLoader(ROWS, batch_size=4))
    assert [loader.state_dict()["consumed"] for _ in loader] == [4, 8, 0]


def test_loader_that_was_prepared_already_stays_as_it_is():
    loader = HALF.prepare_data_loader(data.DataLoader(ROWS))
    assert HALF.prepare_data_loader(loader) is loader


def test_loader_over_shards_reads_this_ranks_shards():
    shards = ElasticShards(["a", "b", "c", "d"], lambda name: [f"{name}{place}" for place in range(2)])
    loader = HALF.prepare_data_loader(data.DataLoader(shards, batch_size=2))
    assert list(loader) == [["b0", "b1"], ["d0", "d1"]]


def test_stream_that_is_not_in_shards_is_refused_with_the_cure():
    with pytest.raises(TypeError, match=r"`Stream` is a stream, .* `ElasticShards\(names, read\)`"):
        HALF.prepare_data_loader(data.DataLoader(Stream()))


def test_loader_draws_its_order_from_the_seed():
    orders = [
        [int(x) for x in HALF.prepare_data_loader(data.DataLoader(ROWS, shuffle=True), seed=seed)]
        for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]


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
    }
    loader = HALF.prepare_data_loader(data.DataLoader(ROWS, **options))
    assert {name: getattr(loader, name) for name in options} == options
    assert [str(warning.message) for warning in recwarn] == []


def test_loader_without_batches_stays_without():
    loader = HALF.prepare_data_loader(data.DataLoader(ROWS, batch_size=None))
    assert list(loader) == ROWS[1::2]


# ---------------------------------------------------------------- stops


class PlayedSession(SimpleNamespace):
    def __init__(self, **fields: Any) -> None:
        super().__init__(stop_seen=False, done=[], **fields)

    def should_stop(self, *, step: int) -> bool:
        self.done.append(step)
        return step >= 3

    def close(self) -> None:
        self.done.append("close")


@pytest.fixture
def session(monkeypatch):
    played = PlayedSession()
    monkeypatch.setattr(context, "_session", played)
    return played


def test_should_stop_asks_the_one_session_of_the_process(session):
    assert get_context().checkpoint is get_context().checkpoint is session
    assert [get_context().should_stop(step=step) for step in (2, 3)] == [False, True]
    assert session.done == [2, 3]


def test_nothing_is_closed_when_there_are_no_checkpoints(monkeypatch):
    monkeypatch.setattr(context, "_session", None)
    context.close_checkpoints()
    assert not context.stop_was_carried_out()
    assert not context.stop_was_requested()


def test_stop_that_the_ranks_voted_for_counts_as_requested(session):
    session.stop_seen = True
    assert context.stop_was_carried_out()
    assert context.stop_was_requested()


def test_each_call_outside_of_a_gang_has_checkpoints_of_its_own(session, monkeypatch):
    own = PlayedSession()
    with context.own_checkpoints():
        assert context._session is None
        context._session = own  # pyright: ignore[reportAttributeAccessIssue]
    assert context._session is session
    assert (own.done, session.done) == (["close"], [])


def test_checkpoints_of_a_call_outside_of_a_gang_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with context.own_checkpoints():
        get_context().checkpoint.save({"weights": torch.zeros(4)}, step=1, wait=True)
        assert list(tmp_path.iterdir())
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_checkpoints_of_a_call_that_raises_are_not_waited_for(session):
    own = PlayedSession()

    def call() -> None:
        with context.own_checkpoints():
            context._session = own  # pyright: ignore[reportAttributeAccessIssue]
            raise ValueError("lr")

    with pytest.raises(ValueError, match="lr"):
        call()
    assert context._session is session
    assert own.done == []


@pytest.mark.parametrize(
    ("reason", "done"),
    [(StopReason.CANCELLED, ["close"]), (StopReason.FAILED, []), (StopReason.REGROUP, [])],
    ids=["cancelled", "failed", "regroup"],
)
def test_last_upload_is_not_waited_for_when_a_peer_is_lost(session, monkeypatch, reason, done):
    request = StopRequest(reason=reason, seconds_left=5.0)
    monkeypatch.setattr(context, "_state", SimpleNamespace(stop_request=request))
    context.close_checkpoints()
    assert session.done == done
