"""The one program of a node: `python -m prefect_torch_elastic.node`.

Today it runs gangs on one machine for a driver that started it and holds the other end of its channel.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import sys


def main() -> None:
    """Parse the command line and run the launcher."""
    parser = argparse.ArgumentParser(prog="python -m prefect_torch_elastic.node", description=__doc__)
    parser.add_argument("--channel", type=int, required=True, metavar="FD", help="socket of the driver")
    parser.add_argument("--log", required=True, metavar="FILE", help="where launcher and agents write to")
    parser.add_argument("--parent", type=int, required=True, metavar="PID", help="the driver")
    options = parser.parse_args()
    gc.disable()  # importing torch makes a million objects and no garbage
    connection = socket.socket(fileno=options.channel)
    try:
        from prefect_torch_elastic.node.launcher import run_launcher
    except ModuleNotFoundError as error:
        _refuse(connection, error)
        raise SystemExit(1) from error
    run_launcher(connection, options.log, options.parent)


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
    main()
    os._exit(0)
