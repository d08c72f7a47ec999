"""One file of a checkpoint, for evaluation or serving: safetensors, or what `torch.save` writes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, assert_never, cast

import torch
from torch import Tensor

from prefect_torch_elastic.checkpoint.archive import Archive, Tree, open_archive
from prefect_torch_elastic.checkpoint.blocks import view_bytes
from prefect_torch_elastic.checkpoint.entries import Kind
from prefect_torch_elastic.checkpoint.export import keep_plain
from prefect_torch_elastic.checkpoint.placing import place_file
from prefect_torch_elastic.checkpoint.verify import Progress
from prefect_torch_elastic.errors import CheckpointError
from prefect_torch_elastic.runlog import Commit
from prefect_torch_elastic.store import Store

Format: TypeAlias = Literal["safetensors", "torch"]
_SAFETENSORS_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}


def consolidate(
    store: Store,
    run_folder: str,
    commit: Commit,
    path: Path,
    *,
    format: Format = "safetensors",
    optimizer: bool = False,
    key: str | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Write the modules of a checkpoint to one file, and return sentences about what is left out.

    Tensors have the names of the module's own `state_dict`; with several entries in the file, the key of the
    entry stands before. Tied parameters are there under each of their names.

    Args:
        store: Where the checkpoint is.
        run_folder: The run's folder there.
        commit: The checkpoint, from the run's log.
        path: The file; it appears whole, or not at all.
        format: `safetensors` is written a batch of tensors at a time; `torch` needs all of them in memory,
            and holds a `state_dict` for `torch.load(weights_only=True)`.
        optimizer: Also the state of the optimizers.
        key: Only this entry of the state; by default all modules.
        progress: Gets the bytes of tensors as they are fetched.

    Raises:
        CheckpointError: If the checkpoint is damaged or was pruned, has no such entry or a dtype that the
            format does not know, or if `path` exists or cannot be written.
        StoreError: If the store cannot be read.
    """
    with open_archive(store, run_folder, commit, progress=progress) as archive, place_file(path) as temporary:
        left_out: list[str] = []
        entries = _choose(archive.grow_tree(), key=key, optimizer=optimizer, left_out=left_out)
        content = next(iter(entries.values())) if len(entries) == 1 else entries
        _write(format, archive, content, temporary, left_out)
        return left_out


def _write(format: Format, archive: Archive, content: Any, path: Path, left_out: list[str]) -> None:
    match format:
        case "safetensors":
            _write_safetensors(archive, content, path, left_out)
        case "torch":
            _write_torch(archive, content, path, left_out)
        case _:
            assert_never(format)


def _choose(tree: Tree, *, key: str | None, optimizer: bool, left_out: list[str]) -> dict[str, Any]:
    wanted = {Kind.MODULE, Kind.OPTIMIZER} if optimizer else {Kind.MODULE}
    chosen = {name: value for name, value in tree.entries.items() if tree.kinds[name] in wanted}
    if key is not None:
        if key not in tree.entries:
            have = ", ".join(f"`{name}`" for name in tree.entries)
            raise CheckpointError(f"the checkpoint has no entry `{key}`. It has {have}.")
        others = {name: value for name, value in chosen.items() if tree.kinds[name] == Kind.OPTIMIZER}
        chosen = {key: tree.entries[key], **others}
    about = [f"`{name}`" for name in tree.kinds]
    left_out += [sentence for sentence in tree.left_out if any(name in sentence for name in about)]
    if not chosen:
        have = ", ".join(f"`{name}`" for name in tree.entries)
        raise CheckpointError(f"the checkpoint has no module. Name an entry with `key`: {have}.")
    rest = [f"`{name}`" for name in tree.kinds if name not in chosen]
    if rest:
        left_out.append(f"the entries {', '.join(rest)}: they were not asked for")
    return chosen


def _write_torch(archive: Archive, content: Any, path: Path, left_out: list[str]) -> None:
    plain = keep_plain(content, "the state", left_out)
    tensors: list[Tensor] = [value for _, value in _list_leaves(plain) if isinstance(value, Tensor)]
    tensors = sorted({id(tensor): tensor for tensor in tensors}.values(), key=archive.find_home)
    archive.expect(tensors)
    values = {id(tensor): archive.fetch(tensor) for tensor in tensors}
    torch.save(_replace(plain, values), path)


def _replace(value: Any, values: Mapping[int, Tensor]) -> Any:
    if isinstance(value, Mapping):
        return {key: _replace(item, values) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list):
        return [_replace(item, values) for item in cast("list[Any]", value)]
    return values.get(id(value), value)


def _write_safetensors(archive: Archive, content: Any, path: Path, left_out: list[str]) -> None:
    tensors: dict[str, Tensor] = {}
    values: list[str] = []
    for name, value in _list_leaves(content):
        if isinstance(value, Tensor):
            tensors[name] = value
        else:
            values.append(name)
    if values:
        left_out.append(f"{len(values)} values such as `{values[0]}`: safetensors holds tensors only")
    # The largest elements first, so that each tensor begins at a multiple of its element.
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, archive.find_home(tensors[name])))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "step": str(archive.saved.manifest.step)}}
    end = 0
    for name in order:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        if tensor.dtype not in _SAFETENSORS_DTYPES:
            raise CheckpointError(
                f"`{name}` is `{tensor.dtype}`, which safetensors does not know. Write the file with "
                '`format="torch"`.'
            )
        dtype = _SAFETENSORS_DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    archive.expect([tensors[name] for name in order])
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            if tensors[name].nbytes:
                data = archive.fetch(tensors[name]).reshape(-1)
                file.write(view_bytes(data.view(torch.uint8)))


def _list_leaves(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Return each value that is no dictionary and no list, named by its path."""
    if isinstance(value, Mapping):
        pairs = list(cast("Mapping[Any, Any]", value).items())
    elif isinstance(value, list):
        pairs = list(enumerate(cast("list[Any]", value)))
    else:
        return [(name, value)]
    return [leaf for key, item in pairs for leaf in _list_leaves(item, f"{name}.{key}" if name else str(key))]
