"""Saving with one rank: what a checkpoint holds, what is left out, and what a store that fails costs."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from prefect_torch_elastic.checkpoint.manifest import parse_manifest, render_manifest_key
from prefect_torch_elastic.errors import CheckpointError, StoreError
from prefect_torch_elastic.runlog import RunLog
from tests.checkpoint_stores import (
    RUN,
    Gate,
    MemoryStore,
    WatchedStore,
    assert_is,
    committed_steps,
    folder_of,
    load_fresh,
    make_state,
    open_session,
    save_steps,
    use_small_blocks,
    wait_until_idle,
)

pytestmark = pytest.mark.usefixtures("checkpoint_log")


def test_save_behind_keeps_what_was_there_when_it_was_called() -> None:
    store, gate = MemoryStore(), Gate()
    session = open_session(WatchedStore(store, gate))
    state = make_state(1.0)
    session.save(state, step=1)
    for name in ("weights", "bias", "scale"):
        state[name].fill_(99.0)  # training goes on
    state["note"]["value"] = 99.0
    gate.is_open.set()
    session.close()
    loaded = make_state(-1.0)
    assert open_session(store).load(loaded) == 1
    assert_is(loaded, 1.0)


def test_save_that_finds_another_on_its_way_is_left_out_and_says_so_t7(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, gate = MemoryStore(), Gate()
    session = open_session(WatchedStore(store, gate))
    assert session.save(make_state(1.0), step=1)
    assert gate.reached.wait(5.0)
    assert not session.save(make_state(2.0), step=2)
    assert "Step 2 is not saved: the save before it is still on its way." in caplog.messages
    gate.is_open.set()
    wait_until_idle(session)
    assert session.save(make_state(3.0), step=3)
    session.close()
    assert committed_steps(store) == [3, 1]


def test_save_that_waits_is_never_left_out() -> None:
    store, gate = MemoryStore(), Gate()
    session = open_session(WatchedStore(store, gate))
    session.save(make_state(1.0), step=1)
    assert gate.reached.wait(5.0)
    threading.Timer(0.1, gate.is_open.set).start()
    assert session.save(make_state(2.0), step=2, wait=True)
    assert committed_steps(store) == [2, 1]


def test_save_uses_one_copy_of_the_state_again_and_again_report_3() -> None:
    store = MemoryStore()
    session = open_session(store, keep_last=1)
    places: set[int] = set()
    for step in range(1, 31):
        session.save(make_state(float(step)), step=step)
        wait_until_idle(session)
        places |= {slab.data_ptr() for slab in session._saver._arena._slabs}
    session.close()
    assert len(places) == 1
    assert_is(load_fresh(store)[1], 30.0)


def test_save_of_a_state_that_changes_its_dtype_and_shape_is_right_each_time_t9() -> None:
    store = MemoryStore()
    session = open_session(store, keep_last=10)
    states = [
        {"w": torch.full((4, 4), 1.0)},
        {"w": torch.full((4, 4), 2.0).bfloat16()},
        {"w": torch.full((2, 8), 3.0).bfloat16()},
        {"w": torch.full((4, 4), 4.0), "more": torch.arange(3)},
        {"w": torch.full((4, 4), 5.0)},
    ]
    for step, state in enumerate(states, start=1):
        session.save(state, step=step, wait=True)
        blank = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        assert open_session(store).load(blank) == step
        session = open_session(store, keep_last=10)
        session.load(blank)
        assert all(torch.equal(blank[name], state[name]) for name in state)


def test_save_after_one_that_was_refused_has_its_own_tensors() -> None:
    """The plan of a refused save must not be taken for the next one's."""
    store = MemoryStore()
    session = open_session(store)
    state = {"a": torch.full((5,), 1.0), "b": torch.full((3,), 2.0)}
    session.save(state, step=1, wait=True)

    def refuse(*_: Any) -> Any:
        raise RuntimeError("refused")

    for step, other in ((2, {"b": torch.zeros(2)}), (3, {"c": torch.zeros(9), "b": torch.zeros(3)})):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session._saver, "_decide", refuse)
            with pytest.raises(RuntimeError, match="refused"):
                session.save(other, step=step)
    state["a"].fill_(4.0)
    session.save(state, step=4, wait=True)
    blank = {"a": torch.zeros(5), "b": torch.zeros(3)}
    assert open_session(store).load(blank) == 4
    assert torch.equal(blank["a"], torch.full((5,), 4.0))
    assert torch.equal(blank["b"], torch.full((3,), 2.0))


@pytest.mark.parametrize("wait", [True, False], ids=["waits", "behind"])
def test_save_of_a_slice_leaves_the_rest_of_its_storage_at_home_report_29(*, wait: bool) -> None:
    store = MemoryStore()
    session = open_session(store)
    session.save({"part": torch.zeros(1 << 20)[10:20]}, step=1, wait=wait)
    session.close()
    blocks = store.keys(f"{folder_of(store, 1)}/r00000/")
    assert sum(len(store.objects[key]) for key in blocks) == 40


@pytest.mark.parametrize("wait", [True, False], ids=["waits", "behind"])
@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.arange(24).reshape(4, 6).t(), id="transposed"),
        pytest.param(torch.arange(24)[::3], id="strided"),
        pytest.param(torch.tensor(3.0).expand(3, 5), id="expanded"),
        pytest.param(torch.zeros(0, 5), id="without elements"),
        pytest.param(torch.tensor(7), id="a number"),
        pytest.param(torch.tensor([True, False, True]), id="bool"),
        pytest.param(torch.randn(5).bfloat16(), id="bfloat16"),
        pytest.param(torch.randn(5).to(torch.float8_e4m3fn), id="float8"),
        pytest.param(torch.randn(5, dtype=torch.complex64).conj(), id="conjugate"),
        pytest.param(torch.tensor([math.nan, math.inf, -0.0]), id="not a number"),
        pytest.param(torch.randn(3, requires_grad=True), id="with a gradient"),
    ],
)
def test_save_and_load_keep_any_tensor(tensor: torch.Tensor, *, wait: bool) -> None:
    store = MemoryStore()
    session = open_session(store)
    session.save({"tensor": tensor}, step=1, wait=wait)
    session.close()
    target = torch.empty(tensor.shape, dtype=tensor.dtype)
    open_session(store).load({"tensor": target})
    plain = tensor.detach().resolve_conj().contiguous()
    assert torch.equal(target.reshape(-1).view(torch.uint8), plain.reshape(-1).view(torch.uint8))


def test_save_keeps_metrics_in_the_log_and_in_the_manifest() -> None:
    store = MemoryStore()
    session = open_session(store)
    metrics = {"loss": torch.tensor(0.25), "accuracy": np.float32(0.5), "bad": math.nan, "worse": -math.inf}
    session.save(make_state(1.0), step=1, metrics=metrics, wait=True)
    (commit,) = RunLog(store, RUN).refresh().commits
    key = render_manifest_key(folder_of(store, 1))
    for kept in (commit.metrics, parse_manifest(store.get(key), key=key).metrics):
        assert (kept["loss"], kept["accuracy"], kept["worse"]) == (0.25, 0.5, -math.inf)
        assert math.isnan(kept["bad"])
    assert (commit.size_bytes, commit.world_size, commit.epoch) == (150 * 4 + 7 * 4 + 8, 1, 1)


@pytest.mark.parametrize("step", [np.int64(5), torch.tensor(5), 5], ids=["numpy", "torch", "int"])
def test_save_takes_any_whole_number_as_step(step: Any) -> None:
    store = MemoryStore()
    session = open_session(store, every_steps=5)
    assert session.save_if_due(make_state(5.0), step=step)
    session.close()
    assert not session.should_stop(step=step)
    assert session.save(make_state(5.0), step=step, wait=True)
    assert load_fresh(store)[0] == 5


@pytest.mark.parametrize("step", [-1, 5.0, 5.5, True, "5", "x", None, 10**12, math.nan, math.inf])
def test_save_refuses_a_step_that_is_no_number_of_steps(step: Any) -> None:
    store = MemoryStore()
    session = open_session(store)
    calls: list[Callable[[], Any]] = [
        lambda: session.save(make_state(1.0), step=step),
        lambda: session.save_if_due(make_state(1.0), step=step),
        lambda: session.should_stop(step=step),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match="is not a number of completed steps"):
            call()
    assert not store.objects


def test_save_of_nothing_names_the_cure() -> None:
    with pytest.raises(CheckpointError, match="The state is empty"):
        open_session(MemoryStore()).save({}, step=1)


@pytest.mark.parametrize("wait", [True, False], ids=["waits", "behind"])
def test_save_that_the_store_refuses_is_told_and_the_next_one_works(
    caplog: pytest.LogCaptureFixture, *, wait: bool
) -> None:
    store = MemoryStore()
    broken = True

    def before(verb: str, key: str) -> None:
        if broken and verb == "put":
            raise StoreError("no space left on /data, needed 3.1 GB")

    session = open_session(WatchedStore(store, before))
    if wait:
        with pytest.raises(CheckpointError, match=r"step 1 could not be saved: .*no space left on /data"):
            session.save(make_state(1.0), step=1, wait=True)
    else:
        assert session.save(make_state(1.0), step=1)
        wait_until_idle(session)
    broken = False
    session.save(make_state(2.0), step=2)
    session.close()
    assert "The save of step 1 failed (1 of 3 in a row): rank 0: StoreError: no space left" in caplog.text
    assert load_fresh(store)[0] == 2


def test_saves_that_fail_in_a_row_end_the_run_t1() -> None:
    def before(verb: str, key: str) -> None:
        if "/r00000/" in key:
            raise StoreError("away")

    session = open_session(WatchedStore(MemoryStore(), before), max_failures=3)
    for step in (1, 2, 3):
        session.save(make_state(1.0), step=step)  # each hears of the one before
        wait_until_idle(session)
    with pytest.raises(CheckpointError, match=r"The save of step 3 failed \(3 of 3 in a row\): .*away"):
        session.save(make_state(1.0), step=4)


def test_saves_that_fail_now_and_then_do_not_end_the_run_report_18() -> None:
    store = MemoryStore()
    failing = False

    def before(verb: str, key: str) -> None:
        if failing and verb == "put":
            raise StoreError("away")

    session = open_session(WatchedStore(store, before), max_failures=2)
    for step in range(1, 9):
        failing = step % 2 == 1
        session.save(make_state(float(step)), step=step)
        wait_until_idle(session)
    session.close()
    assert load_fresh(store)[0] == 8


@pytest.mark.parametrize("block", [0, 1, 2], ids=lambda block: f"block {block}")
def test_save_with_one_block_that_fails_is_no_checkpoint_t1(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    use_small_blocks(monkeypatch)
    monkeypatch.setattr("prefect_torch_elastic.checkpoint.writer.WRITERS", 4)  # in a thread of its own
    store = MemoryStore()
    save_steps(store, 10)

    def before(verb: str, key: str) -> None:
        if verb == "put" and key.endswith(f"/r00000/{block:06}"):
            raise OSError(28, "No space left on device")

    session = open_session(WatchedStore(store, before))
    session.load(make_state(-1.0))
    with pytest.raises(CheckpointError, match=r"rank 0: OSError: .*No space left on device"):
        session.save(make_state(20.0), step=20, wait=True)
    step, state = load_fresh(store)
    assert step == 10
    assert_is(state, 10.0)


def test_close_raises_when_the_last_save_failed() -> None:
    def before(verb: str, key: str) -> None:
        if verb == "put":
            raise StoreError("away")

    session = open_session(WatchedStore(MemoryStore(), before))
    session.save(make_state(1.0), step=1)
    with pytest.raises(CheckpointError, match="the last save failed: rank 0: StoreError: away"):
        session.close()
    session.close()  # it has been told


def test_close_waits_for_the_last_save() -> None:
    store, gate = MemoryStore(), Gate()
    session = open_session(WatchedStore(store, gate))
    session.save(make_state(1.0), step=1)
    threading.Timer(0.1, gate.is_open.set).start()
    session.close()
    assert load_fresh(store)[0] == 1
