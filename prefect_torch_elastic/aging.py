"""What is old: logs and evidence of attempts on this machine, and whole runs in a store.

Deciding is pure; the functions that look and remove say so. Nothing of a live run is touched: an attempt that
writes now and then or whose driver waits for it, or a run whose log or files changed since.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prefect_torch_elastic.checkpoint.retention import fetch_time, last_written
from prefect_torch_elastic.errors import ElasticError, StoreError
from prefect_torch_elastic.runfolder import is_held
from prefect_torch_elastic.runlog import Pruned, RunLog
from prefect_torch_elastic.store import Store

DAY_SECONDS = 86400.0
ATTEMPTS_AGE_SECONDS = 30 * DAY_SECONDS
ATTEMPTS_BYTES = 2 << 30
RUNS_AGE_SECONDS = 30 * DAY_SECONDS
_QUIET_SECONDS = DAY_SECONDS  # an attempt that wrote nothing for longer is over
_OPEN_SECONDS = 7 * DAY_SECONDS  # the same for one whose driver did not say that it is over
_MARK = ".tidied"


@dataclass(frozen=True, kw_only=True)
class AttemptUse:
    """What one attempt has on the disk.

    Attributes:
        path: Its folder.
        size_bytes: All its files.
        modified: When the newest of them changed.
        is_open: Whether its call is still there, which goes when the attempt ends.
        is_held: Whether a driver waits for it.
    """

    path: Path
    size_bytes: int
    modified: float
    is_open: bool
    is_held: bool = False


def choose_old_attempts(
    attempts: Sequence[AttemptUse],
    *,
    now: float,
    max_age_seconds: float = ATTEMPTS_AGE_SECONDS,
    max_bytes: int = ATTEMPTS_BYTES,
) -> list[AttemptUse]:
    """Return the attempts whose files go: those that are too old, then the oldest until the rest is small.

    Args:
        attempts: All of one directory.
        now: The time.
        max_age_seconds: What is older goes.
        max_bytes: What all that stay may have together; live ones count, and are never chosen.
    """
    left = sum(attempt.size_bytes for attempt in attempts)
    chosen: list[AttemptUse] = []
    for attempt in sorted([one for one in attempts if not one.is_held], key=lambda one: one.modified):
        age = now - attempt.modified
        if age <= (_OPEN_SECONDS if attempt.is_open else _QUIET_SECONDS):
            continue
        if age > max_age_seconds or left > max_bytes:
            chosen.append(attempt)
            left -= attempt.size_bytes
    return chosen


def list_attempts(local: Path) -> Iterator[AttemptUse]:
    """Look at the attempts of all runs in a directory of this machine."""
    for path in local.glob("*/attempts/*"):
        size, newest = 0, 0.0
        with suppress(OSError):  # another process removes it
            newest = path.stat().st_mtime
            for file in path.rglob("*"):
                status = file.lstat()
                size, newest = size + status.st_size, max(newest, status.st_mtime)
        if newest:
            yield AttemptUse(
                path=path,
                size_bytes=size,
                modified=newest,
                is_open=os.path.lexists(path / "call"),
                is_held=is_held(path),
            )


def tidy(local: Path, *, own: Store | None = None, every_seconds: float = DAY_SECONDS) -> list[str]:
    """Remove what is old and worth nothing from a directory of this machine, once a day; return what went.

    It never raises: what cannot be removed stays.

    Args:
        local: Directory of the runs on this machine, `RunPlace.local`: old logs and evidence go.
        own: The store there if nobody chose it: runs without checkpoints and lost results go too.
        every_seconds: Do nothing if this was done less long ago, by whichever process.
    """
    mark, now = local / _MARK, time.time()
    removed: list[str] = []
    with suppress(OSError, ElasticError):
        if mark.exists() and now - mark.stat().st_mtime < every_seconds:
            return []
        mark.touch(mode=0o600)
        removed += _tidy_attempts(local, now=now)
        if own is not None:
            removed += _tidy_runs(own, local, now=now)
    return removed


def _tidy_attempts(local: Path, *, now: float) -> list[str]:
    old = choose_old_attempts(list(list_attempts(local)), now=now)
    for attempt in old:
        shutil.rmtree(attempt.path, ignore_errors=True)
        for folder in (attempt.path.parent, attempt.path.parent.parent):
            with suppress(OSError):  # it has other files
                folder.rmdir()
    return [str(attempt.path.relative_to(local)) for attempt in old]


def _tidy_runs(store: Store, local: Path, *, now: float) -> list[str]:
    removed: list[str] = []
    for run in list_runs(store):
        with suppress(ElasticError):  # a damaged log is for a person to look at
            removed += _tidy_run(store, run, local, now=now)
    return removed


def _tidy_run(store: Store, run: str, local: Path, *, now: float) -> list[str]:
    """Remove a run without checkpoints that is over and old, or else its results that no outcome names."""
    state = RunLog(store, run).refresh()
    is_over = not any(is_held(attempt) for attempt in (local / run / "attempts").glob("*"))
    if not state.commits and is_over and is_old(store, run, older_than_seconds=RUNS_AGE_SECONDS, now=now):
        remove_run(store, run)
        return [run]
    named = {f"{run}/{one.result.key}" for one in state.outcomes.values() if one.result is not None}
    lost = [
        entry.key
        for entry in store.list(f"{run}/calls")
        if entry.key not in named and now - entry.modified > RUNS_AGE_SECONDS
    ]
    store.delete(lost)
    return lost


def list_runs(store: Store) -> list[str]:
    """Return the folders of the runs in a store."""
    return [name for name in store.list_folders("") if "log" in store.list_folders(name)]


def last_change(store: Store, folder: str) -> float:
    """Return when a run's log was written last, by the store's clock; 0 if it has none."""
    return last_written(store, f"{folder}/log")


def is_old(store: Store, folder: str, *, older_than_seconds: float, now: float | None = None) -> bool:
    """Whether nothing at all in a run's folder is younger than this.

    Args:
        store: Where the run is.
        folder: Its folder there.
        older_than_seconds: How long nothing may have changed.
        now: The time; by default the store's own, for which one object is written and removed.
    """
    before = (fetch_time(store, folder) if now is None else now) - older_than_seconds
    if last_change(store, folder) >= before:
        return False
    return all(entry.modified < before for entry in store.list(folder))


def remove_run(store: Store, folder: str) -> int:
    """Remove a run with all that it has, and return how many bytes that were.

    It takes the run over first, so that a gang that lives after all stops at its next write, and looks once
    more before anything goes. Ask `is_old` right before. A log that cannot be read goes with the rest.
    The log goes last, newest entry first: what is left of it after an interrupt can be read.

    Raises:
        StoreError: If the run came alive meanwhile and is left as it is, or the store cannot be written.
        Superseded: If a gang took the run over meanwhile; what was pruned by then is gone.
    """
    before = {entry.key: entry.modified for entry in store.list(folder)}
    log = RunLog(store, folder)
    epoch = _take_over(log)
    entries = list(store.list(folder))
    of_log = f"{folder}/log/"
    new = [entry.key for entry in entries if before.get(entry.key) != entry.modified]
    own = [key for key in new if key.startswith(of_log)][: epoch is not None]
    if others := sorted({*new} - {*own}):
        raise StoreError(
            f"the run `{folder}` in `{store.url}` came alive: `{others[0]}` was written just now. It is not "
            "removed. End what writes to it, or leave it."
        )
    for commit in log.state.commits if epoch is not None else ():
        log.append(Pruned(uuid=commit.uuid, step=commit.step), epoch=epoch)
    store.delete([entry.key for entry in entries if not entry.key.startswith(of_log)])
    for entry in reversed(list(store.list(f"{folder}/log"))):
        store.delete([entry.key])
    return sum(entry.size for entry in entries)


def _take_over(log: RunLog) -> int | None:
    """Take the run for its removal; None where its log is damaged, so that no gang can go on with it."""
    try:
        return log.take_epoch(attempt=log.refresh().attempts, by="prune")
    except StoreError:  # a store that is away says so again in what follows
        return None
