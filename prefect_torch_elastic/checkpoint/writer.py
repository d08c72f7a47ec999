"""One rank's part of a save on its way to the store: every block one request, then the rank's manifest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import crc32c

from prefect_torch_elastic.checkpoint.blocks import Blocks
from prefect_torch_elastic.checkpoint.manifest import (
    Block,
    Chunk,
    RankManifest,
    Signed,
    render_block_key,
    render_json,
    render_rank_key,
)
from prefect_torch_elastic.checkpoint.plan import Part
from prefect_torch_elastic.store import Store

WRITERS = 32  # requests at once: with 30 ms and 80 MB/s each, as many as it takes for a gigabyte a second


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank writes: parts of tensors, their bytes, and plain values of its own."""

    parts: Sequence[Part]
    blocks: Blocks
    values: dict[str, Any]


def write_rank(
    store: Store, folder: str, share: Share, *, rank: int, beat: Callable[[], None] = lambda: None
) -> Signed:
    """Write what this rank holds and return size and checksum of its manifest, which is written last.

    Args:
        store: Where to.
        folder: The save's folder, `manifest.render_folder`.
        share: What to write.
        rank: This rank.
        beat: Called each time that something was written.

    Raises:
        StoreError: If something cannot be written; nothing that was written counts then.
    """
    written = _write_blocks(store, folder, rank, share.blocks, beat)
    chunks = tuple(
        Chunk(name=part.name, offsets=part.offsets, sizes=tuple(part.data.shape), pieces=pieces)
        for part, pieces in zip(share.parts, share.blocks.layout.pieces, strict=True)
    )
    data = render_json(RankManifest(rank=rank, chunks=chunks, blocks=written, values=share.values))
    store.put(render_rank_key(folder, rank), data)
    return sign(data)


def sign(data: bytes | memoryview) -> Signed:
    """Return size and checksum of an object."""
    return Signed(size=len(data), crc32c=crc32c.crc32c(data))


def _write_blocks(
    store: Store, folder: str, rank: int, blocks: Blocks, beat: Callable[[], None]
) -> tuple[Block, ...]:
    def write(index: int) -> Block:
        with blocks.read(index) as data:
            checksum = crc32c.crc32c(data)  # before it leaves: what changes on the way is noticed
            store.put(render_block_key(folder, rank, index), data)
            beat()
            return Block(size=len(data), crc32c=checksum)

    count = len(blocks.layout.block_sizes)
    with ThreadPoolExecutor(max(1, min(WRITERS, count)), thread_name_prefix="checkpoint-write") as pool:
        futures = [pool.submit(write, index) for index in range(count)]
        _, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        for future in waiting:  # one block is missing, so nobody needs the rest
            future.cancel()
        for future in futures:
            if not future.cancelled():
                future.result()
        return tuple(future.result() for future in futures)
