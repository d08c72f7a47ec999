"""What a checkpoint says about itself: one JSON object per rank and one for all; read with suspicion.

```
checkpoints/000000000120/<uuid>/manifest.json     tensors, plain values, checksums of the rank manifests
                               /r00003.json       rank 3: its chunks of tensors and its blocks
                               /r00003/000017     rank 3's block 17: raw bytes
```
Keys of objects are made of numbers only, so nothing in a manifest can lead to another place.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from prefect_torch_elastic.checkpoint.layout import BLOCK_BYTES, Piece
from prefect_torch_elastic.errors import CheckpointError

FORMAT = 1
STEPS_LIMIT = 10**12  # a folder has its step in 12 digits
MAX_MANIFEST_BYTES = 1 << 30
_MAX_DIMENSIONS = 64
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SAID = 200  # characters of what a manifest says, in a message


class DamagedError(CheckpointError):
    """A checkpoint that is in the log is not whole; the message names the object, and what was found."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One whole tensor: its dtype as torch spells it (`float32`) and its global shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of one tensor, `offsets` and `sizes` per dimension, and where its bytes are (row by row)."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Block:
    """One object of raw bytes."""

    size: int
    crc32c: int


@dataclass(frozen=True, kw_only=True)
class RankManifest:
    """What one rank wrote."""

    rank: int
    chunks: tuple[Chunk, ...]
    blocks: tuple[Block, ...]
    values: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class Signed:
    """Size and checksum of an object that is written apart."""

    size: int
    crc32c: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A whole checkpoint.

    Attributes:
        step: Completed optimizer steps.
        uuid: The name of this save's folder.
        epoch: The gang that wrote it.
        world_size: Ranks that wrote it.
        tensors: Every tensor by its flat name.
        values: Plain values by their flat names, as `values.encode_value` writes them.
        metrics: What the user gave to `save`.
        ranks: The rank manifests, by rank.
        versions: torch and this package, for people.
    """

    step: int
    uuid: str
    epoch: int
    world_size: int
    tensors: dict[str, TensorEntry]
    values: dict[str, Any]
    metrics: dict[str, float]
    ranks: tuple[Signed, ...]
    versions: dict[str, str]


def render_folder(step: int, uuid: str) -> str:
    """Return the folder of one save, relative to the run folder."""
    return f"checkpoints/{step:012}/{uuid}"


def render_manifest_key(folder: str) -> str:
    """Return the key of a save's global manifest."""
    return f"{folder}/manifest.json"


def render_rank_key(folder: str, rank: int) -> str:
    """Return the key of one rank's manifest."""
    return f"{folder}/r{rank:05}.json"


def render_block_key(folder: str, rank: int, block: int) -> str:
    """Return the key of one rank's block."""
    return f"{folder}/r{rank:05}/{block:06}"


def render_size(size: float) -> str:
    """Return a number of bytes for people: `1.5 GiB`."""
    for unit in _UNITS[:-1]:
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_UNITS[-1]}"


def render_json(manifest: Manifest | RankManifest) -> bytes:
    """Return a manifest as it is stored."""
    if isinstance(manifest, Manifest):
        return json.dumps({"format": FORMAT, **asdict(manifest)}).encode()
    chunks = [
        [chunk.name, chunk.offsets, chunk.sizes, [[p.block, p.offset, p.length] for p in chunk.pieces]]
        for chunk in manifest.chunks
    ]
    blocks = [[block.size, block.crc32c] for block in manifest.blocks]
    body = {"format": FORMAT, "rank": manifest.rank, "chunks": chunks, "blocks": blocks}
    return json.dumps({**body, "values": manifest.values}).encode()


def parse_manifest(data: bytes | memoryview, *, key: str) -> Manifest:
    """Return the manifest in `data`.

    Raises:
        DamagedError: If it is not one, or says what cannot be.
    """
    body = _parse(data, key)
    try:
        manifest = Manifest(
            step=_count(body["step"]),
            uuid=_text(body["uuid"]),
            epoch=_count(body["epoch"]),
            world_size=_count(body["world_size"]),
            tensors={
                _text(name): TensorEntry(dtype=_text(entry["dtype"]), shape=_counts(entry["shape"]))
                for name, entry in body["tensors"].items()
            },
            values=_mapping(body["values"]),
            metrics={_text(name): float(value) for name, value in body["metrics"].items()},
            ranks=tuple(
                Signed(size=_count(entry["size"]), crc32c=_count(entry["crc32c"])) for entry in body["ranks"]
            ),
            versions={_text(name): _text(value) for name, value in body["versions"].items()},
        )
        if len(manifest.ranks) != manifest.world_size:
            raise ValueError(f"{len(manifest.ranks)} ranks of {manifest.world_size}")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _refuse(key, error) from error
    return manifest


def parse_rank_manifest(data: bytes | memoryview, *, key: str, rank: int) -> RankManifest:
    """Return the manifest of one rank in `data`; every piece lies inside a block.

    Raises:
        DamagedError: If it is not one, or says what cannot be.
    """
    body = _parse(data, key)
    try:
        blocks = tuple(Block(size=_count(size), crc32c=_count(crc32c)) for size, crc32c in body["blocks"])
        chunks = tuple(_parse_chunk(entry, blocks) for entry in body["chunks"])
        if _count(body["rank"]) != rank:
            raise ValueError(f"it is of rank {body['rank']}, not {rank}")
        if any(block.size > BLOCK_BYTES for block in blocks):
            raise ValueError(f"a block is larger than {BLOCK_BYTES} bytes")
        return RankManifest(rank=rank, chunks=chunks, blocks=blocks, values=_mapping(body["values"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _refuse(key, error) from error


def _parse_chunk(entry: Any, blocks: tuple[Block, ...]) -> Chunk:
    name, offsets, sizes, pieces = entry
    chunk = Chunk(
        name=_text(name),
        offsets=_counts(offsets),
        sizes=_counts(sizes),
        pieces=tuple(
            Piece(block=_count(block), offset=_count(offset), length=_count(length))
            for block, offset, length in pieces
        ),
    )
    if len(chunk.offsets) != len(chunk.sizes):
        raise ValueError(f"`{chunk.name}` has offsets in {len(chunk.offsets)} dimensions")
    for piece in chunk.pieces:
        if piece.block >= len(blocks) or piece.offset + piece.length > blocks[piece.block].size:
            raise ValueError(f"`{chunk.name}` lies outside of block {piece.block}")
    return chunk


def _parse(data: bytes | memoryview, key: str) -> dict[str, Any]:
    try:
        if len(data) > MAX_MANIFEST_BYTES:
            raise ValueError(f"it has {len(data)} bytes")
        body = _mapping(json.loads(bytes(data)))
        if body.get("format") != FORMAT:
            raise ValueError(f"its format is {body.get('format')!r}, not {FORMAT}")
    except (ValueError, TypeError, RecursionError) as error:
        raise _refuse(key, error) from error
    return body


def _refuse(key: str, error: Exception) -> DamagedError:
    return DamagedError(f"`{key}` is not a manifest that this version writes: {error!s:.{_SAID}}.")


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _counts(values: object) -> tuple[int, ...]:
    if not isinstance(values, list) or len(cast("list[Any]", values)) > _MAX_DIMENSIONS:
        raise ValueError(f"these are not sizes: {values!r}")
    return tuple(_count(value) for value in cast("list[Any]", values))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} is not an object")
    return cast("dict[str, Any]", value)
