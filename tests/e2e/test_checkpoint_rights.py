"""Who may save: only the newest gang of a run, and only all of its ranks together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from prefect_torch_elastic import GangFailed, elastic_task, get_context
from prefect_torch_elastic.runlog import RunLog
from prefect_torch_elastic.store import open_store
from tests.gangs import Driver

if TYPE_CHECKING:
    from tests.e2e.conftest import LiveFlow

QUICK = {"meeting_timeout_seconds": 3.0}


SLOW = """
@elastic_task(nproc_per_node=2, run_key="shared", store={store!r}, max_restarts=2, retries=2)
def train():
    import torch
    context = get_context()
    state = {{"weights": torch.zeros(4)}}
    first = context.checkpoint.load(state)
    context.checkpoint.save(state, step=1, wait=True)
    mark_rank()
    wait_for("go-on")
    for step in range(2, 100):
        context.checkpoint.save(state, step=step, wait=True)
        mark_rank(f"saved-{{step}}")

@flow
def main():
    state = train(return_state=True)
    return {{"message": state.message, "error": str(state.result(raise_on_failure=False))}}

RESULT = main()
"""


def test_gang_whose_run_was_taken_over_commits_nothing_more_and_says_why(
    in_flow: LiveFlow, awake_driver: Driver, tmp_path: Path
):
    store = tmp_path / "store"

    @elastic_task(nproc_per_node=1, run_key="shared", store=str(store))
    def train() -> int:
        import torch

        state = {"weights": torch.zeros(4)}
        first = get_context().checkpoint.load(state)
        get_context().checkpoint.save(state, step=50, wait=True)
        return first

    job = awake_driver.submit(SLOW.format(store=str(store)))
    job.pids("rank-0-*", 2)
    assert in_flow(train) == 1
    (job.folder / "go-on").touch()
    ended = job.wait()
    for text in (ended["message"], ended["error"]):
        assert "Superseded" in text
        assert "a newer gang has taken this run over (epoch 2, this one has 1)" in text
    assert not list(job.folder.glob("saved-*"))
    assert not list(job.folder.glob("rank-1-*")), "no restart"
    log = RunLog(open_store(str(store)), "shared").refresh()
    assert [(commit.step, commit.epoch) for commit in log.all_commits] == [(50, 2), (1, 1)]


def test_save_that_one_rank_leaves_out_is_named(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=3, max_restarts=0, checkpoint=QUICK)
    def train() -> None:
        import torch

        context = get_context()
        context.init_process_group()
        if context.rank != 1:
            context.checkpoint.save({"weights": torch.zeros(4)}, step=1)
        torch.distributed.barrier()

    error = in_flow(lambda: train(return_state=True)).result(raise_on_failure=False)
    assert isinstance(error, GangFailed)
    assert error.exc_type == "CheckpointError"
    assert "called save(step=1), and rank 1 did not within 3 s" in str(error)
    assert "not inside `if rank == 0:`" in str(error)


def test_save_on_rank_0_only_is_named_at_once_when_the_others_make_their_next_call(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=2, max_restarts=0)
    def train() -> None:
        import torch

        context = get_context()
        state = {"weights": torch.zeros(4)}
        for step in range(1, 10):
            if context.rank == 0:
                context.checkpoint.save(state, step=step)
            context.should_stop(step=step)

    error = in_flow(lambda: train(return_state=True)).result(raise_on_failure=False)
    assert isinstance(error, GangFailed)
    assert error.exc_type == "CheckpointError"
    assert "rank 0 called save(step=1), but rank 1 called should_stop(step=1)" in str(error)
