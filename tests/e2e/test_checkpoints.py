"""A run goes on from its checkpoints: after kills, on other sizes, past damage; a broken store ends it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from prefect_torch_elastic import GangFailed, elastic_task, get_context
from prefect_torch_elastic.checkpoint.manifest import render_folder
from prefect_torch_elastic.runlog import RunLog, RunState
from prefect_torch_elastic.store import open_store
from tests.e2e.conftest import fetch_logs
from tests.gangs import wait_until, wait_until_gone

if TYPE_CHECKING:
    from tests.conftest import ScriptRunner
    from tests.e2e.conftest import LiveFlow

Note = Callable[..., None]

FLOWS = Path(__file__).parents[2] / "flows"

pytestmark = pytest.mark.timeout(240)  # some start several programs, each for seconds


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Each test has a store of its own; named in the task, so that the gangs of a file start warm."""
    return tmp_path / "store"


def read_log(store: Path, run: str) -> RunState:
    return RunLog(open_store(str(store)), run).refresh()


def read_notes(notes: Path) -> list[str]:
    return sorted(notes.read_text().splitlines()) if notes.exists() else []


def said(state: Any, *, has: str) -> list[str]:
    return [line.message for line in fetch_logs(state, has=has)]


# ---------------------------------------------------------------- killed and run again


def test_flow_that_kills_a_rank_and_a_gang_ends_with_the_same_weights(
    prefect_server: str, run_script: ScriptRunner, no_leftovers: None
):
    text = (FLOWS / "resume_after_kill.py").read_text()
    every = 5
    options = ["--steps", "30", "--every", str(every), "--store", "runs"]
    script = run_script(text, args=options, timeout_seconds=200)
    assert script.rc == 0, script.stderr
    report = json.loads(script.stdout.splitlines()[-1])
    assert report["identical"] is True
    assert report["resumed_at_step"] > 0
    assert 0 <= report["lost_steps"] <= every
    assert report["attempts"] == 2


KEYED = """
import sys, time
from pathlib import Path
from prefect import flow
from prefect_torch_elastic import elastic_task, get_context

notes, options = Path(sys.argv[1]), {"nproc_per_node": 1, "store": sys.argv[2], "grace_seconds": 10}

def train(name, steps):
    import os, torch
    state = {"weights": torch.zeros(4)}
    first = get_context().checkpoint.load(state)
    with notes.open("a") as file:
        file.write(f"{name} {os.getpid()} {first} {state['weights'].sum():g}\\n")
    for step in range(first, steps):
        state["weights"] += 1
        get_context().checkpoint.save(state, step=step + 1, wait=True)
        time.sleep(0.05)
    return first

keyed = elastic_task(run_key="keyed-{name}", **options)(train)
unkeyed = elastic_task(**options)(train)

@flow
def main(steps):
    futures = [keyed.submit("keyed", steps), unkeyed.submit("unkeyed", steps)]
    print("RESULT", [future.result() for future in futures])

if __name__ == "__main__":
    main(int(sys.argv[3]))
"""


def test_killed_program_goes_on_with_a_run_key_and_starts_again_without(
    prefect_server: str, run_script: ScriptRunner, no_leftovers: None, notes: Path, store: Path
):
    script = run_script.start(KEYED, args=[str(notes), str(store), "10000"])
    wait_until(lambda: notes.exists() and len(read_notes(notes)) == 2, 60.0)

    def has_saved() -> bool:
        logs = [read_log(store, folder.parent.name) for folder in store.glob("*/log")]
        return len(logs) == 2 and all(len(log.commits) > 1 for log in logs)

    wait_until(has_saved, 30.0)
    script.process.kill()
    script.process.wait()
    wait_until_gone([int(line.split()[1]) for line in read_notes(notes)], 30.0)
    reached = read_log(store, "keyed-keyed").commits[0].step
    notes.unlink()
    again = run_script(KEYED, args=[str(notes), str(store), str(reached + 2)], timeout_seconds=90)
    assert f"RESULT [{reached}, 0]" in again.stdout, again.stderr
    assert [line.split()[::2] for line in read_notes(notes)] == [["keyed", str(reached)], ["unkeyed", "0"]]
    assert read_notes(notes)[0].split()[3] == str(4 * reached), "the weights are those of that step"


# ---------------------------------------------------------------- other sizes, other models


def test_run_goes_on_with_other_numbers_of_ranks_c052(in_flow: LiveFlow, store: Path):
    @elastic_task(nproc_per_node=2, run_key="sizes", store=str(store), max_restarts=0)
    def train(steps: int) -> tuple[int, float]:
        import torch
        from torch import nn

        context = get_context()
        torch.manual_seed(0)
        inputs = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)
        targets = inputs.sin().sum(dim=1, keepdim=True)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        parallel = context.prepare_model(model)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
        state = {"model": parallel, "optimizer": optimizer, "schedule": schedule}
        first = context.checkpoint.load(state)
        for _ in range(first, steps):
            share = slice(context.rank, None, context.world_size)  # six samples: equal shares of 1, 2 or 3
            nn.functional.mse_loss(parallel(inputs[share]), targets[share]).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        context.checkpoint.save(state, step=steps)
        return first, nn.functional.mse_loss(model(inputs), targets).item()

    _, expected = train.fn(12)
    in_flow(lambda: train(4))
    state = in_flow(lambda: train.with_options(nproc_per_node=3)(8, return_state=True))
    assert state.result()[0] == 4
    assert any("saved by 2 ranks, now 3" in line for line in said(state, has="Resuming from step 4"))
    state = in_flow(lambda: train.with_options(nproc_per_node=1)(12, return_state=True))
    assert any("saved by 3 ranks, now 1" in line for line in said(state, has="Resuming from step 8"))
    assert state.result() == (8, pytest.approx(expected, rel=1e-6))


def test_model_that_was_changed_between_runs_is_named_at_once_c055(
    in_flow: LiveFlow, note: Note, notes: Path, store: Path
):
    @elastic_task(nproc_per_node=2, run_key="changed", store=str(store), retries=2, max_restarts=2)
    def train(width: int) -> None:
        import torch
        from torch import nn

        note(get_context().attempt)
        model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model, "optimizer": optimizer}
        get_context().checkpoint.load(state)
        get_context().checkpoint.save(state, step=1)

    in_flow(lambda: train(8))
    notes.unlink()
    error = in_flow(lambda: train(6, return_state=True)).result(raise_on_failure=False)
    assert isinstance(error, GangFailed)
    assert (error.exc_type, error.category) == ("CheckpointMismatch", "NonRetryable")
    for part in ("0.weight", "8", "6", str(store)):
        assert part in str(error)
    assert read_notes(notes) == ["2", "2"], "two ranks, once: no restart, no attempt, no retry"
    assert [commit.step for commit in read_log(store, "changed").commits] == [1]


# ---------------------------------------------------------------- damage


def test_damaged_newest_checkpoint_is_said_and_the_one_before_is_taken_c050(in_flow: LiveFlow, store: Path):
    @elastic_task(nproc_per_node=2, run_key="damaged", store=str(store))
    def train(steps: int) -> tuple[int, float]:
        import torch

        state = {"weights": torch.zeros(1000)}
        first = get_context().checkpoint.load(state)
        loaded = state["weights"].sum().item()
        for step in range(first, steps):
            state["weights"] += 1
            get_context().checkpoint.save(state, step=step + 1, wait=True)
        return first, loaded

    in_flow(lambda: train(3))
    newest = read_log(store, "damaged").commits[0]
    assert newest.step == 3
    (block, *_) = sorted((store / "damaged" / render_folder(3, newest.uuid)).glob("r*/*"))
    data = bytearray(block.read_bytes())
    data[len(data) // 2] ^= 1
    block.write_bytes(data)
    state = in_flow(lambda: train(4, return_state=True))
    assert state.result() == (2, 2000.0)
    lines = said(state, has="Resuming from step 2")
    (line,) = [line for line in lines if "The checkpoint of step 3 is damaged and not used again." in line]
    assert block.relative_to(store).as_posix() in line
    log = read_log(store, "damaged")
    assert list(log.bad) == [newest.uuid]
    assert [commit.step for commit in log.commits][:2] == [4, 3], "step 3 was saved again"


def test_store_that_breaks_in_the_middle_of_a_run_ends_all_ranks_with_one_cause_c059(
    in_flow: LiveFlow, note: Note, notes: Path, store: Path
):
    @elastic_task(
        nproc_per_node=2,
        run_key="broken",
        store=str(store),
        max_restarts=0,
        checkpoint={"every_steps": 5, "max_failures": 2},
    )
    def train() -> None:
        import shutil

        import torch

        from prefect_torch_elastic import CheckpointError

        context = get_context()
        state = {"weights": torch.zeros(4)}
        for step in range(1, 10_000):
            if step == 12 and context.rank == 0:
                shutil.rmtree(store / "broken" / "checkpoints")
                (store / "broken" / "checkpoints").write_text("a file is in the way")
                note(f"broken {time.time()}")
            try:
                context.checkpoint.save_if_due(state, step=step)
            except CheckpointError:
                note(f"told {time.time()}")
                raise
            time.sleep(0.01)

    state = in_flow(lambda: train(return_state=True))
    error = state.result(raise_on_failure=False)
    assert isinstance(error, GangFailed)
    assert error.exc_type == "CheckpointError"
    assert "(2 of 2 in a row)" in str(error)
    assert str(store) in str(error)
    assert "Not a directory" in str(error)
    times = [line.split() for line in read_notes(notes)]
    # Both are told at once, and the one that is slower may be ended before it has written its line.
    assert [what for what, _ in times] in (["broken", "told"], ["broken", "told", "told"])
    assert max(float(at) for _, at in times) - float(times[0][1]) < 30.0
    assert any("(1 of 2 in a row)" in line for line in said(state, has="(1 of 2 in a row)"))
