"""Rank 0's hand on the run log: it takes the run over once, and from then on commits, condemns and prunes."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch

from prefect_torch_elastic.checkpoint.manifest import (
    Manifest,
    Signed,
    TensorEntry,
    render_folder,
    render_json,
    render_manifest_key,
    render_size,
)
from prefect_torch_elastic.checkpoint.peers import Peers
from prefect_torch_elastic.checkpoint.retention import prune
from prefect_torch_elastic.checkpoint.saving import SaveOrder
from prefect_torch_elastic.checkpoint.tensors import parse_dtype
from prefect_torch_elastic.checkpoint.writer import sign
from prefect_torch_elastic.errors import CheckpointError, Superseded
from prefect_torch_elastic.runlog import Bad, Commit, RunLog
from prefect_torch_elastic.spec import CheckpointPolicy
from prefect_torch_elastic.store import Store

_COLLECT_EVERY = 20  # commits: looking for garbage lists every folder of the run
_log = logging.getLogger("prefect_torch_elastic.checkpoint")


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a checkpoint holds besides the ranks' own shares."""

    tensors: Mapping[str, TensorEntry]
    values: dict[str, Any]
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def size_bytes(self) -> int:
        """The tensors of all ranks together, each part counted once."""
        return sum(
            math.prod(entry.shape) * parse_dtype(entry.dtype).itemsize for entry in self.tensors.values()
        )


class Ledger:
    """The run's log as its gang writes it."""

    def __init__(
        self, store: Store, folder: str, *, policy: CheckpointPolicy, attempt: int, by: str, call: str
    ) -> None:
        self._store, self._folder, self._policy = store, folder, policy
        self._attempt, self._by, self._call = attempt, by, call
        self._log = RunLog(store, folder)
        self._epoch = self._commits = 0
        self._must_load = False
        self._prune_lock = threading.Lock()

    def enter(self) -> int:
        """Take the run over, the first time this is called, and return the gang's epoch.

        Raises:
            Superseded: If the call has its outcome already, or a later attempt has begun.
            StoreError: If the run folder cannot be read or written.
        """
        if not self._epoch:
            self._epoch = self._log.take_epoch(attempt=self._attempt, by=self._by, call=self._call)
            self._must_load = bool(self._log.state.commits)
        return self._epoch

    def enter_to_save(self) -> int:
        """Return the gang's epoch; a run that goes on from nothing must not push out what it had.

        Raises:
            CheckpointError: If the run has checkpoints and none was loaded.
            Superseded, StoreError: As `enter`.
        """
        epoch = self.enter()
        if self._must_load:
            newest = self._log.state.commits[0].step
            raise CheckpointError(
                f"this run has checkpoints, the newest of step {newest}, and none was loaded. Call "
                "`checkpoint.load(state)` first, or use another `run_key` to begin anew."
            )
        return epoch

    def candidates(self) -> tuple[Commit, ...]:
        """Return the checkpoints that can be loaded, newest first."""
        self.enter()
        return self._log.refresh().commits

    def note_loaded(self) -> None:
        """Take note that the run goes on from a checkpoint, or from nothing as it should: it may save."""
        self._must_load = False

    def count_bad(self) -> int:
        """Return how many checkpoints of the run were found damaged."""
        return len(self._log.state.bad)

    def list_unfinished(self) -> list[int]:
        """Return the steps that have a folder but no commit: saves that were cut off."""
        committed = {commit.step for commit in self._log.state.all_commits}
        steps = [
            int(name) for name in self._store.list_folders(f"{self._folder}/checkpoints") if name.isdigit()
        ]
        return [step for step in steps if step not in committed]

    def condemn(self, commit: Commit, reason: str) -> None:
        """Mark a checkpoint as damaged, so that nobody tries it again."""
        self._log.append(Bad(uuid=commit.uuid, step=commit.step, reason=reason), epoch=self.enter())

    def commit(self, order: SaveOrder, contents: Contents, ranks: Sequence[Signed], seconds: float) -> None:
        """Make a checkpoint exist.

        Raises:
            Superseded: If another gang has taken the run over.
            StoreError: If the store cannot be written.
        """
        folder = f"{self._folder}/{render_folder(order.step, order.uuid)}"
        manifest = Manifest(
            step=order.step,
            uuid=order.uuid,
            epoch=self._epoch,
            world_size=len(ranks),
            tensors=dict(contents.tensors),
            values=contents.values,
            metrics=contents.metrics,
            ranks=tuple(ranks),
            versions={"torch": torch.__version__, "prefect-torch-elastic": version("prefect-torch-elastic")},
        )
        data = render_json(manifest)
        self._store.put(render_manifest_key(folder), data)
        self._log.append(
            Commit(
                step=order.step,
                uuid=order.uuid,
                epoch=self._epoch,
                manifest_crc32c=sign(data).crc32c,
                size_bytes=contents.size_bytes,
                world_size=len(ranks),
                metrics=contents.metrics,
                seconds=seconds,
            ),
            epoch=self._epoch,
        )
        size = render_size(contents.size_bytes)
        _log.info("Step %d is saved: %s in %.2f s.", order.step, size, seconds)

    def prune(self) -> None:
        """Remove what the policy does not keep; the next time tries again what did not work."""
        with self._prune_lock:
            collect = self._commits % _COLLECT_EVERY == 0
            self._commits += 1
            place = self._store, self._folder, self._log
            try:
                prune(*place, policy=self._policy, epoch=self._epoch, collect=collect)
            except Superseded:
                pass  # the next save says it
            except Exception as error:  # noqa: BLE001  (the checkpoint is safe)
                _log.warning("Older checkpoints could not be removed: %s: %s", type(error).__name__, error)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run's checkpoints are, and this rank's seat among those who write and read them.

    Attributes:
        store: The store.
        run_folder: The run's folder there.
        peers: The seat at the meetings.
        ledger: The log, on rank 0; None on the others.
    """

    store: Store
    run_folder: str
    peers: Peers
    ledger: Ledger | None

    def need_ledger(self) -> Ledger:
        """Return the ledger, on rank 0."""
        assert self.ledger is not None, "only rank 0 decides"
        return self.ledger
