"""The cold start: a rank or an agent in a fresh interpreter, where there is no server to fork it from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from prefect_torch_elastic.node import processes

if TYPE_CHECKING:
    from prefect_torch_elastic.node.forkserver import Child

ORDER = "PTE_RANK_ORDER"  # environment variable with the child's spec


def exec_child(child: Child) -> int:
    """Start `python -m prefect_torch_elastic.node.<target> OWNER_PID FD ...` and return its pid."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", f"prefect_torch_elastic.node.{child.target}", str(os.getpid())),
            *map(str, child.fds),
        ],
        pass_fds=child.fds,
        env={**child.environment, ORDER: json.dumps(child.spec)},  # a rank's has a key: not for `ps`
        cwd=child.directory,
        stdin=subprocess.DEVNULL,
    )
    process.returncode = 0  # its status is the owner's to read, by pidfd
    return process.pid


def run_as_child(target: Callable[[dict[str, Any], list[int]], int]) -> NoReturn:
    """Be the main of a module that `exec_child` started: live no longer than the owner, and run `target`."""
    owner, *fds = sys.argv[1:]
    os.setpgid(0, 0)
    processes.die_with_parent()
    if os.getppid() != int(owner):
        os._exit(71)
    os._exit(target(json.loads(os.environ.pop(ORDER)), [int(fd) for fd in fds]))
