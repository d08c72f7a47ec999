"""How long until user code runs: our gangs against torchrun, cold, again, after a death, from a live flow.

`python -m pytest tests/benchmarks -m benchmark -k launch`; results are the last lines, JSON for programs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from prefect_torch_elastic import parcel
from prefect_torch_elastic.local import Launcher, launcher_environment, start_launcher
from prefect_torch_elastic.spec import build_spec
from prefect_torch_elastic.wire import GangEnded, RunGang
from tests.benchmarks import first_line, rounds
from tests.benchmarks.rounds import Line, compare, wait_for_lines

SCRIPT = Path(first_line.__file__)
BY_NPROC = pytest.mark.parametrize(
    ("nproc", "target"), [pytest.param(2, 0.6, id="nproc2"), pytest.param(8, 0.25, id="nproc8")]
)

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(900)]


class Gang:
    """One gang of ours without Prefect: what `python -m prefect_torch_elastic.node` does for a driver."""

    def __init__(self, folder: Path, function: object, *args: object, **fields: object) -> None:
        folder.mkdir()
        self.out, self.started_at = folder / "lines", time.monotonic()
        environment = {**os.environ, "BENCH_OUT": str(self.out)}
        nproc = fields.get("nproc_per_node", 1)
        self.launcher: Launcher = start_launcher(
            launcher_environment(environment, nproc_per_node=nproc),  # pyright: ignore[reportArgumentType]
            key=(),
            log=folder / "launcher.log",
        )
        secret = b"benchmark"
        parcel.write_call(folder / "call", (function, args, {}), key=secret)
        self.launcher.channel.send(
            RunGang(
                run_key="benchmark",
                attempt=1,
                folder=str(folder),
                call=str(folder / "call"),
                secret=secret.hex(),
                fields=asdict(build_spec({**fields, "gpu": 0})),
                environment=launcher_environment(environment, nproc_per_node=1),
                directory=str(folder),
                search_path=[*sys.path, str(Path(__file__).parents[2])],
                modules=[],
            )
        )

    def wait(self) -> GangEnded:
        """Wait for the end of the gang."""
        while True:
            for message in self.launcher.channel.receive(1.0):
                if isinstance(message, GangEnded):
                    return message


@contextmanager
def our_gang(folder: Path, function: object, *args: object, **fields: object) -> Iterator[Gang]:
    gang = Gang(folder, function, *args, **fields)
    try:
        yield gang
    finally:
        gang.launcher.close()


@contextmanager
def torchrun(folder: Path, job: str, *, nproc: int) -> Iterator[tuple[Path, float]]:
    """The same through `torchrun --standalone`."""
    folder.mkdir()
    out, started_at = folder / "lines", time.monotonic()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"),
            *(f"--nproc-per-node={nproc}", str(SCRIPT), job),
        ],
        env={**os.environ, "BENCH_OUT": str(out), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield out, started_at
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    """A new folder name for each round."""
    return (tmp_path / str(number) for number in range(10_000))


def last(lines: list[Line]) -> float:
    return max(line.at for line in lines)


def kill_one(out: Path, nproc: int) -> float:
    lines = wait_for_lines(out, nproc, restart=0)
    time.sleep(0.3)
    at = time.monotonic()
    os.kill(lines[0].pid, signal.SIGKILL)
    return at


@BY_NPROC
def test_launch_starts_a_gang_faster_than_torchrun(folders: Iterator[Path], nproc: int, target: float):
    def ours() -> float:
        with our_gang(next(folders), first_line.first_line, nproc_per_node=nproc) as gang:
            return last(wait_for_lines(gang.out, nproc)) - gang.started_at

    def peer() -> float:
        with torchrun(next(folders), "first_line", nproc=nproc) as (out, started_at):
            return last(wait_for_lines(out, nproc)) - started_at

    compare(f"start-nproc{nproc}", ours, peer, target=target)


@pytest.mark.parametrize(
    ("nproc", "target"), [pytest.param(2, 0.2, id="nproc2"), pytest.param(8, 0.1, id="nproc8")]
)
def test_launch_restarts_after_a_kill_faster_than_torchrun(
    folders: Iterator[Path], nproc: int, target: float
):
    def ours() -> float:
        with our_gang(
            next(folders), first_line.first_line_and_wait, nproc_per_node=nproc, max_restarts=1
        ) as gang:
            killed_at = kill_one(gang.out, nproc)
            return last(wait_for_lines(gang.out, nproc, restart=1)) - killed_at

    def peer() -> float:
        with torchrun(next(folders), "first_line_and_wait", nproc=nproc) as (out, _):
            killed_at = kill_one(out, nproc)
            return last(wait_for_lines(out, nproc, restart=1)) - killed_at

    compare(f"restart-nproc{nproc}", ours, peer, target=target)


def test_launch_notices_a_lost_node(folders: Iterator[Path]):
    """From the kill of one of two agents to user code on the survivor; torchrun never notices."""

    def ours() -> float:
        with our_gang(
            next(folders), first_line.first_line_and_meet, 2, nnodes="1:2", nproc_per_node=1
        ) as gang:
            lines = wait_for_lines(gang.out, 2)
            survivor, victim = sorted(lines, key=lambda line: line.rank)
            time.sleep(0.5)
            agent = psutil.Process(victim.pid).parent()
            assert agent is not None
            killed_at = time.monotonic()
            agent.kill()
            deadline = killed_at + 60
            while time.monotonic() < deadline:
                again = [line for line in rounds.read_lines(gang.out)[2:] if line.pid != survivor.pid]
                if again:
                    return min(line.at for line in again) - killed_at
                time.sleep(0.005)
            raise TimeoutError("the survivors did not come back within 60 s")

    compare("node-loss", ours, None)


_FLOW = """
import os, subprocess, sys, time
from pathlib import Path
from prefect import flow, task
from prefect_torch_elastic import elastic_task
from prefect_torch_elastic.local import pool
from tests.benchmarks import first_line, rounds

folder, nproc = Path(sys.argv[1]), int(sys.argv[2])

@elastic_task(nproc_per_node=nproc, gpu=0)
def train(out):
    import os
    os.environ["BENCH_OUT"] = out
    first_line.first_line()

@task
def peer(out):
    environment = {**os.environ, "BENCH_OUT": out, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    subprocess.run([*command, first_line.__file__, "first_line"], env=environment, check=True)

def until_user_code(call, name):
    out = folder / name
    started_at = time.monotonic()
    call(str(out))
    return max(line.at for line in rounds.wait_for_lines(out, nproc)) - started_at

@flow
def main():
    until_user_code(peer, "warm-up")
    taken = {"peer": [], "cold": [], "second": []}
    for number in range(rounds.ROUNDS):
        taken["peer"].append(until_user_code(peer, f"peer-{number}"))
        pool.close()
        taken["cold"].append(until_user_code(train, f"cold-{number}"))
        taken["second"].append(until_user_code(train, f"second-{number}"))
    return taken

if __name__ == "__main__":
    taken = main()
    rounds.publish("call-to-user-code", taken["cold"], taken["peer"], target=0.8)
    rounds.publish("second-gang", taken["second"], taken["peer"], target=0.1)
"""


def test_launch_from_a_live_flow_is_faster_than_torchrun(prefect_server: str, tmp_path: Path):
    """From `train()` to the last rank's first line, at 8 ranks: the flow's first gang and the one after."""
    script = tmp_path / "bench_flow.py"
    script.write_text(_FLOW)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "8"],
        env={**os.environ, "PYTHONPATH": root, "PREFECT_LOGGING_LEVEL": "ERROR"},
        timeout=800,
    )
    assert done.returncode == 0
