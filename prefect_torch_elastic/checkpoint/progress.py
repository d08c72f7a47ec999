"""What was taken of each shard in one epoch, and how the parts of several ranks become one.

Shards are known by their place in the list. The written form stays small for many shards: one bit for each,
and a number for each of the few that were read in part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


def _no_shards() -> set[int]:
    return set()


def _no_samples() -> dict[int, int]:
    return {}


@dataclass(kw_only=True)
class ShardProgress:
    """What was taken in one epoch.

    Attributes:
        finished: Shards of which every sample was taken.
        partial: Samples taken of other shards, counted from the beginning of the shard.
    """

    finished: set[int] = field(default_factory=_no_shards)
    partial: dict[int, int] = field(default_factory=_no_samples)

    def take(self, shard: int, samples: int, *, finished: bool) -> None:
        """Count that a shard has given its first `samples` samples, or all that it has."""
        if finished:
            self.finished.add(shard)
            self.partial.pop(shard, None)
        elif shard not in self.finished:
            self.partial[shard] = max(samples, self.partial.get(shard, 0))

    def deal(self, order: Sequence[int], *, rank: int, world_size: int) -> list[int]:
        """Return a rank's shards of those that are not finished: one to each rank in turn."""
        return [shard for shard in order if shard not in self.finished][rank::world_size]

    def merge(self, *, done: Iterable[Iterable[int]], taken: Iterable[ShardProgress]) -> ShardProgress:
        """Return this with the shards of ranks that are through, and what the other ranks took."""
        merged = ShardProgress(finished=set(self.finished), partial=dict(self.partial))
        for shards in done:
            for shard in shards:
                merged.take(shard, 0, finished=True)
        for part in taken:
            for shard in part.finished:
                merged.take(shard, 0, finished=True)
            for shard, samples in part.partial.items():
                merged.take(shard, samples, finished=False)
        return merged

    def dump(self) -> dict[str, Any]:
        """Return the written form, of plain JSON values."""
        bits = bytearray(max(self.finished, default=-1) // 8 + 1)
        for shard in self.finished:
            bits[shard // 8] |= 1 << shard % 8
        return {"finished": bits.hex(), "partial": {str(shard): n for shard, n in self.partial.items()}}

    @classmethod
    def parse(cls, written: Mapping[str, Any]) -> ShardProgress:
        """Read what `dump` wrote."""
        bits = bytes.fromhex(written["finished"])
        finished = {8 * place + bit for place, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1}
        return cls(finished=finished, partial={int(shard): int(n) for shard, n in written["partial"].items()})
