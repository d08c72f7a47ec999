"""What the kernel says of memory: the control group's limit, its kills there, and what a process took."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT_V1 = 1 << 60  # cgroup v1 writes a page-rounded 2**63 for "no limit"


def count_oom_kills() -> int | None:
    """Return the kernel's counter of out-of-memory kills here, or None where there is no counter.

    Take it before the ranks start and again when one of them died of SIGKILL: a difference means that the
    kernel did it. Works with control groups v2 (`memory.events`) and v1 (`memory.oom_control`).
    """
    for folder, version in _folders():
        name = "memory.events" if version == 2 else "memory.oom_control"
        try:
            lines = (folder / name).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    return None


def read_memory_limit() -> int | None:
    """Return the smallest limit in bytes that applies here, or None without one."""
    limits: list[int] = []
    for folder, version in _folders():
        name = "memory.max" if version == 2 else "memory.limit_in_bytes"
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            continue
        if text != "max" and int(text) < _NO_LIMIT_V1:
            limits.append(int(text))
    return min(limits, default=None)


def read_peak_memory(pid: int) -> int:
    """Return the most memory in bytes that a process had resident, 0 when it is gone.

    A forked process counts from its fork on, with the pages that it shares with its parent.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("VmHWM:"):  # a process that has just ended has none
            return int(line.split()[1]) * 1024
    return 0


def _folders() -> Iterator[tuple[Path, int]]:
    # Own group first, then those around it. In a pod the path is "/", and the root is the pod's own group.
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for base in (_ROOT, _ROOT / "unified"):
                yield from ((folder, 2) for folder in _list_upwards(base, path))
        elif "memory" in controllers.split(","):
            yield from ((folder, 1) for folder in _list_upwards(_ROOT / "memory", path))


def _list_upwards(base: Path, path: str) -> list[Path]:
    folder = base / path.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(base))]
