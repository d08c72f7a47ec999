"""What is known of a gang at one moment, and the form of what follows from it (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from prefect_torch_elastic.kubernetes.conditions import Object, mapping, number, read_condition, text
from prefect_torch_elastic.kubernetes.naming import QUEUE_LABEL
from prefect_torch_elastic.kubernetes.phases import GangPhase


@dataclass(frozen=True, kw_only=True)
class View:
    """What is known of a gang that exists; see `status.read_status` and `status.GangReading`."""

    jobset: Object
    workload: Object | None
    job: Object | None
    pods: Sequence[Object]
    now: datetime
    position: tuple[int, int] | None
    sees_workloads: bool
    nnodes: int
    nodes_ready: int
    preemptions: int
    evictions: int

    @property
    def restarts(self) -> int:
        """How often the JobSet started a new attempt."""
        return number(self.jobset, "status", "restarts")

    @property
    def counted_restarts(self) -> int:
        """Those that count."""
        return number(self.jobset, "status", "restartsCountTowardsMax")

    @property
    def max_restarts(self) -> int:
        """How many of those there may be."""
        return number(self.jobset, "spec", "failurePolicy", "maxRestarts")

    @property
    def attempt(self) -> int:
        """The attempt that goes on now, from 1."""
        return self.restarts + 1

    @property
    def queue(self) -> str:
        """The queue that it waits in, empty if it names none."""
        return text(self.workload, "spec", "queueName") or text(
            self.jobset, "metadata", "labels", QUEUE_LABEL
        )

    @property
    def pods_left(self) -> int:
        """How many pods the Job has that have not ended."""
        return number(self.job, "status", "active") + number(self.job, "status", "terminating")

    @property
    def holds_quota(self) -> bool:
        """Whether its quota is still its own, or used by pods that have yet to end."""
        reserved = read_condition(self.workload, "QuotaReserved").is_true
        return reserved or bool(mapping(self.workload, "status", "admission")) or self.pods_left > 0

    def seconds_since(self, moment: datetime | None) -> float:
        """How long ago that was; 0 if it is not known when."""
        return max((self.now - moment).total_seconds(), 0.0) if moment else 0.0


@dataclass(frozen=True, kw_only=True)
class Reading:
    """An answer; see `status.GangReading`."""

    phase: GangPhase
    message: str
    detail: str = ""
    preemption: str = ""
    look_again_seconds: float | None = None


def count_left(view: View) -> str:
    """Return how many pods have still to end, in parentheses; empty if none has."""
    left = view.pods_left
    if not left:
        return ""
    return f" ({left} pods still have to end)" if left > 1 else " (1 pod still has to end)"
