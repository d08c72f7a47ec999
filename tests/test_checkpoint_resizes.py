"""Exact resumes on other numbers of ranks and other shardings, and what belongs to single ranks (C052).

The work of a rank is a function of this module; `tests.checkpoint_gangs` runs it in processes that stay.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn

from prefect_torch_elastic.checkpoint.state import per_rank
from prefect_torch_elastic.runlog import RunLog
from prefect_torch_elastic.store.directory import DirectoryStore
from tests.checkpoint_gangs import Gangs, Seat, open_directory
from tests.checkpoint_stores import RUN, committed_steps

BATCH = 12
STEPS, SAVED_AT = 20, 10


@pytest.fixture(scope="module")
def gangs() -> Iterator[Gangs]:
    gangs = Gangs(4)
    yield gangs
    gangs.close()


# ------------------------------------------------------------ training that goes on (C052)


def make_model(kind: str, seat: Seat) -> nn.Module:
    """Return a model whose last layer has two rows: fewer than the ranks of the largest gang."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 2))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if kind == "hsdp":  # two replicas, each spread over half of the ranks
        mesh = init_device_mesh("cpu", (2, seat.world_size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (seat.world_size,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(seat: Seat, *, kind: str, folder: str, save: bool) -> tuple[int, float]:
    """Train to the last step and return where it began and the loss of the last step."""
    with seat.process_group():
        model = make_model(kind, seat)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)
        state = {"optimizer": optimizer, "scheduler": scheduler, "model": model, "seen": 0}

        def slow(verb: str, key: str) -> None:
            if verb == "put":
                time.sleep(0.02)  # the save goes on while the training uses its group

        session = open_directory(seat, folder, before=slow)
        first, share, mean = session.load(state), BATCH // seat.world_size, torch.zeros(1)
        for step in range(first, STEPS):
            draw = torch.Generator().manual_seed(step)
            inputs, targets = torch.randn(BATCH, 33, generator=draw), torch.randn(BATCH, 2, generator=draw)
            mine = slice(seat.rank * share, (seat.rank + 1) * share)
            loss = ((model(inputs[mine]) - targets[mine]) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            state["seen"] += BATCH
            mean = loss.detach().clone().reshape(1)
            distributed.all_reduce(mean)
            if save and step + 1 == SAVED_AT:
                session.save(state, step=step + 1)
        session.close()
        assert state["seen"] == STEPS * BATCH
        return first, mean.item() / seat.world_size


@pytest.fixture(scope="module")
def trained(gangs: Gangs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, float]]:
    """For each sharding, a run of two ranks with a checkpoint in its middle, and its last loss."""
    runs: dict[str, tuple[Path, float]] = {}
    for kind in ("ddp", "fsdp"):
        folder = tmp_path_factory.mktemp(kind)
        (_, loss), _ = gangs.values(train, 2, kind=kind, folder=str(folder), save=True)
        assert committed_steps(DirectoryStore(folder)) == [SAVED_AT]
        runs[kind] = folder, loss
    return runs


def test_training_is_the_same_with_any_sharding_while_a_save_goes_on_t14(
    trained: dict[str, tuple[Path, float]],
) -> None:
    assert trained["ddp"][1] == pytest.approx(trained["fsdp"][1], abs=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3], ids=lambda ranks: f"{ranks} ranks")
@pytest.mark.parametrize("now", ["ddp", "fsdp"], ids=lambda kind: f"to {kind}")
@pytest.mark.parametrize("saved", ["ddp", "fsdp"], ids=lambda kind: f"from {kind}")
def test_training_saved_at_2_ranks_ends_the_same_on_any_number_c052(
    gangs: Gangs, trained: dict[str, tuple[Path, float]], saved: str, now: str, ranks: int
) -> None:
    folder, loss = trained[saved]
    for first, last in gangs.values(train, ranks, kind=now, folder=str(folder), save=False):
        assert first == SAVED_AT
        assert last == pytest.approx(loss, abs=1e-6)


# ------------------------------------------------------------ meshes of two dimensions


def test_training_on_replicas_of_shards_resumes_on_any_mesh_and_is_written_once_c052(
    gangs: Gangs, trained: dict[str, tuple[Path, float]], tmp_path: Path
) -> None:
    plain, loss = trained["fsdp"]
    losses = [last for _, last in gangs.values(train, 4, kind="hsdp", folder=str(tmp_path), save=True)]
    for kind, ranks, folder in (
        ("hsdp", 4, tmp_path),
        ("fsdp", 3, tmp_path),
        ("ddp", 1, tmp_path),
        ("hsdp", 4, plain),
    ):
        for first, last in gangs.values(train, ranks, kind=kind, folder=str(folder), save=False):
            assert first == SAVED_AT
            losses.append(last)
    assert losses == [pytest.approx(loss, abs=1e-6)] * len(losses)
    sizes = [RunLog(DirectoryStore(path), RUN).refresh().commits[0].size_bytes for path in (plain, tmp_path)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)  # the gaps between small tensors differ, no more


ROWS, COLUMNS = 7, 10


def place_tensor(seat: Seat, *, folder: str, shape: tuple[int, ...], spread: str, load: bool) -> list[float]:
    """Save, or load, one tensor on a mesh; `spread` has a letter for each dimension of the mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

    places: dict[str, Placement] = {"r": Shard(0), "c": Shard(1), "a": Replicate()}
    with seat.process_group():
        values = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
        mesh = init_device_mesh("cpu", shape)
        given = torch.zeros_like(values) if load else values
        tensor = distribute_tensor(given, mesh, [places[letter] for letter in spread])
        session = open_directory(seat, folder)
        if load:
            session.load({"w": tensor})
        else:
            session.save({"w": tensor}, step=1, wait=True)
        return tensor.full_tensor().flatten().tolist()


@pytest.mark.parametrize(
    ("shape", "spread"),
    [
        pytest.param((2, 2), "rc", id="rows-and-columns"),
        pytest.param((2, 2), "cr", id="columns-and-rows"),
        pytest.param((2, 2), "ac", id="replicas-of-columns"),
        pytest.param((2, 2), "rr", id="rows-twice"),
        pytest.param((3,), "c", id="columns-of-3-ranks"),
    ],
)
def test_tensor_on_a_mesh_is_loaded_on_any_other(
    gangs: Gangs, tmp_path: Path, shape: tuple[int, ...], spread: str
) -> None:
    folder, ranks = str(tmp_path), int(np.prod(shape))
    (whole, *_) = gangs.values(place_tensor, 4, folder=folder, shape=(2, 2), spread="cr", load=False)
    assert whole == [float(value) for value in range(ROWS * COLUMNS)]
    for loaded in gangs.values(place_tensor, ranks, folder=folder, shape=shape, spread=spread, load=True):
        assert loaded == whole
    other = str(tmp_path / "other")
    os.mkdir(other)
    gangs.values(place_tensor, ranks, folder=other, shape=shape, spread=spread, load=False)
    for loaded in gangs.values(place_tensor, 4, folder=other, shape=(2, 2), spread="rc", load=True):
        assert loaded == whole


# ------------------------------------------------------------ what belongs to single ranks


def save_own(seat: Seat, *, folder: str) -> tuple[Any, ...]:
    """Save entries that differ from rank to rank, and return what this rank draws next."""
    random.seed(seat.rank)
    np.random.seed(seat.rank)
    torch.manual_seed(seat.rank)
    session = open_directory(seat, folder)
    state = {
        "same key": f"of rank {seat.rank}",
        "tensor": torch.full((1000,), float(seat.rank)),
        "own": per_rank({"cursor": 100 + seat.rank}),
        "kept": per_rank(seat.rank, on_resize="keep"),
    }
    session.save(state, step=5, wait=True)
    return draw()


def draw() -> tuple[Any, ...]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def load_own(seat: Seat, *, folder: str, own: bool) -> tuple[Any, ...]:
    session = open_directory(seat, folder)
    state: dict[str, Any] = {
        "same key": "",
        "tensor": torch.zeros(1000),
        "kept": per_rank(-1, on_resize="keep"),
    }
    if own:
        state["own"] = per_rank(None)
    session.load(state)
    drawn = draw()
    cursor = state["own"].value["cursor"] if own else None
    return state["same key"], state["tensor"].unique().tolist(), state["kept"].value, cursor, drawn


def test_entry_with_another_value_on_each_rank_is_rank_0s_unless_marked_t6_report_28(
    gangs: Gangs, tmp_path: Path
) -> None:
    drawn = gangs.values(save_own, 2, folder=str(tmp_path))
    loaded = gangs.values(load_own, 2, folder=str(tmp_path), own=True)
    for rank in range(2):
        text, tensor, kept, cursor, next_drawn = loaded[rank]
        assert (text, tensor) == ("of rank 0", [0.0])
        assert (kept, cursor) == (rank, 100 + rank)
        assert next_drawn == drawn[rank]  # its own random state, not rank 0's (report 28)


def test_entries_of_single_ranks_refuse_another_size_before_anything_is_changed_c052(
    gangs: Gangs, tmp_path: Path
) -> None:
    gangs.values(save_own, 2, folder=str(tmp_path))
    for failure in gangs.failures(load_own, 3, folder=str(tmp_path), own=True):
        assert "CheckpointMismatch" in failure.kinds
        assert "saved with world size 2, now 3" in failure.text


def test_ranks_that_are_new_draw_numbers_of_their_own_c052(gangs: Gangs, tmp_path: Path) -> None:
    drawn = gangs.values(save_own, 2, folder=str(tmp_path))
    loaded = gangs.values(load_own, 3, folder=str(tmp_path), own=False)
    assert [kept for _, _, kept, _, _ in loaded] == [0, 1, -1]
    now = [next_drawn for *_, next_drawn in loaded]
    assert now[:2] == drawn
    assert len(set(now)) == 3
    again = gangs.values(load_own, 3, folder=str(tmp_path), own=False)
    assert [next_drawn for *_, next_drawn in again] == now
