"""The hunt for what a test left behind: processes, shared memory, temp folders.

Several test runs and flows may share one machine, so nothing is judged by its name alone: what belongs to a
stranger who is alive is left out.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

MARK = "ELASTIC_TEST_MARK"  # every process of a session inherits it, whatever its parent becomes
MODULE = "prefect_torch_elastic"
STACK = f"{MODULE}.dev."  # somebody's `dev up --detach`: it has no parent and no mark, and is meant to stay
TEMP_PREFIXES = ("prefect-torch-elastic", "prefect_torch_elastic", "pte-", "torchelastic", "torch_elastic")

ProcessKey = tuple[int, float]  # a pid alone may be used again


def marked_processes() -> dict[ProcessKey, psutil.Process]:
    """Return every process of this session except this one and Python's own resource tracker."""
    return {key: process for key, process in _live_processes() if _mark_of(process) == os.environ[MARK]}


def our_processes() -> dict[ProcessKey, psutil.Process]:
    """Return marked processes, and those that run our module without any mark below us or below nobody."""
    found = marked_processes()
    below_us = {process.pid for process in psutil.Process().children(recursive=True)}
    for key, process in _live_processes():
        if MODULE not in describe(process) or _mark_of(process) is not None:
            continue
        if process.pid in below_us or (_parent_of(process) <= 1 and STACK not in describe(process)):
            found[key] = process
    return found


def _live_processes() -> Iterator[tuple[ProcessKey, psutil.Process]]:
    for process in psutil.process_iter():
        if process.pid == os.getpid() or "multiprocessing.resource_tracker" in describe(process):
            continue
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                yield (process.pid, process.create_time()), process
        except psutil.Error:
            continue


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK)
    except (psutil.Error, OSError):
        return None


def _parent_of(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.Error:
        return -1


def describe(process: psutil.Process) -> str:
    """Return the command line, empty when the process is gone."""
    try:
        return " ".join(process.cmdline())
    except (psutil.Error, OSError):
        return ""


def kill(process: psutil.Process) -> None:
    """Kill a process that may be gone already."""
    try:
        process.kill()
    except psutil.Error:
        return


def our_files() -> set[str]:
    """Return shared memory that no stranger holds, and temp files with a name of ours."""
    temp = Path(tempfile.gettempdir())
    ours = {str(path) for path in temp.iterdir() if path.name.startswith(TEMP_PREFIXES)}
    return ours | _shared_memory()


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    entries = {str(path) for path in folder.iterdir()} if folder.is_dir() else set[str]()
    if entries:
        for _, process in _live_processes():
            if _mark_of(process) != os.environ[MARK]:
                entries -= _mapped_or_open(process.pid, entries)
    return entries


def _mapped_or_open(pid: int, paths: set[str]) -> set[str]:
    """Return those of the paths that the process holds: several test runs may share one machine."""
    held: set[str] = set()
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        held.update(path for path in paths if path in maps)
        held.update(os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # gone, or not ours to look at
        return held & paths
    return held & paths
