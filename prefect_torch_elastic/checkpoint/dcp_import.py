"""A directory of torch's distributed checkpoint (DCP) becomes the first checkpoint of a run.

What it holds is told apart by its form: a dictionary of tensors is a module, one with `state` and
`param_groups` an optimizer, any other one an object with `state_dict`. It is in memory once meanwhile.
"""

from __future__ import annotations

import io
import secrets
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from prefect_torch_elastic.checkpoint.blocks import LiveBlocks
from prefect_torch_elastic.checkpoint.dcp_metadata import read_metadata
from prefect_torch_elastic.checkpoint.entries import Kind
from prefect_torch_elastic.checkpoint.ledger import Contents, Ledger
from prefect_torch_elastic.checkpoint.manifest import STEPS_LIMIT, render_folder
from prefect_torch_elastic.checkpoint.optimizers import snap_optimizer
from prefect_torch_elastic.checkpoint.plan import LocalPlan, make_offer, share_out
from prefect_torch_elastic.checkpoint.randomness import RANDOM, encode_random_state
from prefect_torch_elastic.checkpoint.saving import SaveOrder
from prefect_torch_elastic.checkpoint.snapshot import Snapshot
from prefect_torch_elastic.checkpoint.values import ENTRIES, encode_value, join_name
from prefect_torch_elastic.checkpoint.writer import Share, write_rank
from prefect_torch_elastic.errors import CheckpointError
from prefect_torch_elastic.runlog import Commit, RunLog
from prefect_torch_elastic.spec import CheckpointPolicy
from prefect_torch_elastic.store import Store, probe_store

_BATCHES = ("state.", "param_groups.")  # how an optimizer's names begin when it was flattened


def import_dcp(
    path: Path, store: Store, run_folder: str, *, step: int, key: str = "model"
) -> tuple[Commit, list[str]]:
    """Commit a DCP directory as a checkpoint of a run that has none, and say what is left out.

    Args:
        path: The directory.
        store: Where the run is to be.
        run_folder: The run's folder there, from `runkey.name_folder`.
        step: How many optimizer steps it has completed.
        key: Entry of the state for a directory that holds a bare `state_dict` of a module.

    Raises:
        CheckpointError: If the directory is none of DCP's, is damaged or names code, if the step is none, or
            if the run has checkpoints already.
        StoreError: If the store cannot be written.
    """
    if type(step) is not int or not 0 <= step < STEPS_LIMIT:
        raise CheckpointError(f"`step={step}` is no number of completed steps. Pass 0 or more.")
    probe_store(store)  # before anything is read
    log = RunLog(store, run_folder)
    state = log.refresh()
    if state.all_commits:
        raise CheckpointError(
            f"the run `{run_folder}` has checkpoints already. Import into a run of its own: pass another key."
        )
    started = time.monotonic()
    left_out = ["the random state: it begins anew"]
    snapshot = _take_apart(_grow_tree(path, key), left_out)
    _commit(store, run_folder, snapshot, step=step, attempt=state.attempts, started=started)
    return log.refresh().commits[0], left_out


def _commit(
    store: Store, run_folder: str, snapshot: Snapshot, *, step: int, attempt: int, started: float
) -> None:
    """Save as a gang of one rank does, in the attempt that the run has reached."""
    ledger = Ledger(
        *(store, run_folder), policy=CheckpointPolicy(keep_last=10**9), attempt=attempt, by="import", call=""
    )
    plan = LocalPlan(snapshot.tensors)
    kept, tensors = share_out(
        [make_offer(plan, snapshot.tensors, values=snapshot.values, equal=frozenset())],
        leader_only=frozenset(),
    )
    parts = plan.parts(kept[0])
    order = SaveOrder(number=0, previous=0, step=step, uuid=f"{ledger.enter():06}-{secrets.token_hex(8)}")
    share = Share(parts=parts, blocks=LiveBlocks(parts), values=snapshot.rank_values)
    signed = write_rank(store, f"{run_folder}/{render_folder(step, order.uuid)}", share, rank=0)
    contents = Contents(tensors=tensors, values=snapshot.values)
    ledger.commit(order, contents, [signed], time.monotonic() - started)


# ---------------------------------------------------------------- reading


class _Reader(FileSystemReader):
    """Reads with the metadata that was checked, instead of unpickling it."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        cast("Any", super()).__init__(path)
        self._checked = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._checked


class _Planner(DefaultLoadPlanner):
    """Loads values as data: a pickle that names code is refused."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            cast("Any", self).state_dict[name] = torch.load(value, weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"`{name}` of the DCP checkpoint is a pickle of other things than data, and is not loaded: "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
            ) from error


def _grow_tree(path: Path, key: str) -> dict[str, Any]:
    metadata = read_metadata(path)
    flat: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        tensor = isinstance(entry, TensorStorageMetadata)
        flat[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu") if tensor else None
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            cast("Any", state_dict_loader).load(
                flat, storage_reader=_Reader(path, metadata), planner=planner, no_dist=True
            )
    except CheckpointException as error:  # torch wraps everything, also an interrupt
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, CheckpointError) or not isinstance(cause, Exception):
            raise cause from None
        raise CheckpointError(f"`{path}` cannot be read: {type(cause).__name__}: {cause}") from cause
    given = cast("object", metadata.planner_data)
    paths = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    tree: dict[Any, Any] = {}
    for name, value in flat.items():
        _place(tree, paths.get(name) or (name,), value)
    tree = _with_lists(tree)
    if all(isinstance(value, Tensor) for value in tree.values()) and any("." in name for name in tree):
        return {key: tree}
    return tree


def _place(tree: dict[Any, Any], path: Any, value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(cast("object", tree), dict):
            name = ".".join(str(part) for part in path)
            raise CheckpointError(f"the DCP checkpoint has both `{name}` and something that it lies in.")
    tree[path[-1]] = value


def _with_lists(value: Any) -> Any:
    """Return the tree with lists where the paths had numbers."""
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) for key, item in cast("dict[Any, Any]", value).items()}
    if items and all(type(key) is int for key in items):
        return [items[key] for key in sorted(items)]
    return items


# ---------------------------------------------------------------- taking apart


def _take_apart(tree: Mapping[str, Any], left_out: list[str]) -> Snapshot:
    snapshot = Snapshot()
    kinds = {str(key): _find_kind(value) for key, value in tree.items()}
    modules = {key: tree[key] for key, kind in kinds.items() if kind is Kind.MODULE}
    for key, kind in list(kinds.items()):
        entry, value = join_name("", key), tree[key]
        match kind:
            case Kind.MODULE:
                for name, item in value.items():
                    _keep(snapshot, join_name(entry, name), item)
            case Kind.OPTIMIZER:
                if problem := _keep_optimizer(snapshot, entry, value, modules):
                    left_out.append(f"`{key}`: {problem}")
                    del kinds[key]
            case Kind.TENSOR:
                snapshot.keep(entry, value)
            case _:
                snapshot.values[entry] = encode_value(entry, value, keep=snapshot.keep)
    if not kinds:
        raise CheckpointError("the DCP checkpoint holds nothing that a run could load.")
    snapshot.values[ENTRIES] = {key: str(kind) for key, kind in kinds.items()}
    snapshot.rank_values[RANDOM] = encode_random_state()
    return snapshot


def _find_kind(value: Any) -> Kind:
    if isinstance(value, Tensor):
        return Kind.TENSOR
    if not isinstance(value, dict):
        return Kind.VALUE
    items = cast("dict[str, Any]", value)
    if "param_groups" in items or any(name.startswith(_BATCHES) for name in items):
        return Kind.OPTIMIZER
    flat = not any(isinstance(item, dict) for item in items.values())
    if flat and any(isinstance(item, Tensor) for item in items.values()):
        return Kind.MODULE
    return Kind.OBJECT


def _keep(snapshot: Snapshot, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        snapshot.keep(name, value)
    else:
        snapshot.values[name] = encode_value(name, value, keep=snapshot.keep)


@dataclass(frozen=True, kw_only=True)
class _SavedOptimizer:
    """An optimizer as `snap_optimizer` sees it: parameters, and state and groups by their numbers."""

    state: dict[int, Any]
    groups: list[dict[str, Any]]
    param_groups: list[dict[str, Any]]

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state, "param_groups": self.groups}


def _keep_optimizer(
    snapshot: Snapshot, entry: str, value: Mapping[str, Any], modules: Mapping[str, Mapping[str, Any]]
) -> str:
    """Add an optimizer whose parameters have names; return why it cannot be added, empty if it was."""
    cure = "save it with `get_optimizer_state_dict(model, optimizer)`, without flattening it"
    if "param_groups" not in value:
        return f"its names are flattened; {cure}"
    parameters: dict[str, Tensor] = {}
    for key, module in modules.items():
        for name, item in module.items():
            if isinstance(item, Tensor):
                parameters.setdefault(name, item)
                snapshot.owners.setdefault(id(item), join_name(join_name("", key), name))
    state: dict[Any, Any] = value.get("state", {})
    names = [name for group in value["param_groups"] for name in group["params"]]
    if missing := [name for name in [*names, *state] if name not in parameters]:
        return f"its parameter `{missing[0]}` is in no module of the checkpoint; {cure}"
    numbers = {name: number for number, name in enumerate(names)}
    saved = _SavedOptimizer(
        state={numbers[name]: kept for name, kept in state.items()},
        groups=[
            {**group, "params": [numbers[name] for name in group["params"]]}
            for group in value["param_groups"]
        ],
        param_groups=[
            {"params": [parameters[name] for name in group["params"]]} for group in value["param_groups"]
        ],
    )
    return "" if snap_optimizer(snapshot, entry, saved) else "it has another form than torch's optimizers"
