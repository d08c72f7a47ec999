"""How a benchmark is taken: rounds of ours and of the peer in turn, medians, one JSON object a result."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RESULTS = "PTE_BENCH_RESULTS"  # environment variable: the file that results go to
ROUNDS = int(os.environ.get("PTE_BENCH_ROUNDS", "5"))
_DEADLINE_SECONDS = 90.0


@dataclass(frozen=True, kw_only=True)
class Line:
    """What one rank wrote when its user code began."""

    at: float
    rank: int
    pid: int
    restart: int


def read_lines(path: Path) -> list[Line]:
    """Return the lines that ranks have written so far."""
    if not path.exists():
        return []
    rows = [row.split() for row in path.read_text().splitlines(keepends=True) if row.endswith("\n")]
    return [Line(at=float(at), rank=int(rank), pid=int(pid), restart=int(n)) for at, rank, pid, n in rows]


def wait_for_lines(path: Path, count: int, *, restart: int | None = None) -> list[Line]:
    """Return the lines of one start once there are `count` of them."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while time.monotonic() < deadline:
        lines = [line for line in read_lines(path) if restart is None or line.restart == restart]
        if len(lines) >= count:
            return lines
        time.sleep(0.002)
    raise TimeoutError(f"{len(read_lines(path))} of {count} ranks came within {_DEADLINE_SECONDS:g} s")


def compare(
    bench: str, ours: Callable[[], float], peer: Callable[[], float] | None, *, target: float | None = None
) -> None:
    """Run both in turn, print `{"bench", "ours", "peer", "ratio", "unit"}`, and compare with the target."""
    taken: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(ROUNDS):
        if peer is not None:
            taken["peer"].append(peer())
        taken["ours"].append(ours())
    publish(bench, taken["ours"], taken["peer"], target=target)


def publish(
    bench: str, ours: list[float], peer: list[float], *, target: float | None = None, **details: object
) -> None:
    """Write one result to the file that the end of the test run prints: for people and for programs.

    `details` go into the JSON object.
    """
    mine = statistics.median(ours)
    theirs = statistics.median(peer) if peer else None
    ratio = mine / theirs if theirs else None
    spread = f"[{min(ours):.3f}..{max(ours):.3f}]"
    against = f" against {theirs:.3f} s [{min(peer):.3f}..{max(peer):.3f}]" if theirs else ""
    against += f", ratio {ratio:.3f}" if ratio else ""
    goal = f" (target <= {target:g})" if target is not None else ""
    result = {
        "bench": bench,
        "ours": round(mine, 4),
        "peer": None if theirs is None else round(theirs, 4),
        "ratio": None if ratio is None else round(ratio, 4),
        "unit": "s",
        **details,
    }
    with Path(os.environ[RESULTS]).open("a") as file:
        file.write(f"{bench}: {mine:.3f} s {spread}{against}{goal}\n{json.dumps(result)}\n")
