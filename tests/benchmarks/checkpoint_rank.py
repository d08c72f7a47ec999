"""One rank of the checkpoint benchmarks: a process that holds a state and saves and loads it when told to.

Each line on stdin is `{"do": "save" | "load", "number": 3}`; each line on stdout what it took, as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.benchmarks.checkpoint_clients import CLIENTS, State, local


def make_state(count: int, kib: int, *, rank: int, world_size: int) -> State:
    """Return `count` fp32 tensors of `kib` KiB each; several ranks hold even shares of their rows."""
    rows = kib * 256 // 128
    generator = torch.Generator().manual_seed(rank)
    shards = [torch.randn(rows // world_size, 128, generator=generator) for _ in range(count)]
    if world_size == 1:
        return {f"weight{index}": shard for index, shard in enumerate(shards)}
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world_size,))
    return {
        f"weight{index}": DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)
        for index, shard in enumerate(shards)
    }


def read_memory() -> tuple[float, float]:
    """Return this process's resident memory and its peak since `forget_peak`, in MiB."""
    text = Path("/proc/self/status").read_text()
    now, peak = (int(re.search(rf"{name}:\s+(\d+)", text)[1]) / 1024 for name in ("VmRSS", "VmHWM"))  # pyright: ignore[reportOptionalSubscript]
    return now, peak


def forget_peak() -> None:
    """Begin to measure the peak anew."""
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    """Serve commands until stdin closes."""
    order: dict[str, Any] = json.loads(sys.argv[1])
    replies, sys.stdout = sys.stdout, sys.stderr  # clients print
    rank, world_size, port = order["rank"], order["world_size"], order["port"]
    torch.set_num_threads(1)
    gc.freeze()  # as in a rank; without it each full collection looks through all of torch
    if world_size > 1:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
        )
    state = make_state(order["count"], order["kib"], rank=rank, world_size=world_size)
    sums = {name: local(tensor).double().sum().item() for name, tensor in state.items()}
    client = CLIENTS[order["client"]](order["credentials"], rank, world_size, port)
    print("{}", file=replies, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        loading = command["do"] == "load"
        if loading:
            for tensor in state.values():
                local(tensor).zero_()
        forget_peak()
        before, _ = read_memory()
        if world_size > 1:
            dist.barrier()
        started = time.perf_counter()
        (client.load if loading else client.save)(state, command["number"])
        seconds = time.perf_counter() - started
        _, peak = read_memory()
        if loading:
            found = {name: local(tensor).double().sum().item() for name, tensor in state.items()}
            assert found == sums, "loaded is not what was saved"
        print(json.dumps({"seconds": seconds, "extra_mib": peak - before}), file=replies, flush=True)
    os._exit(0)  # clients have threads that do not end


if __name__ == "__main__":
    main()
