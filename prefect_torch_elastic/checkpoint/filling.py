"""What a restore will do, gathered and checked before anything is changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from prefect_torch_elastic.checkpoint.tensors import (
    find_memory,
    is_fillable,
    make_empty,
    name_dtype,
    parse_dtype,
)
from prefect_torch_elastic.checkpoint.values import Json, decode_value, is_tagged
from prefect_torch_elastic.errors import CheckpointError, CheckpointMismatch

TIED = "tied"
_SHOWN = 6

Action: TypeAlias = "Callable[[], list[str]]"  # changes something, returns sentences for the log


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """What a checkpoint has.

    Attributes:
        tensors: Name -> dtype and global shape.
        values: Name -> JSON, the same for all ranks.
        rank_values: For each saved rank, its own entries.
        step: Completed optimizer steps.
        where: The checkpoint's place in the store, for messages.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    values: Mapping[str, Json]
    rank_values: Sequence[Mapping[str, Json]]
    step: int
    where: str = ""

    def describe(self) -> str:
        """Return how messages call it."""
        return f"the checkpoint of step {self.step}" + (f" in {self.where}" if self.where else "")


@dataclass(kw_only=True)
class RestorePlan:
    """Collects what the entries of a state need from a checkpoint.

    Attributes:
        saved: The checkpoint.
        problems: Sentences about what does not fit.
        targets: Saved name -> contiguous tensor to read into.
        copies: Live tensors that get the value of a target afterwards.
        preparations: For rank, world size and seed, check what is left to check and return what to do.
        owners: id of a parameter -> its name in the current state.
    """

    saved: SavedState
    problems: list[str] = field(default_factory=list[str])
    targets: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])
    preparations: list[Callable[[int, int, int], Action]] = field(default_factory=list[Any])
    owners: dict[int, str] = field(default_factory=dict[int, str])

    def __post_init__(self) -> None:
        self._names: dict[str, list[str]] = {}
        self._memory: dict[int, list[tuple[int, int]]] = {}  # that is read into
        for name in (*self.saved.tensors, *self.saved.values):
            self._names.setdefault(name.partition("/")[0], []).append(name)

    def names_of(self, entry: str) -> list[str]:
        """Return the saved names below an entry."""
        return [name for name in self._names.get(entry, []) if name != entry]

    def resolve(self, name: str) -> str:
        """Return the name under which a tensor was saved: a tied one is there once."""
        if name in self.saved.tensors or name not in self.saved.values:
            return name
        json: Json = self.saved.values[name]
        return json["n"] if is_tagged(json, TIED) else name

    def fill(self, name: str, live: Tensor) -> None:
        """Read the saved tensor into `live`, which has to have its dtype and shape."""
        saved_name = self.resolve(name)
        saved = self.saved.tensors.get(saved_name)
        if saved is None:
            self.problems.append(f"`{name}` is not in the checkpoint.")
            return
        now = (name_dtype(live.dtype), tuple(live.shape))
        if now != (saved[0], tuple(saved[1])):
            self.problems.append(
                f"`{name}` is {saved[0]} {list(saved[1])} in the checkpoint and {now[0]} {list(now[1])} now."
            )
            return
        live = live.detach()
        if saved_name not in self.targets:
            fits = is_fillable(live) and self._claim(live)
            self.targets[saved_name] = live if fits else make_empty(live.dtype, now[1], like=live)
        if self.targets[saved_name] is not live:
            self.copies.append((live, self.targets[saved_name]))

    def fetch(self, name: str, *, live: Tensor | None = None, like: Tensor | None = None) -> Tensor:
        """Return the tensor that will have the saved value: `live` where it fits, else a new one."""
        saved_name = self.resolve(name)
        if saved_name in self.targets:
            return self.targets[saved_name]
        if saved_name not in self.saved.tensors:
            raise CheckpointError(f"The manifest of {self.saved.describe()} lacks the tensor `{name}`.")
        dtype_name, shape = self.saved.tensors[saved_name]
        dtype, shape = parse_dtype(dtype_name), tuple(shape)
        target = None
        if live is not None and live.dtype == dtype and tuple(live.shape) == shape:
            target = live.detach() if is_fillable(live) and self._claim(live) else None
        target = make_empty(dtype, shape, like=like) if target is None else target
        self.targets[saved_name] = target
        return target

    def _claim(self, tensor: Tensor) -> bool:
        """Whether nothing else is read into the memory of a tensor, which several names may have now."""
        if (found := find_memory(tensor)) is None:
            return True
        place, start, end = found
        taken = self._memory.setdefault(place, [])
        if any(start < other_end and other_start < end for other_start, other_end in taken):
            return False
        taken.append((start, end))
        return True

    def decode(self, name: str, *, lives: Mapping[str, Tensor] | None = None) -> Any:
        """Return a saved value; the tensors in it have their values once the targets are filled."""
        return self.decode_json(self.saved.values[name], lives=lives)

    def decode_json(self, json: Json, *, lives: Mapping[str, Tensor] | None = None) -> Any:
        """Return a value that is a part of a saved one."""
        known = lives or {}
        return decode_value(json, fetch=lambda part: self.fetch(part, live=known.get(part)))

    def then(self, action: Action) -> None:
        """Run `action` when the tensors are there."""
        self.preparations.append(lambda _rank, _world_size, _seed: action)

    def raise_problems(self) -> None:
        """Raise what was found.

        Raises:
            CheckpointMismatch: If something does not fit.
        """
        if not self.problems:
            return
        shown = "\n".join(f"- {problem}" for problem in self.problems[:_SHOWN])
        if (more := len(self.problems) - _SHOWN) > 0:
            shown += f"\n- and {more} more"
        raise CheckpointMismatch(
            f"The state does not fit {self.saved.describe()}. Nothing was changed.\n{shown}\n"
            "Build the model and the optimizer as they were, or leave the entry out of what you load: "
            '`load({"model": model})` takes the weights only. A run with another `run_key` starts anew.'
        )


def loading(entry: str, load: Callable[[], object]) -> Action:
    """Return an action that calls `load` and says whose state was refused."""

    def act() -> list[str]:
        try:
            load()
        except Exception as error:
            raise CheckpointMismatch(
                f"`{entry}` refused its state from the checkpoint: {type(error).__name__}: {error}"
            ) from error
        return []

    return act


def set_generator(live: Any, saved: Any) -> bool:
    """Give a live random generator the saved state, if it is one: samplers and loaders hold the object."""
    if type(live) is not type(saved):
        return False
    if isinstance(live, torch.Generator):
        live.set_state(saved.get_state())
    elif hasattr(live, "bit_generator"):  # numpy's
        live.bit_generator.state = saved.bit_generator.state
    elif isinstance(live, random.Random):
        live.setstate(saved.getstate())
    else:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Restore:
    """A restore that fits: read `tensors`, then `apply`.

    Attributes:
        tensors: Saved name -> contiguous tensor (or DTensor) to read into, in place.
        plan: What it was made from.
    """

    tensors: dict[str, Tensor]
    plan: RestorePlan

    def apply(self, rank: int, world_size: int, *, seed: int = 0) -> list[str]:
        """Finish: copies, `load_state_dict`, plain values, random state.

        Args:
            rank: This rank.
            world_size: Ranks now.
            seed: Makes the random state of ranks that the checkpoint does not know, with its own seed.

        Returns:
            Sentences for the log.

        Raises:
            CheckpointMismatch: If what belongs to single ranks does not fit; before anything else is done.
        """
        actions = [prepare(rank, world_size, seed) for prepare in self.plan.preparations]
        self.plan.raise_problems()
        with torch.no_grad():
            for live, value in self.plan.copies:
                live.copy_(value)
        return [sentence for action in actions for sentence in action()]
