"""Whether the parts that ranks wrote are the tensors of the checkpoint: every element once. Pure.

A hole would leave what happened to be in memory, and nothing else would notice: checksums are of blocks. No
torch, so that `verify` judges by the same rules as a load.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from prefect_torch_elastic.checkpoint.manifest import Chunk, Manifest, RankManifest

# torch's names: `bool`, `bfloat16`, `float8_e4m3fn`, `complex64`; `bits2x4` packs four of two bits
_DTYPE = re.compile(r"bool|(?:b?float|complex|q?u?int|bits)([1-9]\d{0,2})(?:x[1-9]|_\w{1,16})?", re.ASCII)


def parse_item_size(dtype: str) -> int | None:
    """Return the bytes of one element of a dtype by its name, None if no torch has such a name."""
    match = _DTYPE.fullmatch(dtype)
    return max(1, int(match[1] or 0) // 8) if match else None


def find_contradiction(chunk: Chunk, manifest: Manifest, *, item_sizes: Mapping[str, int]) -> str:
    """Return what is wrong with one chunk, "" if it is a part of its tensor and has the bytes for it.

    Args:
        chunk: What a rank wrote.
        manifest: Of the checkpoint.
        item_sizes: Bytes of an element for each dtype in the manifest.
    """
    entry = manifest.tensors.get(chunk.name)
    if entry is None:
        return "is in no global manifest"
    box = zip(chunk.offsets, chunk.sizes, entry.shape, strict=False)
    inside = len(chunk.sizes) == len(entry.shape) and all(at + size <= end for at, size, end in box)
    if not inside:
        return f"at {chunk.offsets} with sizes {chunk.sizes} is not in a tensor of shape {entry.shape}"
    size = math.prod(chunk.sizes) * item_sizes[entry.dtype]
    held = sum(piece.length for piece in chunk.pieces)
    return f"has {held} bytes, and its sizes need {size}" if held != size else ""


def find_gaps(manifest: Manifest, ranks: Sequence[RankManifest]) -> Iterator[str]:
    """Yield what is wrong with all chunks together: nothing if each tensor is there, once.

    Args:
        manifest: Of the checkpoint.
        ranks: What each rank wrote; `find_contradiction` found nothing in it.
    """
    chunks: dict[str, list[Chunk]] = {name: [] for name in manifest.tensors}
    for saved in ranks:
        for chunk in saved.chunks:
            chunks[chunk.name].append(chunk)
    for name, entry in manifest.tensors.items():
        held, needed = sum(math.prod(chunk.sizes) for chunk in chunks[name]), math.prod(entry.shape)
        if held != needed:
            yield f"`{name}` has {needed} elements, and all ranks together wrote {held}"
        elif _overlap([chunk for chunk in chunks[name] if math.prod(chunk.sizes)]):
            yield f"`{name}` was written twice in one place, and not at all in another"


def _overlap(chunks: list[Chunk]) -> bool:
    """Whether two boxes share an element: a sweep along the dimension in which they differ most."""
    if len(chunks) < 2:
        return False
    dimensions = range(len(chunks[0].sizes))
    if not dimensions:
        return True  # one element, written twice
    along = max(dimensions, key=lambda dimension: len({chunk.offsets[dimension] for chunk in chunks}))
    open_boxes: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[along]):
        start = chunk.offsets[along]
        open_boxes = [box for box in open_boxes if box.offsets[along] + box.sizes[along] > start]
        if any(_meet(box, chunk) for box in open_boxes):
            return True
        open_boxes.append(chunk)
    return False


def _meet(one: Chunk, other: Chunk) -> bool:
    sides = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in sides)
