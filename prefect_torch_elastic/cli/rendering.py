"""What commands print: tables for people, JSON for programs, progress for those who wait."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from prefect_torch_elastic.checkpoint.verify import Progress


def print_json(value: Any) -> None:
    """Print a value for programs; numbers that JSON does not have are text."""
    print(json.dumps(_finite(value), indent=2))  # noqa: T201


def print_lines(lines: Sequence[str]) -> None:
    """Print plain lines."""
    for line in lines:
        print(line)  # noqa: T201


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str) -> None:
    """Print a table; without a terminal each row is one line, however long."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(
            highlight=False, width=max(80, *(sum(map(len, row)) + 60 for row in [columns, *rows]))
        )
    table = Table(title=Text(title), title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in _NUMBERS else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # no cell is markup
    console.print(table)


_NUMBERS = frozenset({"Step", "Newest step", "Size", "Checkpoints", "Ranks", "Epoch", "Tensors", "Elements"})


@contextmanager
def show_progress(what: str, total_bytes: int) -> Generator[Progress]:
    """Give a function that takes bytes as they are done; a terminal shows them, on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with Bar(
        "{task.description}",
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task(what, total=total_bytes or None)
        yield lambda size: bar.advance(task, size)


def render_time(seconds: float) -> str:
    """Return a unix time as local date and minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else ""


def render_metrics(metrics: Mapping[str, float]) -> str:
    """Return `loss 0.25, accuracy 0.9`."""
    return ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value
