"""Whether a rank stands still, told from two looks at it some seconds apart. Pure."""

from __future__ import annotations

from prefect_torch_elastic.observations import RankSnapshot
from prefect_torch_elastic.stacks import read_main_thread

_INSIDE_TORCH = "/torch/distributed/"
# What a rank that stands still may do between two looks, seconds apart. A look itself costs some hundredths
# of a second and one sleep of the main thread; what it writes, stacks and collectives, is taken off.
_IDLE_CPU_SECONDS = 0.5
_IDLE_BYTES = 32_000
_IDLE_SWITCHES = 20


def is_same_place(one: RankSnapshot, other: RankSnapshot) -> bool:
    """Whether a rank stands where it stood: the same frames, no collective and no work in between.

    A long write or evaluation has the same Python frames all the time, but it computes, reads or writes.
    """
    if other.is_in_disk or _has_worked(one, other) or not one.stacks or not other.stacks:
        return False
    frames = read_main_thread(one.stacks)
    same_frames = bool(frames) and frames == read_main_thread(other.stacks)
    return same_frames and one.step == other.step and one.collectives == other.collectives


def is_blocked(snapshot: RankSnapshot) -> bool:
    """Whether its main thread is inside a call of a collective, and goes on only when that has ended."""
    return _INSIDE_TORCH in read_main_thread(snapshot.stacks).partition("\n")[0]


def _has_worked(one: RankSnapshot, other: RankSnapshot) -> bool:
    """Whether its processes did more than a look costs; one that went away meanwhile hides no other."""
    seconds = size = 0.0
    for pid, now in other.efforts.items():
        before = one.efforts.get(pid, [0.0, 0.0, now[2]])
        seconds += max(0.0, now[0] - before[0])
        size += max(0.0, now[1] - before[1])
        if now[2] - before[2] > _IDLE_SWITCHES:
            return True
    return seconds > _IDLE_CPU_SECONDS or size > _IDLE_BYTES + one.look_bytes
