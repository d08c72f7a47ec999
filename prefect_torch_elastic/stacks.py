"""Stacks as faulthandler or py-spy write them: the main thread, where user code is, who is where. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

_HEAD = re.compile(r"^(Current thread|Thread|Process) ?(0x[0-9a-f]+|\d+)?")
_FRAME = re.compile(r'^\s+File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')  # faulthandler
_SPY_FRAME = re.compile(r"^\s+(?P<name>\S+) \((?P<path>[^)]+):(?P<line>\d+)\)")  # py-spy
# Whose frames are not the user's: the standard library, installed packages, and this one.
_FOREIGN = re.compile(r"/(lib|lib64)/python3|site-packages|dist-packages|/prefect_torch_elastic/|^<frozen")
_ACTIVITY = re.compile(r" \((idle|active)\)|\+gil|\(most recent call first\)|0x[0-9a-f]+")


def read_main_thread(stacks: str) -> str:
    """Return the frames of the main thread, innermost first: py-spy names it, else it is the first one."""
    sections: list[list[str]] = []
    for line in stacks.splitlines():
        if _HEAD.match(line):
            sections.append([line])
        elif sections and line.strip():
            sections[-1].append(line)
    named = [section for section in sections if '"MainThread"' in section[0]]
    chosen = (named or sections or [[]])[0]
    return "\n".join(chosen[1:])


def find_place(stacks: str) -> str:
    """Return where the main thread is in user code, such as "`load` (train.py:12)"; empty if it is not."""
    for line in read_main_thread(stacks).splitlines():
        match = _FRAME.match(line) or _SPY_FRAME.match(line)
        if match and not _FOREIGN.search(match["path"]):
            return f"`{match['name']}` ({PurePosixPath(match['path']).name}:{match['line']})"
    return ""


def group_stacks(stacks: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Return which ranks have the same stacks, and the text of the first of them; no text, no entry.

    Args:
        stacks: By rank.
    """
    groups: dict[str, list[int]] = {}
    for rank, text in stacks.items():
        if text.strip():
            groups.setdefault(_ACTIVITY.sub("", text), []).append(rank)
    return [(ranks, stacks[ranks[0]]) for ranks in groups.values()]
