"""Loading: all ranks try the newest checkpoint together, and the next older one if one finds damage."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from prefect_torch_elastic.checkpoint.ledger import Place
from prefect_torch_elastic.checkpoint.manifest import DamagedError, render_folder, render_size
from prefect_torch_elastic.checkpoint.peers import Word
from prefect_torch_elastic.checkpoint.reader import SavedCheckpoint, fetch_checkpoint, read_tensors
from prefect_torch_elastic.checkpoint.state import Restore, SavedState, plan_restore
from prefect_torch_elastic.errors import CheckpointError
from prefect_torch_elastic.runlog import Commit
from prefect_torch_elastic.store import Store

_log = logging.getLogger("prefect_torch_elastic.checkpoint")


def load(state: Mapping[str, Any], place: Place, *, fresh_if_damaged: bool) -> int:
    """Fill `state` from the newest whole checkpoint and return its step, 0 if the run has none.

    Raises:
        CheckpointError: On all ranks: every checkpoint of the run is damaged.
        CheckpointMismatch: On all ranks: the state does not fit the checkpoint; nothing was changed.
        StoreError: On all ranks: the store cannot be read, which is no reason to take an older checkpoint.
        Superseded: On all ranks: the call has its outcome already.
    """
    answer = place.peers.meet("load()", dict, lambda _: _choose(place, fresh_if_damaged=fresh_if_damaged))
    before = _Before()
    while answer["commit"] is not None:
        commit = Commit(**answer["commit"])
        attempt = _Attempt(state, commit, place)
        started = time.monotonic()

        def decide(words: Sequence[Word], commit: Commit = commit) -> Word:
            return _judge(commit, words, place, fresh_if_damaged=fresh_if_damaged)

        answer = place.peers.meet(f"load() of step {commit.step}", attempt.compare, decide)
        if not answer["good"]:
            continue
        if fresh_if_damaged:
            before.keep(attempt.tensors)
        answer = place.peers.meet(f"load() of step {commit.step}: tensors", attempt.read, decide)
        if answer["good"]:
            attempt.finish(seconds=time.monotonic() - started)
            _note_loaded(place)
            return commit.step
    before.put_back()
    _note_loaded(place)
    return 0


def _note_loaded(place: Place) -> None:
    if place.ledger is not None:
        place.ledger.note_loaded()


class _Attempt:
    """One rank's attempt at one checkpoint: all ranks compare first, and only then does anybody read."""

    def __init__(self, state: Mapping[str, Any], commit: Commit, place: Place) -> None:
        self._state, self._commit, self._place = state, commit, place
        self._saved: SavedCheckpoint | None = None
        self._restore: Restore | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What will be filled."""
        assert self._restore is not None, "compared before"
        return self._restore.tensors

    def compare(self) -> Word:
        """See whether the state fits; nothing is changed."""
        place, commit = self._place, self._commit
        folder = f"{place.run_folder}/{render_folder(commit.step, commit.uuid)}"
        try:
            self._saved = fetch_checkpoint(place.store, folder, checksum=commit.manifest_crc32c)
        except DamagedError as error:
            return {"damage": f"rank {place.peers.rank}: {error}"}
        saved = describe(self._saved, place.store)
        self._restore = plan_restore(self._state, saved, world_size=place.peers.world_size)
        return {"damage": ""}

    def read(self) -> Word:
        """Fill the tensors."""
        assert self._saved is not None, "compared before"
        try:
            read_tensors(self._place.store, self._saved, self.tensors)
        except DamagedError as error:
            return {"damage": f"rank {self._place.peers.rank}: {error}"}
        return {"damage": ""}

    def finish(self, *, seconds: float) -> None:
        """Fill the rest, now that all tensors are there on all ranks."""
        assert self._restore is not None, "compared before"
        peers, commit = self._place.peers, self._commit
        for sentence in self._restore.apply(peers.rank, peers.world_size):
            _log.warning("%s", sentence)
        if peers.rank == 0:
            ranks = f"{commit.world_size} rank{'s' if commit.world_size > 1 else ''}"
            now = "" if commit.world_size == peers.world_size else f", now {peers.world_size}"
            _log.info(
                "Resuming from step %d: %s saved by %s%s, loaded in %.2f s.",
                *(commit.step, render_size(commit.size_bytes), ranks, now, seconds),
            )


class _Before:
    """The tensors of a state as they were before a load, which fills them before it finds damage."""

    def __init__(self) -> None:
        self._copies: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy what was not copied yet: a second checkpoint finds what is left of the first one."""
        for name, tensor in tensors.items():
            if name not in self._copies:
                self._copies[name] = tensor, tensor.detach().clone()

    def put_back(self) -> None:
        with torch.no_grad():
            for tensor, copy in reversed(self._copies.values()):  # of one memory, the first copy is right
                tensor.copy_(copy)


def _choose(place: Place, *, fresh_if_damaged: bool) -> dict[str, Any]:
    """On rank 0: the newest checkpoint that nobody found damaged, or why there is none."""
    ledger = place.need_ledger()
    candidates = ledger.candidates()
    if candidates:
        return {"good": False, "commit": asdict(candidates[0])}
    if bad := ledger.count_bad():
        if not fresh_if_damaged:
            raise CheckpointError(
                f"all checkpoints of this run are damaged ({bad}): `prefect-torch-elastic checkpoints list` "
                "shows them. Begin again with `load(state, fresh_if_damaged=True)`, or use another `run_key`."
            )
        _log.warning(
            "All checkpoints of this run are damaged (%d): it starts at step 0, as was asked for.", bad
        )
    elif unfinished := ledger.list_unfinished():
        steps = ", ".join(str(step) for step in unfinished)
        _log.info(
            "No checkpoint is complete (a save of step %s was cut off): the run starts at step 0.", steps
        )
    else:
        _log.info("No checkpoint yet: the run starts at step 0.")
    return {"good": False, "commit": None}


def _judge(commit: Commit, words: Sequence[Word], place: Place, *, fresh_if_damaged: bool) -> dict[str, Any]:
    """On rank 0: the checkpoint is good as long as no rank found damage."""
    damage = next((word["damage"] for word in words if word["damage"]), "")
    if not damage:
        return {"good": True, "commit": asdict(commit)}
    place.need_ledger().condemn(commit, damage)
    _log.warning("The checkpoint of step %d is damaged and not used again. %s", commit.step, damage)
    return _choose(place, fresh_if_damaged=fresh_if_damaged)


def describe(saved: SavedCheckpoint, store: Store) -> SavedState:
    """Return what a checkpoint has, for `plan_restore`."""
    return SavedState(
        tensors={name: (entry.dtype, entry.shape) for name, entry in saved.manifest.tensors.items()},
        values=saved.manifest.values,
        rank_values=[manifest.values for manifest in saved.ranks],
        step=saved.manifest.step,
        where=f"{store.url}/{saved.folder}",
    )
