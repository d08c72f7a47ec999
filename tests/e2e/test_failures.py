"""How a gang fails: who is named, what travels to the driver, and what is tried again."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from prefect_torch_elastic import (
    GangFailed,
    GangTimedOut,
    NonRetryable,
    TransferError,
    elastic_task,
    get_context,
)

if TYPE_CHECKING:
    from tests.conftest import ScriptRunner
    from tests.e2e.conftest import LiveFlow

Note = Callable[..., None]


def failure_of(state: Any) -> GangFailed:
    error = state.result(raise_on_failure=False)
    assert isinstance(error, GangFailed), repr(error)
    return error


def log_of(error: GangFailed) -> Path:
    assert error.diagnosis is not None
    return Path(error.diagnosis.log)


def test_failed_rank_is_named_with_its_exception_c001(in_flow: LiveFlow, note: Note, notes: Path):
    @elastic_task(nproc_per_node=2, max_restarts=0)
    def train():
        import torch.distributed as dist

        note(os.getpid())
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            note(f"at {time.monotonic()}")
            raise ValueError("lr must be > 0")
        dist.barrier()

    state = in_flow(lambda: train(return_state=True))
    ended = time.monotonic()
    error = failure_of(state)
    assert state.is_failed()
    assert "rank 1 failed: ValueError: lr must be > 0" in state.message.splitlines()[0]
    assert str(error).splitlines()[0] == "rank 1 failed: ValueError: lr must be > 0"
    assert (error.rank, error.node_rank, error.exit_code, error.signal) == (1, 0, 1, None)
    assert (error.exc_type, error.category) == ("ValueError", "UserError")
    assert 'raise ValueError("lr must be > 0")' in error.traceback
    assert __file__ in error.traceback
    assert "prefect_torch_elastic/node" not in error.traceback
    assert 'raise ValueError("lr must be > 0")' in str(error)
    assert type(error.__cause__) is ValueError
    assert str(error.__cause__) == "lr must be > 0"
    lines = notes.read_text().split("\n")
    raised = float(next(line for line in lines if line.startswith("at ")).removeprefix("at "))
    assert ended - raised < 30
    assert not [pid for pid in lines if pid.isdigit() and psutil.pid_exists(int(pid))]
    assert log_of(error).is_file()
    assert str(log_of(error)) in str(error)


def test_killed_rank_is_named_with_its_signal_c003(in_flow: LiveFlow, note: Note, notes: Path):
    @elastic_task(nproc_per_node=2, max_restarts=0)
    def train():
        print(f"last words of rank {get_context().rank}")
        if os.environ["RANK"] == "1":
            note(time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    error = failure_of(in_flow(lambda: train(return_state=True)))
    assert time.monotonic() - float(notes.read_text()) < 15
    first = str(error).splitlines()[0]
    assert first.startswith("rank 1 was killed by SIGKILL")
    assert "memory" in first
    assert (error.rank, error.signal, error.exit_code, error.exc_type) == (1, 9, None, None)
    assert error.category == "Killed"
    assert "last words of rank 1" in str(error)


@pytest.mark.parametrize(
    ("way", "rank_ends", "words", "category"),
    [
        ("os._exit(0)", (0, None), "rank 1 ended with exit code 0", "ExitedEarly"),
        ("os._exit(7)", (7, None), "rank 1 ended with exit code 7", "ExitedEarly"),
        ("import sys; sys.exit(3)", (3, None), "rank 1", "UserError"),
        ("import ctypes; ctypes.string_at(0)", (None, 11), "rank 1 was killed by SIGSEGV", "Crashed"),
        ("os.abort()", (None, 6), "rank 1 was killed by SIGABRT", "Crashed"),
        (
            "os.kill(os.getpid(), 7)",
            (None, 7),
            "rank 1 was killed by SIGBUS (often a full /dev/shm)",
            "SharedMemory",
        ),
        ("os.kill(os.getpid(), 15)", (None, 15), "rank 1 was killed by SIGTERM", "Killed"),
    ],
    ids=["exit-0", "exit-7", "sys-exit-3", "segfault", "abort", "bus-error", "sigterm"],
)
def test_gang_fails_when_a_rank_ends_without_returning(
    in_flow: LiveFlow, way: str, rank_ends: tuple[int | None, int | None], words: str, category: str
):
    @elastic_task(nproc_per_node=2, max_restarts=0)
    def train():
        if get_context().rank == 1:
            exec(way, {"os": os})
        time.sleep(60)

    error = failure_of(in_flow(lambda: train(return_state=True)))
    assert str(error).startswith(words)
    assert (error.exit_code, error.signal) == rank_ends
    assert (error.rank, error.category) == (1, category)


def test_crash_stacks_are_beside_the_log_of_the_rank(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=2, max_restarts=0)
    def train():
        import ctypes

        def crash_here():
            ctypes.string_at(0)

        if get_context().rank == 1:
            crash_here()
        time.sleep(60)

    error = failure_of(in_flow(lambda: train(return_state=True)))
    stacks = log_of(error).with_suffix(".stacks").read_text()
    assert "crash_here" in stacks


def test_sys_exit_without_an_error_is_a_return(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=2, max_restarts=0)
    def train():
        raise SystemExit

    assert in_flow(train) is None


@pytest.mark.parametrize("way", ["raise", "kill", "exit", "abort"])
def test_culprit_is_named_when_the_others_are_in_a_collective(in_flow: LiveFlow, way: str):
    """Its peers often raise before anybody has seen the culprit end."""

    @elastic_task(nproc_per_node=3, max_restarts=0)
    def train(culprit: int):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        for step in range(1000):
            dist.all_reduce(torch.ones(1000))
            if step == 20 and dist.get_rank() == culprit:
                match way:
                    case "raise":
                        raise KeyError("the cause")
                    case "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    case "exit":
                        os._exit(5)
                    case _:
                        os.abort()

    named = [failure_of(in_flow(lambda rank=rank: train(rank, return_state=True))) for rank in (2, 0, 1)]
    assert [error.rank for error in named] == [2, 0, 1]
    kinds = {(error.exc_type, error.signal, error.exit_code) for error in named}
    expected = {"raise": ("KeyError", None, 1), "kill": (None, 9, None), "exit": (None, None, 5)}
    assert kinds == {expected.get(way, (None, 6, None))}


def test_node_of_the_culprit_is_named_when_there_are_two(in_flow: LiveFlow):
    @elastic_task(nnodes=2, nproc_per_node=1, max_restarts=0)
    def train():
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise ValueError("on the other node")
        dist.barrier()

    error = failure_of(in_flow(lambda: train(return_state=True)))
    assert str(error).startswith("rank 1 (node 1) failed: ValueError: on the other node")
    assert (error.rank, error.node_rank) == (1, 1)


def test_stacks_of_the_waiting_ranks_are_kept(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=2, max_restarts=0)
    def train():
        import torch.distributed as dist

        def wait_for_the_others():
            dist.barrier()

        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            time.sleep(0.3)
            raise ValueError("boom")
        wait_for_the_others()

    error = failure_of(in_flow(lambda: train(return_state=True)))
    assert "wait_for_the_others" in (log_of(error).parent / "rank-0.stacks").read_text()


def test_cause_is_none_when_the_exception_cannot_be_unpickled(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=2, max_restarts=0)
    def train():
        class TwoPartsError(Exception):
            def __init__(self, code: int, text: str) -> None:
                super().__init__(f"{code}: {text}")  # BaseException pickles these args, not ours

        raise TwoPartsError(7, "too hot")

    error = failure_of(in_flow(lambda: train(return_state=True)))
    assert str(error).splitlines()[0].endswith("failed: TwoPartsError: 7: too hot")
    assert error.__cause__ is None
    assert "raise TwoPartsError" in error.traceback


def test_cause_is_none_when_the_exception_cannot_be_pickled(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=2, max_restarts=0)
    def train():
        import threading

        error = OSError("disk is gone")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    error = failure_of(in_flow(lambda: train(return_state=True)))
    assert error.exc_type == "OSError"
    assert error.__cause__ is None
    assert "disk is gone" in str(error).splitlines()[0]


def test_huge_message_is_cut_in_the_state_and_whole_in_the_log(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=1, max_restarts=0)
    def train():
        raise ValueError("x" * 3_000_000)

    state = in_flow(lambda: train(return_state=True))
    error = failure_of(state)
    assert str(error).startswith("rank 0 failed: ValueError: xxx")
    assert len(state.message) < 50_000
    assert "characters left out" in str(error)
    assert log_of(error).read_text().count("x") > 3_000_000


@pytest.mark.parametrize("obstacle", ["closed streams", "a broken __str__"])
def test_exception_is_reported_whatever_the_function_did(in_flow: LiveFlow, obstacle: str):
    @elastic_task(nproc_per_node=1, max_restarts=0)
    def train():
        import sys

        class OddError(Exception):
            def __str__(self) -> str:
                if obstacle == "a broken __str__":
                    raise RuntimeError
                return "odd"

        if obstacle == "closed streams":
            sys.stdout.close()
            sys.stderr.close()
        raise OddError

    error = failure_of(in_flow(lambda: train(return_state=True)))
    assert (error.exc_type, error.category) == ("OddError", "UserError")


def test_keyboard_interrupt_of_a_rank_does_not_interrupt_the_flow(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=2, max_restarts=0)
    def train():
        raise KeyboardInterrupt

    error = failure_of(in_flow(lambda: train(return_state=True)))
    assert error.exc_type == "KeyboardInterrupt"
    assert in_flow(lambda: 1) == 1


def test_module_that_ranks_cannot_import_is_not_tried_again(
    in_flow: LiveFlow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: Note, notes: Path
):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "only_here_7f3a.py").write_text(
        f"import os\nif os.getpid() != {os.getpid()}:\n    raise ImportError('libfoo.so.3 is missing')\n"
        "class Config: pass\n"
    )
    import only_here_7f3a  # pyright: ignore[reportMissingImports]

    @elastic_task(nproc_per_node=2, max_restarts=3, retries=2)
    def train(config: Any):
        note()

    error = failure_of(in_flow(lambda: train(only_here_7f3a.Config(), return_state=True)))
    assert error.category == "CallNotLoadable"
    assert "ImportError: libfoo.so.3 is missing" in str(error).splitlines()[0]
    assert not notes.exists()


def test_restart_gives_the_result(in_flow: LiveFlow, note: Note, notes: Path, read_logs: Callable[..., Any]):
    @elastic_task(nproc_per_node=2, max_restarts=1)
    def train():
        context = get_context()
        note((context.restart_count, context.attempt))
        if context.restart_count == 0 and context.rank == 1:
            raise RuntimeError("a bad moment")
        while context.restart_count == 0:
            time.sleep(1)
        return context.restart_count, os.environ["TORCHELASTIC_RESTART_COUNT"]

    state = in_flow(lambda: train(return_state=True))
    assert state.result() == (1, "1")
    assert notes.read_text().split("\n")[:-1] == ["(0, 1)", "(0, 1)", "(1, 1)", "(1, 1)"]
    lines = read_logs(state, has="start again")
    (said,) = [line for line in lines if "start again" in line.message]
    assert said.message.startswith("rank 1 failed: RuntimeError: a bad moment")
    assert "restart 1 of 1" in said.message
    assert said.level == logging.WARNING


def test_restarts_are_spent_and_counted(in_flow: LiveFlow, note: Note, notes: Path):
    @elastic_task(nproc_per_node=1, max_restarts=2)
    def train():
        note()
        raise RuntimeError("each time")

    error = failure_of(in_flow(lambda: train(return_state=True)))
    assert notes.read_text().count("\n") == 3
    assert "restarted 2 times" in str(error)


def test_same_failure_at_the_same_step_stops_restarts(in_flow: LiveFlow, note: Note, notes: Path):
    @elastic_task(nproc_per_node=1, max_restarts=3)
    def train():
        note()
        get_context().report({"loss": 1.0}, step=4)
        raise ValueError("nan loss")

    error = failure_of(in_flow(lambda: train(return_state=True)))
    assert notes.read_text().count("\n") == 2
    assert str(error).splitlines()[0] == "rank 0 failed at step 4: ValueError: nan loss"


def test_same_failure_at_a_later_step_is_restarted(in_flow: LiveFlow, note: Note, notes: Path):
    @elastic_task(nproc_per_node=1, max_restarts=2)
    def train():
        note()
        context = get_context()
        context.report({"loss": 1.0}, step=4 + context.restart_count)
        raise ValueError("nan loss")

    in_flow(lambda: train(return_state=True))
    assert notes.read_text().count("\n") == 3


@pytest.mark.parametrize("how", ["raised", "derived", "listed", "listed with its module"])
def test_non_retryable_ends_restarts_and_retries(in_flow: LiveFlow, note: Note, notes: Path, how: str):
    names = {"listed": ["ZeroDivisionError"], "listed with its module": ["json.decoder.JSONDecodeError"]}

    @elastic_task(nproc_per_node=2, max_restarts=3, retries=2, non_retryable=names.get(how, []))
    def train():
        import json

        class BadDataError(NonRetryable):
            pass

        if get_context().rank == 1:
            time.sleep(60)
        note()
        match how:
            case "raised":
                raise NonRetryable("bad data")
            case "derived":
                raise BadDataError("bad data")
            case "listed":
                raise ZeroDivisionError
            case _:
                json.loads("{")

    error = failure_of(in_flow(lambda: train(return_state=True)))
    assert notes.read_text().count("\n") == 1
    assert error.category == "NonRetryable"


def test_retry_is_a_new_attempt_of_the_same_run_c071(in_flow: LiveFlow, note: Note, notes: Path):
    @elastic_task(nproc_per_node=2, max_restarts=1, retries=1)
    def train():
        context = get_context()
        tracker = os.environ["PTE_TRACKER_RUN_ID"]
        note((context.run_key, tracker, context.attempt, context.restart_count))
        if context.attempt == 1:
            raise RuntimeError("not yet")
        return context.run_key

    first = in_flow(train)
    rows = [eval(line) for line in notes.read_text().splitlines()]
    assert {row[0] for row in rows} == {first}
    assert len({row[1] for row in rows}) == 1
    assert {row[2:] for row in rows} == {(1, 0), (1, 1), (2, 0)}
    assert in_flow(train.with_options(retries=1)) != first


def test_run_timeout_ends_the_gang_and_is_an_error_of_its_own(in_flow: LiveFlow, note: Note, notes: Path):
    @elastic_task(nproc_per_node=2, run_timeout_seconds=1, grace_seconds=1)
    def train():
        note(os.getpid())
        time.sleep(60)

    error = failure_of(in_flow(lambda: train(return_state=True)))
    assert isinstance(error, GangTimedOut)
    assert "run_timeout_seconds=1" in str(error)
    assert not [pid for pid in notes.read_text().split() if psutil.pid_exists(int(pid))]


def test_retry_condition_of_the_user_still_decides(in_flow: LiveFlow, note: Note, notes: Path):
    asked: list[Any] = []

    def only_once(task: Any, run: Any, state: Any) -> bool:
        asked.append(state.data)
        return False

    @elastic_task(nproc_per_node=1, max_restarts=0, retries=3, retry_condition_fn=only_once)
    def train():
        note()
        raise RuntimeError("no")

    in_flow(lambda: train(return_state=True))
    assert notes.read_text().count("\n") == 1
    assert isinstance(asked[0], GangFailed)


def test_error_survives_pickling(in_flow: LiveFlow):
    import pickle

    @elastic_task(nproc_per_node=1, max_restarts=0)
    def train():
        raise ValueError("x")

    error = failure_of(in_flow(lambda: train(return_state=True)))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.rank, again.category) == (str(error), 0, "UserError")
    assert not isinstance(error, TransferError)


def test_exception_class_of_main_is_the_cause(run_script: ScriptRunner, prefect_server: str):
    result = run_script(
        """
from prefect import flow
from prefect_torch_elastic import GangFailed, elastic_task

class DataError(Exception):
    def __init__(self, row):
        super().__init__(row)
        self.row = row

@elastic_task(nproc_per_node=2, max_restarts=0)
def train():
    raise DataError(17)

@flow
def main():
    try:
        train()
    except GangFailed as error:
        print("cause", type(error.__cause__) is DataError, error.__cause__.row)

if __name__ == "__main__":
    main()
"""
    )
    assert result.rc == 0, result.stderr
    assert "cause True 17" in result.stdout
