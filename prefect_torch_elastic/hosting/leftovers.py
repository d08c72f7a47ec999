"""The processes that a flow run started, found whatever became of their parents, and ended.

Those of a gang end by themselves when their host is gone: their launcher gives the ranks their grace, in
which they save. Everything else is killed.

A worker starts us with the run's id in the environment. Whatever we start carries it in its first
environment: forked or exec'ed, with a session of its own or not. Only the standard library: the companion
uses this too.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from prefect_torch_elastic.node.processes import MARK

RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
_ROUNDS = 50
_ROUND_SECONDS = 0.02
_GANG_SECONDS = 3600.0  # longer than any grace: after it even a launcher is killed
_GANG_LOOK_SECONDS = 0.2


def start_tick(pid: int) -> int:
    """Return when a process started, in clock ticks since the machine did; -1 when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    return int(stat.rpartition(")")[2].split()[19])


def now_tick() -> int:
    """Return the present in the unit of `start_tick`."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def wait_for_gangs(run_id: str, *, since: int, until: int) -> None:
    """Wait until the launchers of a run whose host is gone have ended their gangs and themselves."""
    deadline = time.monotonic() + _GANG_SECONDS
    while any(_list_started(run_id, since, until, gangs=True)) and time.monotonic() < deadline:
        time.sleep(_GANG_LOOK_SECONDS)


def kill_started(run_id: str, *, since: int, until: int, gangs: bool = True) -> list[int]:
    """SIGKILL what the run started between two ticks, until nothing is left; return the pids.

    Args:
        run_id: The flow run.
        since: Start of the process that carries it out: an older process is a shell around us.
        until: A younger one belongs to the same run started again.
        gangs: Whether those of gangs too.
    """
    killed: set[int] = set()
    for _ in range(_ROUNDS):  # a process that forks while we look is found in the next round
        found = list(_list_started(run_id, since, until, gangs=gangs))
        if not found:
            break
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(_ROUND_SECONDS)
    return sorted(killed)


def _list_started(run_id: str, since: int, until: int, *, gangs: bool) -> Iterator[int]:
    mark, launched = f"{RUN_VARIABLE}={run_id}".encode(), f"{MARK}=".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:  # gone, a stranger's, or dead already: a zombie has no environment
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark not in environment or (not gangs and any(one.startswith(launched) for one in environment)):
            continue
        if since <= start_tick(int(entry.name)) <= until:
            yield int(entry.name)
