"""The tensors of a module under the names that they have without any wrapper around it.

DistributedDataParallel, `torch.compile` and activation checkpointing put a module inside another one, and
their names would bind a checkpoint to them. `fully_shard` changes no name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from prefect_torch_elastic.checkpoint.filling import TIED, RestorePlan, loading
from prefect_torch_elastic.checkpoint.snapshot import Snapshot
from prefect_torch_elastic.checkpoint.values import TAG, encode_value, join_name
from prefect_torch_elastic.compat import torch_wrappers
from prefect_torch_elastic.errors import CheckpointError

_EXTRA_STATE = "_extra_state"


def snap_module(snapshot: Snapshot, entry: str, module: nn.Module) -> None:
    """Add the parameters, buffers and extra state of a module; tied parameters are there once."""
    live = _LiveModule(entry, module)
    objects: dict[str, Tensor] = {}
    for plain_name, tensor in live.owned:
        name = join_name(entry, plain_name)
        objects[name] = tensor
        snapshot.owners.setdefault(id(tensor), name)
    for plain_name, (_, value) in live.parts.items():
        name = join_name(entry, plain_name)
        own = objects.get(name)
        first = snapshot.owners[id(own)] if own is not None else name
        if not isinstance(value, Tensor) or _is_extra_state(plain_name):
            snapshot.values[name] = encode_value(name, value, keep=snapshot.keep)
        elif first != name and first in snapshot.tensors:
            snapshot.values[name] = {TAG: TIED, "n": first}
        elif isinstance(own, nn.Parameter):
            snapshot.keep_trained(name, value)
        else:
            snapshot.keep(name, value)


def plan_module(plan: RestorePlan, entry: str, module: nn.Module) -> None:
    """Plan to fill a module; what it has and what was saved have to be the same."""
    live = _LiveModule(entry, module)
    for plain_name, tensor in live.owned:
        plan.owners.setdefault(id(tensor), join_name(entry, plain_name))
    filled: dict[str, Any] = {}
    names: set[str] = set()
    for plain_name, (own_name, value) in live.parts.items():
        name = join_name(entry, plain_name)
        names.add(name)
        filled[own_name] = value
        if isinstance(value, Tensor) and not _is_extra_state(plain_name):
            plan.fill(name, value)
        elif name in plan.saved.values:
            filled[own_name] = plan.decode(name)
        else:
            plan.problems.append(f"`{name}` is not in the checkpoint.")
    for name in plan.names_of(entry):
        if name not in names and name.count("/") == 1:
            plan.problems.append(f"`{name}` is in the checkpoint and not in `{entry}` now.")
    # The tensors are filled in place; this is for extra state and for hooks.
    plan.then(loading(entry, lambda: module.load_state_dict(filled)))


class _LiveModule:
    """What a module has now.

    Attributes:
        parts: Plain name -> name in `state_dict`, live value.
        owned: Plain name and object of each parameter and buffer; tied ones once for each name.
    """

    def __init__(self, entry: str, module: nn.Module) -> None:
        modules: list[tuple[str, nn.Module]] = _list_modules(module)
        _refuse_flat_parameters(entry, modules)
        with torch.no_grad():
            state = module.state_dict()  # first: under `fully_shard` it puts the sharded parameters in place
        simplify = _find_plain_names(modules)
        self.parts: dict[str, tuple[str, Any]] = {
            simplify(name): (name, value) for name, value in state.items()
        }
        self.owned: list[tuple[str, Tensor]] = []
        for path, child in modules:
            for name, tensor in (
                *child.named_parameters(recurse=False),
                *child.named_buffers(recurse=False),
            ):
                self.owned.append((simplify(f"{path}.{name}" if path else name), tensor))


def _list_modules(module: Any) -> list[tuple[str, nn.Module]]:
    return list(module.named_modules(remove_duplicate=False))


def _is_extra_state(name: str) -> bool:
    """Whether a name is of what `get_extra_state` returned, which is no parameter."""
    return name == _EXTRA_STATE or name.endswith(f".{_EXTRA_STATE}")


def _find_plain_names(modules: Sequence[tuple[str, nn.Module]]) -> Callable[[str], str]:
    """Return the function from a name in `state_dict` to the name without wrappers."""
    wrappers = torch_wrappers()
    kinds = tuple(wrappers)
    if not any(isinstance(child, kinds) for _, child in modules):
        return str
    plain = {"": ""}
    for path, child in modules:
        if path not in plain:
            parent, _, own = path.rpartition(".")
            plain[path] = _join(plain[parent], own)
        for wrapper, inner in wrappers.items():
            if isinstance(child, wrapper):
                plain[_join(path, inner)] = plain[path]
    return lambda name: _simplify(name, plain)


def _simplify(name: str, plain: dict[str, str]) -> str:
    parent, _, own = name.rpartition(".")
    while parent not in plain:  # a hook of the module named it
        parent, _, more = parent.rpartition(".")
        own = f"{more}.{own}"
    return _join(plain[parent], own)


def _join(parent: str, own: str) -> str:
    return f"{parent}.{own}" if parent and own else parent or own


def _refuse_flat_parameters(entry: str, modules: Sequence[tuple[str, nn.Module]]) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for path, child in modules:
        if isinstance(child, fsdp.FullyShardedDataParallel):
            raise CheckpointError(
                f"`{entry}` cannot be saved: `{path or entry}` is a `FullyShardedDataParallel`, whose "
                "parameters have no names of their own. Shard it with `torch.distributed.fsdp.fully_shard`."
            )
