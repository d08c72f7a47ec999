"""What a store says about its runs and checkpoints, from logs and manifests; no tensor is read."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from prefect_torch_elastic.aging import last_change
from prefect_torch_elastic.checkpoint.manifest import Manifest, render_folder
from prefect_torch_elastic.checkpoint.values import ENTRIES, split_name
from prefect_torch_elastic.checkpoint.verify import Damage
from prefect_torch_elastic.errors import StoreError
from prefect_torch_elastic.runlog import Commit, RunLog, RunState
from prefect_torch_elastic.store import Store


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run.

    Attributes:
        run: Its folder.
        checkpoints: How many can be loaded.
        newest_step: Of the newest of them.
        size_bytes: Of all of them.
        world_size: Ranks that saved the newest.
        epoch: How often the run was taken over.
        damaged: How many were found damaged.
        changed: When its log was written last, as unix time.
        problem: Why its log cannot be read, with the cure; the rest is not known then.
    """

    run: str
    checkpoints: int = 0
    newest_step: int | None = None
    size_bytes: int = 0
    world_size: int | None = None
    epoch: int = 0
    damaged: int = 0
    changed: float
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class CheckpointRow:
    """One checkpoint of a run.

    Attributes:
        commit: From the log.
        saved: When it was, as unix time; 0 if its manifest is gone.
        state: `ok`, or what is wrong with it.
    """

    commit: Commit
    saved: float
    state: str

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self.commit), "saved": self.saved, "state": self.state}


@dataclass(frozen=True, kw_only=True)
class CheckpointCheck:
    """Whether one checkpoint is what was committed.

    Attributes:
        step: Its step.
        uuid: Its name in the store.
        damages: What reading it has found.
        reason: What a load had found before, which marked it in the log; it is not read again.
        size_bytes: How many bytes were read.
    """

    step: int
    uuid: str
    damages: tuple[Damage, ...] = ()
    reason: str = ""
    size_bytes: int = 0

    @property
    def ok(self) -> bool:
        return not self.damages and not self.reason

    def as_dict(self) -> dict[str, Any]:
        damages = [
            {"rank": one.rank, "object": one.key, "expected": one.expected, "found": one.found}
            for one in self.damages
        ]
        return {
            "step": self.step,
            "uuid": self.uuid,
            "ok": self.ok,
            "damages": damages,
            "reason": self.reason,
        }


def describe_run(store: Store, folder: str) -> RunRow:
    """Return the row of a run; a log that cannot be read does not hide the other runs."""
    try:
        state = RunLog(store, folder).refresh()
    except StoreError as error:
        return RunRow(run=folder, changed=last_change(store, folder), problem=str(error))
    newest = state.commits[0] if state.commits else None
    return RunRow(
        run=folder,
        checkpoints=len(state.commits),
        newest_step=newest.step if newest else None,
        size_bytes=sum(commit.size_bytes for commit in state.commits),
        world_size=newest.world_size if newest else None,
        epoch=state.epoch,
        damaged=sum(uuid not in state.pruned for uuid in state.bad),
        changed=last_change(store, folder),
    )


def list_rows(store: Store, folder: str) -> list[CheckpointRow]:
    """Return the checkpoints of a run, newest first, without those that were pruned."""
    state = RunLog(store, folder).refresh()
    rows: list[CheckpointRow] = []
    for commit in state.all_commits:
        if commit.uuid in state.pruned:
            continue
        bad = state.bad.get(commit.uuid)
        place = f"{folder}/{render_folder(commit.step, commit.uuid)}"
        manifest = next(iter(store.list(place)), None)  # `manifest.json` is the first by name
        there = manifest is not None and manifest.key.endswith("/manifest.json")
        word = "ok" if there else "damaged: its manifest is missing"
        rows.append(
            CheckpointRow(
                commit=commit,
                saved=manifest.modified if manifest and there else 0.0,
                state=f"damaged: {bad.reason}" if bad else word,
            )
        )
    return rows


def list_damaged(store: Store, folder: str, state: RunState) -> list[CheckpointCheck]:
    """Return the checkpoints of a run that a load found damaged, and of which something is still there."""
    return [
        CheckpointCheck(step=bad.step, uuid=bad.uuid, reason=bad.reason)
        for bad in state.bad.values()
        if bad.uuid not in state.pruned and any(store.list(f"{folder}/{render_folder(bad.step, bad.uuid)}"))
    ]


def describe_checkpoint(folder: str, commit: Commit, manifest: Manifest) -> dict[str, Any]:
    """Return what is known about one checkpoint."""
    return {
        "run": folder,
        "step": commit.step,
        "uuid": commit.uuid,
        "size_bytes": commit.size_bytes,
        "world_size": commit.world_size,
        "epoch": commit.epoch,
        "seconds": commit.seconds,
        "metrics": commit.metrics,
        "versions": manifest.versions,
        "entries": summarize_tensors(manifest),
    }


def summarize_tensors(manifest: Manifest) -> list[dict[str, Any]]:
    """Return each entry of the state: its kind, its tensors, their elements and dtypes."""
    kinds: dict[str, str] = manifest.values.get(ENTRIES, {})
    groups: dict[str, dict[str, Any]] = {
        key: {"entry": key, "kind": kind, "tensors": 0, "elements": 0, "dtypes": []}
        for key, kind in kinds.items()
    }
    for name, entry in manifest.tensors.items():
        key = split_name(name)[0]
        empty: dict[str, Any] = {"entry": key, "kind": "", "tensors": 0, "elements": 0, "dtypes": []}
        group = groups.setdefault(key, empty)
        group["tensors"] += 1
        group["elements"] += math.prod(entry.shape)
        if entry.dtype not in group["dtypes"]:
            group["dtypes"].append(entry.dtype)
    return list(groups.values())
