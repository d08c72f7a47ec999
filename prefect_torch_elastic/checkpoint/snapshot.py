"""One rank's part of a checkpoint, while it is gathered and when it is complete."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from prefect_torch_elastic.checkpoint.tensors import check_tensor, is_dtensor
from prefect_torch_elastic.checkpoint.values import Json


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One rank's part of a checkpoint.

    Attributes:
        tensors: Name -> live Tensor or DTensor, without copies.
        values: Name -> JSON, the same on all ranks: rank 0's are kept.
        rank_values: Entry -> JSON of this rank alone.
        leader_only: Names of tensors that training does not keep equal on all ranks, such as running means:
            rank 0's are kept, all of them, so that they fit together.
        owners: id of each parameter and buffer of the state's modules -> its name.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    values: dict[str, Json] = field(default_factory=dict[str, Json])
    rank_values: dict[str, Json] = field(default_factory=dict[str, Json])
    leader_only: set[str] = field(default_factory=set[str])
    owners: dict[int, str] = field(default_factory=dict[int, str])

    def keep(self, name: str, tensor: Tensor) -> None:
        """Add a tensor that may differ between ranks, unless it is spread over them."""
        self.tensors[name] = check_tensor(name, tensor)
        if not is_dtensor(tensor):
            self.leader_only.add(name)

    def keep_trained(self, name: str, tensor: Tensor) -> None:
        """Add a tensor that training keeps equal on all ranks that have it: any of them may write it."""
        self.tensors[name] = check_tensor(name, tensor)
