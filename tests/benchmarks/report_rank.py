"""A training loop that reports at every step, beside a peer that does the same; prints one JSON object.

A step is work of about a millisecond, and both ranks meet after each, so that the slower one counts. Short
stretches with and without reports alternate, and the quick quarter of each kind is compared: what else the
machine does meets both, and is mostly in the others.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

import torch
from torch import distributed

from prefect_torch_elastic import context
from prefect_torch_elastic.rankstate import RankState

STEPS = 20  # of one stretch
_WARM_UP = 200
_CALLS = 500


class Loop:
    """Steps of some 1 ms of CPU work, with an exchange of one number between the ranks."""

    def __init__(self, rounds: int) -> None:
        self._a, self._sum = torch.randn(64, 64), torch.zeros(1)
        self._rounds = rounds

    def step(self) -> None:
        for _ in range(self._rounds):
            torch.mm(self._a, self._a)
        distributed.all_reduce(self._sum)

    def run(self, steps: int, *, report: bool) -> float:
        """Return the seconds of so many steps."""
        here = context.get_context()
        started = time.perf_counter()
        for step in range(steps):
            self.step()
            if report:
                here.report({"loss": 1.0, "lr": 1e-3, "tokens": 4096}, step=step, total_steps=steps)
        return time.perf_counter() - started


def measure_call(calls: int) -> float:
    """Return the microseconds of one `report`."""
    here = context.get_context()
    rounds: list[float] = []
    for _ in range(20):
        started = time.perf_counter()
        for step in range(calls):
            here.report({"loss": 1.0, "lr": 1e-3, "tokens": 4096}, step=step, total_steps=calls)
        rounds.append((time.perf_counter() - started) / calls * 1e6)
    return statistics.median(rounds)


def calibrate() -> Loop:
    """Return a loop of about 1,000 steps a second, the same on both ranks."""
    probe = Loop(100)
    seconds = torch.tensor([probe.run(_WARM_UP, report=False) / _WARM_UP])
    distributed.all_reduce(seconds, distributed.ReduceOp.MAX)
    return Loop(max(1, round(100 * 1e-3 / float(seconds))))


def main() -> None:
    """Take `pairs` stretches of each kind."""
    order: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    page = RankState.create_file("bench")
    context.bind(RankState(page), {})
    rank = int(os.environ["RANK"])
    distributed.init_process_group("gloo")
    loop = calibrate()
    loop.run(_WARM_UP, report=True)
    taken: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(order["pairs"]):
        for report in (False, True) if pair % 2 else (True, False):
            taken[report].append(loop.run(STEPS, report=report))
    bare, reporting = (statistics.quantiles(taken[report], n=4)[0] for report in (False, True))
    result = {"cost": reporting / bare - 1, "steps_per_second": STEPS / bare}
    result["microseconds"] = measure_call(_CALLS)
    if rank == 0:
        print(json.dumps(result))
    distributed.barrier()


if __name__ == "__main__":
    main()
