"""The no-op training function of the launch benchmarks, and the same thing as a script for torchrun.

A rank writes one line, `<monotonic seconds> <rank> <pid> <restart>`, when the first line of user code runs.
The monotonic clock is the machine's, so the benchmark may subtract its own.
"""

import os
import time

import torch


def first_line() -> None:
    """Write the line and return."""
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    line = f"{time.monotonic()} {os.environ['RANK']} {os.getpid()} {restart}\n"
    with open(os.environ["BENCH_OUT"], "a") as file:
        file.write(line)


def first_line_and_wait() -> None:
    """Write the line and, before the first restart, wait to be killed."""
    first_line()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(600)


def first_line_and_meet(world_size: int) -> None:
    """Write the line and go round in all-reduces; return once the gang of `world_size` was formed again."""
    first_line()
    torch.distributed.init_process_group("gloo")
    started = time.monotonic()
    while time.monotonic() - started < 600:
        torch.distributed.all_reduce(torch.ones(1))
        time.sleep(0.01)
        again = len(open(os.environ["BENCH_OUT"]).read().split("\n")) > world_size + 1  # noqa: SIM115
        if again and time.monotonic() - started > 0.2:
            return


if __name__ == "__main__":
    import sys

    globals()[sys.argv[1]]()
