"""What tests of deploying share: a flow in a file, and a step that runs in a pool."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect_torch_elastic.pooltask import pool_task

ONE_FLOW = """
    from prefect import flow

    @flow
    def main(steps: int = 1, name: str = "x"):
        "Do it."
        return steps
"""


def step(pool: str | None, *, name: str = "step", body: Callable[..., Any] | None = None) -> Any:
    """Return a task that runs in a pool, or here."""
    return pool_task(work_pool=pool, name=name)(body or (lambda: None))


@contextmanager
def writing(folder: Path) -> Iterator[Callable[..., Path]]:
    """Give a function that makes Python files; modules loaded meanwhile are forgotten."""
    before, path = set(sys.modules), list(sys.path)

    def write(text: str, name: str = "deployed_flows.py") -> Path:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return file

    yield write
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
