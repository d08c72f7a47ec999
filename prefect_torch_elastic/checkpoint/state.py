"""What a training loop passes to `save` and `load`: taken apart into tensors and values, and filled again.

Names are paths: the key in the state, then the parameter. Tensors are live and never copied here. Everything
is compared before anything is changed.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, assert_never

from torch import Tensor

from prefect_torch_elastic.checkpoint.entries import Kind, find_kinds, per_rank
from prefect_torch_elastic.checkpoint.filling import Restore, RestorePlan, SavedState, loading, set_generator
from prefect_torch_elastic.checkpoint.modules import plan_module, snap_module
from prefect_torch_elastic.checkpoint.optimizers import plan_optimizer, snap_optimizer
from prefect_torch_elastic.checkpoint.randomness import RANDOM, encode_random_state
from prefect_torch_elastic.checkpoint.rank_entries import encode_own, plan_merged, plan_own, plan_random_state
from prefect_torch_elastic.checkpoint.snapshot import Snapshot
from prefect_torch_elastic.checkpoint.values import ENTRIES, encode_value, join_name
from prefect_torch_elastic.errors import CheckpointError

__all__ = ["Restore", "SavedState", "Snapshot", "per_rank", "plan_restore", "take_snapshot"]


def take_snapshot(state: Mapping[str, Any]) -> Snapshot:
    """Take the state apart.

    Args:
        state: Modules, optimizers, objects with `state_dict` and `load_state_dict`, tensors, plain values.

    Raises:
        CheckpointError: If there is nothing to save, or something that cannot be saved: it names the key.
    """
    if not state:
        raise CheckpointError('The state is empty: there is nothing to save. Pass `{"model": model}`.')
    kinds = find_kinds(state)
    snapshot = Snapshot()
    for key, kind in kinds.items():
        entry, value = join_name("", key), state[key]
        match kind:
            case Kind.MODULE:
                snap_module(snapshot, entry, value)
            case Kind.OPTIMIZER:
                if not snap_optimizer(snapshot, entry, value):  # an unusual one: an object like others
                    kinds[key] = Kind.OBJECT
                    snapshot.values[entry] = encode_value(entry, value.state_dict(), keep=snapshot.keep)
            case Kind.OBJECT:
                snapshot.values[entry] = encode_value(entry, value.state_dict(), keep=snapshot.keep)
            case Kind.TENSOR:
                snapshot.keep(entry, value)
            case Kind.VALUE:
                snapshot.values[entry] = encode_value(entry, value, keep=snapshot.keep)
            case Kind.PER_RANK | Kind.MERGED:
                snapshot.rank_values[entry] = encode_own(entry, value)
            case _:
                assert_never(kind)
    snapshot.values[ENTRIES] = {key: str(kind) for key, kind in kinds.items()}
    snapshot.rank_values[RANDOM] = encode_random_state()
    return snapshot


def plan_restore(state: Mapping[str, Any], saved: SavedState, *, world_size: int | None = None) -> Restore:
    """Compare the state with a checkpoint and plan how to fill it; nothing is changed.

    Args:
        state: What to fill: all that was saved, or a part of it.
        saved: What the checkpoint has.
        world_size: Ranks now, to refuse entries of single ranks here and not only in `apply`.

    Raises:
        CheckpointMismatch: If something does not fit: names, dtypes, shapes, groups, kinds.
        CheckpointError: If a value of the checkpoint is damaged.
    """
    plan = RestorePlan(saved=saved)
    kinds = _known_kinds(plan, find_kinds(state))
    # Values last: where one shares its memory with a model, as a placeholder does, it gets another.
    for key, kind in sorted(kinds.items(), key=lambda entry: entry[1] in (Kind.OBJECT, Kind.VALUE)):
        entry, value = join_name("", key), state[key]
        match kind:
            case Kind.MODULE:
                plan_module(plan, entry, value)
            case Kind.OPTIMIZER:
                plan_optimizer(plan, entry, value)
            case Kind.OBJECT:
                _plan_object(plan, entry, value)
            case Kind.TENSOR:
                plan.fill(entry, value)
            case Kind.VALUE:
                _plan_value(plan, state, key, entry)
            case Kind.PER_RANK:
                plan_own(plan, entry, value, world_size)
            case Kind.MERGED:
                plan_merged(plan, entry, value)
            case _:
                assert_never(kind)
    plan_random_state(plan)
    plan.raise_problems()
    return Restore(tensors=plan.targets, plan=plan)


def _known_kinds(plan: RestorePlan, kinds: Mapping[str, Kind]) -> dict[str, Kind]:
    """Return how each entry was saved, without those that do not fit."""
    saved_kinds: dict[str, str] = plan.saved.values.get(ENTRIES, {})
    known: dict[str, Kind] = {}
    for key, kind in kinds.items():
        saved = saved_kinds.get(key)
        if saved is None:
            have = ", ".join(f"`{name}`" for name in saved_kinds)
            plan.problems.append(f"`{key}` is not in the checkpoint, which has {have}.")
        elif saved == kind or (saved, kind) == (Kind.OBJECT, Kind.OPTIMIZER):
            known[key] = Kind(saved)
        else:
            plan.problems.append(f"`{key}` is a {saved} in the checkpoint and a {kind} now.")
    return known


def _find_lives(entry: str, value: Any) -> dict[str, Tensor]:
    """Return the tensors that are there now under the names that a snapshot gives them."""
    lives: dict[str, Tensor] = {}
    try:
        encode_value(entry, value, keep=lives.__setitem__)
    except CheckpointError:  # it is replaced by what could be saved
        lives.clear()
    return lives


def _plan_object(plan: RestorePlan, entry: str, value: Any) -> None:
    # Only for tensors: to ask a data loader for its state may start its workers.
    lives = _find_lives(entry, value.state_dict()) if plan.names_of(entry) else {}
    content = plan.decode(entry, lives=lives)
    plan.then(loading(entry, lambda: value.load_state_dict(content)))


def _plan_value(plan: RestorePlan, state: Mapping[str, Any], key: str, entry: str) -> None:
    content = plan.decode(entry, lives=_find_lives(entry, state[key]))
    if not isinstance(state, MutableMapping):
        raise CheckpointError(
            f"`{key}` is a plain value, and a `{type(state).__name__}` cannot be changed. Pass the state "
            "as a `dict`."
        )

    def replace() -> list[str]:
        if not set_generator(state[key], content):
            state[key] = content
        return []

    plan.then(replace)
