"""A training loop of one rank that saves behind its steps, and what that costs it; prints one JSON object."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor

from prefect_torch_elastic.checkpoint.session import CheckpointSession
from prefect_torch_elastic.store import open_store
from tests.benchmarks.checkpoint_rank import make_state, read_memory

_SETTLED = 5  # saves after which memory must not grow
_USUAL_STEPS = 20


class Training:
    """Steps of some 10 ms: a matrix product, and Python that wants the interpreter's lock."""

    def __init__(self) -> None:
        self._a, self._b = torch.randn(500, 500), torch.randn(500, 500)

    def step(self) -> float:
        started = time.perf_counter()
        for _ in range(3):
            torch.mm(self._a, self._b)
        sum(range(100_000))
        return time.perf_counter() - started


def copy(state: dict[str, Tensor], into: dict[str, Tensor]) -> float:
    started = time.perf_counter()
    for name, tensor in state.items():
        into[name].copy_(tensor)
    return time.perf_counter() - started


def main() -> None:
    """Save `saves` times and print the medians."""
    order: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    gc.freeze()  # as in a rank; without it each full collection looks through all of torch
    state = make_state(32, order["mib"] * 1024 // 32, rank=0, world_size=1)
    warm = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    session = CheckpointSession(open_store(order["url"], order["credentials"]), "stall")
    training = Training()
    rows: list[dict[str, float]] = []
    memory: list[float] = []
    for number in range(1, order["saves"] + 1):
        usual = statistics.median(training.step() for _ in range(_USUAL_STEPS))
        copied = copy(state, warm)
        started = time.perf_counter()
        assert session.save(state, step=number)
        blocked = time.perf_counter() - started
        steps: list[float] = []
        while session._saver.busy:
            steps.append(training.step())
        uploaded = time.perf_counter() - started
        session.close()  # hears how it ended
        slower = sum(steps) - usual * len(steps)
        rows.append({"copy": copied, "save": blocked, "slower": slower, "uploaded": uploaded, "step": usual})
        if steps:
            rows[-1]["step_while_uploading"] = statistics.median(steps)
        memory.append(read_memory()[0])
    later = rows[1:]
    result = {name: statistics.median(row[name] for row in later if name in row) for name in later[0]}
    result |= {"first_save": rows[0]["save"], "saves": len(rows)}
    result["spread"] = [min(row["save"] for row in later), max(row["save"] for row in later)]  # pyright: ignore[reportArgumentType]
    result["growth_mib"] = memory[-1] - memory[min(_SETTLED, len(memory)) - 1]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
