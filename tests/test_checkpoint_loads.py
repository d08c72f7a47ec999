"""Loading with one rank: what is chosen, what is filled, what is refused, and who may still write."""

from __future__ import annotations

import logging
import shutil
import threading
from typing import Any

import pytest
import torch

from prefect_torch_elastic.checkpoint.session import CheckpointSession
from prefect_torch_elastic.context import get_context
from prefect_torch_elastic.errors import CheckpointError, CheckpointMismatch, NonRetryable, Superseded
from prefect_torch_elastic.runlog import CallStatus, Outcome, RunLog
from prefect_torch_elastic.store.directory import DirectoryStore
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
)

pytestmark = pytest.mark.usefixtures("checkpoint_log")


def test_load_says_that_the_run_is_new_c061(caplog: pytest.LogCaptureFixture) -> None:
    step, state = load_fresh(MemoryStore())
    assert step == 0
    assert_is(state, -1.0)  # what the user put there
    assert caplog.messages == ["No checkpoint yet: the run starts at step 0."]
    assert caplog.records[0].levelno == logging.INFO


def test_load_tells_a_run_that_was_cut_off_from_a_new_one_c061(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    store.put(f"{RUN}/checkpoints/000000000020/000001-aa/r00000/000000", b"half")
    step, state = load_fresh(store)
    assert step == 0
    assert_is(state, -1.0)
    assert caplog.messages == [
        "No checkpoint is complete (a save of step 20 was cut off): the run starts at step 0."
    ]


@pytest.mark.parametrize("wait", [True, False], ids=["waits", "behind"])
def test_load_gives_back_what_was_saved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, wait: bool
) -> None:
    use_small_blocks(monkeypatch)
    store = MemoryStore()
    session = open_session(store)
    assert session.save(make_state(3.5), step=12, wait=wait)
    session.close()
    caplog.clear()
    step, state = load_fresh(store)
    assert step == 12
    assert_is(state, 3.5)
    assert len(store.keys(f"{RUN}/checkpoints")) > 4  # several blocks
    assert " saved by 1 rank, loaded in" in caplog.text
    assert "Resuming from step 12: " in caplog.text


def test_load_fills_tensors_in_place() -> None:
    store = MemoryStore()
    save_steps(store, 1)
    state = make_state(-1.0)
    before = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    open_session(store).load(state)
    assert all(state[name] is tensor for name, tensor in before.items())


def test_load_takes_the_newest_checkpoint_and_not_the_highest_step() -> None:
    store = MemoryStore()
    save_steps(store, 10, 20)
    save_steps(store, 15)  # a gang that fell back and trained on
    step, state = load_fresh(store)
    assert step == 15
    assert_is(state, 15.0)


def test_load_of_a_part_leaves_the_rest_alone() -> None:
    store = MemoryStore()
    save_steps(store, 7)
    part = {"bias": torch.zeros(7), "note": {"value": 0.0}}
    assert open_session(store).load(part) == 7
    assert torch.equal(part["bias"], torch.full((7,), 7.0))
    assert part["note"] == {"value": 7.0}


def test_load_of_another_shape_changes_nothing_and_is_not_tried_again_c055() -> None:
    store = MemoryStore()
    save_steps(store, 7)
    state = {**make_state(-1.0), "bias": torch.zeros(8)}
    with pytest.raises(CheckpointMismatch, match=r"`bias` is float32 \[7\] .* \[8\] now") as caught:
        open_session(store).load(state)
    assert isinstance(caught.value, NonRetryable)
    assert f"{store.url}/{RUN}" in str(caught.value)
    assert torch.equal(state["weights"], make_state(-1.0)["weights"])
    assert load_fresh(store)[0] == 7  # it is not marked as damaged


def test_load_waits_for_a_save_that_is_on_its_way_report_7() -> None:
    gate = Gate()
    session = open_session(WatchedStore(MemoryStore(), gate))
    session.save(make_state(4.0), step=4)
    assert gate.reached.wait(5.0)
    threading.Timer(0.1, gate.is_open.set).start()
    state = make_state(-1.0)
    assert session.load(state) == 4
    assert_is(state, 4.0)


def test_load_of_a_call_that_has_succeeded_is_superseded() -> None:
    store = MemoryStore()
    RunLog(store, RUN).append(Outcome(call="c0ffee", status=CallStatus.SUCCEEDED, attempt=1), epoch=None)
    with pytest.raises(Superseded, match="succeeded already"):
        load_fresh(store, call="c0ffee")


def test_two_runs_under_one_root_do_not_meet_c056() -> None:
    store = MemoryStore()
    save_steps(store, 10, folder="one")
    save_steps(store, 20, folder="two")
    for folder, step in (("one", 10), ("two", 20)):
        loaded, state = load_fresh(store, folder=folder)
        assert loaded == step
        assert_is(state, float(step))


def test_copied_run_folder_is_as_good_as_the_first_report_26(tmp_path: Any) -> None:
    (tmp_path / "first").mkdir()
    save_steps(DirectoryStore(tmp_path / "first"), 10, 20)
    shutil.copytree(tmp_path / "first", tmp_path / "second" / "deep")
    copy = DirectoryStore(tmp_path / "second" / "deep")
    for _ in range(2):
        step, state = load_fresh(copy)
        assert step == 20
        assert_is(state, 20.0)


def test_checkpoints_outside_of_a_gang_are_in_a_folder_that_goes_away() -> None:
    session = CheckpointSession.open(get_context(), {}, None)
    assert session.load(make_state(-1.0)) == 0
    assert session.save(make_state(1.0), step=1, wait=True)
    state = make_state(-1.0)
    assert session.load(state) == 1
    assert_is(state, 1.0)


# ------------------------------------------------------------ save before load


@pytest.mark.parametrize("wait", [True, False], ids=["waits", "behind"])
def test_save_to_a_run_that_was_not_loaded_is_refused_and_keeps_its_checkpoints(*, wait: bool) -> None:
    store = MemoryStore()
    save_steps(store, 10, 20)
    session = open_session(store, keep_last=1, every_steps=1)
    for _ in range(2):  # the first refusal is no permission
        with pytest.raises(CheckpointError, match="the newest of step 20, and none was loaded") as caught:
            session.save(make_state(0.0), step=1, wait=wait)
        assert "Call `checkpoint.load(state)` first, or use another `run_key`" in str(caught.value)
    with pytest.raises(CheckpointError, match="none was loaded"):
        session.save_if_due(make_state(0.0), step=2)
    assert committed_steps(store) == [20, 10]
    step, state = load_fresh(store)
    assert step == 20
    assert_is(state, 20.0)


def test_save_to_a_run_that_was_not_loaded_works_after_a_load() -> None:
    store = MemoryStore()
    save_steps(store, 10, 20)
    session = open_session(store)
    with pytest.raises(CheckpointError, match="none was loaded"):
        session.save(make_state(1.0), step=1)
    state = make_state(-1.0)
    assert session.load(state) == 20
    assert_is(state, 20.0)
    assert session.save(make_state(21.0), step=21, wait=True)
    assert load_fresh(store)[0] == 21


def test_load_that_failed_is_no_permission_to_begin_again() -> None:
    store = MemoryStore()
    save_steps(store, 10, 20)
    session = open_session(store, keep_last=1)
    with pytest.raises(CheckpointMismatch):
        session.load({"model": torch.nn.Linear(3, 5)})
    with pytest.raises(CheckpointError, match="none was loaded"):
        session.save(make_state(1.0), step=1, wait=True)
    assert committed_steps(store) == [20, 10]


# ------------------------------------------------------------ another gang


def save_and_close(session: CheckpointSession, step: int, *, wait: bool) -> None:
    session.save(make_state(float(step)), step=step, wait=wait)
    session.close()  # a save behind the training is told here


@pytest.mark.parametrize("wait", [True, False], ids=["waits", "behind"])
def test_gang_that_was_replaced_commits_nothing_and_says_why(*, wait: bool) -> None:
    store = MemoryStore()
    old = save_steps(store, 10)
    save_steps(store, 20)
    with pytest.raises(Superseded, match=r"a newer gang has taken this run over \(epoch 2"):
        save_and_close(old, 30, wait=wait)
    step, state = load_fresh(store)
    assert step == 20
    assert_is(state, 20.0)


def test_gang_that_was_replaced_condemns_nothing() -> None:
    """What it cannot read may have been pruned by its successor."""
    store = MemoryStore()
    old = save_steps(store, 10)
    save_steps(store, 20)
    key = store.keys(f"{folder_of(store, 20)}/r00000/")[0]
    whole = store.objects.pop(key)
    with pytest.raises(Superseded):
        old.load(make_state(-1.0))
    store.put(key, whole)
    assert load_fresh(store)[0] == 20
