"""A checkpoint as a plain directory of torch's distributed checkpoint (DCP), for every tool that reads those.

Module `model` becomes `model.0.weight` and so on, an optimizer what `get_optimizer_state_dict` names. A DCP
directory holds values as pickles, so only those go there that `torch.load(weights_only=True)` takes.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from prefect_torch_elastic.checkpoint.archive import Archive, open_archive
from prefect_torch_elastic.checkpoint.placing import place_folder
from prefect_torch_elastic.checkpoint.verify import Progress
from prefect_torch_elastic.runlog import Commit
from prefect_torch_elastic.store import Store

_FILE_BYTES = 256 << 20  # torch's writer keeps all tensors of a file in memory until it is written


def export_dcp(
    store: Store, run_folder: str, commit: Commit, path: Path, *, progress: Progress | None = None
) -> list[str]:
    """Write a checkpoint as a DCP directory and return sentences about what is left out.

    Args:
        store: Where the checkpoint is.
        run_folder: The run's folder there.
        commit: The checkpoint, from the run's log.
        path: The directory; it appears whole, or not at all.
        progress: Gets the bytes of tensors as they are fetched.

    Raises:
        CheckpointError: If the checkpoint is damaged or was pruned, or `path` exists or cannot be written.
        StoreError: If the store cannot be read.
    """
    with open_archive(store, run_folder, commit, progress=progress) as archive, place_folder(path) as folder:
        tree = archive.grow_tree()
        left_out = tree.left_out
        kept = {key: keep_plain(value, f"`{key}`", left_out) for key, value in tree.entries.items()}
        state = {key: value for key, value in kept.items() if value is not NOTHING}
        state.setdefault("step", archive.saved.manifest.step)
        writer = _Writer(folder, thread_count=1, sync_files=False)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                cast("Any", state_dict_saver).save(
                    state, storage_writer=writer, planner=_Planner(archive), no_dist=True
                )
        except CheckpointException as error:  # torch wraps everything, also an interrupt
            raise next(iter(error.failures.values()))[0] from None
        return left_out


class _Planner(DefaultSavePlanner):
    """Fetches a tensor when it is written."""

    def __init__(self, archive: Archive) -> None:
        super().__init__(enable_plan_caching=False)
        self._archive = archive

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data: Any = super().resolve_data(write_item)
        return self._archive.fetch(data) if isinstance(data, Tensor) else data

    def sort(self, items: list[WriteItem]) -> list[WriteItem]:
        """Return the items as their bytes lie in the store; they are fetched in this order then."""
        values = [item for item in items if not isinstance(self.lookup_object(item.index), Tensor)]
        tensors = [item for item in items if isinstance(self.lookup_object(item.index), Tensor)]
        tensors.sort(key=lambda item: self._archive.find_home(self.lookup_object(item.index)))
        self._archive.expect([self.lookup_object(item.index) for item in tensors])
        return [*values, *tensors]


class _Writer(FileSystemWriter):
    """Writes several files, one after the other, so that one file's tensors are in memory at a time."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert isinstance(planner, _Planner)
        results: list[WriteResult] = []
        prefix: Any = type(cast("object", plan.storage_data))
        for number, items in enumerate(_split(planner.sort(plan.items))):
            part = replace(plan, items=items, storage_data=prefix(f"__{number}_"))
            results += super().write_data(part, planner).wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def keep_plain(value: Any, name: str, left_out: list[str]) -> Any:
    """Return `value` without the parts that need pickled code; what is left out is noted."""
    if isinstance(value, Mapping):
        kept: dict[Any, Any] = {}
        for key, item in cast("Mapping[Any, Any]", value).items():
            part = keep_plain(item, f"{name}, `{key}`", left_out)
            if part is not NOTHING:
                kept[key] = part
        return kept
    if isinstance(value, list):
        items = [keep_plain(item, name, left_out) for item in cast("list[Any]", value)]
        return items if all(item is not NOTHING for item in items) else NOTHING
    if isinstance(value, Tensor) or _is_plain(value):
        return value
    left_out.append(f"{name}: a `{type(value).__name__}` would be pickled code")
    return NOTHING


NOTHING: Any = object()  # instead of a value that is left out


def _is_plain(value: Any) -> bool:
    """Whether a value comes back from a pickle that may name no code but torch's."""
    buffer = io.BytesIO()
    try:
        if any(isinstance(item, Tensor) for item in _inner(value)):
            return False  # it would be a placeholder
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:  # noqa: BLE001  (any error of a class of the user's)
        return False
    return True


def _inner(value: Any) -> list[Any]:
    if isinstance(value, (tuple, set, frozenset)):
        return [leaf for item in cast("tuple[Any, ...]", value) for leaf in _inner(item)]
    return [value]


def _split(items: list[WriteItem]) -> list[list[WriteItem]]:
    """Return the items of each file."""
    files: list[list[WriteItem]] = [[]]
    size = 0
    for item in items:
        data = item.tensor_data
        item_size = data.chunk.sizes.numel() * data.properties.dtype.itemsize if data else 0
        if files[-1] and size + item_size > _FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(item)
        size += item_size
    return files
