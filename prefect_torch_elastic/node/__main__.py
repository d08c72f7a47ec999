"""The one program of a node: `python -m prefect_torch_elastic.node`.

With `--call` it is the job of a work pool and carries out what a driver has ordered. Without, it runs gangs
on one machine for a process that started it and holds the other end of its channel.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import socket
import sys
import traceback

from prefect_torch_elastic.pod import INDEX_VARIABLE, NNODES_VARIABLE, ExitCode


def main() -> int:
    """Parse the command line and run what it asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m prefect_torch_elastic.node", description=__doc__)
    job = parser.add_argument_group("the job of a work pool")
    job.add_argument("--call", metavar="KEY", help="the order, below the store")
    job.add_argument("--store", metavar="URL", help="the store")
    job.add_argument("--root", metavar="ID", help="the outermost flow run, whose key signed the order")
    job.add_argument("--store-credentials", default="", metavar="TYPE/BLOCK", help="for the store")
    job.add_argument("--nproc-per-node", metavar="N", help="for a gang: torch is imported meanwhile")
    launcher = parser.add_argument_group("gangs on this machine")
    launcher.add_argument("--channel", type=int, metavar="FD", help="socket of the driver")
    launcher.add_argument(
        "--log", metavar="FILE", help="of launcher and agents; else named by standard input"
    )
    launcher.add_argument("--parent", type=int, metavar="PID", help="the driver")
    given = parser.parse_args()
    if given.call is not None:
        _require(parser, given, "store", "root")
        return _carry_out_in_pod(given) if NNODES_VARIABLE in os.environ else _carry_out(given)
    _require(parser, given, "channel", "parent")
    _launch(given)
    return 0


def _require(parser: argparse.ArgumentParser, given: argparse.Namespace, *names: str) -> None:
    if missing := [f"--{name}" for name in names if getattr(given, name) is None]:
        parser.error(f"these are needed too: {', '.join(missing)}")


def _carry_out_in_pod(given: argparse.Namespace) -> int:
    """Carry out the order as a pod of a gang; whatever error ends that, it leaves with last words."""
    signal.signal(signal.SIGTERM, _leave_pod)  # before the imports, which take seconds
    try:
        return _carry_out(given)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (nobody else would say why)
        from prefect_torch_elastic.hosting.leaving import refuse

        sys.stderr.write(f"{error}\n" if isinstance(error, SystemExit) else traceback.format_exc())
        return refuse(os.environ, error)


def _leave_pod(*_: object) -> None:
    """Leave a pod that is taken away before its gang was formed: PID 1 hears no signal by itself."""
    os._exit(ExitCode.STOPPED)


def _carry_out(given: argparse.Namespace) -> int:
    from prefect_torch_elastic.local import launcher_environment, pool

    is_follower = os.environ.get(INDEX_VARIABLE, "0") != "0"  # its gang's head is elsewhere
    if (
        nproc := given.nproc_per_node
    ) and not is_follower:  # both imports below take seconds: Prefect's here, torch's there
        nproc = int(nproc) if nproc.isdigit() else nproc
        pool.start_ahead(launcher_environment(os.environ, nproc_per_node=nproc))
    try:
        from prefect_torch_elastic.dispatch.order import CallReference
        from prefect_torch_elastic.hosting.host import carry_out

        return carry_out(
            CallReference(
                store=given.store,
                order=given.call,
                root=given.root,
                store_credentials=given.store_credentials,
            )
        )
    finally:
        pool.close()


def _launch(given: argparse.Namespace) -> None:
    gc.disable()  # importing torch makes a million objects and no garbage
    connection = socket.socket(fileno=given.channel)
    try:
        from prefect_torch_elastic.node.launcher import run_launcher
    except ModuleNotFoundError as error:
        _refuse(connection, error)
        raise SystemExit(1) from error
    # empty: whoever started this ahead of its gang is gone
    if log := given.log or os.fsdecode(sys.stdin.buffer.read()):
        run_launcher(connection, log, given.parent)


def _refuse(connection: socket.socket, error: ModuleNotFoundError) -> None:
    """Tell the driver what is missing here: it has no torch to find that out itself."""
    from dataclasses import asdict

    from prefect_torch_elastic.channel import Channel
    from prefect_torch_elastic.diagnosis import diagnose_setup
    from prefect_torch_elastic.wire import GangEnded, GangStatus

    problem = f"`{error.name}` is not installed in {sys.prefix}, where the gang was to run."
    if error.name in {"torch", "numpy"}:
        problem += " Run `pip install 'prefect-torch-elastic[torch]'` there."
    Channel(connection).send(GangEnded(status=GangStatus.FAILED, diagnosis=asdict(diagnose_setup(problem))))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
