"""Damage: a half-written or changed checkpoint is never loaded, never believed, and always named (C050)."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from prefect_torch_elastic.errors import CheckpointError, StoreError
from prefect_torch_elastic.runlog import Bad, RunLog
from prefect_torch_elastic.store.directory import DirectoryStore
from tests.checkpoint_stores import (
    RUN,
    MemoryStore,
    WatchedStore,
    assert_is,
    folder_of,
    load_fresh,
    make_state,
    open_session,
    save_steps,
    use_small_blocks,
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    use_small_blocks(monkeypatch)
    caplog.set_level(logging.INFO, logger="prefect_torch_elastic.checkpoint")


class Cut(BaseException):
    """The process is dead from here on."""


class CutStore(WatchedStore):
    """Lets the first `operations` operations happen, and nothing after them."""

    def __init__(self, inner: MemoryStore, operations: int) -> None:
        super().__init__(inner, self._cut)
        self._left = operations

    def _cut(self, verb: str, key: str) -> None:
        self._left -= 1
        if self._left < 0:
            raise Cut


def count_operations(base: MemoryStore) -> int:
    """Return how many store operations the save of step 20 by a second gang takes."""
    watched = WatchedStore(base.copy())
    save_steps(watched, 20)
    return len(watched.operations)


BASE_STEP = 10


def make_base() -> MemoryStore:
    store = MemoryStore()
    save_steps(store, BASE_STEP)
    return store


def test_save_that_is_cut_after_any_operation_is_whole_or_not_there_c050() -> None:
    base = make_base()
    operations = count_operations(base)
    assert operations > 10
    taken: list[int] = []
    for cut in range(operations + 1):
        store = base.copy()
        try:
            save_steps(CutStore(store, cut), 20)
        except Cut:
            assert cut < operations
        step, state = load_fresh(store)
        assert_is(state, float(step))
        taken.append(step)
        assert not RunLog(store, RUN).state.bad  # a cut is no damage
        save_steps(store, 30)  # and the run goes on
        assert load_fresh(store)[0] == 30
    assert taken == sorted(taken)
    assert set(taken) == {BASE_STEP, 20}


def test_first_save_that_is_cut_after_any_operation_is_a_start_from_zero_that_says_so_c050_t11(
    caplog: pytest.LogCaptureFixture,
) -> None:
    operations = count_operations(MemoryStore())
    for cut in range(operations):
        caplog.clear()
        store = MemoryStore()
        with pytest.raises(Cut):
            save_steps(CutStore(store, cut), 20)
        has_folder = bool(store.keys(f"{RUN}/checkpoints"))
        step, state = load_fresh(store)
        if step:
            assert_is(state, 20.0)
            continue
        assert_is(state, -1.0)
        said = "a save of step 20 was cut off" if has_folder else "No checkpoint yet"
        assert said in caplog.text


def test_garbage_of_cut_saves_goes_when_it_is_old_c050() -> None:
    base = make_base()
    for cut in range(count_operations(base)):
        store = base.copy()
        with pytest.raises(Cut):
            save_steps(CutStore(store, cut), 20)
        store.age(2 * 3600.0)
        save_steps(store, 30, keep_last=1)
        (step,) = store.list_folders(f"{RUN}/checkpoints")
        assert int(step) == 30
        assert len(store.list_folders(f"{RUN}/checkpoints/{step}")) == 1
        assert_is(load_fresh(store)[1], 30.0)


def test_garbage_that_is_young_stays_for_whoever_writes_it() -> None:
    store = make_base()

    def cut(verb: str, key: str) -> None:
        if verb == "put" and f"{20:012}" in key and key.endswith("/r00000/000001"):
            raise Cut

    with pytest.raises(Cut):
        save_steps(WatchedStore(store, cut), 20)
    left = store.keys(f"{RUN}/checkpoints/{20:012}")
    assert left
    save_steps(store, 30, keep_last=1)
    assert store.keys(f"{RUN}/checkpoints/{20:012}") == left


# ------------------------------------------------------------ objects that changed


def _remove(store: MemoryStore, key: str) -> None:
    del store.objects[key]


def _empty(store: MemoryStore, key: str) -> None:
    store.objects[key] = b""


def _truncate(store: MemoryStore, key: str) -> None:
    store.objects[key] = store.objects[key][:-1]


def _flip(place: float) -> Callable[[MemoryStore, str], None]:
    def flip(store: MemoryStore, key: str) -> None:
        data = bytearray(store.objects[key])
        data[int(place * (len(data) - 1))] ^= 0x10
        store.objects[key] = bytes(data)

    return flip


def _swap(store: MemoryStore, key: str) -> None:
    """Put the same object of the older checkpoint in its place: same size, other numbers."""
    older = key.replace(folder_of(store, 20), folder_of(store, 10))
    store.objects[key] = store.objects[older]


CHANGES = [
    pytest.param(_remove, id="missing"),
    pytest.param(_empty, id="empty"),
    pytest.param(_truncate, id="cut short by a byte"),
    pytest.param(_flip(0.0), id="first byte flipped"),
    pytest.param(_flip(0.5), id="a byte flipped"),
    pytest.param(_flip(1.0), id="last byte flipped"),
    pytest.param(_swap, id="swapped with an older one"),
]
NAMES = ["manifest.json", "r00000.json", "r00000/000000", "r00000/000001", "r00000/000003"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", CHANGES)
def test_damaged_object_makes_all_take_the_next_older_checkpoint_c050_t3(
    change: Callable[[MemoryStore, str], None], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    save_steps(store, 10, 20)
    folder = folder_of(store, 20)
    change(store, f"{folder}/{name}")
    caplog.clear()
    step, state = load_fresh(store)
    assert step == 10
    assert_is(state, 10.0)
    ((uuid, bad),) = RunLog(store, RUN).refresh().bad.items()
    assert isinstance(bad, Bad)
    assert (bad.step, uuid) == (20, folder.rpartition("/")[2])
    assert f"`{folder}/{name}`" in bad.reason
    assert "rank 0" in bad.reason
    assert any(
        word in bad.reason for word in ("is missing", "was changed", "committed was", "committed were")
    )
    warning = f"The checkpoint of step 20 is damaged and not used again. {bad.reason}"
    assert warning in caplog.messages


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(_remove, r"block `.*/r00000/000001` is missing", id="missing"),
        pytest.param(_empty, r"block `.*/r00000/000001` has 0 bytes, committed were 256", id="empty"),
        pytest.param(
            _truncate, r"block `.*/r00000/000001` has 255 bytes, committed were 256", id="cut short"
        ),
        pytest.param(
            _flip(0.5),
            r"rank 0's block `.*/r00000/000001` was changed: "
            r"its crc32c is [0-9a-f]{8}, committed was [0-9a-f]{8}",
            id="flipped",
        ),
    ],
)
def test_damage_is_told_with_what_was_found_and_what_was_expected_c050(
    change: Callable[[MemoryStore, str], None], says: str
) -> None:
    store = MemoryStore()
    save_steps(store, 10, 20)
    change(store, f"{folder_of(store, 20)}/r00000/000001")
    load_fresh(store)
    (bad,) = RunLog(store, RUN).refresh().bad.values()
    assert re.search(says, bad.reason), bad.reason


def test_damage_in_a_directory_is_found_c050(tmp_path: Any) -> None:
    store = DirectoryStore(tmp_path)
    save_steps(store, 10, 20)
    block = tmp_path / folder_of(store, 20) / "r00000" / "000001"
    data = block.read_bytes()
    for damaged in (data[:100], b"", data[:7] + b"\x99" + data[8:]):
        save_steps(store, 20)
        block = tmp_path / folder_of(store, 20) / "r00000" / "000001"
        block.write_bytes(damaged)
        step, state = load_fresh(store)
        assert step in (10, 20)  # an older one of either step
        assert_is(state, float(step))
    assert len(RunLog(store, RUN).refresh().bad) == 3


def test_damage_is_looked_for_once() -> None:
    store = MemoryStore()
    save_steps(store, 10, 20)
    folder = folder_of(store, 20)
    _flip(0.5)(store, f"{folder}/r00000/000001")
    load_fresh(store)
    watched = WatchedStore(store)
    assert load_fresh(watched)[0] == 10
    assert not [key for _, key in watched.operations if key.startswith(folder)]


def test_damage_that_was_only_on_the_way_is_read_again() -> None:
    store = MemoryStore()
    save_steps(store, 10, 20)

    class Noisy(WatchedStore):
        flipped = False

        def get_range(self, key: str, start: int, length: int) -> memoryview:
            data = super().get_range(key, start, length)
            if self.flipped:
                return data
            self.flipped = True
            return memoryview(bytes([data[0] ^ 1]) + bytes(data[1:]))

    assert load_fresh(Noisy(store))[0] == 20
    assert not RunLog(store, RUN).state.bad


def test_step_that_was_damaged_can_be_saved_again() -> None:
    store = MemoryStore()
    save_steps(store, 10, 20)
    _remove(store, f"{folder_of(store, 20)}/manifest.json")
    session = open_session(store)
    assert session.load(make_state(-1.0)) == 10
    session.save(make_state(20.5), step=20, wait=True)
    step, state = load_fresh(store)
    assert step == 20
    assert_is(state, 20.5)


def test_several_damaged_checkpoints_are_passed_over_in_one_load() -> None:
    store = MemoryStore()
    save_steps(store, 10, 20, 30, 40, keep_last=10)
    _remove(store, f"{folder_of(store, 40)}/manifest.json")
    _flip(0.2)(store, f"{folder_of(store, 30)}/r00000.json")
    _truncate(store, f"{folder_of(store, 20)}/r00000/000002")
    step, state = load_fresh(store)
    assert step == 10
    assert_is(state, 10.0)
    assert {bad.step for bad in RunLog(store, RUN).refresh().bad.values()} == {20, 30, 40}


# ------------------------------------------------------------ nothing is left


def damage_all(store: MemoryStore) -> None:
    for key in store.keys(f"{RUN}/checkpoints"):
        if key.endswith("/r00000/000001"):
            _flip(0.5)(store, key)


def test_run_without_a_whole_checkpoint_is_an_error_and_no_start_from_zero_c050() -> None:
    store = MemoryStore()
    save_steps(store, 10, 20)
    damage_all(store)
    for _ in range(2):  # the second time from the log
        with pytest.raises(CheckpointError, match=r"all checkpoints of this run are damaged \(2\)") as caught:
            load_fresh(store)
        assert "load(state, fresh_if_damaged=True)" in str(caught.value)


def test_run_without_a_whole_checkpoint_starts_from_zero_when_that_is_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    save_steps(store, 10, 20)
    damage_all(store)
    for _ in range(2):
        session, state = open_session(store), make_state(-1.0)
        caplog.clear()
        assert session.load(state, fresh_if_damaged=True) == 0
        assert_is(state, -1.0)  # and not what was read before the damage was found
        assert "All checkpoints of this run are damaged (2): it starts at step 0" in caplog.text
    session.save(make_state(5.0), step=5, wait=True)
    step, state = load_fresh(store)
    assert step == 5
    assert_is(state, 5.0)


def test_run_with_a_model_starts_from_its_own_weights_when_all_is_damaged() -> None:
    store = MemoryStore()

    def make() -> dict[str, Any]:
        torch.manual_seed(1)
        model = torch.nn.Linear(20, 20)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    state = make()
    state["model"](torch.ones(20)).sum().backward()
    state["optimizer"].step()
    open_session(store).save(state, step=1, wait=True)
    damage_all(store)
    fresh, wanted = make(), make()
    assert open_session(store).load(fresh, fresh_if_damaged=True) == 0
    for name, tensor in wanted["model"].state_dict().items():
        assert torch.equal(fresh["model"].state_dict()[name], tensor)


# ------------------------------------------------------------ a store that fails is no damage


@pytest.mark.parametrize("verb", ["list", "get", "get_range"])
def test_store_that_cannot_be_read_is_an_error_and_no_damage(verb: str) -> None:
    store = MemoryStore()
    save_steps(store, 10, 20)
    before = dict(store.objects)

    def refuse(what: str, key: str) -> None:
        if what == verb:
            raise StoreError("the store is away")

    state = make_state(-1.0)
    with pytest.raises(StoreError, match="the store is away"):
        open_session(WatchedStore(store, refuse)).load(state)
    written = {key for key in store.objects if key not in before}
    assert all("/log/" in key for key in written)
    assert not RunLog(store, RUN).refresh().bad
    assert load_fresh(store)[0] == 20


def test_store_that_fails_at_any_read_of_a_load_is_an_error_and_no_damage() -> None:
    store = MemoryStore()
    save_steps(store, 10, 20)
    watched = WatchedStore(store.copy())
    load_fresh(watched)
    for number in range(len(watched.operations)):
        copy = store.copy()
        failing = WatchedStore(copy)

        def fail_at(verb: str, key: str, number: int = number, failing: WatchedStore = failing) -> None:
            if len(failing.operations) > number:
                raise StoreError("the store is away")

        failing.before = fail_at
        with pytest.raises(StoreError, match="the store is away"):
            load_fresh(failing)
        assert not RunLog(copy, RUN).refresh().bad
        assert load_fresh(copy)[0] == 20


def test_directory_that_is_not_mounted_is_an_error_and_no_start_from_zero(tmp_path: Any) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        load_fresh(DirectoryStore(tmp_path / "not mounted"))
