"""One page of shared memory per rank: what the rank is doing, and what it is asked to do.

The rank writes, its agent reads, and the other way round for the stop request. Frameworks replace signal
handlers, so a stop is asked for here first, and by signal from those who do not look. A page costs a rank
less than 20 microseconds a step, needs no lock (a sequence number that is odd while a write is going on), and
survives the rank's death by any signal, so the last step before a SIGKILL is known.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, assert_never, cast

from prefect_torch_elastic.arrivals import KEPT, Arrivals
from prefect_torch_elastic.steptimes import BUCKETS, bucket_of, quantile_seconds

_SIZE = 12288
# The page: 8-byte words, then the text. A word is written in one store; `struct` would zero its bytes first.
_STOP, _STOP_AT, _POLLS, _GPU_BYTES, _SEQUENCE, _STEP, _TOTAL, _REPORTED_AT, _LENGTH = range(9)
_MARKED_AT, _STEPS, _LONGEST, _BUSY, _LOAD, _SAVE, _PHASE = range(9, 16)
_COUNTS = 16  # of steps by how long they took, in buckets
_ARRIVALS = _COUNTS + BUCKETS  # look, first, count, times, and the look again: a torn copy has two
_ARRIVALS_END = _ARRIVALS + 3 + KEPT
_TEXT_WORD = _ARRIVALS_END + 1
_TEXT_AT = 8 * _TEXT_WORD
_UNKNOWN = -1
_PHASE_CHARACTERS = 100


# Asks a rank for the stacks of its threads. Programs take SIGUSR1 for "save and leave".
DUMP_SIGNAL = signal.SIGRTMIN + 3


class StopReason(IntEnum):
    """Why a rank is asked to stop."""

    NONE = 0
    CANCELLED = 1
    PREEMPTED = 2
    TIMED_OUT = 3
    REGROUP = 4
    FAILED = 5

    @property
    def lets_ranks_save(self) -> bool:
        """Whether all peers are there to agree on a last save; after a lost peer a vote would only wait."""
        return self in {StopReason.CANCELLED, StopReason.PREEMPTED, StopReason.TIMED_OUT}


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """A stop that was asked for, and how long the rank has from now; never below 0.

    That is what a save may take: until SIGTERM for a rank that gets it late, else until SIGKILL.
    """

    reason: StopReason
    seconds_left: float


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """What a rank reported last; `step` is None before the first report."""

    step: int | None = None
    total_steps: int | None = None
    reported_at: float = 0.0
    phase: str = ""
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])


class Busy(StrEnum):
    """What the library itself does for a rank, while its training stands still."""

    NONE = ""
    LOAD = "load"
    SAVE = "save"


_BUSIES = tuple(Busy)  # the page has the place of each


@dataclass(frozen=True, kw_only=True)
class RankReadings:
    """What a page says of a rank's time; all times are in seconds.

    A step's time is what lies between two reports, without phases, saves and loads in between.

    Attributes:
        progress: What it reported last.
        busy: What the library does for it now.
        marked_at: When it last said anything: a step, or the begin or end of a phase, a save or a load
            (`time.monotonic`); 0 before it said anything.
        steps: Reports so far.
        step_seconds: Median of the steps; 0 before the second report.
        step_p95_seconds: Of 20 steps 19 took no longer.
        longest_seconds: The longest time between two reports, with all that lies in between.
        load_seconds, save_seconds, phase_seconds: Sums since the first report, before it since the start. A
            save in a phase is a save.
        gpu_memory_bytes: Memory of its GPUs at its highest; 0 without one.
        arrivals: When it came to its newest collectives; None before the first look.
    """

    progress: RankProgress = field(default_factory=RankProgress)
    busy: Busy = Busy.NONE
    marked_at: float = 0.0
    steps: int = 0
    step_seconds: float = 0.0
    step_p95_seconds: float = 0.0
    longest_seconds: float = 0.0
    load_seconds: float = 0.0
    save_seconds: float = 0.0
    phase_seconds: float = 0.0
    gpu_memory_bytes: int = 0
    arrivals: Arrivals | None = None


class RankState:
    """A view of one rank's page; the same object serves the rank and its agent."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, _SIZE)
        self._words = memoryview(self._page).cast("q")
        self._sequence = 0
        self._step, self._total = _UNKNOWN, _UNKNOWN
        self._metrics: dict[str, Any] = {}
        self._phase, self._busy = "", Busy.NONE
        self._reported_at = self._marked_at = 0
        self._sums = {_LOAD: 0, _SAVE: 0, _PHASE: 0}
        self._apart = 0  # since the last report: nanoseconds that were no training step

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
        now = time.monotonic_ns()
        self._step, self._metrics = step, metrics
        self._total = _UNKNOWN if total_steps is None else total_steps
        if not self._reported_at:  # what came before the first step is of the start
            self._forget_sums()
        gap = now - self._reported_at if self._reported_at else 0
        # a step that ends inside of a phase is a step: the phase counts from its last one
        apart, self._apart, self._reported_at = self._apart, 0, now
        self._write(now, gap=gap, step=gap - apart, reports=1)

    def enter_phase(self, phase: str) -> str:
        """Publish what the rank does besides steps, and return what it did before."""
        before, now = self._phase, time.monotonic_ns()
        self._account(now)
        self._phase = phase
        self._write(now)
        return before

    @contextmanager
    def busy(self, what: Busy) -> Generator[None, None, None]:
        """Publish what the library does for the rank, for as long as the block runs."""
        before = self._enter_busy(what)
        try:
            yield
        finally:
            self._enter_busy(before)

    def note_gpu_memory(self, size: int) -> None:
        """Publish how much memory of its GPUs the rank has at most; any thread may do so."""
        self._words[_GPU_BYTES] = size

    def note_arrivals(self, arrivals: Arrivals) -> None:
        """Publish when the rank came to its newest collectives, `KEPT` at most; always from one thread."""
        words, times = self._words, arrivals.offsets_us
        words[_ARRIVALS_END] = 0
        for place, word in enumerate([arrivals.look, arrivals.first, len(times), *times], _ARRIVALS):
            words[place] = word
        words[_ARRIVALS_END] = arrivals.look

    def request_stop(self, reason: StopReason, *, seconds_left: float) -> None:
        """Ask the rank to stop, or again with less time."""
        self._words[_STOP_AT] = time.monotonic_ns() + int(seconds_left * 1e9)
        self._words[_STOP] = reason  # last: whoever sees the reason finds its deadline

    @property
    def stop_request(self) -> StopRequest | None:
        """The stop that the rank was asked for, with the time that is left now."""
        reason = StopReason(self._words[_STOP])
        if reason is StopReason.NONE:
            return None
        left = (self._words[_STOP_AT] - time.monotonic_ns()) / 1e9
        return StopRequest(reason=reason, seconds_left=max(0.0, left))

    def poll_for_stop(self) -> StopRequest | None:
        """Return the stop request, and let the agent know that this rank looks for it.

        A rank that looks is told here first and gets SIGTERM late; the others get it at once.
        """
        self._words[_POLLS] = 1
        return self.stop_request

    @property
    def polls(self) -> bool:
        """Whether the rank has looked for a stop request so far."""
        return bool(self._words[_POLLS])

    def read(self) -> RankProgress:
        """Return the newest whole report; of a writer that died in the middle, only the numbers."""
        words, text = self._copy()
        return _parse_progress(words[_STEP], words[_TOTAL], words[_REPORTED_AT], text)

    def read_all(self) -> RankReadings:
        """Return the newest whole report and the times of all of them."""
        words, text = self._copy()
        progress = _parse_progress(words[_STEP], words[_TOTAL], words[_REPORTED_AT], text)
        busy, counts = _BUSIES[words[_BUSY]], words[_COUNTS:_ARRIVALS]
        if doing := _word_of(busy, progress.phase):
            words[doing] += time.monotonic_ns() - words[_MARKED_AT]
        return RankReadings(
            progress=progress,
            busy=busy,
            marked_at=words[_MARKED_AT] / 1e9,
            steps=words[_STEPS],
            step_seconds=quantile_seconds(counts, 0.5),
            step_p95_seconds=quantile_seconds(counts, 0.95),
            longest_seconds=words[_LONGEST] / 1e9,
            load_seconds=words[_LOAD] / 1e9,
            save_seconds=words[_SAVE] / 1e9,
            phase_seconds=words[_PHASE] / 1e9,
            gpu_memory_bytes=words[_GPU_BYTES],
            arrivals=_parse_arrivals(words[_ARRIVALS : _ARRIVALS_END + 1]),
        )

    def _copy(self) -> tuple[list[int], bytes]:
        for _ in range(100):
            words = self._words[:_TEXT_WORD].tolist()
            text = self._page[_TEXT_AT : _TEXT_AT + words[_LENGTH]]
            if words[_SEQUENCE] % 2 == 0 and self._words[_SEQUENCE] == words[_SEQUENCE]:
                return words, text
        return self._words[:_TEXT_WORD].tolist(), b""

    def _enter_busy(self, what: Busy) -> Busy:
        before, now = self._busy, time.monotonic_ns()
        self._account(now)
        self._busy = what
        self._write(now)
        return before

    def _forget_sums(self) -> None:
        self._sums = dict.fromkeys(self._sums, 0)
        for word in self._sums:
            self._words[word] = 0

    def _account(self, now: int) -> None:
        """Count the time since the last mark, unless it belongs to a step."""
        if word := _word_of(self._busy, self._phase):
            spent = now - self._marked_at
            self._sums[word] += spent
            self._apart += spent

    def _write(self, now: int, *, gap: int = 0, step: int = 0, reports: int = 0) -> None:
        text = _encode([self._phase, self._metrics]).encode()
        if len(text) > _SIZE - _TEXT_AT:
            text = json.dumps([self._phase[:_PHASE_CHARACTERS], {}]).encode()
        words = self._words
        words[_SEQUENCE] = self._sequence + 1
        words[_STEP], words[_TOTAL], words[_REPORTED_AT] = self._step, self._total, self._reported_at
        words[_MARKED_AT] = self._marked_at = now
        words[_BUSY] = _BUSIES.index(self._busy)
        words[_STEPS] += reports
        if not reports:
            for word, spent in self._sums.items():
                words[word] = spent
        if gap:
            words[_COUNTS + bucket_of(step)] += 1
            if gap > words[_LONGEST]:
                words[_LONGEST] = gap
        words[_LENGTH] = len(text)
        self._page[_TEXT_AT : _TEXT_AT + len(text)] = text
        self._sequence += 2
        words[_SEQUENCE] = self._sequence


def _word_of(busy: Busy, phase: str) -> int | None:
    """Return the word that the time of a rank goes to now, None for one in training steps."""
    match busy:
        case Busy.LOAD:
            return _LOAD
        case Busy.SAVE:
            return _SAVE
        case Busy.NONE:
            return _PHASE if phase else None
        case _:
            assert_never(busy)


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


def _parse_arrivals(words: list[int]) -> Arrivals | None:
    look, first, count = words[:3]
    if not look or words[-1] != look:
        return None
    return Arrivals(look=look, first=first, offsets_us=words[3 : 3 + count])


def _plain(value: Any) -> Any:
    """A metric that JSON does not know: a tensor or numpy scalar becomes a float, the rest a short text."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)[:100]


_encode = json.JSONEncoder(default=_plain, skipkeys=True).encode  # `json.dumps` would make one a call
