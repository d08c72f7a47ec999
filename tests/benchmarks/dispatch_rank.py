"""The user's code of the dispatch benchmark, for our gangs and as a script for torchrun.

A rank notes when its first line ran and when the processes above it born, so that no program has to be
changed to see where the time goes.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch

_PARENT, _START_TICKS = 1, 19  # fields of /proc/<pid>/stat after the name
_GENERATIONS = 4


def note_first_line(out: str) -> int:
    """Write one line of JSON and return the world size, which is the value of the call."""
    now, pid = time.time(), os.getpid()
    booted_at = now - time.clock_gettime(time.CLOCK_BOOTTIME)
    born: list[float] = []
    for _ in range(_GENERATIONS):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        born.append(booted_at + int(fields[_START_TICKS]) / os.sysconf("SC_CLK_TCK"))
        pid = int(fields[_PARENT])
    line = {"rank": os.environ["RANK"], "at": now, "torch": torch.__version__, "born": born}
    with open(out, "a") as file:
        file.write(json.dumps(line) + "\n")
    return int(os.environ["WORLD_SIZE"])


if __name__ == "__main__":
    import sys

    note_first_line(sys.argv[1])
