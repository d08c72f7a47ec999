"""A real rank in a fresh interpreter: what it tells its agent, whatever its function does to it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_elastic import parcel
from prefect_torch_elastic.channel import is_readable
from prefect_torch_elastic.errors import ElasticError
from prefect_torch_elastic.node.coldstart import exec_child
from prefect_torch_elastic.node.rank import RankOrder
from prefect_torch_elastic.node.rankprocess import RankProcess
from prefect_torch_elastic.rankstate import Busy, StopReason

KEY = bytes(range(32))
SECONDS = 20.0


class ColdRank:
    """A rank whose agent is the test."""

    def __init__(self, folder: Path, function: Any, args: tuple[Any, ...], **changed: Any) -> None:
        (folder / "node-0").mkdir()
        self.folder = folder / "node-0"
        parcel.write_parcel(folder / "call", (function, args, {}), key=KEY)
        order = RankOrder(
            call=str(folder / "call"),
            secret=KEY.hex(),
            prefix=str(self.folder / "rank-0"),
            search_path=[],
            threads=1,
            collective_timeout_seconds=None,
            non_retryable=[],
        )
        order = replace(order, **changed)
        log = self.folder / "rank-0.log"
        prefix = self.folder / "rank-0"
        self.process = RankProcess(
            rank=0, local_rank=0, node_rank=0, prefix=prefix, log=log, level=logging.INFO
        )
        child = self.process.child(asdict(order), {**os.environ, "RANK": "0"}, str(folder))
        self.process.watch(exec_child(child))

    def wait(self) -> int:
        """Return the rank's exit code; as an agent does, ask a failed one to leave once it has told all."""
        deadline = time.monotonic() + SECONDS
        while not is_readable(self.process.pidfd, 0.02):
            assert time.monotonic() < deadline, self.log
            self.process.read_news()
            if self.process.recorded and self.process.told_at is None:
                self.process.ask_to_stop(StopReason.FAILED, seconds_left=5.0)
                self.process.terminate()
        assert self.process.reap()
        assert self.process.code is not None
        return self.process.code

    @property
    def log(self) -> str:
        return self.process.tail.path.read_text()

    def evidence(self):
        return self.process.evidence(oom_killed=None, memory_limit_bytes=None)

    def end(self) -> None:
        """Kill the rank if it still runs."""
        if self.process.alive:
            self.process.send(signal.SIGKILL)
            os.waitpid(self.process.pid, 0)
        self.process.forget()


@pytest.fixture
def start(tmp_path):
    """`start(function, *args)` starts a rank that runs the function; keywords change its order."""
    started: list[ColdRank] = []

    def run(function, *args: Any, **changed: Any) -> ColdRank:
        started.append(ColdRank(tmp_path, function, args, **changed))
        return started[-1]

    yield run
    for rank in started:
        rank.end()


def result_of(rank: ColdRank) -> Any:
    return parcel.read_parcel(rank.folder / "rank-0.result", key=KEY)


def test_rank_that_removes_its_number_from_the_environment_still_returns(start):
    def train(x):
        import os

        os.environ.pop("RANK")
        return x * 2

    rank = start(train, 21)
    assert rank.wait() == 0, rank.log
    assert result_of(rank) == 42


def test_rank_that_clears_its_whole_environment_still_says_that_it_exited(start):
    def train():
        import os
        import sys

        os.environ.clear()
        sys.exit()

    rank = start(train)
    assert rank.wait() == 0, rank.log
    assert result_of(rank) is None


def test_order_of_a_cold_rank_is_in_nothing_that_others_or_its_children_can_read(start, tmp_path):
    def train():
        import os
        import pathlib

        links = pathlib.Path("/proc/self/fd").iterdir()
        shown = [pathlib.Path(f"/proc/self/{name}").read_text() for name in ("cmdline", "environ")]
        files = [os.readlink(link) for link in links if link.is_symlink()]
        return *shown, repr(dict(os.environ)), files

    rank = start(train)
    assert rank.wait() == 0, rank.log
    *texts, files = result_of(rank)
    assert "prefect_torch_elastic.node.rank" in texts[0]
    assert str(tmp_path) not in texts[0]
    assert not [text for text in texts if KEY.hex() in text]
    assert not [file for file in files if "pte-order" in file]


def test_order_of_a_cold_rank_may_be_larger_than_an_environment_variable(start):
    many = [f"/nowhere/{number:05}" for number in range(20_000)]  # Linux takes 128 KiB a variable

    def train():
        import sys

        return sum(path.startswith("/nowhere/") for path in sys.path)

    rank = start(train, search_path=[*many, *sys.path])
    assert rank.wait() == 0, rank.log
    assert result_of(rank) == len(many)


def test_rank_that_cannot_write_its_error_record_tells_type_and_message_all_the_same(start, tmp_path):
    def train(folder):
        import pathlib
        import shutil

        shutil.rmtree(folder)
        pathlib.Path(folder).write_text("")  # not even root can write below it now
        raise ValueError("lr must be > 0, got " + "ä" * 5000 + " in config.yaml")

    rank = start(train, str(tmp_path / "node-0"))
    assert rank.wait() == 1
    evidence = rank.evidence()
    assert (evidence.exc_type, evidence.stage, evidence.exit_code) == ("ValueError", "run", 1)
    assert evidence.exc_message.startswith("lr must be > 0, got ")
    assert evidence.exc_message.endswith(" in config.yaml")
    assert "in train" in evidence.traceback
    assert evidence.error == ""


def test_what_a_rank_writes_is_for_its_owner_only_whatever_the_umask(start, tmp_path):
    def fail():
        raise ValueError("lr must be > 0")

    before = os.umask(0)
    try:
        rank = start(fail)
    finally:
        os.umask(before)
    assert rank.wait() == 1
    names = ["rank-0.error", "rank-0.error.json", "rank-0.log", "rank-0.stacks"]
    assert sorted(path.name for path in rank.folder.iterdir()) == names
    modes = {name: oct((rank.folder / name).stat().st_mode & 0o777) for name in names}
    assert modes == dict.fromkeys(names, "0o600")


def test_failed_rank_tells_all_and_sends_its_exception(start):
    def fail():
        raise ValueError("lr must be > 0")

    rank = start(fail)
    assert rank.wait() == 1
    evidence = rank.evidence()
    assert (evidence.exc_type, evidence.exc_message) == ("ValueError", "lr must be > 0")
    assert not evidence.told_to_stop
    assert isinstance(parcel.read_parcel(Path(evidence.error), key=KEY), ValueError)


# ---------------------------------------------------------------- stops


def wait_for_stop():
    """Train until the page says stop, as `should_stop` finds out."""
    import time

    from prefect_torch_elastic import context

    deadline = time.monotonic() + 20.0
    state = context._state
    assert state is not None
    while state.poll_for_stop() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ask_to_stop(rank: ColdRank) -> None:
    deadline = time.monotonic() + SECONDS
    while not rank.process.state.polls:
        assert time.monotonic() < deadline, rank.log
        time.sleep(0.01)
    rank.process.ask_to_stop(StopReason.PREEMPTED, seconds_left=30.0)


def play_session(*, stop_seen: bool = False, problem: str = ""):
    """Give this rank a session that says what is done to it."""
    from types import SimpleNamespace

    from prefect_torch_elastic import CheckpointError, context

    def close():
        print("closed")
        if problem:
            raise CheckpointError(problem)

    context._session = SimpleNamespace(stop_seen=stop_seen, close=close)


def test_rank_that_leaves_by_stop_training_is_stopped_and_no_failure(start):
    def train():
        from prefect_torch_elastic import StopTraining

        play_session()
        wait_for_stop()
        raise StopTraining

    rank = start(train)
    ask_to_stop(rank)
    assert rank.wait() == 143, rank.log
    assert rank.process.stopped_at is not None
    assert (rank.process.failed_at, rank.process.returned_at) == (None, None)
    assert sorted(path.name for path in rank.folder.iterdir()) == ["rank-0.log", "rank-0.stacks"]
    assert rank.log.startswith("closed\n")
    assert "stopped as asked" in rank.log


def test_stop_training_that_nobody_asked_for_is_a_failure_that_says_so(start):
    def train():
        from prefect_torch_elastic import StopTraining

        raise StopTraining

    rank = start(train)
    assert rank.wait() == 1
    evidence = rank.evidence()
    assert (evidence.exc_type, evidence.stage) == ("ElasticError", "run")
    assert evidence.exc_message.startswith("the function raised `StopTraining`, but nobody asked this gang")
    assert "in train" in evidence.traceback
    assert isinstance(parcel.read_parcel(Path(evidence.error), key=KEY), ElasticError)


def return_value():
    return 1


def exit_well():
    import sys

    sys.exit()


@pytest.mark.parametrize("leave", [return_value, exit_well], ids=["return", "exit"])
def test_what_a_function_returns_after_a_stop_is_no_result(start, leave):
    def train(leave):
        play_session(stop_seen=True)
        return leave()

    rank = start(train, leave)
    assert rank.wait() == 143, rank.log
    assert rank.process.stopped_at is not None
    assert not (rank.folder / "rank-0.result").exists()


def test_checkpoints_are_closed_before_the_result_is_written(start):
    def train():
        play_session()
        return 1

    rank = start(train)
    assert rank.wait() == 0, rank.log
    assert result_of(rank) == 1
    assert rank.log.split() == ["closed"]


def test_last_upload_that_fails_fails_the_rank_and_leaves_no_result(start):
    def train():
        play_session(problem="2 blocks could not be written")
        return 1

    rank = start(train)
    assert rank.wait() == 1
    evidence = rank.evidence()
    assert (evidence.stage, evidence.exc_type) == ("checkpoint", "CheckpointError")
    assert not (rank.folder / "rank-0.result").exists()


def test_rank_that_raised_waits_for_no_upload(start):
    def train():
        play_session()
        raise ValueError("lr must be > 0")

    rank = start(train)
    assert rank.wait() == 1
    assert rank.evidence().exc_type == "ValueError"
    assert "closed" not in rank.log


# ---------------------------------------------------------------- what else it tells


def test_rank_tells_of_its_checkpoints_and_marks_the_time_that_they_take(start, tmp_path):
    def train():
        import torch

        from prefect_torch_elastic import get_context

        checkpoint = get_context().checkpoint
        state = {"weights": torch.ones(1000)}
        checkpoint.load(state)
        checkpoint.save(state, step=1, metrics={"loss": 0.5})
        checkpoint.save(state, step=2, wait=True)

    (tmp_path / "store").mkdir()
    rank = start(train, storage={"url": str(tmp_path / "store"), "folder": "run"})
    assert rank.wait() == 0, rank.log
    behind, waited = rank.process.told
    assert (behind.step, behind.metrics, behind.size_bytes) == (1, {"loss": 0.5}, 4000)
    assert behind.key.startswith("checkpoints/")
    assert (tmp_path / "store" / "run" / behind.key).is_dir()
    assert 0.0 < behind.stall_seconds <= behind.seconds
    assert (waited.step, waited.stall_seconds) == (2, waited.seconds)
    readings = rank.process.state.read_all()
    assert readings.save_seconds >= waited.seconds
    assert readings.load_seconds > 0.0
    assert readings.busy is Busy.NONE
