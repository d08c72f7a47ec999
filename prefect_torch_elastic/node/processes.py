"""What Linux tells and does about processes: parents, groups, adoption, states, the sweep of leftovers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import TextIO

MARK = "PTE_MARK"
"""Environment variable that all descendants of a launcher carry, so that whoever is left can find them."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SELF = Path("/proc/self")
_REAP_SECONDS = 5.0
_MOST_PROCESSES = 256
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that it can be waited for and ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL at the death of the parent *thread*; call it after the parent is final."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def count_threads() -> int:
    """Return the number of threads of this process, those of native libraries included."""
    return len(list((_SELF / "task").iterdir()))


def find_open_gpus() -> list[str]:
    """Return the GPU devices that this process has open; asks no driver, so it opens none."""
    found: set[str] = set()
    for entry in (_SELF / "fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(entry)
            if target.startswith("/dev/nvidia"):
                found.add(target)
    return sorted(found)


def list_children(pid: int | None = None) -> list[int]:
    """Return the pids of the children of a process, or of this one, adopted ones included."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in ((_SELF if pid is None else Path(f"/proc/{pid}")) / "task").iterdir():
            with contextlib.suppress(OSError):
                children += map(int, (thread / "children").read_text().split())
    return children


def read_state(pid: int) -> str:
    """Return the kernel's letter for what a process does, such as `S`; empty when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def is_stopped(pid: int) -> bool:
    """Whether a process is held by SIGSTOP or a debugger: it looks alive to everybody else."""
    return read_state(pid) in ("T", "t")


def describe(pid: int) -> str:
    """Return what the kernel tells of a process that cannot speak itself, as far as it may be read."""
    parts: list[str] = []
    for name in ("wchan", "syscall", "stack", "status"):
        with contextlib.suppress(OSError):
            parts.append(f"/proc/{pid}/{name}:\n{Path(f'/proc/{pid}/{name}').read_text().strip()}\n")
    return "\n".join(parts)


def list_tree(pid: int) -> list[int]:
    """Return a process and all its living descendants, the near ones first; 256 at most."""
    tree = [pid]
    for one in tree:  # it grows meanwhile
        tree += list_children(one)[: _MOST_PROCESSES - len(tree)]
    return tree


def read_effort(pid: int) -> list[float]:
    """Return what grows while a process works; zeros of one that is gone.

    Returns:
        Seconds computed, with those of reaped children; bytes read and written, of files and pipes; how often
        its main thread has gone to sleep.
    """
    folder = Path(f"/proc/{pid}")
    seconds = size = switches = 0.0
    with contextlib.suppress(OSError):
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        seconds = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        status = (folder / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2]
        switches = float(status.split()[0]) if status else 0.0
        size = float(sum(int(line.split()[1]) for line in (folder / "io").read_text().splitlines()[:2]))
    return [seconds, size, switches]


class StopClock:
    """Measures how long a process has been held by SIGSTOP or a debugger, look by look."""

    def __init__(self) -> None:
        self._since: float | None = None

    def seconds(self, pid: int) -> float:
        """Look at the process, and return for how long each look has found it held."""
        if not is_stopped(pid):
            self._since = None
            return 0.0
        self._since = self._since or time.monotonic()
        return time.monotonic() - self._since


def redirect_output(log: int) -> None:
    """Send all output of this process to an open file, and close the number that it came with.

    Line buffered, whatever the streams were before: the last line before a SIGKILL is in the file.
    """
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = sys.__stdout__ = _open_line_buffered(1)
    sys.stderr = sys.__stderr__ = _open_line_buffered(2)


def _open_line_buffered(fd: int) -> TextIO:
    return open(fd, "w", buffering=1, closefd=False, errors="backslashreplace")


def kill_group(leader: int, number: int = signal.SIGKILL) -> bool:
    """Signal the process group of `leader`; False when there is none any more."""
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def reap(child: int, *, timeout_seconds: float) -> None:
    """Wait for a child that was asked to end, and kill it (it may be stopped) when it does not."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        if os.waitpid(child, os.WNOHANG)[0]:
            return
        pidfd = os.pidfd_open(child)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(timeout_seconds * 1000):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        finally:
            os.close(pidfd)


def kill_children(*, keep: set[int]) -> list[int]:
    """SIGKILL and reap every child that is not in `keep`, until there is none; return their pids.

    A subreaper's unexpected children are orphans of its ranks: data loaders, servers, helpers that called
    `setsid`. A killed child hands its own children up, so this goes on until nothing new arrives.
    """
    killed: list[int] = []
    for _ in range(100):
        orphans = [pid for pid in list_children() if pid not in keep]
        if not orphans:
            break
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        deadline = time.monotonic() + _REAP_SECONDS
        while any(pid in orphans for pid in list_children()) and time.monotonic() < deadline:
            reap_orphans(keep=keep)
            time.sleep(0.002)
        if time.monotonic() >= deadline:  # the kernel holds one (a dead disk, a GPU driver): nothing ends it
            break
    return killed


def reap_orphans(*, keep: set[int]) -> None:
    """Take the status of children that have ended and are not in `keep`."""
    for pid in list_children():
        if pid not in keep:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def kill_marked(mark: str) -> list[int]:
    """SIGKILL every process whose first environment carries `mark`: forked or exec'ed, `setsid` or not."""
    killed: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        if is_marked(int(entry.name), mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(entry.name), signal.SIGKILL)
                killed.append(int(entry.name))
    return killed


def is_marked(pid: int, mark: str) -> bool:
    """Whether a process's first environment carries `mark`; False when it is gone or a zombie."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{MARK}={mark}".encode() in environment.split(b"\0")


def close_all_but(*keep: int) -> None:
    """Close every file descriptor above stderr except `keep`."""
    low = 3
    for fd in sorted(fd for fd in keep if fd >= low):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")
