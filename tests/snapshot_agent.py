"""An agent of two ranks, played in a process of its own, because a fork server needs one without threads.

`python -m tests.snapshot_agent warm|cold FOLDER SCENE...` prints one JSON object: for each scene its
evidence, how long it took, and what the kernel says of the ranks after it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect_torch_elastic import parcel
from prefect_torch_elastic.node import processes
from prefect_torch_elastic.node.coldstart import exec_child
from prefect_torch_elastic.node.forkserver import ForkServer
from prefect_torch_elastic.node.lookout import Lookout
from prefect_torch_elastic.node.rank import RankOrder
from prefect_torch_elastic.node.rankprocess import RankProcess
from prefect_torch_elastic.node.rankset import RankSet
from prefect_torch_elastic.wire import Message, TakeEvidence

KEY = bytes(range(32))
_SECONDS = 60.0


def join_peers() -> Any:
    """Return the process group of both ranks, after one collective in it."""
    from torch import distributed, ones

    from prefect_torch_elastic import get_context

    get_context().init_process_group("gloo")
    distributed.all_reduce(ones(1))
    return distributed


def part_from_peers(mark: Callable[[str], None]) -> None:
    """Rank 0 waits in a collective that rank 1, which loads data, never comes to."""
    from torch import ones

    from prefect_torch_elastic import get_context

    context, distributed = get_context(), join_peers()
    context.report({"loss": 1.0}, step=7, total_steps=9)
    if context.rank == 1:
        mark("there")
        load_data()
    threading.Timer(0.3, mark, ["there"]).start()
    distributed.all_reduce(ones(4, 2))


def load_data() -> None:
    time.sleep(_SECONDS)


def hold_lock(mark: Callable[[str], None]) -> None:
    """Rank 1 is in C code, and holds Python's lock for years."""
    from prefect_torch_elastic import get_context

    if get_context().rank == 1:
        mark("there")
        re.match("(a+)+$", "a" * 60 + "b")
    time.sleep(0.5)
    mark("there")
    time.sleep(_SECONDS)


def count(mark: Callable[[str], None]) -> None:
    """Both ranks do nothing but count, without torch."""
    mark("there")
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.001)


SCENES: dict[str, Callable[[Callable[[str], None]], None]] = {
    "apart": part_from_peers,
    "lock": hold_lock,
    "stopped": count,
    "counting": count,
}


class Agent:
    """Starts ranks, asks them for evidence, and ends them."""

    def __init__(self, folder: Path, *, warm: bool) -> None:
        self._folder = folder
        self._server = ForkServer.fork_if_safe() if warm else None
        assert not warm or self._server, "this process has no threads"
        self._told: list[Message] = []
        self._channel, self._other_end = socket.socketpair()
        self.ranks = RankSet(
            self._channel, read_channel=lambda: None, offer=self._take, keep=lambda: set[int]()
        )
        self._lookout = Lookout(self.ranks, node=3, tell=self._told.append, offer=self._take)

    def play(self, scene: str, number: int) -> dict[str, Any]:
        self._start(scene)
        self._pump_until(lambda: len(list(self._folder.glob(f"{scene}-*-there"))) == 2)
        if scene == "stopped":
            self.ranks.ranks[1].send(signal.SIGSTOP)
            self._pump_until(lambda: processes.read_state(self.ranks.ranks[1].pid) == "T")
        started = time.monotonic()
        self._lookout.take_evidence(TakeEvidence(number=number, reason="a test"))
        self._pump_until(lambda: bool(self._told))
        seconds, evidence = time.monotonic() - started, self._told.pop()
        if scene == "stopped":
            self._pump_until(lambda: processes.read_state(self.ranks.ranks[1].pid) == "T")
        states = [processes.read_state(rank.pid) for rank in self.ranks.ranks]
        for rank in self.ranks.ranks:
            rank.kill()
        self._pump_until(lambda: not any(rank.alive for rank in self.ranks.ranks))
        self.ranks.release()
        return {"evidence": asdict(evidence), "seconds": seconds, "states": states}

    def close(self) -> None:
        if self._server:
            self._server.close()

    def _start(self, scene: str) -> None:
        folder, function = str(self._folder), SCENES[scene]

        def run() -> None:
            def mark(name: str) -> None:
                Path(f"{folder}/{scene}-{os.environ['RANK']}-{name}").touch()

            function(mark)

        call = self._folder / f"call-{scene}"
        parcel.write_parcel(call, (run, (), {}), key=KEY)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for number in range(2):
            prefix = self._folder / f"{scene}-rank-{number}"
            rank = RankProcess(
                rank=number,
                local_rank=number,
                node_rank=0,
                prefix=prefix,
                log=self._folder / f"{scene}-{number}.log",
                level=logging.INFO,
            )
            order = RankOrder(
                call=str(call),
                secret=KEY.hex(),
                prefix=str(prefix),
                search_path=[],
                threads=1,
                collective_timeout_seconds=None,
                non_retryable=[],
            )
            place = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            children.append(rank.child(asdict(order), {**os.environ, **place, **meeting}, folder))
            self.ranks.add(rank)
        pids = self._server.fork(children) if self._server else [exec_child(child) for child in children]
        for rank, pid in zip(self.ranks.ranks, pids, strict=True):
            rank.watch(pid)
        self.ranks.watch()

    def _pump_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _SECONDS
        while not condition():
            assert time.monotonic() < deadline, [log.read_text() for log in self._folder.glob("*.log")]
            self.ranks.pump(0.02)
            if condition():
                return
            self._lookout.look(1)

    def _take(self, _message: Message) -> bool:
        return True


def main() -> None:
    """Play the scenes that the command line names."""
    start_method, folder, *scenes = sys.argv[1:]
    processes.adopt_orphans()
    agent = Agent(Path(folder), warm=start_method == "warm")
    try:
        print(json.dumps({scene: agent.play(scene, number + 1) for number, scene in enumerate(scenes)}))
    finally:
        agent.close()
        processes.kill_children(keep=set())


if __name__ == "__main__":
    main()
