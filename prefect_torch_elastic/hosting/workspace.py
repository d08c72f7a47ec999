"""The private folder of one dispatched call on the machine that runs it; the next job removes what was left.

A job that is killed with -9 leaves its folder behind. It held a lock there, which the kernel has released.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK, _NEW_LOCK = ".lock", ".lock-new"


@contextmanager
def open_workspace(home: Path, name: str) -> Generator[Path, None, None]:
    """Give a private folder while the call runs.

    Args:
        home: Prefect's home on this machine.
        name: Of the call, unique among those that run here.
    """
    hosts = home / "torch-elastic-jobs"
    hosts.mkdir(mode=0o700, parents=True, exist_ok=True)
    _sweep(hosts)
    folder = hosts / f"{name}-{os.getpid()}"
    folder.mkdir(mode=0o700)
    with (folder / _NEW_LOCK).open("wb") as lock:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / _NEW_LOCK).rename(folder / _LOCK)  # locked before another job's sweep can find it
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(hosts: Path) -> None:
    for folder in hosts.iterdir():
        try:
            with (folder / _LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # it is in use, has no lock yet, or there are no locks
            continue
