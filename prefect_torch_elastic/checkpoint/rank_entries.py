"""Entries that differ from rank to rank: marked ones, objects that merge all ranks' states, random state."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from prefect_torch_elastic.checkpoint.entries import Kind, find_kind, per_rank
from prefect_torch_elastic.checkpoint.filling import Action, RestorePlan, loading, set_generator
from prefect_torch_elastic.checkpoint.randomness import RANDOM, prepare_random_state, seed_new_rank
from prefect_torch_elastic.checkpoint.values import Json, decode_value, encode_value
from prefect_torch_elastic.errors import CheckpointError


def encode_own(entry: str, value: Any) -> Json:
    """Return this rank's part of an entry."""
    inner = value.value if isinstance(value, per_rank) else value
    kind = find_kind(inner)
    return encode_value(entry, inner if kind in (Kind.VALUE, Kind.TENSOR) else inner.state_dict())


def plan_own(plan: RestorePlan, entry: str, marked: per_rank, world_size: int | None) -> None:
    """Plan to give each rank its own part back."""
    if world_size is not None:
        _check_world_size(plan, entry, marked, world_size)

    def prepare(rank: int, ranks: int, _: int) -> Action:
        _check_world_size(plan, entry, marked, ranks)
        if rank >= len(plan.saved.rank_values):
            sentence = f"Rank {rank} is new: `{entry}` was left as it is."
            return lambda: [sentence]
        content = decode_value(_read(plan, entry, rank))
        return loading(entry, lambda: _put_back(entry, marked, content))

    plan.preparations.append(prepare)


def plan_merged(plan: RestorePlan, entry: str, value: Any) -> None:
    """Plan to give an object the states of all saved ranks."""
    ranks = range(len(plan.saved.rank_values))
    states = [decode_value(_read(plan, entry, rank)) for rank in ranks]
    plan.then(loading(entry, lambda: value.load_rank_states(states)))


def plan_random_state(plan: RestorePlan) -> None:
    """Plan to put the random state back, last of all: whatever is loaded before may draw."""

    def prepare(rank: int, _: int, seed: int) -> Action:
        saved_ranks = len(plan.saved.rank_values)
        if rank < saved_ranks:
            return prepare_random_state(_read(plan, RANDOM, rank))
        if not saved_ranks:
            raise CheckpointError(f"The manifest of {plan.saved.describe()} has no rank.")
        first = _read(plan, RANDOM, 0)
        return lambda: seed_new_rank(first, seed=seed, rank=rank, step=plan.saved.step)

    plan.preparations.append(prepare)


def _check_world_size(plan: RestorePlan, entry: str, marked: per_rank, world_size: int) -> None:
    saved = len(plan.saved.rank_values)
    if saved != world_size and marked.on_resize == "refuse":
        plan.problems.append(
            f"`{entry}` belongs to single ranks: saved with world size {saved}, now {world_size}. "
            'Pass `per_rank(..., on_resize="keep")` to leave new ranks as they are.'
        )


def _read(plan: RestorePlan, entry: str, rank: int) -> Json:
    values = plan.saved.rank_values[rank]
    if entry not in values:
        raise CheckpointError(f"The manifest of {plan.saved.describe()} lacks `{entry}` of rank {rank}.")
    return values[entry]


def _put_back(entry: str, marked: per_rank, content: Any) -> None:
    live = marked.value
    match find_kind(live):
        case Kind.TENSOR:
            _copy(entry, live, content)
        case Kind.VALUE:
            if not set_generator(live, content):
                marked.value = content
        case _:
            live.load_state_dict(content)


def _copy(entry: str, live: Tensor, content: Any) -> None:
    if not isinstance(content, Tensor) or content.shape != live.shape or content.dtype != live.dtype:
        raise CheckpointError(f"`{entry}` is {content!r:.80} in the checkpoint and {live!r:.80} now.")
    live.detach().copy_(content)
