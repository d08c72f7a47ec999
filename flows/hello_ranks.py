"""Say hello from every rank, check an all-reduce, time it: run this first when a gang does not start.

python flows/hello_ranks.py
python flows/hello_ranks.py --nproc 4 --nnodes 2
"""

import argparse
import time
from typing import Any

from prefect import flow

from prefect_torch_elastic import elastic_task, get_context

COLUMNS = ("rank", "node", "local_rank", "pid", "host", "device", "torch", "threads")


@elastic_task(nproc_per_node=2)
def hello(megabytes: list[float]) -> dict[str, Any]:
    """Describe this rank, then sum tensors of some sizes over all ranks and time it."""
    import os
    import socket

    import torch
    import torch.distributed as dist

    context = get_context()
    values = (context.rank, context.node_rank, context.local_rank, os.getpid(), socket.gethostname())
    me = dict(
        zip(COLUMNS, (*values, str(context.device), torch.__version__, torch.get_num_threads()), strict=True)
    )
    print(f"Up: {me}", flush=True)  # before the first collective: it tells which ranks came that far
    context.init_process_group()
    everyone: list[Any] = [None] * context.world_size
    dist.all_gather_object(everyone, me)
    bandwidth = {size: all_reduce_megabytes_per_second(size) for size in megabytes}
    return {"ranks": everyone, "bandwidth": bandwidth}


def all_reduce_megabytes_per_second(megabytes: float, *, rounds: int = 5) -> float:
    """Return the bus bandwidth of an all-reduce and check the sum."""
    import torch
    import torch.distributed as dist

    context = get_context()
    n = context.world_size
    pattern = torch.arange(max(1, int(megabytes * 1e6) // 4), device=context.device) % 1000
    seconds: list[float] = []
    for _ in range(rounds):
        tensor = (pattern + context.rank).float()
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor)
        checked = tensor[-1].item()  # waits for a GPU
        seconds.append(time.perf_counter() - started)
        expected = (n * pattern + n * (n - 1) // 2).float()
        if not torch.equal(tensor, expected):
            raise RuntimeError(
                f"The all-reduce of {megabytes} MB over {n} ranks is wrong on rank {context.rank}: its last "
                f"value is {checked}, not {expected[-1].item()}. Look at the network and "
                "at the memory of its node."
            )
    # Each link carries 2 (n - 1) / n of the tensor, whatever the algorithm.
    return 2 * (n - 1) / n * tensor.numel() * 4 / 1e6 / sorted(seconds)[rounds // 2]


@flow
def hello_ranks(*, nproc: int = 2, nnodes: int = 1) -> dict[str, Any]:
    """Start a gang and return what its ranks say of themselves, and the bandwidth by size in MB."""
    return hello.with_options(nproc_per_node=nproc, nnodes=nnodes)([0.004, 1.0, 16.0])


def main() -> None:
    """Run the flow and print two tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2, help="ranks on each node (default: %(default)s)")
    parser.add_argument("--nnodes", type=int, default=1, help="nodes, simulated here (default: %(default)s)")
    arguments = parser.parse_args()
    report = hello_ranks(nproc=arguments.nproc, nnodes=arguments.nnodes)
    rows = [COLUMNS, *(tuple(str(row[column]) for column in COLUMNS) for row in report["ranks"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for size, rate in report["bandwidth"].items():
        print(f"all-reduce of {size:g} MB: correct, bus bandwidth {rate:.0f} MB/s")


if __name__ == "__main__":
    main()
