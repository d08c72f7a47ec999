"""A checkpoint as a tree that other tools know, read from outside of its gang: `state_dict`s by entry.

The tree is there at once, with a placeholder for each tensor; tensors are fetched when they are asked for, a
batch at a time, so a checkpoint may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prefect_torch_elastic.checkpoint.entries import Kind
from prefect_torch_elastic.checkpoint.filling import TIED
from prefect_torch_elastic.checkpoint.layout import Piece
from prefect_torch_elastic.checkpoint.manifest import render_folder
from prefect_torch_elastic.checkpoint.optimizers import decode_optimizer
from prefect_torch_elastic.checkpoint.reader import SavedCheckpoint, fetch_checkpoint, read_tensors
from prefect_torch_elastic.checkpoint.retention import pin
from prefect_torch_elastic.checkpoint.tensors import parse_dtype
from prefect_torch_elastic.checkpoint.values import (
    ENTRIES,
    Json,
    decode_value,
    is_tagged,
    join_name,
    split_name,
)
from prefect_torch_elastic.checkpoint.verify import Progress
from prefect_torch_elastic.errors import CheckpointError
from prefect_torch_elastic.runlog import Commit, RunLog
from prefect_torch_elastic.store import Store

BATCH_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Tree:
    """What a checkpoint holds, as other tools write it.

    Attributes:
        entries: Key of the state -> a module's `state_dict` by plain names, an optimizer's by names of
            parameters, a tensor, or a value; tensors are placeholders on the `meta` device.
        kinds: Key of the state -> how it was saved.
        left_out: Sentences about what is not there.
    """

    entries: dict[str, Any]
    kinds: dict[str, str]
    left_out: list[str]


class Archive:
    """One checkpoint, open for reading.

    Args:
        store: Where it is.
        saved: Its manifests.
        progress: Gets the bytes of tensors as they are fetched.
    """

    def __init__(self, store: Store, saved: SavedCheckpoint, progress: Progress | None = None) -> None:
        self._store, self._progress = store, progress
        self.saved = saved
        self._names: dict[int, str] = {}  # id of a placeholder -> flat name
        self._placeholders: dict[str, Tensor] = {}
        self._batch: dict[str, Tensor] = {}
        self._homes: dict[str, tuple[int, int, int]] = {}
        self._ahead: list[str] = []  # what will be asked for, last first

    @property
    def size_bytes(self) -> int:
        """The tensors together."""
        return sum(self.placeholder(name).nbytes for name in self.saved.manifest.tensors)

    def placeholder(self, name: str) -> Tensor:
        """Return a tensor without values for a flat name; `fetch` knows it."""
        if name not in self._placeholders:
            entry = self.saved.manifest.tensors.get(name)
            if entry is None:
                raise CheckpointError(f"the checkpoint names the tensor `{name}`, which it does not have.")
            tensor = torch.empty(entry.shape, dtype=parse_dtype(entry.dtype), device="meta")
            self._placeholders[name] = tensor
            self._names[id(tensor)] = name
        return self._placeholders[name]

    def expect(self, tensors: Sequence[Tensor]) -> None:
        """Say in which order tensors will be fetched, so that small ones come together."""
        names = (self._names[id(tensor)] for tensor in tensors if id(tensor) in self._names)
        self._ahead = list(dict.fromkeys(names))[::-1]

    def find_home(self, tensor: Tensor) -> tuple[int, int, int]:
        """Return where a tensor's bytes begin: in this order each block is read about once."""
        if not self._homes:
            for rank in self.saved.ranks:
                for chunk in rank.chunks:
                    piece = chunk.pieces[0] if chunk.pieces else Piece(block=0, offset=0, length=0)
                    self._homes.setdefault(chunk.name, (rank.rank, piece.block, piece.offset))
        return self._homes.get(self._names.get(id(tensor), ""), (-1, 0, 0))

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return the values of a placeholder; any other tensor is returned as it is.

        Raises:
            DamagedError: If a block is missing or was changed.
            StoreError: If the store cannot be read.
        """
        name = self._names.get(id(tensor))
        if name is None:
            return tensor
        if name not in self._batch:
            self._read_batch(name)
        return self._batch[name]

    def _read_batch(self, name: str) -> None:
        names, size = [name], self.placeholder(name).nbytes
        if name in self._ahead:
            del self._ahead[self._ahead.index(name) :]
        while self._ahead and size + self.placeholder(self._ahead[-1]).nbytes <= BATCH_BYTES:
            names.append(self._ahead.pop())
            size += self.placeholder(names[-1]).nbytes
        self._batch = {}  # its memory goes first
        self._batch = {name: torch.empty_like(self.placeholder(name), device="cpu") for name in names}
        read_tensors(self._store, self.saved, self._batch)
        if self._progress:
            self._progress(size)

    def grow_tree(self) -> Tree:
        """Return everything that does not belong to a single rank.

        Raises:
            CheckpointError: If a value of the checkpoint is damaged.
        """
        kinds: dict[str, str] = dict(self.saved.manifest.values.get(ENTRIES, {}))
        tree = Tree(entries={}, kinds=kinds, left_out=[])
        modules = [key for key, kind in kinds.items() if kind == Kind.MODULE]
        for key, kind in kinds.items():
            try:
                match kind:
                    case Kind.MODULE:
                        tree.entries[key] = self._grow_module(key, tree)
                    case Kind.OPTIMIZER:
                        tree.entries[key] = self._grow_optimizer(key, modules)
                    case Kind.PER_RANK | Kind.MERGED:
                        tree.left_out.append(f"`{key}`: it belongs to single ranks")
                    case Kind.TENSOR:
                        tree.entries[key] = self.placeholder(_entry(key))
                    case _:
                        tree.entries[key] = self._decode(self.saved.manifest.values[_entry(key)])
            except CheckpointError as error:  # mostly a class that is not imported here
                tree.left_out.append(f"`{key}`: {error}")
            except (KeyError, TypeError) as error:
                raise CheckpointError(
                    f"the entry `{key}` of the checkpoint is damaged: {type(error).__name__}: {error}."
                ) from error
        tree.left_out.append("the random state: it belongs to single ranks")
        return tree

    def _decode(self, json: Json) -> Any:
        return decode_value(json, fetch=self.placeholder)

    def _grow_module(self, key: str, tree: Tree) -> dict[str, Any]:
        """Return a module's state_dict; tied parameters are there under each of their names."""
        manifest, prefix = self.saved.manifest, f"{_entry(key)}/"
        grown: dict[str, Any] = {}
        for name in manifest.tensors:
            if name.startswith(prefix) and name.count("/") == 1:
                grown[split_name(name)[1]] = self.placeholder(name)
        for name, json in manifest.values.items():
            if not name.startswith(prefix) or name.count("/") != 1:
                continue
            plain = split_name(name)[1]
            if is_tagged(json, TIED):
                grown[plain] = self.placeholder(json["n"])
                continue
            try:
                grown[plain] = self._decode(json)
            except CheckpointError as error:
                tree.left_out.append(f"`{plain}` of `{key}`: {error}")
        return grown

    def _grow_optimizer(self, key: str, modules: Sequence[str]) -> dict[str, Any]:
        """Return what torch's `get_optimizer_state_dict` would: `state` and `param_groups` by names."""
        saved = decode_optimizer(self.saved.manifest.values[_entry(key)], self._decode)
        state = saved.state
        for name in self.saved.manifest.tensors:
            words = name.split("/")
            if len(words) == 5 and words[:2] == [_entry(key), "state"]:
                state.setdefault("/".join(words[2:4]), {})[split_name(words[4])[0]] = self.placeholder(name)
        homes = {name.split("/")[0] for name in saved.shapes}
        alone = len(homes & {_entry(module) for module in modules}) == 1
        groups: list[dict[str, Any]] = [
            {**group, "params": [_plain(name, alone=alone) for name in group["params"]]}
            for group in saved.groups
        ]
        return {
            "state": {_plain(name, alone=alone): kept for name, kept in state.items()},
            "param_groups": groups,
        }


@contextmanager
def open_archive(
    store: Store, run_folder: str, commit: Commit, *, progress: Progress | None = None
) -> Generator[Archive]:
    """Give a checkpoint for reading; nobody removes its data meanwhile.

    Args:
        store: Where it is.
        run_folder: The run's folder there.
        commit: The checkpoint, from the run's log.
        progress: Gets the bytes of tensors as they are fetched.

    Raises:
        CheckpointError: If it was pruned in the meantime.
        DamagedError: If its manifests are damaged.
        StoreError: If the store cannot be read.
    """
    with pin(store, run_folder, commit.uuid):
        state = RunLog(store, run_folder).refresh()
        if commit.uuid in state.pruned:
            raise CheckpointError(
                f"the checkpoint of step {commit.step} was pruned in the meantime. Take a newer one."
            )
        folder = f"{run_folder}/{render_folder(commit.step, commit.uuid)}"
        saved = fetch_checkpoint(store, folder, checksum=commit.manifest_crc32c)
        yield Archive(store, saved, progress)


def _entry(key: str) -> str:
    return join_name("", key)


def _plain(name: str, *, alone: bool) -> str | int:
    """Return a parameter's name in its module, behind the module's key unless that is the only one."""
    if name.startswith("#/"):  # a parameter of no module in the state: its place in the order
        return int(name[2:])
    home, own = split_name(name)
    return own if alone else f"{home}.{own}"
