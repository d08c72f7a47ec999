"""Prints the results of the benchmarks at the end of the run, where pytest captures nothing."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.benchmarks.rounds import RESULTS


def pytest_configure(config: pytest.Config) -> None:
    handle, name = tempfile.mkstemp(prefix="benchmarks-")
    os.close(handle)
    os.environ[RESULTS] = name


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    results = Path(os.environ[RESULTS]).read_text()
    if results:
        terminalreporter.section("benchmarks")
        terminalreporter.write(results)


def pytest_unconfigure(config: pytest.Config) -> None:
    Path(os.environ.pop(RESULTS)).unlink(missing_ok=True)
