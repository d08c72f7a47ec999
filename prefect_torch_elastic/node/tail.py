"""The end of a rank's log file as it grows: which lines go up to the task run, and how many are cut.

Ranks write to files, so a flood never waits for anybody; what goes up is bounded, what is cut is counted.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from prefect_torch_elastic.node.ranklog import parse_line

LINES_PER_SECOND = 50
BURST_LINES = 400
LINE_CHARACTERS = 4000
LAST_LINES = 200
REDRAW_SECONDS = 10.0
_READ_BYTES = 1 << 20
_BACKLOG_BYTES = 4 << 20


class LogTail:
    """Reads one rank's log from `start`, where this round begins; `level` is the least level that goes up."""

    def __init__(self, path: Path, *, level: int, start: int = 0) -> None:
        self.path = path
        self._level = level
        self._start = self._offset = start
        self._partial = b""
        self._previous = logging.INFO
        self._tokens, self._filled_at = float(BURST_LINES), time.monotonic()
        self._cut_lines = self._cut_bytes = 0
        self._redrawn_at = time.monotonic()

    def read(self) -> list[tuple[int, str]]:
        """Return the new lines that go up, as `(level, text)`."""
        try:
            with self.path.open("rb") as file:
                backlog = file.seek(0, 2) - self._offset
                if backlog > _BACKLOG_BYTES:
                    self._cut_bytes += backlog - _READ_BYTES
                    self._offset += backlog - _READ_BYTES
                    self._partial = b""
                file.seek(self._offset)
                data = file.read(_READ_BYTES)
        except OSError:
            return []
        self._offset += len(data)
        *lines, partial = (self._partial + data).split(b"\n")
        lines = [_final_text(line) for line in lines]
        if b"\r" in partial:
            lines += self._show_redraw(partial)
            partial = _final_text(partial)
        if len(partial) > LINE_CHARACTERS:
            lines, partial = [*lines, partial], b""
        self._partial = partial
        return self._select([line.decode(errors="replace") for line in lines])

    def finish(self) -> list[tuple[int, str]]:
        """Return what is left, a last line without an end included, and say what was cut."""
        found: list[tuple[int, str]] = []
        before = -1
        while self._offset != before:
            before = self._offset
            found += self.read()
        if self._partial:
            found += self._select([self._partial.decode(errors="replace")])
            self._partial = b""
        return [*found, *self._render_cut()]

    def count_cut(self, lines: int) -> None:
        """Take note of lines that could not be sent up."""
        self._cut_lines += lines

    def last_lines(self) -> list[str]:
        """Return the end of this round's log, for a failure report."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(self._start, file.seek(0, 2) - LAST_LINES * 200))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        return [line[:LINE_CHARACTERS] for line in text.splitlines()[-LAST_LINES:]]

    def _show_redraw(self, partial: bytes) -> list[bytes]:
        """A progress bar redraws its line many times a second; now and then one of them goes up."""
        now = time.monotonic()
        if now - self._redrawn_at < REDRAW_SECONDS:
            return []
        self._redrawn_at = now
        return [_final_text(partial)]

    def _select(self, lines: list[str]) -> list[tuple[int, str]]:
        now = time.monotonic()
        self._tokens = min(BURST_LINES, self._tokens + (now - self._filled_at) * LINES_PER_SECOND)
        self._filled_at = now
        chosen: list[tuple[int, str]] = []
        for line in lines:
            level, text = parse_line(line, self._previous)
            self._previous = level
            if level < self._level or not text.strip():
                continue
            if self._tokens < 1:
                self._cut_lines += 1
                continue
            self._tokens -= 1
            if (more := len(text) - LINE_CHARACTERS) > 0:
                text = f"{text[:LINE_CHARACTERS]}… ({more} more characters)"
            chosen.append((level, text))
        if chosen and self._tokens >= 1:  # then nothing was cut here: the gap is before these lines
            return [*self._render_cut(), *chosen]
        return chosen

    def _render_cut(self) -> list[tuple[int, str]]:
        if not self._cut_lines and not self._cut_bytes:
            return []
        parts = [f"{self._cut_lines} lines"] if self._cut_lines else []
        parts += [f"{self._cut_bytes / 2**20:.0f} MiB"] if self._cut_bytes else []
        self._cut_lines = self._cut_bytes = 0
        return [(logging.WARNING, f"… {' and '.join(parts)} cut here; all of it is in {self.path}")]


def _final_text(line: bytes) -> bytes:
    """Return what a terminal would show of a line that was redrawn with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
