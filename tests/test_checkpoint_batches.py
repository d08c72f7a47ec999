"""Tensors that cannot be read in place: they take little memory on the way, and arrive whole."""

from __future__ import annotations

import weakref

import pytest
import torch

from prefect_torch_elastic.checkpoint import batches
from prefect_torch_elastic.checkpoint.manifest import DamagedError
from prefect_torch_elastic.checkpoint.reader import SavedCheckpoint, fetch_checkpoint, read_tensors
from prefect_torch_elastic.runlog import RunLog
from tests.checkpoint_stores import RUN, MemoryStore, folder_of, open_session, use_small_blocks

BATCH = 1024  # bytes
ROWS, COLUMNS = 48, 20
ROW = COLUMNS * 4


class Copies:
    """Watches the memory beside the tensors: how many bytes of it lived at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._living: dict[int, int] = {}
        self.most = self.all = 0
        allocate = batches._allocate_rows

        def watch(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            rows = allocate(shape, dtype)
            self.all += 1
            # the storage and not the tensor: views of it hold the memory as well
            storage = rows.untyped_storage()
            number = self.all
            self._living[number] = rows.nbytes
            weakref.finalize(storage, self._living.pop, number)
            self.most = max(self.most, sum(self._living.values()))
            return rows

        monkeypatch.setattr(batches, "_allocate_rows", watch)

    @property
    def living(self) -> int:
        return sum(self._living.values())


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    use_small_blocks(monkeypatch)
    monkeypatch.setattr(batches, "_BATCH_BYTES", BATCH)
    return Copies(monkeypatch)


def make_values(index: int) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + 10_000 * index


def save(count: int) -> tuple[MemoryStore, SavedCheckpoint]:
    store = MemoryStore()
    state = {f"t{index}": make_values(index) for index in range(count)}
    open_session(store).save(state, step=1, wait=True)
    commit = RunLog(store, RUN).refresh().commits[0]
    return store, fetch_checkpoint(store, folder_of(store, 1), checksum=commit.manifest_crc32c)


def test_tensors_that_are_not_contiguous_take_the_memory_of_a_few_batches(copies: Copies) -> None:
    store, saved = save(6)
    targets = {f"t{index}": torch.zeros(COLUMNS, ROWS).t() for index in range(6)}
    read_tensors(store, saved, targets)
    for index in range(6):
        assert torch.equal(targets[f"t{index}"], make_values(index))
    assert copies.living == 0
    assert 0 < copies.most <= batches.AT_ONCE * BATCH
    assert copies.all > 6  # larger tensors than a batch are cut


def test_row_larger_than_a_batch_is_one_copy(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_BATCH_BYTES", ROW - 1)
    store, saved = save(1)
    target = torch.zeros(COLUMNS, ROWS).t()
    read_tensors(store, saved, {"t0": target})
    assert torch.equal(target, make_values(0))
    assert copies.all == ROWS
    assert copies.most <= batches.AT_ONCE * ROW


def test_tensors_in_host_memory_are_read_in_place_at_once(copies: Copies) -> None:
    store, saved = save(3)
    targets = {f"t{index}": torch.zeros(ROWS, COLUMNS) for index in range(3)}
    read_tensors(store, saved, targets)
    assert copies.all == 0
    for index in range(3):
        assert torch.equal(targets[f"t{index}"], make_values(index))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 5), (5, 0)], ids=str)
def test_tensor_of_any_shape_is_read_beside_and_in_place(copies: Copies, shape: tuple[int, ...]) -> None:
    del copies
    store = MemoryStore()
    value = torch.full(shape, 7.0)
    open_session(store).save({"t": value, "other": torch.ones(2)}, step=1, wait=True)
    commit = RunLog(store, RUN).refresh().commits[0]
    saved = fetch_checkpoint(store, folder_of(store, 1), checksum=commit.manifest_crc32c)
    for target in (torch.zeros(shape), torch.zeros((*shape, 2))[..., 0]):
        read_tensors(store, saved, {"t": target})
        assert torch.equal(target, value)


def test_damage_of_a_later_batch_ends_the_read(copies: Copies) -> None:
    store, saved = save(6)
    key = store.keys(f"{saved.folder}/r00000/")[-1]
    store.objects[key] = bytes(len(store.objects[key]))
    targets = {f"t{index}": torch.zeros(COLUMNS, ROWS).t() for index in range(6)}
    with pytest.raises(DamagedError, match="was changed"):
        read_tensors(store, saved, targets)
    assert copies.most <= batches.AT_ONCE * BATCH
