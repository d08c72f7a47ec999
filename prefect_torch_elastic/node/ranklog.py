"""One line format for everything a rank says, so that the agent can read levels back from its log file.

`print` and native output stay as they are (INFO); `logging`, `warnings` and `get_run_logger` write
`12:34:56.789 | WARNING | mylib - slow disk`, which is also Prefect's console format.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, TextIO

_FORMAT = "%(asctime)s.%(msecs)03d | %(levelname)-7s | %(source)s%(message)s"
_OURS = "prefect_torch_elastic."
_LINE = re.compile(r"^\d\d:\d\d:\d\d\.\d{3} \| (?P<level>[A-Z]+) *\| (?P<text>.*)$", re.DOTALL)
# glog, as torch's C++ and Python loggers write it: `[W1129 18:31:00.1 …]`, `[rank0]:[W1129 …`, `W1129 18:31…`
_NATIVE = re.compile(r"^(\[rank\d+\]:)?\[?(?P<level>[IWEF])\d{4} \d\d:\d\d:\d\d")
_NATIVE_LEVELS = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}
_CONTINUED = "    | "
_PREFECT_LOGGERS = "prefect.logging.loggers"


def start_logging(stream: TextIO) -> None:
    """Send the root logger and `warnings` of this rank to `stream`, at INFO and above."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_OneRecordFormatter(_FORMAT, "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)


def parse_line(line: str, previous: int) -> tuple[int, str]:
    """Return level and text of one line of a rank's log.

    Args:
        line: The line without its end.
        previous: Level of the line before, which continuation lines share.
    """
    if line.startswith(_CONTINUED):
        return previous, line.removeprefix(_CONTINUED)
    if match := _LINE.match(line):
        level = logging.getLevelNamesMapping().get(match["level"], logging.INFO)
        return level, match["text"]
    if match := _NATIVE.match(line):
        return _NATIVE_LEVELS[match["level"]], line
    return logging.INFO, line


def patch_get_run_logger() -> None:
    """Let Prefect's `get_run_logger` work in ranks, from the moment that their own code imports Prefect.

    A rank has no run context of Prefect, and importing Prefect to make one would cost seconds in each rank.
    """
    if _PREFECT_LOGGERS in sys.modules:
        _patch(sys.modules[_PREFECT_LOGGERS])
    elif not any(isinstance(finder, _PatchOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PatchOnImport())


def get_rank_logger(*_: Any, **__: Any) -> logging.Logger:
    """What `get_run_logger` returns in a rank: lines reach the task run's log through the rank's output."""
    return logging.getLogger("task")


class _OneRecordFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.source = "" if record.name.startswith(_OURS) else f"{record.name} - "
        return super().format(record).replace("\n", f"\n{_CONTINUED}")


class _PatchOnImport(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _PREFECT_LOGGERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            execute = loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                execute(module)
                _patch(module)

            loader.exec_module = execute_and_patch
        return spec


def _patch(loggers: ModuleType) -> None:
    """Replace the function wherever Prefect holds it: its packages hand it on under their own names."""
    original: Any = vars(loggers)["get_run_logger"]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "prefect" and vars(module).get("get_run_logger") is original:
            vars(module)["get_run_logger"] = get_rank_logger
