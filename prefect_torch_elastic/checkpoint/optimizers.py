"""The state of an optimizer by the names of its parameters, taken without running it.

torch's `get_optimizer_state_dict` runs `step` on a fresh optimizer; this room only reads. Each tensor is
`<entry>/state/<module entry>/<parameter>/<key>`; groups, steps and shapes are one JSON value, `<entry>`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from prefect_torch_elastic.checkpoint.filling import RestorePlan, loading
from prefect_torch_elastic.checkpoint.snapshot import Snapshot
from prefect_torch_elastic.checkpoint.tensors import is_dtensor, make_empty, name_dtype, parse_dtype
from prefect_torch_elastic.checkpoint.torch_values import is_number
from prefect_torch_elastic.checkpoint.values import (
    Json,
    decoding,
    encode_value,
    join_name,
    split_name,
)

_STATE = "state"
_GROUPS = "param_groups"
_PARAMETERS = "params"
# How the step is computed, not what: these stay as the program sets them on this machine.
_MACHINE_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable", _PARAMETERS, "param_names"})


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """An optimizer's state_dict, understood.

    Attributes:
        names: Number in the state_dict -> name of the parameter.
        parameters: The same numbers -> parameter.
        state: The same numbers -> what the optimizer keeps for it.
        groups: Options and numbers of each group.
        others: Whatever else the class puts into its state_dict.
    """

    names: dict[int, str]
    parameters: dict[int, Tensor]
    state: dict[int, dict[Any, Any]]
    groups: list[dict[str, Any]]
    others: dict[Any, Any]


def snap_optimizer(snapshot: Snapshot, entry: str, optimizer: Any) -> bool:
    """Add the state of an optimizer; False if its state_dict has another form than torch's."""
    parts = _read(optimizer, snapshot.owners)
    if parts is None:
        return False
    rest: dict[int, dict[Any, Any]] = {}
    numbers: dict[tuple[str, str, str], list[int]] = {}
    for number, kept in parts.state.items():
        prefix = f"{entry}/{_STATE}/{parts.names[number]}"
        for key, value in kept.items():
            if type(key) is not str or not isinstance(value, Tensor):
                rest.setdefault(number, {})[key] = value
            elif is_number(value):
                shared = (key, name_dtype(value.dtype), json.dumps(encode_value(entry, value.item())))
                numbers.setdefault(shared, []).append(number)
            else:
                snapshot.keep_trained(join_name(prefix, key), value)
    snapshot.values[entry] = {
        "parameters": [
            [number, name, list(parts.parameters[number].shape)] for number, name in parts.names.items()
        ],
        "stateful": list(parts.state),
        # Nearly always one line: all parameters have made the same number of steps.
        "numbers": [[key, dtype, json.loads(text), of] for (key, dtype, text), of in numbers.items()],
        "rest": encode_value(entry, rest, keep=snapshot.keep),
        "groups": encode_value(f"{entry}/groups", parts.groups, keep=snapshot.keep),
        "others": encode_value(f"{entry}/others", parts.others, keep=snapshot.keep),
    }
    return True


def plan_optimizer(plan: RestorePlan, entry: str, optimizer: Any) -> None:
    """Plan to fill an optimizer; it has to have the parameters that were saved, in any order."""
    parts = _read(optimizer, plan.owners)
    if parts is None:
        plan.problems.append(f"`{entry}` gives a `state_dict` of another form than torch's optimizers.")
        return
    with decoding():
        saved = decode_optimizer(plan.saved.values[entry], plan.decode_json)
    if not _same_parameters(plan, entry, parts, saved.shapes):
        return
    options = _match_groups(plan, entry, parts, saved)
    numbers = {name: number for number, name in parts.names.items()}
    state = {numbers[name]: kept for name, kept in saved.state.items()}
    for name in plan.names_of(entry):
        words = name.split("/")  # entry, "state", module entry, parameter, key
        number = numbers.get("/".join(words[2:4])) if len(words) == 5 and words[1] == _STATE else None
        if number is not None:
            key = split_name(words[4])[0]
            live = parts.state.get(number, {}).get(key)
            state.setdefault(number, {})[key] = _fetch(plan, name, parts.parameters[number], live)
    plan.then(loading(entry, lambda: _load(optimizer, parts, state, options, saved.others)))


@dataclass(frozen=True, kw_only=True)
class SavedOptimizer:
    """What is kept of an optimizer besides its tensors, by the names of parameters."""

    shapes: dict[str, tuple[int, ...]]
    state: dict[str, dict[Any, Any]]
    groups: list[dict[str, Any]]
    others: dict[Any, Any]


def decode_optimizer(content: Json, decode: Callable[[Json], Any]) -> SavedOptimizer:
    """Return what `encode_optimizer` wrote; `decode` reads the values in it."""
    names: dict[int, str] = {number: name for number, name, _ in content["parameters"]}
    state: dict[str, dict[Any, Any]] = {names[number]: {} for number in content["stateful"]}
    for key, dtype, value, of in content["numbers"]:
        for number in of:  # a tensor for each: optimizers count in place
            state[names[number]][key] = torch.tensor(decode(value), dtype=parse_dtype(dtype), device="cpu")
    for number, kept in decode(content["rest"]).items():
        state[names[number]] |= kept
    groups: list[dict[str, Any]] = decode(content["groups"])
    for group in groups:
        group[_PARAMETERS] = [names[number] for number in group[_PARAMETERS]]
    return SavedOptimizer(
        shapes={name: tuple(shape) for _, name, shape in content["parameters"]},
        state=state,
        groups=groups,
        others=decode(content["others"]),
    )


def _read(optimizer: Any, owners: Mapping[int, str]) -> _Parts | None:
    whole: dict[Any, Any] = optimizer.state_dict()
    if not {_STATE, _GROUPS} <= set(whole):
        return None
    names: dict[int, str] = {}
    parameters: dict[int, Tensor] = {}
    for group, live in zip(whole[_GROUPS], optimizer.param_groups, strict=True):
        for number, parameter in zip(group[_PARAMETERS], live[_PARAMETERS], strict=True):
            # Without a module in the state that has it: its place in the order.
            names[number] = owners.get(id(parameter)) or f"#/{len(names)}"
            parameters[number] = parameter
    others = {key: value for key, value in whole.items() if key not in (_STATE, _GROUPS)}
    if any(number not in names for number in whole[_STATE]):
        return None
    return _Parts(
        names=names, parameters=parameters, state=whole[_STATE], groups=whole[_GROUPS], others=others
    )


def _same_parameters(
    plan: RestorePlan, entry: str, parts: _Parts, shapes: dict[str, tuple[int, ...]]
) -> bool:
    before = len(plan.problems)
    now = {parts.names[number]: tuple(parameter.shape) for number, parameter in parts.parameters.items()}
    for name, shape in now.items():
        if name not in shapes:
            plan.problems.append(
                f"`{entry}` has {len(now)} parameters now and {len(shapes)} in the checkpoint: "
                f"`{name}` is new."
            )
        elif shapes[name] != shape:
            plan.problems.append(
                f"`{entry}`: `{name}` is {list(shapes[name])} in the checkpoint and {list(shape)} now."
            )
    for name in shapes:
        if name not in now:
            plan.problems.append(
                f"`{entry}` has {len(now)} parameters now and {len(shapes)} in the checkpoint: "
                f"`{name}` is missing."
            )
    return len(plan.problems) == before


def _match_groups(
    plan: RestorePlan, entry: str, parts: _Parts, saved: SavedOptimizer
) -> list[dict[str, Any]]:
    """Return the saved options for each group of now: found by its parameters, not by its place."""
    home = {name: index for index, group in enumerate(saved.groups) for name in group[_PARAMETERS]}
    options = [
        {key: value for key, value in group.items() if key not in _MACHINE_OPTIONS} for group in saved.groups
    ]
    found: list[dict[str, Any]] = []
    for index, group in enumerate(parts.groups):
        homes = sorted({home[parts.names[number]] for number in group[_PARAMETERS]})
        if not homes:  # no parameters: it is what it is
            found.append({})
            continue
        if any(not _same_options(options[homes[0]], options[other]) for other in homes[1:]):
            sizes = [len(group[_PARAMETERS]) for group in saved.groups]
            plan.problems.append(
                f"`{entry}`: group {index} has parameters of the groups {homes} of the checkpoint (of "
                f"{sizes} parameters), which have other options."
            )
        found.append(options[homes[0]])
    return found


def _same_options(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return encode_value("", one, keep=_ignore) == encode_value("", other, keep=_ignore)


def _ignore(_: str, __: Tensor) -> None: ...


def _fetch(plan: RestorePlan, name: str, parameter: Tensor, live: Any) -> Tensor:
    """Return where to read state into: as the optimizer has it, else as it would make it."""
    _, shape = plan.saved.tensors[name]
    if isinstance(live, Tensor):
        return plan.fetch(name, live=live, like=live)
    if len(shape) == 0 and parameter.dim() > 0:
        return plan.fetch(name)  # a number; the optimizer moves it where it needs it
    if is_dtensor(parameter) and tuple(shape) != tuple(parameter.shape):
        return plan.fetch(name, live=_make_replicated(plan, name, parameter))
    return plan.fetch(name, like=parameter)


def _make_replicated(plan: RestorePlan, name: str, parameter: Any) -> Tensor:
    """Return a DTensor of another shape than its parameter's, such as Adafactor's rows and columns."""
    from torch.distributed.tensor import DTensor, Replicate

    dtype, shape = plan.saved.tensors[name]
    local = make_empty(parse_dtype(dtype), tuple(shape), like=parameter.to_local())
    mesh = parameter.device_mesh
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _load(
    optimizer: Any,
    parts: _Parts,
    state: dict[int, dict[Any, Any]],
    options: list[dict[str, Any]],
    others: dict[Any, Any],
) -> None:
    live_tensors = [
        {key: value for key, value in group.items() if isinstance(value, Tensor)} for group in parts.groups
    ]
    groups = [
        {**group, **{key: _as_kept(value, group.get(key)) for key, value in chosen.items()}}
        for group, chosen in zip(parts.groups, options, strict=True)
    ]
    optimizer.load_state_dict({**others, _STATE: state, _GROUPS: groups})
    for group, chosen, live in zip(optimizer.param_groups, groups, live_tensors, strict=True):
        for key, tensor in live.items():
            # The same object again, such as a learning rate that a compiled step or a scheduler holds.
            with torch.no_grad():
                tensor.copy_(torch.as_tensor(chosen[key], device=tensor.device))
            group[key] = tensor
    if _load_of(type(optimizer)) is _load_of(torch.optim.Optimizer):
        _keep_dtypes(optimizer, parts, state)


def _load_of(kind: Any) -> Any:
    return kind.load_state_dict


def _as_kept(saved: Any, live: Any) -> Any:
    number = isinstance(saved, Tensor) and saved.dim() == 0 and not isinstance(live, Tensor)
    return cast("Tensor", saved).item() if number else saved


def _keep_dtypes(optimizer: Any, parts: _Parts, state: dict[int, dict[Any, Any]]) -> None:
    """Undo torch's cast of state to its parameter's dtype: float32 moments of a bfloat16 model stay so."""
    for number, kept in state.items():
        now = optimizer.state[parts.parameters[number]]
        for key, value in kept.items():
            if key != "step" and isinstance(value, Tensor) and now[key].dtype != value.dtype:
                now[key] = value.to(now[key].device)
