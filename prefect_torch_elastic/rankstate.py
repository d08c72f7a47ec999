"""One page of shared memory per rank: what the rank is doing, and what it is asked to do.

The rank writes, its agent reads, and the other way round for the stop request. A page costs a rank less than
20 microseconds a step, needs no lock (a sequence number that is odd while a write is going on), and survives
the rank's death by any signal, so the last step before a SIGKILL is known.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, cast

_SIZE = 4096
# The page: 8-byte words, then the text. A word is written in one store; `struct` would zero its bytes first.
_STOP, _SEQUENCE, _STEP, _TOTAL, _REPORTED_AT, _LENGTH = range(6)
_TEXT_WORD = 6
_TEXT_AT = 8 * _TEXT_WORD
_UNKNOWN = -1
_PHASE_CHARACTERS = 100


class StopReason(IntEnum):
    """Why a rank is asked to stop."""

    NONE = 0
    CANCELLED = 1
    PREEMPTED = 2
    TIMED_OUT = 3
    REGROUP = 4


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """What a rank reported last; `step` is None before the first report."""

    step: int | None = None
    total_steps: int | None = None
    reported_at: float = 0.0
    phase: str = ""
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])


class RankState:
    """A view of one rank's page; the same object serves the rank and its agent."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, _SIZE)
        self._words = memoryview(self._page).cast("q")
        self._sequence = 0
        self._step, self._total = _UNKNOWN, _UNKNOWN
        self._metrics: dict[str, Any] = {}
        self._phase = ""

    @staticmethod
    def create_file(name: str) -> int:
        """Return a file descriptor of an empty page that belongs to no folder and ends with its last user."""
        fd = os.memfd_create(f"pte-{name}")
        os.ftruncate(fd, _SIZE)
        return fd

    def close(self) -> None:
        self._words.release()
        self._page.close()

    def report(self, metrics: dict[str, Any], *, step: int, total_steps: int | None) -> None:
        """Publish a finished step; `metrics` are numbers or short texts."""
        self._step, self._metrics = step, metrics
        self._total = _UNKNOWN if total_steps is None else total_steps
        self._write()

    def enter_phase(self, phase: str) -> str:
        """Publish what the rank does besides steps, and return what it did before."""
        before, self._phase = self._phase, phase
        self._write()
        return before

    def request_stop(self, reason: StopReason) -> None:
        self._words[_STOP] = reason

    @property
    def stop_requested(self) -> StopReason:
        return StopReason(self._words[_STOP])

    def read(self) -> RankProgress:
        """Return the newest whole report; of a writer that died in the middle, only the numbers."""
        for _ in range(100):
            before = self._words[_SEQUENCE]
            step, total, at, length = self._words[_STEP:_TEXT_WORD]
            text = self._page[_TEXT_AT : _TEXT_AT + length]
            if before % 2 == 0 and self._words[_SEQUENCE] == before:
                return _parse_progress(step, total, at, text)
        step, total, at, _ = self._words[_STEP:_TEXT_WORD]
        return _parse_progress(step, total, at, b"")

    def _write(self) -> None:
        text = json.dumps([self._phase, self._metrics], default=_plain, skipkeys=True).encode()
        if len(text) > _SIZE - _TEXT_AT:
            text = json.dumps([self._phase[:_PHASE_CHARACTERS], {}]).encode()
        words = self._words
        words[_SEQUENCE] = self._sequence + 1
        words[_STEP], words[_TOTAL], words[_REPORTED_AT] = self._step, self._total, time.monotonic_ns()
        words[_LENGTH] = len(text)
        self._page[_TEXT_AT : _TEXT_AT + len(text)] = text
        self._sequence += 2
        words[_SEQUENCE] = self._sequence


def _parse_progress(step: int, total_steps: int, reported_at: int, text: bytes) -> RankProgress:
    try:
        phase, metrics = cast("tuple[str, dict[str, Any]]", json.loads(text) if text else ("", {}))
    except ValueError:
        phase, metrics = "", {}
    return RankProgress(
        step=step if reported_at and step != _UNKNOWN else None,
        total_steps=total_steps if reported_at and total_steps != _UNKNOWN else None,
        reported_at=reported_at / 1e9,
        phase=phase,
        metrics=metrics,
    )


def _plain(value: Any) -> Any:
    """A metric that JSON does not know: a tensor or numpy scalar becomes a float, the rest a short text."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)[:100]
