"""How a driver of these tests answers: one file of JSON for each flow that it was asked to run."""

import asyncio
import inspect
import json
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SHOWN = ("code", "rank", "exc_type", "category", "traceback", "work_pool", "flow_run_id")


def describe(error: Any) -> dict[str, Any]:
    """Return all that a caller sees of an exception."""
    cause = error.__cause__
    return {
        "type": type(error).__name__,
        "text": str(error),
        "notes": getattr(error, "__notes__", []),
        "cause": None if cause is None else [type(cause).__name__, str(cause), getattr(cause, "code", None)],
        **{name: str(getattr(error, name)) for name in _SHOWN if hasattr(error, name)},
    }


def answer_all(flows: Sequence[Any]) -> None:
    """Run those that the command line names, one after the other; `FOLDER/<name>.json` is the answer."""
    folder = Path(sys.argv[1])
    by_name = {getattr(one, "__name__", "") or one.name: one for one in flows}
    for name in sys.argv[2:]:
        began = time.monotonic()
        try:
            made = by_name[name]()
            value: dict[str, Any] = asyncio.run(made) if inspect.iscoroutine(made) else made
        except Exception:  # noqa: BLE001  (the tests of the other flows go on)
            value = {"raised": traceback.format_exc()}
        value["seconds"] = time.monotonic() - began
        part = folder / f"{name}.part"
        part.write_text(json.dumps(value, default=str))
        part.rename(folder / f"{name}.json")
