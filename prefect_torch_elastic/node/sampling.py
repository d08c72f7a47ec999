"""What an agent says once a second about the ranks of its node, and when it has nothing new to say."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from prefect_torch_elastic.node.memory import read_peak_memory
from prefect_torch_elastic.node.rankprocess import RankProcess
from prefect_torch_elastic.observations import NodeSample, RankSample

SAMPLE_SECONDS = 1.0
QUIET_SECONDS = 5.0  # the head has to know that a node that stands still is there


class Sampler:
    """Says when the next sample of a node is due, and takes it."""

    def __init__(self) -> None:
        self._taken_at = self._told_at = -math.inf
        self._told: object = None
        self._looks: dict[int, int] = {}  # of each rank, the newest that was told

    def sample(
        self, ranks: Sequence[RankProcess], *, node: int, round_number: int, now: float, last: bool = False
    ) -> NodeSample | None:
        """Return a sample if one is due: each second while something goes on, else every few.

        Args:
            ranks: The ranks of the node.
            node: The node's number.
            round_number: The round that the ranks belong to.
            now: Monotonic seconds.
            last: Take one now; the ranks have ended.
        """
        if not ranks or (not last and now - self._taken_at < SAMPLE_SECONDS):
            return None
        self._taken_at = now
        samples = [sample_rank(rank) for rank in ranks]
        looks = {one.rank: one.arrivals.look for one in samples if one.arrivals}
        seen = (round_number, looks, [(one.steps, one.phase, one.busy) for one in samples])
        if not last and seen == self._told and now - self._told_at < QUIET_SECONDS:
            return None
        self._told, self._told_at = seen, now
        old = {rank for rank, look in looks.items() if look == self._looks.get(rank)}
        self._looks = looks
        told = [replace(one, arrivals=None) if one.rank in old else one for one in samples]
        return NodeSample(node=node, round=round_number, ranks=told)


def sample_rank(rank: RankProcess) -> RankSample:
    """Return what a rank does now, from its page and from the kernel's books."""
    readings = rank.state.read_all()
    progress = readings.progress
    since = max(readings.marked_at, rank.started_at)
    rank.peak_memory = max(rank.peak_memory, read_peak_memory(rank.pid) if rank.alive else 0)
    return RankSample(
        rank=rank.rank,
        step=progress.step,
        total_steps=progress.total_steps,
        idle_seconds=max(0.0, time.monotonic() - since),
        phase=progress.phase,
        busy=readings.busy.value,
        steps=readings.steps,
        step_seconds=readings.step_seconds,
        step_p95_seconds=readings.step_p95_seconds,
        longest_seconds=readings.longest_seconds,
        save_seconds=readings.save_seconds,
        load_seconds=readings.load_seconds,
        phase_seconds=readings.phase_seconds,
        memory_bytes=rank.peak_memory,
        gpu_memory_bytes=readings.gpu_memory_bytes,
        arrivals=readings.arrivals,
    )
