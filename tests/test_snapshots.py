"""Evidence of ranks that go on: stacks and collectives, whatever the ranks are in the middle of."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_elastic.arrivals import Arrivals
from prefect_torch_elastic.node import processes, snapshots
from prefect_torch_elastic.node.lookout import Lookout
from prefect_torch_elastic.node.rankprocess import RankProcess
from prefect_torch_elastic.node.rankset import RankSet
from prefect_torch_elastic.node.sampling import Sampler
from prefect_torch_elastic.observations import EvidenceTaken
from prefect_torch_elastic.rankstate import Busy
from prefect_torch_elastic.wire import TakeEvidence
from tests.gangs import wait_until

LISTENER = 'Thread 0x3 (most recent call first):\n  File "/x/node/flightrecorder.py", line 52 in _listen'
LOADER = 'Thread 0x2 (most recent call first):\n  File "loader.py", line 9 in fetch'
MAIN = 'Current thread 0x1 (most recent call first):\n  File "train.py", line 3 in step'


def _kinds(files: list[str]) -> list[str]:
    """Return the names of evidence files without the time at which they were kept."""
    assert all(Path(file).stat().st_size for file in files)
    return [re.sub(r"\.\d{9,}", "", Path(file).name) for file in files]


def test_stacks_begin_with_the_main_thread_and_leave_out_our_own():
    assert snapshots.order_stacks("\n\n".join([LISTENER, LOADER, MAIN]) + "\n") == f"{MAIN}\n\n{LOADER}"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("{", id="torn"),
        pytest.param('{"number": 4, "last": [{}]}', id="older"),
        pytest.param('{"number": 5, "last": [], "problem": "RuntimeError: no"}', id="unreadable"),
    ],
)
def test_collectives_that_are_not_of_this_request_are_none(tmp_path, text):
    path = tmp_path / "rank-0.collectives.json"
    path.write_text(text)
    assert snapshots.read_collectives(path, 5) is None
    assert snapshots.read_collectives(tmp_path / "none", 5) is None


# ---------------------------------------------------------------- real ranks


def play(start_method: str, folder: Path, *scenes: str) -> dict[str, Any]:
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "tests.snapshot_agent", start_method, str(folder), *scenes],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        timeout=100,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    return play("warm", tmp_path_factory.mktemp("warm"), "apart", "lock", "stopped")


@pytest.fixture(scope="module")
def cold(tmp_path_factory):
    return play("cold", tmp_path_factory.mktemp("cold"), "apart", "counting")


@pytest.mark.parametrize("start_method", ["warm", "cold"])
def test_ranks_that_stand_apart_say_where(request, start_method):
    scene = request.getfixturevalue(start_method)["apart"]
    waiting, missing = scene["evidence"]["ranks"]
    assert (scene["evidence"]["node"], scene["evidence"]["number"], scene["seconds"] < 2.0) == (3, 1, True)
    assert (waiting["step"], missing["step"], waiting["is_alive"]) == (7, 7, True)
    assert "in all_reduce" in waiting["stacks"].splitlines()[1]
    assert "in load_data" in missing["stacks"].splitlines()[1]
    assert "flightrecorder" not in waiting["stacks"]
    (last,) = waiting["collectives"]
    assert (last["sequence"], last["operation"], last["is_done"]) == (2, "gloo:all_reduce", False)
    assert last["sizes"] == "[[4, 2]]"
    (last,) = missing["collectives"]
    assert (last["sequence"], last["is_done"]) == (1, True)
    names = ["apart-rank-0.stacks", "apart-rank-0.collectives.json"]
    assert _kinds(waiting["files"]) == names


def test_rank_that_holds_the_interpreters_lock_gives_its_stacks(warm):
    scene = warm["lock"]
    free, holder = scene["evidence"]["ranks"]
    assert "in hold_lock" in holder["stacks"]
    assert holder["stacks"].splitlines()[1].endswith("in match")
    assert "in hold_lock" in free["stacks"]
    assert scene["seconds"] < 3.0


def test_rank_that_sigstop_holds_is_looked_at_and_sleeps_on(warm):
    scene = warm["stopped"]
    awake, asleep = scene["evidence"]["ranks"]
    assert (awake["is_stopped"], asleep["is_stopped"]) == (False, True)
    assert "in count" in awake["stacks"]
    assert "do_signal_stop" in asleep["stacks"] or "State:\tT" in asleep["stacks"]
    assert scene["states"][1] == "T"
    kernel = next(Path(file) for file in asleep["files"] if file.endswith(".kernel"))
    assert "State:\tT" in kernel.read_text()


def test_ranks_without_torch_have_no_collectives(cold):
    for rank in cold["counting"]["evidence"]["ranks"]:
        assert rank["collectives"] == []
        assert "in count" in rank["stacks"]
    assert cold["counting"]["seconds"] < 2.0


# ---------------------------------------------------------------- played ranks


class Node:
    """A node of one rank, whose process is a sleeping child of the test."""

    def __init__(self, folder: Path) -> None:
        self.told, self.offered = list[Any](), list[Any]()
        self._channel, self._other_end = socket.socketpair()
        self.ranks = RankSet(
            self._channel, read_channel=lambda: None, offer=self._take, keep=lambda: set[int]()
        )
        prefix = folder / "rank-0"
        self.rank = RankProcess(
            rank=0, local_rank=0, node_rank=0, prefix=prefix, log=folder / "log", level=logging.INFO
        )
        self.ranks.add(self.rank)
        self._child = subprocess.Popen(["sleep", "60"])
        self.rank.watch(self._child.pid)
        self.ranks.watch()
        self.lookout = Lookout(self.ranks, node=0, tell=self.told.append, offer=self._take)

    def close(self) -> None:
        self._child.kill()
        self._child.wait()
        self.ranks.release()
        self._channel.close()
        self._other_end.close()

    def take_evidence(self) -> EvidenceTaken:
        self.lookout.take_evidence(TakeEvidence(number=9, reason="a test"))
        deadline = time.monotonic() + 5.0
        while not self.told:
            assert time.monotonic() < deadline
            self.lookout.look(1)
            time.sleep(0.005)
        return self.told.pop()

    def _take(self, message: Any) -> bool:
        self.offered.append(message)
        return True


@pytest.fixture
def node(tmp_path):
    made = Node(tmp_path)
    yield made
    made.close()


def test_rank_that_is_not_ready_is_not_signalled_and_the_kernel_speaks_for_it(node):
    (snapshot,) = node.take_evidence().ranks
    assert "wchan" in snapshot.stacks
    assert _kinds(snapshot.files) == ["rank-0.kernel"]
    assert node.rank.alive


def end_rank(node: Node) -> None:
    node.rank.send(signal.SIGKILL)
    node._child.wait()
    node.rank.reap()


def test_rank_that_has_returned_says_what_it_left(node):
    Path(f"{node.rank.prefix}.stacks").write_text(f"{LISTENER}\n\n{MAIN}\n")
    node.rank.returned_at = time.monotonic()
    end_rank(node)
    node.lookout.take_evidence(TakeEvidence(number=2, reason="a test"))
    (snapshot,) = node.told[0].ranks
    assert (snapshot.is_alive, snapshot.stacks) == (False, MAIN)


def test_rank_that_has_ended_without_having_returned_is_left_out(node):
    end_rank(node)
    assert node.take_evidence().ranks == []


def test_rank_that_has_failed_and_still_lives_is_left_out(node):
    node.rank.failed_at = time.monotonic()
    assert node.take_evidence().ranks == []


def test_snapshot_says_what_each_process_of_the_rank_has_done(node):
    (snapshot,) = node.take_evidence().ranks
    (effort,) = snapshot.efforts.values()
    assert list(snapshot.efforts) == [str(node.rank.pid)]
    assert effort[1] > 0


def test_node_without_ranks_answers_at_once(node):
    node.ranks.ranks, kept = [], node.ranks.ranks
    node.lookout.take_evidence(TakeEvidence(number=4, reason="a test"))
    node.ranks.ranks = kept
    assert node.told == [EvidenceTaken(node=0, number=4, ranks=[])]


def test_open_request_is_answered_before_the_ranks_are_ended(node):
    node.lookout.take_evidence(TakeEvidence(number=1, reason="a test"))
    node.lookout.take_evidence(TakeEvidence(number=2, reason="a test"))
    node.lookout.prepare_end()
    assert [message.number for message in node.told] == [1, 2]


def test_stacks_do_not_grow_for_ever(node):
    path = Path(f"{node.rank.prefix}.stacks")
    path.write_bytes(b"x" * (2 << 20))
    node._child.send_signal(signal.SIGSTOP)  # SIGUSR1 waits: `sleep` would die of it
    node.rank.can_dump = True
    snapshots.StackDump(node.rank)
    assert path.stat().st_size == 0


@pytest.fixture
def install_pyspy(tmp_path, monkeypatch):
    """`install_pyspy(script)` puts a program of this name into the path."""

    def install(script: str) -> None:
        program = tmp_path / "py-spy"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return install


def test_py_spy_is_asked_where_it_is_installed_and_stops_nobody(tmp_path, install_pyspy):
    install_pyspy(f"echo \"$@\"; echo '{MAIN.splitlines()[1]}'")
    process = snapshots._start_pyspy(77, tmp_path / "rank-0.pyspy")
    assert process is not None
    assert process.wait(10.0) == 0
    assert (tmp_path / "rank-0.pyspy").read_text().startswith("dump --nonblocking --pid 77\n")


@pytest.mark.parametrize(
    ("script", "ended_by"),
    [
        pytest.param("exec sleep 60", signal.SIGTERM, id="obedient"),
        pytest.param("trap '' TERM; echo ready; exec sleep 60", signal.SIGKILL, id="stubborn"),
    ],
)
def test_py_spy_that_does_not_end_is_ended_and_the_rank_goes_on(
    node, install_pyspy, monkeypatch, script, ended_by
):
    monkeypatch.setattr(snapshots, "LONGEST_SECONDS", 0.5)
    install_pyspy(script)
    sent = list[int]()
    monkeypatch.setattr(node.rank, "send", sent.append)
    taking = snapshots.EvidenceTaking([node.rank], node=0, number=1)
    pyspy = taking._takings[0]._pyspy
    assert pyspy is not None
    wait_until(lambda: Path(f"/proc/{pyspy.pid}/cmdline").read_bytes().startswith(b"sleep"), 5.0)
    taking.finish()
    assert pyspy.returncode == -ended_by
    assert sent == [signal.SIGCONT]


def test_rank_that_was_stopped_before_is_not_continued_for_py_spy(node, install_pyspy, monkeypatch):
    install_pyspy("exec sleep 60")
    node._child.send_signal(signal.SIGSTOP)
    wait_until(lambda: processes.is_stopped(node.rank.pid), 5.0)
    snapshots.EvidenceTaking([node.rank], node=0, number=1).finish()
    assert processes.is_stopped(node.rank.pid)


# ---------------------------------------------------------------- samples


def take_sample(sampler: Sampler, node: Node, now: float, *, last: bool = False) -> Any:
    return sampler.sample([node.rank], node=2, round_number=5, now=now, last=last)


def test_sample_says_what_a_rank_does(node):
    node.rank.state.report({"loss": 1.0}, step=3, total_steps=9)
    node.rank.state.enter_phase("evaluate")
    with node.rank.state.busy(Busy.SAVE):
        message = take_sample(Sampler(), node, 100.0)
    (sample,) = message.ranks
    assert (message.node, message.round, sample.rank) == (2, 5, 0)
    assert (sample.step, sample.total_steps, sample.phase, sample.busy) == (3, 9, "evaluate", "save")
    assert 0.0 <= sample.idle_seconds < 5.0
    assert sample.memory_bytes > 0


def test_rank_that_has_said_nothing_is_idle_since_it_started(node):
    node.rank.started_at -= 50.0
    (sample,) = take_sample(Sampler(), node, 100.0).ranks
    assert sample.step is None
    assert 50.0 <= sample.idle_seconds < 60.0


def test_sample_is_taken_once_a_second_while_steps_are_made(node):
    sampler, taken = Sampler(), list[float]()
    for tick in range(30):
        node.rank.state.report({}, step=tick, total_steps=None)
        if take_sample(sampler, node, 100.0 + tick / 10):
            taken.append(tick / 10)
    assert taken == [0.0, 1.0, 2.0]


def test_standstill_is_told_every_few_seconds(node):
    sampler = Sampler()
    told = [tick for tick in range(12) if take_sample(sampler, node, 100.0 + tick)]
    assert told == [0, 5, 10]


def test_last_sample_is_told_whenever_it_comes_and_keeps_the_peak_memory(node):
    sampler = Sampler()
    peak = take_sample(sampler, node, 100.0).ranks[0].memory_bytes
    node.rank.send(signal.SIGKILL)
    node._child.wait()
    node.rank.reap()
    (sample,) = take_sample(sampler, node, 100.1, last=True).ranks
    assert sample.memory_bytes == peak


def test_arrivals_are_told_once(node):
    sampler, arrivals = Sampler(), Arrivals(look=3, first=1, offsets_us=[-2, -1])
    node.rank.state.note_arrivals(arrivals)
    told = [take_sample(sampler, node, 100.0 + 5 * tick).ranks[0].arrivals for tick in range(2)]
    newer = Arrivals(look=4, first=9, offsets_us=[-1])
    node.rank.state.note_arrivals(newer)
    told.append(take_sample(sampler, node, 106.0).ranks[0].arrivals)
    assert told == [arrivals, None, newer]
