"""What ranks must have in common: names, values and the same checkpoint; whoever differs is named on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from prefect_torch_elastic.checkpoint.plan import HEAD_ELEMENTS, checksum_head
from prefect_torch_elastic.errors import CheckpointError, CheckpointMismatch
from tests.checkpoint_gangs import Seat, open_rank, run_ranks
from tests.checkpoint_stores import (
    MemoryStore,
    WatchedStore,
    assert_is,
    committed_steps,
    folder_of,
    make_state,
    open_session,
    save_steps,
    use_small_blocks,
)

# ------------------------------------------------------------ names


def make_stage(rank: int) -> dict[str, Any]:
    """Return one stage of a pipeline, as its rank has it."""
    return {"model": nn.ModuleDict({f"layer{rank}": nn.Linear(3, 3)})}


@pytest.mark.parametrize(
    ("make", "named"),
    [
        pytest.param(
            make_stage, "rank 0 saves `model/layer0.bias`, and rank 1 has no such name", id="stages"
        ),
        pytest.param(
            lambda rank: {"w": torch.ones(3), **({"more": 1} if rank else {})},
            "rank 1 saves `more`, and rank 0 has no such name",
            id="a value more",
        ),
        pytest.param(
            lambda rank: {"w": torch.ones(3), **({} if rank else {"more": torch.ones(2)})},
            "rank 0 saves `more`, and rank 1 has no such name",
            id="a tensor less",
        ),
    ],
)
def test_save_of_other_names_on_each_rank_is_refused_by_all_and_names_one(
    make: Callable[[int], dict[str, Any]], named: str
) -> None:
    store = MemoryStore()

    def work(seat: Seat) -> str:
        session = open_rank(seat, store)
        with pytest.raises(CheckpointError) as caught:
            session.save(make(seat.rank), step=10, wait=True)
        session.save(make(0), step=11, wait=True)  # the refused plan is nobody's
        return str(caught.value)

    for text in run_ranks(work):
        assert named in text
        assert "mark with `per_rank`" in text
    assert committed_steps(store) == [11]


# ------------------------------------------------------------ values


def make_model(value: float) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def save_models(store: MemoryStore, values: tuple[float, float]) -> None:
    def work(seat: Seat) -> None:
        open_rank(seat, store).save({"model": make_model(values[seat.rank])}, step=10, wait=True)

    assert run_ranks(work) == [None, None]


def test_save_of_models_that_differ_keeps_rank_0s_as_a_whole_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    save_models(store, (1.0, 2.0))
    assert "`model/0.weight` is another one on rank 1 than on rank 0 (12 such tensors)" in caplog.text
    model = make_model(0.0)
    assert open_session(store).load({"model": model}) == 10
    found = {value for parameter in model.parameters() for value in parameter.unique().tolist()}
    assert found == {1.0}


def test_tensor_that_differs_only_behind_its_first_row_makes_all_of_the_model_rank_0s(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()

    def work(seat: Seat) -> None:
        model = make_model(1.0)
        if seat.rank == 1:
            with torch.no_grad():
                model[3].weight[1:] = 2.0  # pyright: ignore[reportIndexIssue]
        open_rank(seat, store).save({"model": model}, step=10, wait=True)

    assert run_ranks(work) == [None, None]
    assert "`model/3.weight` is another one on rank 1 than on rank 0 (1 such tensors)" in caplog.text
    assert not store.keys(f"{folder_of(store, 10)}/r00001/")


def test_save_of_equal_models_is_shared_by_the_ranks_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    save_models(store, (1.0, 1.0))
    assert not caplog.records
    assert all(store.keys(f"{folder_of(store, 10)}/r{rank:05}/") for rank in range(2))


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.arange(24).reshape(4, 6).t(), id="transposed"),
        pytest.param(torch.tensor(3.0).expand(3, 5), id="expanded"),
        pytest.param(torch.zeros(0, 5), id="without elements"),
        pytest.param(torch.tensor(7), id="a number"),
        pytest.param(torch.tensor([True, False, True]), id="bool"),
        pytest.param(torch.ones(5).to(torch.float8_e4m3fn), id="float8"),
        pytest.param(torch.ones(5, dtype=torch.complex64).conj(), id="conjugate"),
        pytest.param(torch.ones(3, requires_grad=True), id="with a gradient"),
        pytest.param(torch.ones(2, 4 * HEAD_ELEMENTS), id="long"),
    ],
)
def test_checksum_of_the_head_depends_on_values_and_not_on_strides(tensor: torch.Tensor) -> None:
    copy = tensor.detach().resolve_conj().clone().contiguous()
    assert checksum_head(tensor) == checksum_head(copy)
    if copy.numel():
        flipped = copy.clone().reshape(-1).view(torch.uint8)
        flipped[0] ^= 1
        assert checksum_head(flipped.view(copy.dtype).reshape(copy.shape)) != checksum_head(copy)


# ------------------------------------------------------------ loads


def test_load_of_a_state_that_does_not_fit_on_one_rank_changes_nothing_on_any_c055() -> None:
    store = MemoryStore()
    save_steps(store, 7)
    states = [make_state(-1.0), {**make_state(-1.0), "bias": torch.zeros(8)}]

    def work(seat: Seat) -> None:
        open_rank(seat, store).load(states[seat.rank])

    for error in run_ranks(work):
        assert isinstance(error, CheckpointMismatch)
        assert "`bias` is float32 [7]" in str(error)
    assert_is(states[0], -1.0)
    assert torch.equal(states[1]["weights"], make_state(-1.0)["weights"])


class BadView(WatchedStore):
    """A store that shows objects whose key ends in `name` with a bit flipped."""

    def __init__(self, inner: MemoryStore, name: str) -> None:
        super().__init__(inner)
        self._name = name

    def get(self, key: str) -> memoryview:
        return self._flip(key, super().get(key))

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        return self._flip(key, super().get_range(key, start, length))

    def _flip(self, key: str, data: memoryview) -> memoryview:
        return memoryview(bytes([data[0] ^ 1]) + bytes(data[1:])) if key.endswith(self._name) else data


@pytest.mark.parametrize("name", ["manifest.json", "r00000.json"])
def test_damage_of_a_manifest_that_one_rank_sees_changes_nothing_on_any_c050(name: str) -> None:
    store = MemoryStore()
    save_steps(store, 7)
    states = [make_state(-1.0), make_state(-1.0)]

    def work(seat: Seat) -> None:
        view = BadView(store, name) if seat.rank else store
        open_rank(seat, view).load(states[seat.rank])

    for error in run_ranks(work):
        assert isinstance(error, CheckpointError)
        assert "all checkpoints of this run are damaged (1)" in str(error)
    for state in states:
        assert_is(state, -1.0)


def test_damage_of_a_block_that_one_rank_sees_gives_all_their_own_tensors_back_c050(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_small_blocks(monkeypatch)
    store = MemoryStore()
    save_steps(store, 7)
    states = [make_state(-1.0), make_state(-1.0)]

    def work(seat: Seat) -> int:
        view = BadView(store, "r00000/000001") if seat.rank else store
        return open_rank(seat, view).load(states[seat.rank], fresh_if_damaged=True)

    assert run_ranks(work) == [0, 0]
    for state in states:
        assert_is(state, -1.0)
