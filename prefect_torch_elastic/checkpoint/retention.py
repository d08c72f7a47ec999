"""Which checkpoints stay, and the removal of the others: first the log says so, then their data goes.

A reader that the log does not know (an evaluation, an export) pins what it reads and renews the pin; one that
is killed keeps the data for an hour. What saves left that were cut off is garbage, and goes when it is old.
Ages are told by the store's own clock: a machine whose clock is wrong removes nothing that is in use.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress

from prefect_torch_elastic.checkpoint.manifest import render_folder
from prefect_torch_elastic.errors import StoreError
from prefect_torch_elastic.runlog import Commit, Pruned, RunLog, RunState
from prefect_torch_elastic.spec import CheckpointPolicy
from prefect_torch_elastic.store import Store

PIN_SECONDS = 3600.0
GARBAGE_SECONDS = 3600.0  # a rank that was held up may still be writing into a folder that is younger
ABANDONED_SECONDS = 86400.0  # of a save that its gang could still commit: a person cannot tell
_log = logging.getLogger("prefect_torch_elastic.checkpoint")


def choose_pruned(commits: Sequence[Commit], policy: CheckpointPolicy) -> list[Commit]:
    """Return the checkpoints that the policy does not keep, oldest first; the newest one always stays.

    Args:
        commits: Those that can be loaded, newest first.
        policy: What to keep: the union of its rules.
    """
    kept = {commit.uuid for commit in commits[: max(1, policy.keep_last)]}
    if policy.keep_best and policy.metric:
        kept |= {commit.uuid for commit in _rank(commits, policy)[: policy.keep_best]}
    if policy.keep_every_steps:
        by_step = {commit.step: commit.uuid for commit in reversed(commits)}  # of one step, the newest
        kept |= {uuid for step, uuid in by_step.items() if step % policy.keep_every_steps == 0}
    return [commit for commit in reversed(commits) if commit.uuid not in kept]


def prune(
    store: Store,
    run_folder: str,
    log: RunLog,
    *,
    policy: CheckpointPolicy,
    epoch: int | None,
    collect: bool = False,
) -> list[Commit]:
    """Remove the checkpoints that the policy does not keep, and return them.

    Args:
        store: Where they are.
        run_folder: The run's folder there.
        log: Its log, read up to now.
        policy: What to keep.
        epoch: Of the gang that prunes; None for a person.
        collect: Also remove what cut-off saves and unfinished removals left.

    Raises:
        Superseded: If a newer gang has taken the run over; nothing more is removed then.
        StoreError: If the store cannot be written.
    """
    pruned = choose_pruned(log.state.commits, policy)
    for commit in pruned:
        log.append(Pruned(uuid=commit.uuid, step=commit.step), epoch=epoch)
        if not _is_pinned(store, run_folder, commit.uuid):
            _remove(store, f"{run_folder}/{render_folder(commit.step, commit.uuid)}")
    if collect:
        collect_garbage(store, run_folder, log, epoch=epoch)
    return pruned


def collect_garbage(store: Store, run_folder: str, log: RunLog, *, epoch: int | None) -> list[str]:
    """Remove folders of saves that no checkpoint needs and nobody writes any more; return their names.

    These are saves without a commit whose last object is an hour old, damaged checkpoints of that age if one
    is good, removals that were cut off, and pins of readers that are gone.

    Args:
        store: Where they are.
        run_folder: The run's folder there.
        log: Its log; it is read after the folders, so a checkpoint that is new to this process is known.
        epoch: Of the gang that collects; None for a person. Nothing is removed for a gang that was replaced.
    """
    folders = [
        (step, uuid)
        for step in store.list_folders(f"{run_folder}/checkpoints")
        for uuid in store.list_folders(f"{run_folder}/checkpoints/{step}")
    ]
    state = log.refresh()
    if epoch is not None and state.epoch != epoch:
        return []
    live = {commit.uuid for commit in state.commits}
    now = fetch_time(store, run_folder)
    removed: list[str] = []
    for step, uuid in folders:
        folder = f"{run_folder}/checkpoints/{step}/{uuid}"
        if uuid in live or _is_pinned(store, run_folder, uuid, now=now):
            continue
        written = last_written(store, folder)
        if not written and not _is_over(uuid, state):
            continue  # in a directory, its first blocks may be on their way, and nobody knows since when
        if now - written > _patience(uuid, state, epoch=epoch):
            _remove(store, folder)
            removed.append(f"{step}/{uuid}")
    pins = store.list(f"{run_folder}/pins")
    store.delete([pinned.key for pinned in pins if now - pinned.modified >= PIN_SECONDS])
    return removed


@contextmanager
def pin(store: Store, run_folder: str, uuid: str) -> Generator[None]:
    """Keep the data of a checkpoint while it is read from outside of its gang.

    Look into the log again inside the `with`: a checkpoint that is not pruned by then stays until the end. A
    reader that may not write reads without a pin.
    """
    key = f"{run_folder}/pins/{uuid}/{secrets.token_hex(8)}"
    try:
        store.put(key, b"")
    except StoreError as error:
        _log.warning("The checkpoint is read without a pin, so a prune may remove it meanwhile: %s", error)
        yield
        return
    done = threading.Event()

    def renew() -> None:
        while not done.wait(PIN_SECONDS / 4):
            with suppress(StoreError):  # the next one is in time too
                store.put(key, b"")

    thread = threading.Thread(target=renew, name="checkpoint-pin", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with suppress(StoreError):  # it ends by itself
            store.delete([key])


def _patience(uuid: str, state: RunState, *, epoch: int | None) -> float:
    """Return how many seconds after its last object a folder that is no checkpoint is garbage."""
    if uuid in state.pruned:
        return -math.inf
    if uuid in state.bad:  # while there is no other, its bytes may still be worth something
        return GARBAGE_SECONDS if state.commits else math.inf
    return GARBAGE_SECONDS if _is_over(uuid, state) or epoch is not None else ABANDONED_SECONDS


def _is_over(uuid: str, state: RunState) -> bool:
    """Whether the gang of a save can commit nothing more."""
    number = uuid.partition("-")[0]
    return number.isdigit() and int(number) < state.epoch


def _rank(commits: Sequence[Commit], policy: CheckpointPolicy) -> list[Commit]:
    """Return the checkpoints that have the metric, best first; of equal ones the newer."""
    sign = 1.0 if policy.mode == "min" else -1.0
    values = [(commit.metrics.get(policy.metric or "", math.nan), commit) for commit in commits]
    known = [(value, commit) for value, commit in values if not math.isnan(value)]
    return [commit for _, commit in sorted(known, key=lambda entry: sign * entry[0])]


def _is_pinned(store: Store, run_folder: str, uuid: str, *, now: float | None = None) -> bool:
    pins = list(store.list(f"{run_folder}/pins/{uuid}"))
    if not pins:
        return False
    now = fetch_time(store, run_folder) if now is None else now
    return any(now - pinned.modified < PIN_SECONDS for pinned in pins)


def fetch_time(store: Store, run_folder: str) -> float:
    """Return what the store's clock says: objects are stamped by it, not by this machine's."""
    folder = f"{run_folder}/pins/now-{secrets.token_hex(8)}"
    store.put(f"{folder}/0", b"")
    try:
        return next(found.modified for found in store.list(folder))
    finally:
        store.delete([f"{folder}/0"])


def last_written(store: Store, folder: str) -> float:
    """Return when the newest object in a folder was written, by the store's clock; 0 if there is none."""
    return max((found.modified for found in store.list(folder)), default=0.0)


def _remove(store: Store, folder: str) -> None:
    store.delete([found.key for found in store.list(folder)])
    # In a directory, a rank that was killed in its first block leaves a folder in which nothing is listed.
    store.delete([f"{folder}/{name}/000000" for name in store.list_folders(folder)])
