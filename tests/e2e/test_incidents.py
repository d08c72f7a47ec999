"""Ten incidents made on purpose: each is found in time, and named with its rank, its kind and evidence."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from prefect_torch_elastic import GangFailed, elastic_task, get_context

if TYPE_CHECKING:
    from tests.e2e.conftest import LiveFlow

Note = Callable[..., None]

BAD_STEP = 8
STEP_SECONDS = 0.05
HANG_SECONDS = 10 + 3 * STEP_SECONDS
DEATH_SECONDS = 2.0
ENDING_SECONDS = 2.0  # from the verdict until the flow has the error: ranks and agents are ended
LONG_SECONDS = 90.0


def train_until(misfortune: Callable[[int], Any], note: Note) -> None:
    """Train with an all-reduce per step; at one step `misfortune(rank)` happens, after its time was noted."""
    import torch
    import torch.distributed as dist

    context = get_context()
    dist.init_process_group("gloo")
    for step in range(1, 40):
        if step == BAD_STEP:
            dist.barrier()
            if context.rank == 0:
                note(f"{time.monotonic()}")
            if misfortune(context.rank) == "stop":
                break
        dist.all_reduce(torch.ones(3))
        time.sleep(STEP_SECONDS)
        context.report({}, step=step)


def raise_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("loss is NaN")


def kill_one(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def fill_memory(rank: int) -> None:
    if rank == 1:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        bytearray(1 << 34)


def leave_with_code(rank: int) -> None:
    if rank == 1:
        os._exit(3)


def end_early(rank: int) -> str | None:
    """Rank 0 has a batch less than rank 1."""
    return "stop" if rank == 0 else None


def sleep_in_loader(rank: int) -> None:
    def load_batch() -> None:
        time.sleep(LONG_SECONDS)

    if rank == 1:
        load_batch()


def call_another_collective(rank: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == 1:
        dist.broadcast(torch.ones(3), src=0)


def take_lock_twice(rank: int) -> None:
    if rank == 1:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire(timeout=LONG_SECONDS)


def get_stuck_in_save(rank: int) -> None:
    class Stuck:
        def state_dict(self) -> dict[str, int]:
            if rank == 1:
                time.sleep(LONG_SECONDS)
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    get_context().checkpoint.save({"stuck": Stuck()}, step=BAD_STEP)


def stop_one(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the verdict has to say; `words` are in the first line of the task's message."""

    category: str
    words: str
    seconds: float
    rank: int = 1


INCIDENTS = [
    pytest.param(
        raise_on_one,
        Expected(
            category="UserError", words="rank 1 failed at step 7: ValueError: loss", seconds=DEATH_SECONDS
        ),
        id="exception",
    ),
    pytest.param(
        kill_one,
        Expected(category="Killed", words="rank 1 was killed by SIGKILL at step 7", seconds=DEATH_SECONDS),
        id="sigkill",
    ),
    pytest.param(
        fill_memory,
        Expected(
            category="HostOutOfMemory", words="rank 1 failed at step 7: MemoryError", seconds=DEATH_SECONDS
        ),
        id="out-of-memory",
    ),
    pytest.param(
        leave_with_code,
        Expected(
            category="ExitedEarly", words="rank 1 ended with exit code 3 at step 7", seconds=DEATH_SECONDS
        ),
        id="exit",
    ),
    pytest.param(
        end_early,
        Expected(
            category="CollectivesApart",
            words="in a collective; rank 0 had already finished",
            seconds=DEATH_SECONDS,
            rank=0,
        ),
        id="uneven-batches",
    ),
    pytest.param(
        sleep_in_loader,
        Expected(
            category="Hang",
            words="rank 1 has not entered all_reduce #",
            seconds=HANG_SECONDS,
        ),
        id="data-loader",
    ),
    pytest.param(
        call_another_collective,
        Expected(category="CollectivesApart", words="rank 1 called broadcast", seconds=HANG_SECONDS),
        id="other-collective",
    ),
    pytest.param(
        take_lock_twice,
        Expected(
            category="Hang", words="it is in `take_lock_twice` (test_incidents.py:", seconds=HANG_SECONDS
        ),
        id="deadlock",
    ),
    pytest.param(
        get_stuck_in_save,
        Expected(
            category="StuckSave", words="rank 1 has been in a save of a checkpoint", seconds=HANG_SECONDS
        ),
        id="stuck-save",
    ),
    pytest.param(
        stop_one,
        Expected(category="StoppedResponding", words="rank 1 was stopped", seconds=HANG_SECONDS),
        id="sigstop",
    ),
]


@pytest.mark.parametrize(("misfortune", "expected"), INCIDENTS)
def test_incident_is_found_in_time_and_named_c069(
    in_flow: LiveFlow, note: Note, notes: Path, misfortune: Callable[[int], Any], expected: Expected
):
    limit = 7 if misfortune is get_stuck_in_save else None

    @elastic_task(nproc_per_node=2, max_restarts=0, progress_timeout_seconds=limit)
    def train() -> None:
        train_until(misfortune, note)

    state = in_flow(lambda: train(return_state=True))
    ended_at = time.monotonic()
    error = state.result(raise_on_failure=False)
    assert isinstance(error, GangFailed), repr(error)
    assert error.diagnosis
    assert (error.category, error.rank) == (expected.category, expected.rank), str(error)
    assert expected.words in str(state.message).splitlines()[0]
    assert expected.rank not in error.diagnosis.victims
    assert ended_at - float(notes.read_text()) <= expected.seconds + ENDING_SECONDS
    # where the other rank was: in its stacks if it lived, in its own traceback if it lost its peer first
    folder, other = Path(error.diagnosis.log).parent, 1 - expected.rank
    said = [folder / f"rank-{other}.stacks", folder / f"rank-{other}.log"]
    assert any("test_incidents.py" in path.read_text() for path in said if path.exists())


@pytest.mark.parametrize(("nnodes", "nproc"), [(1, 2), (2, 1)], ids=["1 node", "2 nodes"])
def test_gang_that_hung_starts_again_within_its_budget(
    in_flow: LiveFlow, note: Note, nnodes: int, nproc: int
):
    @elastic_task(nnodes=nnodes, nproc_per_node=nproc, max_restarts=1)
    def train() -> int:
        if get_context().restart_count == 0:
            train_until(call_another_collective, note)
        return get_context().restart_count

    assert in_flow(train) == 1
