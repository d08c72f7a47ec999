"""What a failure looks like: rank 1 fails while the others wait for it, and the error names rank 1.

python flows/failing.py
python flows/failing.py --how kill
"""

import argparse

from prefect import flow

from prefect_torch_elastic import GangFailed, elastic_task, get_context

WAYS = ("raise", "kill", "exit", "segfault", "hang")
CULPRIT = 1


@elastic_task(nproc_per_node=2, max_restarts=0, run_timeout_seconds=30)
def train(how: str, *, lr: float = 0.0) -> float:
    """Sum a tensor over all ranks again and again; in the fourth step one rank fails."""
    import torch
    import torch.distributed as dist

    context = get_context()
    context.init_process_group()
    weights = torch.ones(4, device=context.device)
    for step in range(10):
        if step == 3 and context.rank == CULPRIT:
            fail(how, lr=lr)
        dist.all_reduce(weights)  # the other ranks wait here for the one that failed
        context.report({"weight": weights[0].item()}, step=step + 1, total_steps=10)
    return weights[0].item()


def fail(how: str, *, lr: float) -> None:
    """End this rank, or stop it from going on, in one of `WAYS`."""
    import ctypes
    import os
    import signal
    import time

    print(f"About to fail: {how}", flush=True)
    match how:
        case "raise":
            raise ValueError(f"lr must be > 0, got {lr}")
        case "kill":  # what the kernel does to a process when memory runs out
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "hang":  # nothing fails: it is found, because the other rank waits for this one
            time.sleep(3600)
        case _:
            raise ValueError(f"`how={how}` is none of {', '.join(WAYS)}. Pass one of them.")


@flow
def failing(how: str = "raise") -> GangFailed | None:
    """Run the gang that fails and return the error, as a flow that goes on would take it."""
    try:
        train(how)
    except GangFailed as error:
        return error
    return None


def main() -> None:
    """Run the flow and print what the error says and what a program can read from it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--how", choices=WAYS, default="raise", help="how rank 1 fails (default: %(default)s)"
    )
    error = failing(parser.parse_args().how)
    if error is None:
        raise SystemExit("The gang did not fail, although a rank was told to. Run it with at least 2 ranks.")
    print(str(error).splitlines()[0])
    print(f"category: {error.category}")
    print(f"rank: {error.rank}, exit code: {error.exit_code}, signal: {error.signal}")
    print(error.traceback or "(no traceback: the rank did not raise an exception)")


if __name__ == "__main__":
    main()
