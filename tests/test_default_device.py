"""Checkpoints under `torch.set_default_device`: what is ours stays in host memory, wherever theirs goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from prefect_torch_elastic.checkpoint.data import ElasticDataLoader  # noqa: E402
from prefect_torch_elastic.checkpoint.shard_loader import ElasticShardLoader  # noqa: E402
from prefect_torch_elastic.checkpoint.shards import ElasticShards  # noqa: E402
from tests.checkpoint_stores import MemoryStore, open_session  # noqa: E402

WIDTH = 8
SAMPLES = 12


@pytest.fixture(autouse=True)
def default_device() -> Iterator[None]:
    """`meta` stands for a GPU: a tensor that was made without a device cannot hold a value."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def read_shard(name: str) -> Iterator[str]:
    yield from (f"{name}-{number}" for number in range(2))


def make_state(value: float) -> dict[str, Any]:
    model = torch.nn.Linear(WIDTH, WIDTH, device="cpu")
    rate = torch.tensor(0.1, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    shards = ElasticShards(["a", "b", "c"], read_shard, shuffle=True)
    return {
        "model": model,
        "optimizer": optimizer,
        "columns": torch.full((5, 7), value, device="cpu").t(),
        "number": torch.tensor(value, device="cpu"),
        "plain": {"tensor": torch.full((3,), value, device="cpu"), "text": str(value)},
        "generator": torch.Generator().manual_seed(int(value)),
        "loader": ElasticDataLoader(cast("Any", range(SAMPLES)), shuffle=True, batch_size=2, collate_fn=list),
        "shards": ElasticShardLoader(shards, rank=0, world_size=1, collate_fn=list),
    }


def train(state: dict[str, Any]) -> list[Any]:
    """Take one step and two batches; return the batches."""
    state["model"](torch.ones(2, WIDTH, device="cpu")).sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    seen: list[Any] = []
    for name in ("loader", "shards"):
        for batch in state[name]:
            seen.append(batch)
            break
    return seen


@pytest.mark.parametrize("wait", [True, False], ids=["waits", "behind"])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "fresh"])
def test_state_is_saved_and_loaded_when_the_default_device_is_another(wait: bool, trained: bool) -> None:
    store = MemoryStore()
    state = make_state(3.0)
    before = train(state)
    session = open_session(store)
    session.save(state, step=4, wait=wait)
    session.close()
    after = train(state)

    again = make_state(-1.0)
    if trained:
        train(again)
    assert open_session(store).load(again) == 4
    assert train(again) == after != before
    for name in ("weight", "bias"):
        assert torch.equal(getattr(again["model"], name), getattr(state["model"], name))
    assert torch.equal(again["columns"], state["columns"])
    assert again["number"].item() == 3.0
    assert again["plain"]["tensor"].tolist() == [3.0] * 3
    assert again["generator"].initial_seed() == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_gives_its_samples_when_the_default_device_is_another(workers: int) -> None:
    options: dict[str, Any] = {"shuffle": True, "num_workers": workers, "collate_fn": list}
    loader = ElasticDataLoader(cast("Any", range(SAMPLES)), batch_size=2, **options)
    assert sorted(sample for batch in loader for sample in batch) == list(range(SAMPLES))
