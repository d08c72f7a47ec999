"""The bytes of a save: taken from live tensors without a copy, or from a copy that training may outrun.

Pages that were touched before are copied eleven times as fast as fresh ones, so every buffer here is kept and
used again.
"""

from __future__ import annotations

import queue
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from prefect_torch_elastic.checkpoint.layout import BLOCK_BYTES, Layout, Piece, lay_out
from prefect_torch_elastic.checkpoint.plan import Part

_SLAB_BLOCKS = 32  # 256 MiB
PACKING_BUFFERS = 8  # 64 MiB: what a save straight from the tensors may use besides them


class Blocks(Protocol):
    """The blocks of one rank's save."""

    @property
    def layout(self) -> Layout: ...

    def read(self, index: int) -> AbstractContextManager[memoryview]:
        """Return the bytes of one block; they stay as they are inside the `with`."""
        ...


class LiveBlocks:
    """Blocks of tensors that nobody changes meanwhile: large ones are sent from where they are."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._pinned = any(part.data.is_cuda for part in parts)
        self._sources = [_flat_source(part.data) for part in parts]
        wait_for_devices(parts)  # for copies too, and here, where the training's streams are the current ones
        self.layout = lay_out([source.numel() for source in self._sources])
        self._pieces: list[list[tuple[Tensor, int, Piece]]] = [[] for _ in self.layout.block_sizes]
        for source, pieces in zip(self._sources, self.layout.pieces, strict=True):
            start = 0
            for piece in pieces:
                self._pieces[piece.block].append((source, start, piece))
                start += piece.length
        self._spare: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        for _ in range(PACKING_BUFFERS):
            self._spare.put(None)

    @contextmanager
    def read(self, index: int) -> Generator[memoryview]:
        pieces = self._pieces[index]
        source, start, piece = pieces[0]
        if len(pieces) == 1 and source.device.type == "cpu":
            yield view_bytes(source[start : start + piece.length])
            return
        buffer = self._spare.get()  # waits for another block to be sent
        try:
            if buffer is None:
                buffer = allocate(BLOCK_BYTES, pinned=self._pinned)
            buffer[: self.layout.block_sizes[index]].zero_()  # the gaps between pieces
            for source, start, piece in pieces:
                buffer[piece.offset : piece.offset + piece.length].copy_(source[start : start + piece.length])
            yield view_bytes(buffer[: self.layout.block_sizes[index]])
        finally:
            self._spare.put(buffer)


class StagedBlocks:
    """A copy of the tensors, laid out as blocks; taken by `Arena.stage`."""

    def __init__(self, memory: Sequence[Tensor], layout: Layout) -> None:
        self.layout = layout
        self._memory = memory

    @contextmanager
    def read(self, index: int) -> Generator[memoryview]:
        yield view_bytes(self._memory[index])


class Arena:
    """Host memory for one staged save, allocated once; pinned if it is copied to from a GPU.

    It is made of slabs, because torch rounds pinned memory up to a power of two.
    """

    def __init__(self) -> None:
        self._slabs: list[Tensor] = []

    def stage(self, parts: Sequence[Part]) -> StagedBlocks:
        """Copy the tensors and return the copy; the one before must have been sent."""
        layout = lay_out([part.data.numel() * part.data.element_size() for part in parts])
        memory = self._provide(layout.block_sizes, pinned=any(part.data.is_cuda for part in parts))
        for part, pieces in zip(parts, layout.pieces, strict=True):
            if len(pieces) == 1:
                place = slice(pieces[0].offset, pieces[0].offset + pieces[0].length)
                target = memory[pieces[0].block][place].view(part.data.dtype).view(part.data.shape)
                target.copy_(part.data, non_blocking=part.data.is_cuda)
                continue
            source, start = _flat_source(part.data), 0
            for piece in pieces:  # a block of its own each
                memory[piece.block].copy_(source[start : start + piece.length], non_blocking=source.is_cuda)
                start += piece.length
        wait_for_devices(parts)
        return StagedBlocks(memory, layout)

    def _provide(self, sizes: Sequence[int], *, pinned: bool) -> list[Tensor]:
        """Return memory for each block: a view of a slab."""
        blocks: list[Tensor] = []
        for number, first in enumerate(range(0, len(sizes), _SLAB_BLOCKS)):
            group = sizes[first : first + _SLAB_BLOCKS]
            starts = [place * BLOCK_BYTES for place in range(len(group))]
            needed = starts[-1] + group[-1]
            if number == len(self._slabs):
                self._slabs.append(allocate(needed, pinned=pinned))
            elif self._slabs[number].numel() < needed:
                self._slabs[number] = allocate(0, pinned=False)  # frees the smaller one first
                self._slabs[number] = allocate(needed, pinned=pinned)
            slab = self._slabs[number]
            blocks += [slab[start : start + size] for start, size in zip(starts, group, strict=True)]
        return blocks


def wait_for_devices(parts: Sequence[Part]) -> None:
    """Wait until the GPUs have done what was asked of them: tensors and copies are final then."""
    for device in {part.data.device for part in parts if part.data.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def allocate(size: int, *, pinned: bool) -> Tensor:
    """Return zeroed host memory: its pages are there before anything is timed."""
    return torch.zeros(max(size, 1), dtype=torch.uint8, device="cpu", pin_memory=pinned)


def view_bytes(memory: Tensor) -> memoryview:
    """Return a flat CPU tensor of bytes as a buffer, without a copy."""
    array: Any = memory.numpy()  # a buffer, which its type does not say
    return memoryview(array)


def _flat_source(data: Tensor) -> Tensor:
    """Return a tensor's elements, row by row, as bytes; a copy only if they do not lie so already."""
    plain = data.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8) if plain.numel() else plain.new_empty(0, dtype=torch.uint8)
