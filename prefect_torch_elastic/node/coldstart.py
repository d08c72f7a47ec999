"""The cold start: a rank or an agent in a fresh interpreter, where there is no server to fork it from."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from prefect_torch_elastic.node import processes

if TYPE_CHECKING:
    from prefect_torch_elastic.node.forkserver import Child


def exec_child(child: Child) -> int:
    """Start `python -m prefect_torch_elastic.node.<target> OWNER_PID ORDER_FD FD ...` and return its pid."""
    order = _write_order(child.spec)
    try:
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", f"prefect_torch_elastic.node.{child.target}"),
                *map(str, (os.getpid(), order, *child.fds)),
            ],
            pass_fds=(order, *child.fds),
            env=child.environment,
            cwd=child.directory,
            stdin=subprocess.DEVNULL,
        )
    finally:
        os.close(order)
    process.returncode = 0  # its status is the owner's to read, by pidfd
    return process.pid


def run_as_child(target: Callable[[dict[str, Any], list[int]], int]) -> NoReturn:
    """Be the main of a module that `exec_child` started: live no longer than the owner, and run `target`."""
    owner, order, *fds = map(int, sys.argv[1:])
    os.setpgid(0, 0)
    processes.die_with_parent()
    if os.getppid() != owner:
        os._exit(71)
    os._exit(target(_read_order(order), fds))


def _write_order(spec: dict[str, Any]) -> int:
    """Return an open file with the child's spec, in memory only.

    A rank's has a key and maybe credentials. `ps` shows a command line, and /proc an environment for as long
    as the process lives; both hold 128 KiB at most.
    """
    order = os.memfd_create("pte-order", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(order, "wb", closefd=False) as file:
            file.write(json.dumps(spec).encode())
        os.lseek(order, 0, os.SEEK_SET)
        fcntl.fcntl(order, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    except BaseException:
        os.close(order)
        raise
    return order


def _read_order(order: int) -> dict[str, Any]:
    with os.fdopen(order, "rb") as file:  # closed at once: nothing that the child starts inherits it
        return json.loads(file.read())
