"""What a rank reads of a checkpoint: the manifests, then the blocks that its tensors need, each verified."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import crc32c
from torch import Tensor

from prefect_torch_elastic.checkpoint.batches import AT_ONCE, Batch, Fill, Target, plan_batches
from prefect_torch_elastic.checkpoint.coverage import find_contradiction, find_gaps
from prefect_torch_elastic.checkpoint.manifest import (
    DamagedError,
    Manifest,
    RankManifest,
    Signed,
    parse_manifest,
    parse_rank_manifest,
    render_block_key,
    render_manifest_key,
    render_rank_key,
)
from prefect_torch_elastic.checkpoint.plan import plan_reads
from prefect_torch_elastic.checkpoint.tensors import parse_dtype
from prefect_torch_elastic.errors import CheckpointError, ObjectMissing, StoreError
from prefect_torch_elastic.store import Store

READERS = 32  # requests at once, as many as `writer.WRITERS`; each holds the few MiB that came last


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """The manifests of one checkpoint, verified down from the checksum in the log."""

    folder: str
    manifest: Manifest
    ranks: tuple[RankManifest, ...]


def fetch_checkpoint(store: Store, folder: str, *, checksum: int) -> SavedCheckpoint:
    """Return the manifests of the checkpoint in `folder`.

    Args:
        store: Where it is.
        folder: `manifest.render_folder`, under the run folder.
        checksum: crc32c of the global manifest, from the commit.

    Raises:
        DamagedError: If an object is missing, or is not what was written.
        StoreError: If the store cannot be read.
    """
    key = render_manifest_key(folder)
    data = _fetch(store, key)
    if (found := crc32c.crc32c(data)) != checksum:
        raise DamagedError(f"`{key}` was changed: its crc32c is {found:08x}, committed was {checksum:08x}.")
    manifest = parse_manifest(data, key=key)
    item_sizes: dict[str, int] = {}
    for name, entry in manifest.tensors.items():
        try:
            item_sizes[entry.dtype] = parse_dtype(entry.dtype).itemsize
        except CheckpointError as error:
            raise DamagedError(f"`{key}`: `{name}`: {error}") from error

    def fetch_rank(rank: int) -> RankManifest:
        saved = _fetch_rank_manifest(store, render_rank_key(folder, rank), rank, manifest.ranks[rank])
        for chunk in saved.chunks:
            if problem := find_contradiction(chunk, manifest, item_sizes=item_sizes):
                where = f"rank {rank}'s `{render_rank_key(folder, rank)}`"
                raise DamagedError(f"{where}: `{chunk.name}` {problem}.")
        return saved

    readers = max(1, min(READERS, manifest.world_size))
    with ThreadPoolExecutor(readers, thread_name_prefix="checkpoint-read") as pool:
        ranks = tuple(pool.map(fetch_rank, range(manifest.world_size)))
    if problem := next(find_gaps(manifest, ranks), ""):
        raise DamagedError(f"`{key}`: {problem}.")
    return SavedCheckpoint(folder=folder, manifest=manifest, ranks=ranks)


def read_tensors(store: Store, saved: SavedCheckpoint, tensors: Mapping[str, Tensor]) -> int:
    """Fill these tensors in place from a checkpoint, and return how many bytes were fetched.

    Args:
        store: Where it is.
        saved: Its manifests.
        tensors: What to fill, by flat name; each has the shape and dtype that was saved.

    Raises:
        DamagedError: If a block is missing or was changed; some tensors have been filled by then.
        StoreError: If the store cannot be read.
    """
    fetched = 0
    with ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint-read") as pool:
        under_way: deque[tuple[Batch, list[Future[None]]]] = deque()
        try:
            for batch in plan_batches(plan_reads(tensors, saved.manifest, saved.ranks), saved.ranks):
                reads = [pool.submit(_read_block, store, saved, fill) for fill in batch.fills]
                under_way.append((batch, reads))
                fetched += sum(fill.block.size for fill in batch.fills)
                del batch, reads  # its memory lives as long as it is under way
                if len(under_way) == AT_ONCE:
                    _finish(*under_way.popleft())
            while under_way:
                _finish(*under_way.popleft())
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)  # the first damage is enough
            raise
    return fetched


def _finish(batch: Batch, reads: Sequence[Future[None]]) -> None:
    for read in reads:
        read.result()
    batch.copy()


def _read_block(store: Store, saved: SavedCheckpoint, fill: Fill) -> None:
    """Read one block into its targets; what was changed on the way is read once more."""
    key = render_block_key(saved.folder, fill.rank, fill.index)
    found = _scatter(store, key, fill)
    if found != fill.block.crc32c:
        found = _scatter(store, key, fill)
    if found != fill.block.crc32c:
        raise DamagedError(
            f"rank {fill.rank}'s block `{key}` was changed: its crc32c is {found:08x}, "
            f"committed was {fill.block.crc32c:08x}."
        )


def _scatter(store: Store, key: str, fill: Fill) -> int:
    """Fetch a block piece by piece, copy each byte to where it belongs, and return the checksum."""
    checksum = start = 0
    waiting = sorted(fill.targets, key=lambda target: target.offset, reverse=True)
    active: list[Target] = []
    for data in _fetch_block(store, key, size=fill.block.size):
        checksum = crc32c.crc32c(data, checksum)
        end = start + len(data)
        while waiting and waiting[-1].offset < end:
            active.append(waiting.pop())
        for target in active:
            first, last = max(target.offset, start), min(target.end, end)
            target.memory[first - target.offset : last - target.offset] = data[first - start : last - start]
        active = [target for target in active if target.end > end]
        start = end
    return checksum


def _fetch_rank_manifest(store: Store, key: str, rank: int, signed: Signed) -> RankManifest:
    data = _fetch(store, key)
    found = Signed(size=len(data), crc32c=crc32c.crc32c(data))
    if found != signed:
        raise DamagedError(
            f"rank {rank}'s `{key}` was changed: {found.size} bytes with crc32c {found.crc32c:08x}, "
            f"committed were {signed.size} with {signed.crc32c:08x}."
        )
    return parse_rank_manifest(data, key=key, rank=rank)


def _fetch(store: Store, key: str) -> memoryview:
    try:
        return store.get(key)
    except ObjectMissing as error:
        raise DamagedError(f"`{key}` is missing.") from error


def _fetch_block(store: Store, key: str, *, size: int) -> Iterator[memoryview]:
    """Yield a block's bytes in pieces; a block of another size is damage, not a failure of the store."""
    try:
        yield from store.stream(key, size)
    except ObjectMissing as error:
        raise DamagedError(f"block `{key}` is missing.") from error
    except StoreError as error:
        found = _size_of(store, key)
        if found in (None, size):
            raise
        raise DamagedError(f"block `{key}` has {found} bytes, committed were {size}.") from error


def _size_of(store: Store, key: str) -> int | None:
    return next((entry.size for entry in store.list(key.rpartition("/")[0]) if entry.key == key), None)
