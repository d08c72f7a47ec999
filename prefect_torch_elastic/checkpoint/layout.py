"""Where the bytes of one rank's tensors go: blocks of one size, each written by a single request. Pure.

A large tensor is cut into blocks of its own, which need no copy on the way out. Small ones share blocks, so
three thousand biases cost a handful of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_BYTES = 8 << 20
_SHARED_BYTES = BLOCK_BYTES // 4  # an item below this size shares its block with others
ALIGN_BYTES = 64  # a cache line: staged copies run at full speed, and any dtype can be read in place


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of bytes of one item that lies in one block."""

    block: int
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The blocks of one rank.

    Attributes:
        pieces: For each item its bytes in order, none for an item without bytes.
        block_sizes: The size of each block in bytes.
    """

    pieces: tuple[tuple[Piece, ...], ...]
    block_sizes: tuple[int, ...]


def lay_out(sizes: Sequence[int]) -> Layout:
    """Return the layout of items of these sizes in bytes; the same sizes give the same layout."""
    pieces: list[tuple[Piece, ...]] = []
    blocks: list[int] = []
    shared = -1  # the block that small items go to
    for size in sizes:
        if size >= _SHARED_BYTES:
            own: list[Piece] = []
            for start in range(0, size, BLOCK_BYTES):
                length = min(BLOCK_BYTES, size - start)
                own.append(Piece(block=len(blocks), offset=0, length=length))
                blocks.append(length)
            pieces.append(tuple(own))
        elif size == 0:
            pieces.append(())
        else:
            offset = -(-blocks[shared] // ALIGN_BYTES) * ALIGN_BYTES if shared >= 0 else 0
            if shared < 0 or offset + size > BLOCK_BYTES:
                shared, offset = len(blocks), 0
                blocks.append(0)
            blocks[shared] = offset + size
            pieces.append((Piece(block=shared, offset=offset, length=size),))
    return Layout(pieces=tuple(pieces), block_sizes=tuple(blocks))
