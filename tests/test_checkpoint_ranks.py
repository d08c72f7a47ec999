"""Several real ranks: a failure of one that all hear of, in time and by name, and stops that all agree on.

The work of a rank is a function of this module; `tests.checkpoint_gangs` runs it in processes that stay.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from prefect_torch_elastic.checkpoint import news, peers, saving
from prefect_torch_elastic.checkpoint.peers import StoreBoard
from prefect_torch_elastic.errors import CheckpointError, StopTraining, StoreError
from prefect_torch_elastic.rankstate import RankState, StopReason
from prefect_torch_elastic.runlog import RunLog
from prefect_torch_elastic.store.directory import DirectoryStore
from tests.checkpoint_gangs import Gangs, Seat, open_directory, open_rank
from tests.checkpoint_stores import RUN, WatchedStore, committed_steps

FULL_DISK = "no space left on /data, needed 3.1 GB, free 0.2 GB"


@pytest.fixture(scope="module")
def gangs() -> Iterator[Gangs]:
    gangs = Gangs(3)
    yield gangs
    gangs.close()


# ------------------------------------------------------------ saves of many ranks


def save_often(seat: Seat, *, folder: str, steps: int) -> None:
    def slow(verb: str, key: str) -> None:
        if seat.rank == 1 and verb == "put":
            time.sleep(0.005)

    session = open_directory(seat, folder, before=slow, keep_last=2)
    for step in range(1, steps + 1):
        tensors = {f"t{index}": torch.full((50,), float(step)) for index in range(6)}
        session.save({**tensors, "step": step}, step=step, wait=True)


def test_saves_of_several_ranks_leave_the_last_two_and_no_error_c056(gangs: Gangs, tmp_path: Path) -> None:
    gangs.values(save_often, 3, folder=str(tmp_path), steps=20)
    assert committed_steps(DirectoryStore(tmp_path)) == [20, 19]
    store = DirectoryStore(tmp_path)
    assert [int(step) for step in store.list_folders(f"{RUN}/checkpoints")] == [19, 20]
    assert not list(tmp_path.rglob(".tmp-*"))
    loaded = gangs.values(load_often, 2, folder=str(tmp_path))
    assert loaded == [(20, 20.0)] * 2


def load_often(seat: Seat, *, folder: str) -> tuple[int, float]:
    state: dict[str, Any] = {f"t{index}": torch.zeros(50) for index in range(6)}
    step = open_directory(seat, folder).load(state)
    return step, torch.stack(list(state.values())).mean().item()


def make_state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((10,), value), "v": torch.full((3,), value)}


def save_once(seat: Seat, *, folder: str, step: int = 10) -> None:
    session, state = open_directory(seat, folder), make_state(-1.0)
    session.load(state)  # a run that has checkpoints is not saved to before
    session.save(make_state(float(step)), step=step, wait=True)


def load_once(seat: Seat, *, folder: str) -> tuple[int, float]:
    state = make_state(-1.0)
    return open_directory(seat, folder).load(state), state["w"].mean().item()


# ------------------------------------------------------------ one rank fails


def save_with_a_full_disk(seat: Seat, *, folder: str, failing: int, wait: bool) -> None:
    def full(verb: str, key: str) -> None:
        if seat.rank == failing and verb == "put" and "/checkpoints/" in key:
            raise StoreError(FULL_DISK)

    session = open_directory(seat, folder, before=full, max_failures=1)
    session.load(make_state(-1.0))
    session.save(make_state(20.0), step=20, wait=wait)
    session.close()


@pytest.mark.parametrize("wait", [True, False], ids=["waits", "behind"])
@pytest.mark.parametrize("failing", [0, 1], ids=lambda rank: f"rank {rank}")
def test_save_that_fails_on_one_rank_fails_on_all_with_its_cause_c059(
    gangs: Gangs, tmp_path: Path, failing: int, *, wait: bool
) -> None:
    gangs.values(save_once, 2, folder=str(tmp_path))
    options = {"folder": str(tmp_path), "failing": failing, "wait": wait}
    results = gangs.run(save_with_a_full_disk, 2, **options)
    for result in results:
        assert result.failure is not None
        assert "CheckpointError" in result.failure.kinds
        assert f"rank {failing}: StoreError: {FULL_DISK}" in result.failure.text
        assert result.seconds < 20.0
    assert committed_steps(DirectoryStore(tmp_path)) == [10]
    assert gangs.values(load_once, 2, folder=str(tmp_path)) == [(10, 10.0)] * 2


def save_something_odd(seat: Seat, *, folder: str) -> None:
    state = {"w": torch.ones(10), "odd": 1 if seat.rank == 0 else object()}
    open_directory(seat, folder).save(state, step=20)


def test_save_of_what_cannot_be_saved_on_one_rank_names_it_on_all_c054(gangs: Gangs, tmp_path: Path) -> None:
    for failure in gangs.failures(save_something_odd, 2, folder=str(tmp_path)):
        assert "CheckpointError" in failure.kinds
        assert "`odd`" in failure.text
        assert "object" in failure.text


def save_while_rank_1_hangs(seat: Seat, *, folder: str, wait: bool) -> str:
    """Save until an error says that it is enough, and only then let rank 1 go on; return the error."""

    def hang(verb: str, key: str) -> None:
        if seat.rank == 1 and verb == "put":
            StoreBoard.connect(*seat.address).read(["released"], timeout_seconds=30.0)

    session = open_directory(seat, folder, before=hang, max_failures=3)
    session.load(make_state(-1.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "_LEAST_PATIENCE_SECONDS", 0.3)
        patch.setattr(saving, "_PATIENCE", 0.0)
        patch.setattr(news, "STUCK_SECONDS", 0.5)
        try:
            for step in range(11, 1000):
                session.save(make_state(float(step)), step=step, wait=wait)
                time.sleep(0.02)
        except CheckpointError as error:
            return str(error)
        finally:
            if seat.rank == 0:
                StoreBoard.connect(*seat.address).post("released", {})
    return ""


def test_save_of_a_rank_that_hangs_is_given_up_and_names_it_t13(gangs: Gangs, tmp_path: Path) -> None:
    gangs.values(save_once, 2, folder=str(tmp_path))
    first, second = gangs.values(save_while_rank_1_hangs, 2, folder=str(tmp_path), wait=True)
    assert first == second
    assert "step 11 could not be saved: rank 1 did not write its share within" in first
    assert gangs.values(load_once, 2, folder=str(tmp_path)) == [(10, 10.0)] * 2


def test_saves_behind_a_rank_that_hangs_do_not_hold_the_training_and_end_the_run(
    gangs: Gangs, tmp_path: Path
) -> None:
    errors = gangs.values(save_while_rank_1_hangs, 2, folder=str(tmp_path), wait=False)
    assert errors[0] == errors[1]  # and both came to an end while rank 1 was hanging
    assert "(3 of 3 in a row): rank 1 did not end writing" in errors[0]


# ------------------------------------------------------------ ranks that do not do the same


def call_on_one_rank(seat: Seat, *, folder: str, alone: int) -> None:
    peers._ANSWER_SECONDS = 0.5
    try:
        session = open_directory(seat, folder, meeting_timeout_seconds=1.0)
        if seat.rank == alone:
            session.save({"w": torch.ones(10)}, step=10)
    finally:
        peers._ANSWER_SECONDS = 5.0


@pytest.mark.parametrize("alone", [0, 1], ids=lambda rank: f"rank {rank}")
def test_save_on_one_rank_only_is_named_in_time(gangs: Gangs, tmp_path: Path, alone: int) -> None:
    results = gangs.run(call_on_one_rank, 2, folder=str(tmp_path), alone=alone)
    failure = results[alone].failure
    assert failure is not None
    assert "CheckpointError" in failure.kinds
    assert f"rank {alone} called save(step=10), and rank {1 - alone} did not within 1 s" in failure.text
    assert results[1 - alone].failure is None
    assert results[alone].seconds < 15.0


def save_steps_that_differ(seat: Seat, *, folder: str) -> None:
    session = open_directory(seat, folder)
    session.save({"w": torch.ones(10)}, step=10 * (seat.rank + 1))


def test_save_with_another_step_on_each_rank_is_refused_by_all_t18(gangs: Gangs, tmp_path: Path) -> None:
    for failure in gangs.failures(save_steps_that_differ, 2, folder=str(tmp_path)):
        assert "rank 0 called save(step=10), but rank 1 called save(step=20)" in failure.text
    assert committed_steps(DirectoryStore(tmp_path)) == []


def save_models_that_differ(seat: Seat, *, folder: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4 + seat.rank))
    open_directory(seat, folder).save({"model": model}, step=10)


def test_save_of_another_model_on_each_rank_is_refused_by_all(gangs: Gangs, tmp_path: Path) -> None:
    for failure in gangs.failures(save_models_that_differ, 2, folder=str(tmp_path)):
        assert "CheckpointError" in failure.kinds
        assert "1.weight` is float32 [4, 3] on rank 0 and float32 [5, 3] on rank 1" in failure.text
    assert committed_steps(DirectoryStore(tmp_path)) == []


def save_and_load_at_once(seat: Seat, *, folder: str) -> None:
    session = open_directory(seat, folder)
    if seat.rank == 0:
        session.save({"w": torch.ones(10)}, step=10)
    else:
        session.load({"w": torch.ones(10)})


def test_ranks_that_save_and_load_at_once_are_named_report_8(gangs: Gangs, tmp_path: Path) -> None:
    for failure in gangs.failures(save_and_load_at_once, 2, folder=str(tmp_path)):
        assert "rank 0 called save(step=10), but rank 1 called load()" in failure.text


# ------------------------------------------------------------ loads of many ranks


def load_with_a_bad_view(seat: Seat, *, folder: str, failing: int, how: str) -> tuple[int, float]:
    """Load while one rank's store shows the checkpoint of step 20 in another way."""

    class BadView(WatchedStore):
        def get_range(self, key: str, start: int, length: int) -> memoryview:
            data = super().get_range(key, start, length)
            if seat.rank != failing or f"{20:012}" not in key:
                return data
            if how == "away":
                raise StoreError("the store is away")
            return memoryview(bytes([data[0] ^ 1]) + bytes(data[1:]))

    session, state = open_rank(seat, BadView(DirectoryStore(Path(folder)))), make_state(-1.0)
    return session.load(state), state["w"].mean().item()


@pytest.mark.parametrize("failing", [0, 1], ids=lambda rank: f"rank {rank}")
def test_damage_that_one_rank_sees_makes_all_fall_back_together_report_15(
    gangs: Gangs, tmp_path: Path, failing: int
) -> None:
    for step in (10, 20):
        gangs.values(save_once, 2, folder=str(tmp_path), step=step)
    loaded = gangs.values(load_with_a_bad_view, 2, folder=str(tmp_path), failing=failing, how="flipped")
    assert loaded == [(10, 10.0)] * 2
    (bad,) = RunLog(DirectoryStore(tmp_path), RUN).refresh().bad.values()
    assert bad.step == 20
    assert bad.reason.startswith(f"rank {failing}: ")
    assert "its crc32c is" in bad.reason


def test_store_that_one_rank_cannot_read_is_an_error_on_all_and_no_damage(
    gangs: Gangs, tmp_path: Path
) -> None:
    for step in (10, 20):
        gangs.values(save_once, 2, folder=str(tmp_path), step=step)
    for failure in gangs.failures(load_with_a_bad_view, 2, folder=str(tmp_path), failing=1, how="away"):
        assert "StoreError" in failure.kinds
        assert "the store is away" in failure.text
    assert committed_steps(DirectoryStore(tmp_path)) == [20, 10]


# ------------------------------------------------------------ stops


def stop(seat: Seat, *, folder: str, seconds_left: float, save_seconds: float) -> tuple[bool, float]:
    """Train in endless small steps; rank 1 alone is asked to stop."""
    file = RankState.create_file("test")
    page = RankState(file)
    os.close(file)
    session = open_directory(seat, folder, state=page, every_steps=10**6)
    state = make_state(0.0)
    session._news.clock.add(save_seconds)
    asked = 0.0
    try:
        for step in range(1, 2000):
            state["w"].fill_(float(step))
            time.sleep(0.002)
            if step == 20:
                asked = time.monotonic()
                if seat.rank == 1:
                    page.request_stop(StopReason.PREEMPTED, seconds_left=seconds_left)
            session.save_if_due(state, step=step)
    except StopTraining:
        return session.stop_seen, time.monotonic() - asked
    return False, 0.0


def test_stop_of_one_rank_stops_all_at_one_step_with_a_save(gangs: Gangs, tmp_path: Path) -> None:
    results = gangs.values(stop, 2, folder=str(tmp_path), seconds_left=30.0, save_seconds=0.1)
    assert all(seen and seconds < 15.0 for seen, seconds in results)
    ((step, mean), other) = gangs.values(load_once, 2, folder=str(tmp_path))
    assert (step, mean) == other
    assert step == mean >= 20


def test_stop_that_leaves_no_time_stops_all_without_a_save(gangs: Gangs, tmp_path: Path) -> None:
    results = gangs.values(stop, 2, folder=str(tmp_path), seconds_left=30.0, save_seconds=100.0)
    assert all(seen and seconds < 15.0 for seen, seconds in results)
    assert committed_steps(DirectoryStore(tmp_path)) == []
