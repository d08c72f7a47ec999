"""Where the bytes of blocks go: to the tensors themselves, or through memory that a batch holds for a while.

Whole rows of a tensor in host memory are read in place. What lies on a GPU, is not contiguous or is a share
of columns is read as whole rows first, and copied. That memory is bounded: a state on GPUs may be larger than
what the host has left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from prefect_torch_elastic.checkpoint.blocks import view_bytes
from prefect_torch_elastic.checkpoint.manifest import Block, Chunk, RankManifest
from prefect_torch_elastic.checkpoint.plan import SavedRegion

AT_ONCE = 4  # batches under way: the next are fetched while the oldest is waited for
_BATCH_BYTES = 64 << 20  # of copies: 8 blocks, so that all readers have work in four batches of 256 MiB


@dataclass(frozen=True, kw_only=True)
class Target:
    """Bytes of a block, from `offset` on, that belong at one place in memory."""

    offset: int
    memory: memoryview

    @property
    def end(self) -> int:
        return self.offset + len(self.memory)


@dataclass(kw_only=True)
class Fill:
    """One block that is needed, and where its bytes go."""

    rank: int
    index: int
    block: Block
    targets: list[Target] = field(default_factory=list[Target])


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Blocks to read, and what to copy when all of them are there: `(target, from)`."""

    fills: list[Fill]
    copies: list[tuple[Tensor, Tensor]]

    def copy(self) -> None:
        """Bring what was read beside its tensors to where it belongs."""
        with torch.no_grad():
            for target, source in self.copies:
                target.copy_(source)


def plan_batches(regions: Sequence[SavedRegion], ranks: Sequence[RankManifest]) -> Iterator[Batch]:
    """Yield what has to be read, a batch at a time: its memory is taken when it is asked for.

    Args:
        regions: What is needed of the chunks.
        ranks: The rank manifests, by rank.
    """
    batch: list[SavedRegion] = []
    size = 0
    for region in sorted(regions, key=lambda region: (region.rank, region.chunk, region.offsets)):
        for part in _split(region, ranks[region.rank].chunks[region.chunk]):
            needed = _count_copied(part, ranks[part.rank].chunks[part.chunk])
            if batch and size + needed > _BATCH_BYTES:
                yield _plan_fills(batch, ranks)
                batch, size = [], 0
            batch.append(part)
            size += needed
    if batch:
        yield _plan_fills(batch, ranks)


def _split(region: SavedRegion, chunk: Chunk) -> Iterator[SavedRegion]:
    """Cut a region whose copy would be larger than a batch between its rows."""
    copied = _count_copied(region, chunk)
    if copied <= _BATCH_BYTES:
        yield region
        return
    count = region.target.shape[0]
    step = max(1, _BATCH_BYTES // (copied // count))
    for first in range(0, count, step):
        offsets = (region.offsets[0] + first, *region.offsets[1:])
        yield replace(region, offsets=offsets, target=region.target[first : first + step])


def _plan_fills(regions: Sequence[SavedRegion], ranks: Sequence[RankManifest]) -> Batch:
    fills: dict[tuple[int, int], Fill] = {}
    copies: list[tuple[Tensor, Tensor]] = []
    for region in regions:
        chunk = ranks[region.rank].chunks[region.chunk]
        memory, start, copy = _prepare_target(region, chunk)
        if copy is not None:
            copies.append((region.target, copy))
        position = 0  # in the chunk's bytes
        for piece in chunk.pieces:
            first, last = max(position, start), min(position + piece.length, start + len(memory))
            if first < last:
                place = (region.rank, piece.block)
                if place not in fills:
                    block = ranks[region.rank].blocks[piece.block]
                    fills[place] = Fill(rank=region.rank, index=piece.block, block=block)
                offset = piece.offset + first - position
                target = Target(offset=offset, memory=memory[first - start : last - start])
                fills[place].targets.append(target)
            position += piece.length
    return Batch(fills=list(fills.values()), copies=copies)


def _prepare_target(region: SavedRegion, chunk: Chunk) -> tuple[memoryview, int, Tensor | None]:
    """Return memory for a region, the byte of the chunk that it begins with, and what to copy afterwards."""
    target, sizes = region.target, chunk.sizes
    row = math.prod(sizes[1:]) * target.element_size()
    start = region.offsets[0] * row if sizes else 0
    if _is_in_place(region, chunk):
        return _flat_bytes(target), start, None
    rows = _allocate_rows((*target.shape[:1], *sizes[1:]), target.dtype)
    copy = rows
    for dimension in range(1, len(sizes)):
        copy = copy.narrow(dimension, region.offsets[dimension], target.shape[dimension])
    return _flat_bytes(rows), start, copy


def _is_in_place(region: SavedRegion, chunk: Chunk) -> bool:
    target = region.target
    whole_rows = tuple(target.shape[1:]) == chunk.sizes[1:]
    return whole_rows and target.is_contiguous() and target.device.type == "cpu"


def _count_copied(region: SavedRegion, chunk: Chunk) -> int:
    if _is_in_place(region, chunk):
        return 0
    return math.prod((*region.target.shape[:1], *chunk.sizes[1:])) * region.target.element_size()


def _allocate_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


def _flat_bytes(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    return view_bytes(tensor.detach().view(-1).view(torch.uint8))
