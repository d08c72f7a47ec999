"""How the processes of a stack end: flows first, then workers, the server, and whoever is left."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from prefect_torch_elastic.dev.plan import MARK

_LOOK_SECONDS = 0.02
_ROUNDS = 100


def list_children(pid: int) -> list[int]:
    """Return the pids of a process's children; none if it has gone."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (thread / "children").read_text().split())
    return children


def ask(pid: int) -> None:
    """Send SIGTERM to a process that may have gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def kill(pid: int) -> None:
    """Send SIGKILL to a process that may have gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def find_marked(token: str) -> list[int]:
    """Return every process whose first environment carries the mark of a stack, zombies left out."""
    line = f"{MARK}={token}".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if line in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def sweep(token: str) -> list[int]:
    """SIGKILL all processes of a stack, until no new one appears; return their pids."""
    killed: list[int] = []
    for _ in range(_ROUNDS):
        found = find_marked(token)
        if not found:
            break
        for pid in found:
            kill(pid)
        killed += [pid for pid in found if pid not in killed]
        time.sleep(_LOOK_SECONDS)
    return killed
