"""A gang is asked to stop while its ranks look for that: they agree, save and leave, and it is no success."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from prefect_torch_elastic import GangFailed, GangTimedOut, StopTraining, elastic_task, get_context
from tests.e2e.conftest import LiveFlow, fetch_logs
from tests.gangs import Driver, kill, wait_until_gone

Note = Callable[..., None]

RUN_SECONDS = 6.0  # ranks import what checkpoints need, and train a while


def read_notes(notes: Path) -> list[str]:
    return sorted(notes.read_text().split()) if notes.exists() else []


def train_until_asked(note: Note) -> int:
    """Train until the ranks agree to stop; note a SIGTERM and the last step."""
    import signal

    context = get_context()

    def on_sigterm(*_: object) -> None:
        note("sigterm")

    signal.signal(signal.SIGTERM, on_sigterm)
    step = 0
    while not context.should_stop(step=step):
        step += 1
        context.report({}, step=step)
        time.sleep(0.02 * (1 + context.rank))
    note(f"{context.rank}:{step}")
    return step


def test_ranks_that_look_agree_on_a_step_and_leave_without_a_signal(
    in_flow: LiveFlow, note: Note, notes: Path
):
    @elastic_task(nproc_per_node=2, run_timeout_seconds=RUN_SECONDS, grace_seconds=30, max_restarts=1)
    def train() -> int:
        return train_until_asked(note)

    started = time.monotonic()
    state = in_flow(lambda: train(return_state=True))
    assert time.monotonic() - started < RUN_SECONDS + 20.0, "they did not wait for the end of the grace"
    error = state.result(raise_on_failure=False)
    assert isinstance(error, GangTimedOut)
    steps = [line.split(":") for line in read_notes(notes)]
    assert [rank for rank, _ in steps] == ["0", "1"], "no SIGTERM came"
    assert len({step for _, step in steps}) == 1
    lines = [line.message for line in fetch_logs(state, has="stopped as asked")]
    assert any("The gang is asked to stop (timed out); its ranks have 30 s." in line for line in lines)
    assert any("What the function returned is no result." in line for line in lines)
    assert not any("were killed" in line for line in lines)


def test_ranks_of_two_nodes_agree_on_a_step(in_flow: LiveFlow, note: Note, notes: Path):
    @elastic_task(nnodes=2, nproc_per_node=1, run_timeout_seconds=RUN_SECONDS, grace_seconds=30)
    def train() -> int:
        return train_until_asked(note)

    error = in_flow(lambda: train(return_state=True)).result(raise_on_failure=False)
    assert isinstance(error, GangTimedOut)
    steps = [line.split(":") for line in read_notes(notes)]
    assert [rank for rank, _ in steps] == ["0", "1"]
    assert len({step for _, step in steps}) == 1


def test_rank_that_looks_and_does_not_leave_gets_sigterm_near_the_end_of_its_grace(
    in_flow: LiveFlow, note: Note, notes: Path
):
    @elastic_task(nproc_per_node=1, run_timeout_seconds=1, grace_seconds=2)
    def train() -> None:
        import signal
        import sys

        from prefect_torch_elastic import context

        asked_at = [0.0]

        def on_sigterm(*_: object) -> None:
            note(f"{time.monotonic() - asked_at[0]:.2f}")
            sys.exit(0)

        signal.signal(signal.SIGTERM, on_sigterm)
        assert context._state is not None
        while context._state.poll_for_stop() is None:
            time.sleep(0.01)
        asked_at[0] = time.monotonic()
        time.sleep(60)

    error = in_flow(lambda: train(return_state=True)).result(raise_on_failure=False)
    assert isinstance(error, GangTimedOut)
    (seconds,) = map(float, read_notes(notes))
    assert 1.3 < seconds < 1.95, "a quarter of the grace is left then"


def test_save_if_due_saves_the_last_step_and_the_next_run_goes_on(
    in_flow: LiveFlow, note: Note, notes: Path, tmp_path: Path
):
    @elastic_task(
        nproc_per_node=2,
        run_key="stop-and-go",
        store=str(tmp_path / "store"),
        grace_seconds=30,
        max_restarts=0,
    )
    def train(steps: int) -> int:
        import torch

        context = get_context()
        state = {"weights": torch.zeros(4), "count": 0}
        first = context.checkpoint.load(state)
        note(f"start:{first}:{state['count']}:{state['weights'].sum():g}")
        for step in range(first, steps):
            state["weights"] += 1
            state["count"] = step + 1
            time.sleep(0.02)
            try:
                context.checkpoint.save_if_due(state, step=step + 1)
            except StopTraining:
                note(f"left:{step + 1}")
                raise
        return state["count"]

    stopped = train.with_options(run_timeout_seconds=RUN_SECONDS)
    error = in_flow(lambda: stopped(10_000, return_state=True)).result(raise_on_failure=False)
    assert isinstance(error, GangTimedOut)
    lines = read_notes(notes)
    (left,) = {line for line in lines if line.startswith("left")}
    step = int(left.split(":")[1])
    assert step > 0
    notes.unlink()
    assert in_flow(lambda: train(step + 3)) == step + 3
    assert set(read_notes(notes)) == {f"start:{step}:{step}:{4 * step}"}


def test_function_that_swallows_the_stop_is_no_success(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=2, run_timeout_seconds=RUN_SECONDS, grace_seconds=30)
    def train() -> str:
        import torch

        state, step = {"weights": torch.zeros(4)}, 0
        try:
            while True:
                step += 1
                time.sleep(0.02)
                get_context().checkpoint.save_if_due(state, step=step)
        except BaseException:  # noqa: BLE001  (as careless code does)
            pass
        return "a value"

    error = in_flow(lambda: train(return_state=True)).result(raise_on_failure=False)
    assert isinstance(error, GangTimedOut)


def test_stop_training_that_nobody_asked_for_fails_with_words_about_it(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=2, max_restarts=0)
    def train() -> None:
        raise StopTraining

    error = in_flow(lambda: train(return_state=True)).result(raise_on_failure=False)
    assert isinstance(error, GangFailed)
    assert (error.category, error.exc_type) == ("UserError", "ElasticError")
    assert "raised `StopTraining`, but nobody asked this gang to stop" in str(error)


def test_rank_that_fails_takes_ranks_that_look_for_stops_along_without_a_vote(
    in_flow: LiveFlow, note: Note, notes: Path
):
    @elastic_task(nproc_per_node=2, max_restarts=0, grace_seconds=30)
    def train() -> None:
        context = get_context()
        for step in range(1, 10_000):
            try:
                if context.should_stop(step=step):
                    note("agreed")
            except StopTraining:
                note("told")
                raise
            time.sleep(0.02)
            if step == 10 and context.rank == 1:
                raise ValueError("lr must be > 0")

    started = time.monotonic()
    error = in_flow(lambda: train(return_state=True)).result(raise_on_failure=False)
    assert isinstance(error, GangFailed)
    assert (error.rank, error.exc_type) == (1, "ValueError")
    assert time.monotonic() - started < 25.0
    assert "agreed" not in read_notes(notes)


ORPHANS = """
@elastic_task(nproc_per_node=2, grace_seconds=30, run_key="orphans", store=str(FOLDER / "store"))
def train():
    import torch
    from prefect_torch_elastic import StopTraining
    context = get_context()
    state = {"weights": torch.zeros(4)}
    step = context.checkpoint.load(state)
    if step:
        return step
    while True:
        step += 1
        try:
            context.checkpoint.save_if_due(state, step=step)
        except StopTraining:
            mark(f"left-{context.rank}", step)
            raise
        if step == 5:
            mark_rank()
        time.sleep(0.02)

@flow
def main():
    return train()

RESULT = main()
"""


def test_gang_whose_flow_was_killed_saves_and_leaves(driver: Driver):
    job = driver.submit(ORPHANS)
    ranks = job.pids("rank-0-*", 2)
    kill(driver.pid)
    wait_until_gone(ranks, 30.0)
    steps = [int(path.read_text()) for path in sorted(job.folder.glob("left-*"))]
    assert len(steps) == 2
    assert steps[0] == steps[1] >= 5
