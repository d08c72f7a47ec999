"""The entries of a state: what kind each is, which decides how it is saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

import torch
from torch import Tensor, nn

from prefect_torch_elastic.errors import CheckpointError


class Kind(StrEnum):
    """How an entry is saved and loaded; the words are in checkpoints and in messages."""

    MODULE = "module"
    OPTIMIZER = "optimizer"
    OBJECT = "object with state_dict"
    TENSOR = "tensor"
    VALUE = "plain value"
    PER_RANK = "value of each rank"
    MERGED = "object merged over ranks"


class per_rank:  # noqa: N801  (reads as a word in `state`)
    """Marks an entry of the state that is another one on each rank.

    Without it an entry is taken from rank 0. Each rank gets its own back; after a load a plain value is in
    `value`.

    Attributes:
        value: A plain value, or an object with `state_dict` and `load_state_dict`; at most 1 MiB of it.
        on_resize: With another number of ranks than saved, `refuse` is an error before anything is changed,
            and `keep` leaves new ranks as they are and drops what belonged to ranks that are gone.
    """

    def __init__(self, value: Any, *, on_resize: Literal["refuse", "keep"] = "refuse") -> None:
        self.value = value
        self.on_resize = on_resize


def find_kinds(state: Mapping[str, Any]) -> dict[str, Kind]:
    """Return the kind of each entry, modules first: optimizers are named by them, wherever these stand.

    Raises:
        CheckpointError: If a key cannot be one.
    """
    kinds: dict[str, Kind] = {}
    for key, value in state.items():
        if type(key) is not str or not key or key.startswith("__"):
            raise CheckpointError(
                f"The state has the key {key!r}. Keys are text, not empty, and do not begin with `__`."
            )
        kinds[key] = find_kind(value)
    # What reads the optimizer, such as a scheduler, comes after it.
    order = {Kind.MODULE: 0, Kind.OPTIMIZER: 1}
    return dict(sorted(kinds.items(), key=lambda item: order.get(item[1], 2)))


def find_kind(value: Any) -> Kind:
    """Return the kind of one value."""
    if isinstance(value, per_rank):
        return Kind.PER_RANK
    if isinstance(value, nn.Module):
        return Kind.MODULE
    if isinstance(value, torch.optim.Optimizer):
        return Kind.OPTIMIZER
    if callable(getattr(value, "state_dict", None)):
        if callable(getattr(value, "load_rank_states", None)):
            return Kind.MERGED
        if callable(getattr(value, "load_state_dict", None)):
            return Kind.OBJECT
    return Kind.TENSOR if isinstance(value, Tensor) else Kind.VALUE
