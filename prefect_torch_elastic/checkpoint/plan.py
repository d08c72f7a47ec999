"""Who writes which part of which tensor, and which saved parts a rank reads: torch's planner, as plain data.

DCP's planner finds the parts of a DTensor, drops what several ranks hold, and maps saved parts onto any other
sharding. Its plans cross between ranks as JSON here, not as pickles, and its collectives are not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

import crc32c
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from prefect_torch_elastic.checkpoint.manifest import Manifest, RankManifest, TensorEntry
from prefect_torch_elastic.checkpoint.tensors import name_dtype, parse_dtype
from prefect_torch_elastic.errors import CheckpointError

HEAD_ELEMENTS = 256
HEAD_ROWS = 16
# What crosses between ranks: name, offsets, sizes, dtype, global shape, whether other ranks hold other parts.
PlanItem: TypeAlias = tuple[str, Sequence[int], Sequence[int], str, Sequence[int], bool]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a tensor on this rank: `data` is a view of the live tensor."""

    name: str
    offsets: tuple[int, ...]
    data: Tensor


@dataclass(frozen=True, kw_only=True)
class SavedRegion:
    """A box of one saved chunk, and the part of a live tensor that it fills.

    Attributes:
        rank: The rank whose manifest has the chunk.
        chunk: Its index there.
        offsets: Where the box starts in the chunk.
        target: A view of the live tensor; its shape is the box's.
    """

    rank: int
    chunk: int
    offsets: tuple[int, ...]
    target: Tensor


class Offer(TypedDict):
    """What one rank could write, as JSON.

    Attributes:
        items: Parts of tensors.
        names: Every name of the rank's state, of tensors and of plain values.
        heads: Checksums of the beginnings of whole tensors that training keeps equal on all ranks.
    """

    items: list[PlanItem]
    names: list[str]
    heads: dict[str, int]


class LocalPlan:
    """What this rank could write."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._planner = _save_planner()
        self.rebind(tensors)
        self._items = self._planner.create_local_plan().items

    def rebind(self, tensors: Mapping[str, Tensor]) -> None:
        """Use the plan for these tensors, which have the fingerprint of those before."""
        _set_up(self._planner, tensors)

    def render(self) -> list[PlanItem]:
        """Return the items of an offer."""
        return [_render(item) for item in self._items]

    def parts(self, kept: Sequence[int]) -> list[Part]:
        """Return what this rank writes: the items at these places."""
        return [_part(self._planner, self._items[index]) for index in kept]


def make_offer(
    plan: LocalPlan, tensors: Mapping[str, Tensor], *, values: Iterable[str], equal: Set[str]
) -> Offer:
    """Return what this rank tells rank 0.

    Args:
        plan: The plan for these tensors.
        tensors: The rank's tensors.
        values: Names of its plain values.
        equal: Names of whole tensors that should be equal on all ranks.
    """
    heads = {name: checksum_head(tensors[name]) for name in tensors if name in equal}
    return {"items": plan.render(), "names": [*tensors, *values], "heads": heads}


def checksum_head(tensor: Tensor) -> int:
    """Return the crc32c of up to `HEAD_ELEMENTS` elements from all over a tensor: cheap, also from a GPU."""
    if not tensor.numel():
        return 0
    head = tensor.detach()
    while head.dim() > 1:  # some rows of each dimension, without a copy of all
        head = head[:: max(1, head.shape[0] // HEAD_ROWS)][:HEAD_ROWS].flatten(0, 1)
    flat = head.reshape(-1)
    flat = flat[:: max(1, flat.numel() // HEAD_ELEMENTS)][:HEAD_ELEMENTS]
    plain = flat.resolve_conj().resolve_neg().cpu().contiguous()
    return crc32c.crc32c(plain.view(torch.uint8).numpy().tobytes())


def fingerprint(tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Return what a plan depends on: as long as it is equal, the plan of the last save still holds."""
    return tuple(
        (name, tensor.dtype, tensor.shape, getattr(tensor, "placements", None))
        for name, tensor in tensors.items()
    )


def share_out(
    offers: Sequence[Offer], *, leader_only: Set[str]
) -> tuple[list[list[int]], dict[str, TensorEntry]]:
    """Return which of its items each rank writes, so that each part is written once and all write alike.

    Args:
        offers: What each rank could write, by rank.
        leader_only: Tensors that rank 0 writes whenever it has them.

    Raises:
        CheckpointError: If ranks have other names, or different tensors under one name.
        ValueError: If the parts of a tensor overlap or leave a hole.
    """
    _check_names(offers)
    _check_alike([offer["items"] for offer in offers])
    places: list[list[int]] = []  # of the items that a rank may write
    for rank, offer in enumerate(offers):
        items = enumerate(offer["items"])
        places.append([place for place, item in items if not rank or item[0] not in leader_only])
    planner = _save_planner()
    _set_up(planner, {})
    given = [
        SavePlan([_parse(offer["items"][place]) for place in own])
        for offer, own in zip(offers, places, strict=True)
    ]
    shared, metadata = planner.create_global_plan(given)
    kept: list[list[int]] = []
    for offer, own, mine in zip(offers, places, shared, strict=True):
        wanted = {(item.index.fqn, tuple(item.index.offset or ())) for item in mine.items}
        kept.append([place for place in own if _place_of(offer["items"][place]) in wanted])
    tensors: dict[str, TensorEntry] = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        tensors[name] = TensorEntry(dtype=name_dtype(entry.properties.dtype), shape=tuple(entry.size))
    return kept, tensors


def find_unequal(offers: Sequence[Offer]) -> dict[str, int]:
    """Return tensors that should be equal on all ranks and are not, each with a rank that has another."""
    first = offers[0]["heads"]
    return {
        name: rank
        for rank, offer in reversed(list(enumerate(offers)))
        for name, head in offer["heads"].items()
        if first.get(name, head) != head
    }


def _place_of(item: PlanItem) -> tuple[str, tuple[int, ...]]:
    return item[0], tuple(item[1])


def _check_names(offers: Sequence[Offer]) -> None:
    """A checkpoint is loaded by names, so all ranks have the same."""
    first = set(offers[0]["names"])
    for rank, offer in enumerate(offers):
        if others := first.symmetric_difference(offer["names"]):
            name = min(others)
            has, lacks = (0, rank) if name in first else (rank, 0)
            raise CheckpointError(
                f"rank {has} saves `{name}`, and rank {lacks} has no such name. Save the same names on all "
                "ranks, and mark with `per_rank` what is another one on each. Stages of a pipeline cannot be "
                "saved yet."
            )


def _check_alike(plans: Sequence[Sequence[PlanItem]]) -> None:
    """A part is told by its name and place alone, so any rank might write it for all."""
    known: dict[str, tuple[int, str, list[int]]] = {}
    for rank, plan in enumerate(plans):
        for name, _, _, dtype, shape, _ in plan:
            first, *there = known.setdefault(name, (rank, dtype, list(shape)))
            if there != [dtype, list(shape)]:
                raise CheckpointError(
                    f"`{name}` is {there[0]} {there[1]} on rank {first} "
                    f"and {dtype} {list(shape)} on rank {rank}. "
                    "Build the same model on all ranks, or mark what is another one on each with `per_rank`."
                )


def plan_reads(
    tensors: Mapping[str, Tensor], manifest: Manifest, ranks: Sequence[RankManifest]
) -> list[SavedRegion]:
    """Return what has to be read to fill these tensors, however they are sharded now."""
    homes: dict[str, list[tuple[int, int]]] = {}
    metadata: dict[str, Any] = {}
    for saved in ranks:
        for index, chunk in enumerate(saved.chunks):
            if chunk.name not in tensors:
                continue
            entry = manifest.tensors[chunk.name]
            stored = metadata.setdefault(
                chunk.name,
                TensorStorageMetadata(
                    TensorProperties(dtype=parse_dtype(entry.dtype)), torch.Size(entry.shape), []
                ),
            )
            stored.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
            homes.setdefault(chunk.name, []).append((saved.rank, index))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _set_up(planner, tensors, Metadata(metadata))
    regions: list[SavedRegion] = []
    for item in planner.create_local_plan().items:
        rank, chunk = homes[item.storage_index.fqn][item.storage_index.index or 0]
        target = planner.resolve_tensor(item).detach()
        regions.append(
            SavedRegion(rank=rank, chunk=chunk, offsets=tuple(item.storage_offsets), target=target)
        )
    return regions


def _save_planner() -> DefaultSavePlanner:
    # names are flat already, and torch's plan cache overlooks dtypes
    return DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, enable_plan_caching=False
    )


def _set_up(planner: Any, tensors: Mapping[str, Tensor], metadata: Metadata | None = None) -> None:
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=False)


def _part(planner: DefaultSavePlanner, item: WriteItem) -> Part:
    data = planner.resolve_data(item)
    assert isinstance(data, Tensor)
    return Part(name=item.index.fqn, offsets=tuple(item.index.offset or ()), data=data)


def _render(item: WriteItem) -> PlanItem:
    data = item.tensor_data
    assert data is not None, "a state of tensors has no byte items"
    return (
        item.index.fqn,
        list(data.chunk.offsets),
        list(data.chunk.sizes),
        name_dtype(data.properties.dtype),
        list(data.size),
        item.type is WriteItemType.SHARD,
    )


def _parse(item: PlanItem) -> WriteItem:
    name, offsets, sizes, dtype, shape, sharded = item
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD if sharded else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
            properties=TensorProperties(dtype=parse_dtype(dtype)),
            size=torch.Size(shape),
        ),
    )
