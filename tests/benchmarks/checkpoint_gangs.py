"""The processes of a checkpoint benchmark, the rounds in which they take turns, and the results."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect_torch_elastic.store import open_store
from tests.benchmarks.checkpoint_server import BenchmarkServer
from tests.benchmarks.rounds import RESULTS

PEER = "s3torchconnector"  # the fastest one; `ratio` is against it
FULL_SPEED = {"latency_seconds": 0.0, "bytes_per_second": 0.0}
S3LIKE = {"latency_seconds": 0.030, "bytes_per_second": 80e6}  # of each request
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is saved: `count` fp32 tensors of `kib` KiB, by `ranks` ranks together."""

    count: int
    kib: int
    ranks: int = 1

    @property
    def mib(self) -> float:
        return self.count * self.kib / 1024


@dataclass
class Taken:
    """Seconds by client and round, and the most memory that a client took besides the state."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    extra_mib: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def median(self, client: str) -> float:
        return statistics.median(self.seconds[client])

    def ratio(self, peer: str) -> float | None:
        return self.median(peer) / self.median("ours") if self.seconds.get(peer) else None


class Gang:
    """The ranks of one client."""

    def __init__(self, client: str, size: Size, credentials: Mapping[str, Any]) -> None:
        self.client, self._errors = client, tempfile.TemporaryFile()  # noqa: SIM115  (closed in `close`)
        order = {"client": client, "count": size.count, "kib": size.kib, "credentials": credentials}
        order |= {"world_size": size.ranks, "port": _free_port()}
        self._ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.benchmarks.checkpoint_rank",
                    json.dumps({**order, "rank": rank}),
                ],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, "AWS_EC2_METADATA_DISABLED": "true"},
                text=True,
            )
            for rank in range(size.ranks)
        ]

    def wait_until_ready(self) -> None:
        self._hear()

    def run(self, what: str, number: int) -> tuple[float, float]:
        """Save or load, and return the slowest rank's seconds and the most extra memory, in MiB."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps({"do": what, "number": number}) + "\n")
            rank.stdin.flush()
        replies = self._hear()
        return max(reply["seconds"] for reply in replies), max(reply["extra_mib"] for reply in replies)

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.communicate()
        self._errors.close()

    def _hear(self) -> list[dict[str, Any]]:
        lines = [rank.stdout.readline() for rank in self._ranks if rank.stdout]
        if not all(lines):
            self._errors.seek(0)
            raise RuntimeError(f"{self.client} ended: {self._errors.read().decode()[-4000:]}")
        return [json.loads(line) for line in lines]


class Contest:
    """Clients that save and load the same state in the same store, in turn."""

    def __init__(self, server: BenchmarkServer, gangs: Sequence[Gang], size: Size) -> None:
        self._server, self._gangs, self.size = server, gangs, size
        self._regime = FULL_SPEED
        self._store = open_store(server.url(), server.credentials)
        self._numbers: dict[str, int] = defaultdict(int)

    def set_regime(self, **faults: float) -> None:
        """Make the server slower."""
        self._regime = {**FULL_SPEED, **faults}
        self._server.set_faults(**self._regime)

    def save(self, rounds: int, *, few: Mapping[str, int] | None = None) -> Taken:
        """Save in rounds, after one that does not count.

        Args:
            rounds: How often each client saves.
            few: How often slow clients do instead; one that saves once has no round before.
        """
        return self._take("save", rounds, few or {})

    def load(self, rounds: int, *, few: Mapping[str, int] | None = None) -> Taken:
        """Load what was saved last, in the same way."""
        return self._take("load", rounds, few or {})

    def _take(self, what: str, rounds: int, few: Mapping[str, int]) -> Taken:
        taken = Taken()
        for turn in range(-1, rounds):
            for gang in self._gangs:
                limit = few.get(gang.client, rounds)
                if turn >= limit or (turn < 0 and limit < 2):
                    continue
                if what == "save":
                    self._forget(gang.client)
                    self._numbers[gang.client] += 1
                seconds, extra = gang.run(what, self._numbers[gang.client])
                taken.extra_mib[gang.client] = max(taken.extra_mib[gang.client], extra)
                if turn >= 0:
                    taken.seconds[gang.client].append(seconds)
        return taken

    def _forget(self, client: str) -> None:
        """Remove what the client saved before, so that the server has warm memory for what comes."""
        self._server.set_faults(**FULL_SPEED)
        self._store.delete([entry.key for entry in self._store.list(client) if "/log/" not in entry.key])
        self._server.set_faults(**self._regime)


@contextmanager
def contest(size: Size, clients: Sequence[str]) -> Iterator[Contest]:
    """Start a server and the clients, and stop them at the end."""
    with ExitStack() as stack:
        server = stack.enter_context(BenchmarkServer())
        gangs: list[Gang] = []
        for client in clients:
            gangs.append(Gang(client, size, server.credentials))
            stack.callback(gangs[-1].close)
        for gang in gangs:
            gang.wait_until_ready()
        yield Contest(server, gangs, size)


def report(bench: str, taken: Taken, size: Size, *, targets: Mapping[str, float], **more: Any) -> None:
    """Write one result: a line for people, and one JSON object for programs."""
    bench += f"-{size.ranks}ranks" if size.ranks > 1 else ""
    ours, clients = taken.median("ours"), [name for name in taken.seconds if name != "ours"]
    result = {
        "bench": bench,
        "ours": round(ours, 4),
        "peer": round(taken.median(PEER), 4),
        "ratio": round(taken.ratio(PEER) or 0, 3),
        "unit": "s",
        "ratio_fsspec": _round(taken.ratio("fsspec")),
        "ratio_boto": _round(taken.ratio("boto3")),
        "peers": {name: round(taken.median(name), 4) for name in clients},
        "extra_mib": round(taken.extra_mib["ours"], 1),
        "peers_extra_mib": {name: round(taken.extra_mib[name], 1) for name in clients},
        "mib": size.mib,
        "ranks": size.ranks,
        "rounds": {name: len(seconds) for name, seconds in taken.seconds.items()},
        **more,
    }
    spread = f"[{min(taken.seconds['ours']):.3f}..{max(taken.seconds['ours']):.3f}]"
    line = f"{bench}: {ours:.3f} s {spread}, {size.mib / ours:.0f} MiB/s, +{taken.extra_mib['ours']:.0f} MiB"
    for name in clients:
        goal = f" (target >= {targets[name]:g})" if name in targets else ""
        ratio = taken.ratio(name) or 0
        low, high = min(taken.seconds[name]), max(taken.seconds[name])
        line += f"; {name} {taken.median(name):.3f} s [{low:.3f}..{high:.3f}], ratio {ratio:.2f}{goal}"
    write_result(line, result)


def write_result(line: str, result: Mapping[str, Any]) -> None:
    """Write to the file that the end of the test run prints."""
    with Path(os.environ[RESULTS]).open("a") as file:
        file.write(f"{line}\n{json.dumps(result)}\n")


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
