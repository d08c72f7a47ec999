"""A checkpoint in memory: snapshots go through JSON and copies of bytes, as they would through a store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from prefect_torch_elastic.checkpoint.state import Restore, SavedState, Snapshot, plan_restore, take_snapshot


@dataclass(frozen=True, kw_only=True)
class MemoryCheckpoint:
    """What one rank saved: whole tensors, and JSON of every rank."""

    tensors: dict[str, torch.Tensor]
    values: str
    rank_values: list[str]
    step: int = 10

    @classmethod
    def take(cls, state: Mapping[str, Any], *, step: int = 10, ranks: int = 1) -> MemoryCheckpoint:
        """Save the state; `ranks` pretends that as many ranks had this rank's own entries."""
        return cls.of(take_snapshot(state), step=step, ranks=ranks)

    @classmethod
    def of(cls, snapshot: Snapshot, *, step: int = 10, ranks: int = 1) -> MemoryCheckpoint:
        return cls(
            tensors={name: whole(tensor).clone() for name, tensor in snapshot.tensors.items()},
            values=json.dumps(snapshot.values, allow_nan=False, sort_keys=True),
            rank_values=[json.dumps(snapshot.rank_values, allow_nan=False)] * ranks,
            step=step,
        )

    @property
    def saved(self) -> SavedState:
        return SavedState(
            tensors={
                name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                for name, tensor in self.tensors.items()
            },
            values=json.loads(self.values),
            rank_values=[json.loads(values) for values in self.rank_values],
            step=self.step,
        )

    def load(self, state: Mapping[str, Any], *, rank: int = 0, world_size: int = 1) -> list[str]:
        """Plan, read and apply."""
        restore = plan_restore(state, self.saved)
        self.read_into(restore)
        return restore.apply(rank, world_size)

    def read_into(self, restore: Restore) -> None:
        """Fill the targets, each of which has to take bytes as they come."""
        targets: dict[str, Any] = dict(restore.tensors)
        for name, target in targets.items():
            if hasattr(target, "placements"):
                from torch.distributed.tensor import distribute_tensor

                assert target.to_local().is_contiguous()
                saved = self.tensors[name]
                target.copy_(distribute_tensor(saved, target.device_mesh, target.placements))
                continue
            assert target.is_contiguous()
            assert not target.requires_grad
            target.copy_(self.tensors[name])


def whole(tensor: Any) -> torch.Tensor:
    """Return all of a tensor, whatever ranks it is spread over."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
