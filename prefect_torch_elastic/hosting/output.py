"""What a job prints: its worker reads it, and may die. The job then goes on, and prints to nobody."""

from __future__ import annotations

import os
import select
import threading

from rich.console import Console

_FDS = (1, 2)


def outlive_reader() -> None:
    """From now on nothing that this process prints ends it because the reader of its output has gone."""
    # Prefect prints log lines with rich, which takes a broken pipe for the end of the program.
    Console.on_broken_pipe = _go_on  # pyright: ignore[reportAttributeAccessIssue]  (`self` has another name)
    threading.Thread(target=_watch, name="output", daemon=True).start()


def _go_on(console: Console) -> None:
    """Drop the line; the next one finds `/dev/null` in place of the pipe."""


def _watch() -> None:
    """Put `/dev/null` in place of a pipe that nobody reads any more: a `print` there raises."""
    broken = select.poll()
    for fd in _FDS:
        broken.register(fd, 0)  # errors alone, which includes a reader that has closed
    left = set(_FDS)
    while left:
        for fd, event in broken.poll():
            broken.unregister(fd)
            left.discard(fd)
            if event & select.POLLNVAL:  # the body closed it
                continue
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, fd)
            os.close(null)
