"""What a directory of torch's distributed checkpoint says about itself, read without running what it names.

Its `.metadata` is a pickle, and torch loads it with no check: a pickle may call anything. Here it may name
torch's classes for metadata, and nothing else.
"""

from __future__ import annotations

import math
import pickle
import re
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from prefect_torch_elastic.errors import CheckpointError

FILE = ".metadata"
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch": frozenset({"Size"}),  # and dtypes
    "torch.serialization": frozenset({"_get_layout"}),  # looks up a name
    "pathlib": frozenset({"PosixPath", "PurePosixPath"}),
    "collections": frozenset({"OrderedDict"}),
}
_CURE = "Copy the directory again from where it was saved."
_FILE_NAME = re.compile(r"[^/\\\x00]+")


def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of a DCP directory.

    Raises:
        CheckpointError: If there is none, or it names anything but torch's metadata.
    """
    path = folder / FILE
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"`{folder}` is no complete DCP checkpoint: it has no `{FILE}`. Name the directory that "
            "`torch.distributed.checkpoint.save` wrote."
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"`{path}` cannot be read: {type(error).__name__}: {error}.") from error
    if not isinstance(metadata, Metadata) or not isinstance(cast("object", metadata.storage_data), dict):
        raise CheckpointError(f"`{path}` holds a `{type(metadata).__name__}`, not torch's `Metadata`.")
    for info in metadata.storage_data.values():
        name = getattr(info, "relative_path", None)
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or name in {".", ".."}:
            raise CheckpointError(f"`{path}` names the file {name!r}, which is not in its directory.")
    _demand_plausible(folder, metadata)
    return metadata


def _demand_plausible(folder: Path, metadata: Metadata) -> None:
    """Refuse tensors that the files cannot hold: memory is taken for them before anything is read."""
    left = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        size, dtype = cast("Any", entry.size), entry.properties.dtype
        if not isinstance(size, torch.Size) or min(size, default=0) < 0:
            raise CheckpointError(f"`{name}` of the DCP checkpoint is damaged: its size is {size!r}. {_CURE}")
        left -= math.prod(size) * dtype.itemsize
        if left < 0:
            raise CheckpointError(
                f"`{name}` of the DCP checkpoint is damaged: its size, {list(size)} of {dtype}, is more than "
                f"the files of `{folder}` hold. {_CURE}"
            )


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name in _ALLOWED.get(module_name, ()):
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(dtype := getattr(torch, global_name, None), torch.dtype):
            return dtype
        raise CheckpointError(
            f"the metadata of the DCP checkpoint names `{module_name}.{global_name}`, which is no "
            "metadata of torch: it is not loaded. See who wrote this checkpoint before you load it elsewhere."
        )
