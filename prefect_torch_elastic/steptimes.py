"""How long steps took, as a histogram of fixed size that a rank fills in well below a microsecond. Pure.

Eight buckets for each doubling, from 65 microseconds to 73 minutes: a quantile is off by a few percent.
"""

from __future__ import annotations

from collections.abc import Sequence

_LOWEST_BITS, _HIGHEST_BITS = 17, 42  # of a time in nanoseconds, as `int.bit_length` counts them
_BITS_INSIDE = 3
_INSIDE = 1 << _BITS_INSIDE

BUCKETS = (_HIGHEST_BITS - _LOWEST_BITS + 1) * _INSIDE


def bucket_of(nanoseconds: int) -> int:
    """Return the bucket of a time, in [0, BUCKETS); times out of range go to the first or the last one."""
    bits = nanoseconds.bit_length()
    if bits < _LOWEST_BITS or nanoseconds < 0:
        return 0
    if bits > _HIGHEST_BITS:
        return BUCKETS - 1
    # the three bits behind the leading one say where in the doubling it is
    return ((bits - _LOWEST_BITS) << _BITS_INSIDE) + (nanoseconds >> (bits - 1 - _BITS_INSIDE)) - _INSIDE


def quantile_seconds(counts: Sequence[int], share: float) -> float:
    """Return the time that this share of all steps did not exceed; 0 if there are none.

    Args:
        counts: Steps in each bucket.
        share: Such as 0.5 for the median.
    """
    wanted = share * sum(counts)
    if not wanted:
        return 0.0
    below = 0
    for bucket, count in enumerate(counts):
        if count and below + count >= wanted:
            low, high = _bounds(bucket)
            return (low + (high - low) * (wanted - below) / count) / 1e9
        below += count
    raise AssertionError("a share is at most 1")


def _bounds(bucket: int) -> tuple[int, int]:
    doubling, place = divmod(bucket, _INSIDE)
    unit = 1 << (doubling + _LOWEST_BITS - 1 - _BITS_INSIDE)
    return (_INSIDE + place) * unit, (_INSIDE + place + 1) * unit
