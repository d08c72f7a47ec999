"""Nodes of other machines that have not come yet: who is missing, what is said about it, and until when."""

from __future__ import annotations

import time

from prefect_torch_elastic.spec import Spec

_SAY_SECONDS = 60.0


class Awaited:
    """The nodes that the leader waits for.

    Args:
        spec: The gang.
    """

    def __init__(self, spec: Spec) -> None:
        now = time.monotonic()
        self._missing = set(range(1, spec.max_nodes))
        self._nnodes = spec.max_nodes
        self._seconds = spec.rdzv_timeout_seconds
        self._deadline, self._say_at = now + self._seconds, now + _SAY_SECONDS

    def arrive(self, node: int) -> None:
        """Take note of a node that has come."""
        self._missing.discard(node)

    @property
    def next_news(self) -> float | None:
        """When (`time.monotonic()`) there is something to say or to do; None when all have come."""
        return min(self._say_at, self._deadline) if self._missing else None

    def news(self, now: float) -> str:
        """Return a line for the log, once a minute; empty at other times."""
        if not self._missing or now < self._say_at:
            return ""
        self._say_at = now + _SAY_SECONDS
        return f"{self._joined()}; missing: {self._name_missing()}."

    def overdue(self, now: float) -> str:
        """Return what to say when the time is over and nodes are missing; empty before."""
        if not self._missing or now < self._deadline:
            return ""
        return f"only {self._joined()} in {self._seconds:g} s; missing: {self._name_missing()}."

    def _joined(self) -> str:
        return f"{self._nnodes - len(self._missing)} of {self._nnodes} nodes have joined"

    def _name_missing(self) -> str:
        names = [f"node {node}" for node in sorted(self._missing)]
        return ", ".join([*names[:8], *([f"and {len(names) - 8} more"] if len(names) > 8 else [])])
