"""A driver whose console goes away, as when its worker is killed: its lines end, its flow goes on."""

from __future__ import annotations

import logging
from functools import partial

from prefect.logging.handlers import PrefectConsoleHandler
from rich.console import Console


def outlive_console() -> None:
    """Let no log line end this process because nobody reads its console any more.

    Prefect prints log lines with rich, which takes a broken pipe for the end of the program.
    """
    named = [one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    for logger in (logging.root, *named):
        for handler in logger.handlers:
            if isinstance(handler, PrefectConsoleHandler):
                handler.console.on_broken_pipe = partial(_fall_silent, handler.console)


def _fall_silent(console: Console) -> None:
    console.quiet = True
