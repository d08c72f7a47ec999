"""A real rank in a fresh interpreter: what it tells its agent, whatever its function does to it."""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_elastic import parcel
from prefect_torch_elastic.channel import is_readable
from prefect_torch_elastic.node.coldstart import ORDER, exec_child
from prefect_torch_elastic.node.rank import RankOrder
from prefect_torch_elastic.node.rankprocess import RankProcess
from prefect_torch_elastic.rankstate import StopReason

KEY = bytes(range(32))
SECONDS = 20.0


class ColdRank:
    """A rank whose agent is the test."""

    def __init__(self, folder: Path, function: Any, args: tuple[Any, ...]) -> None:
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
                self.process.ask_to_stop(StopReason.CANCELLED)
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
    """`start(function, *args)` starts a rank that runs the function."""
    started: list[ColdRank] = []

    def run(function, *args: Any) -> ColdRank:
        started.append(ColdRank(tmp_path, function, args))
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


def test_order_of_a_cold_rank_is_not_in_its_command_line(start, tmp_path):
    def train():
        import os
        import pathlib

        return pathlib.Path("/proc/self/cmdline").read_text(), sorted(os.environ)

    rank = start(train)
    assert rank.wait() == 0, rank.log
    words, names = result_of(rank)
    assert "prefect_torch_elastic.node.rank" in words
    assert KEY.hex() not in words
    assert str(tmp_path) not in words
    assert ORDER not in names  # nor is it handed to what the function starts


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
