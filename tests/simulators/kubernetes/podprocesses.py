"""What the kernel does for a container: signals reach its first process like PID 1, and all die with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

POD_MARK = "SIMULATED_POD"
"""Environment variable that every process of a pod carries: the pod's uid."""

_SETPRIV = shutil.which("setpriv")
_REAP_SECONDS = 5.0


class StartError(Exception):
    """The command cannot be started: exit code 128, with the runtime's words."""


class ContainerProcess:
    """The first process of a container, in a session of its own, with all output in one file.

    The kernel kills it when this process dies.

    Args:
        environment: All of it; the pod's mark is added.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path,
        log: Path,
        mark: str,
    ) -> None:
        self.mark = mark
        path = environment.get("PATH")
        if shutil.which(command[0], path=path) is None:
            raise StartError(f'exec: "{command[0]}": executable file not found in $PATH')
        # Asked for by the child itself: `preexec_fn` would fork all of a process that has many threads. The
        # parent in question is the thread that calls us, so that one must outlive the container.
        prefix = [_SETPRIV, "--pdeathsig", "KILL", "--"] if _SETPRIV else []
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, POD_MARK: mark},
                cwd=folder,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its pid outside of the container."""
        return self._process.pid

    def wait(self) -> int:
        """Wait for its end, and return the exit code as a container runtime counts it."""
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def terminate(self) -> None:
        """Send SIGTERM, which PID 1 of a container does not get unless it has a handler for it."""
        if _catches(self.pid, signal.SIGTERM):
            self.send(signal.SIGTERM)

    def send(self, number: int) -> None:
        """Send a signal to it alone."""
        self._process.send_signal(number)

    def kill_others(self) -> None:
        """Kill whatever is left of the container, after the first process has ended."""
        deadline = time.monotonic() + _REAP_SECONDS
        while (left := self._others()) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)  # for the kernel

    def _others(self) -> list[int]:
        mark = f"{POD_MARK}={self.mark}".encode()
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [pid for pid in pids if pid != os.getpid() and _belongs(pid, session=self.pid, mark=mark)]


def _belongs(pid: int, *, session: int, mark: bytes) -> bool:
    """Whether a living process is of the session, or carries the mark."""
    try:
        state, _, _, of_session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
        if state in "ZX":
            return False
        return int(of_session) == session or mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
