"""The parts of a stack as children of the supervisor: started or adopted, watched, reaped, ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

from prefect_torch_elastic.dev.ending import ask, list_children, sweep
from prefect_torch_elastic.dev.plan import StackPlan
from prefect_torch_elastic.dev.programs.report import Event, parse_reports
from prefect_torch_elastic.dev.state import StackState
from prefect_torch_elastic.node.processes import kill_children

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_PROGRAMS = "prefect_torch_elastic.dev.programs"
_FORKER = "workers"
_LOOK_SECONDS = 0.02
# What they may take to end by themselves. A flow ends its gang, and says what became of it.
_FLOW_SECONDS, _ORPHAN_SECONDS, _WORKER_SECONDS, _SERVER_SECONDS = 8.0, 1.0, 3.0, 3.0


class Parts:
    """The server and the workers.

    Attributes:
        ready: Parts that have said that they are.
        ended: How a part ended.
        stop_reason: Why all of it has to end; empty as long as it need not.
    """

    def __init__(self, plan: StackPlan, state: StackState, *, watched: Mapping[int, str]) -> None:
        """Prepare the parts.

        Args:
            plan: What to start.
            state: Where their processes are noted.
            watched: Processes without which the stack ends, and what they are to it; 0 is nobody.
        """
        self.ready: set[str] = set()
        self.ended: dict[str, str] = {}
        self.stop_reason = ""
        self._plan = plan
        self._state = state
        self._names: dict[int, str] = {}
        self._gone: dict[int, int] = {}
        self._reports, self._reporting = os.pipe()
        self._rest = b""
        self._wakeups = self._catch_signals()
        self._watched: dict[int, str] = {}
        self._poll = select.poll()
        for fd in (self._reports, self._wakeups):
            self._poll.register(fd, select.POLLIN)
        for pid, what in watched.items():
            if pid:
                self._watch(pid, what)

    def start(self, listening: int, environment: Mapping[str, str]) -> None:
        """Start the programs; `listening` is the socket of the server."""
        pipe, me = str(self._reporting), str(os.getpid())
        self._spawn("server", [str(listening), pipe, me], [listening, self._reporting], environment)
        if self._plan.pools:
            pools, logs = json.dumps(dict(self._plan.pools)), str(self._plan.logs)
            self._spawn(_FORKER, [pools, logs, pipe, me], [self._reporting], environment)

    def look(self, timeout_seconds: float | None) -> None:
        """Wait until something happens, and take note of it."""
        wait = None if timeout_seconds is None else max(0.0, timeout_seconds) * 1000
        for fd, _ in self._poll.poll(wait):
            if fd == self._reports:
                self._read_reports()
            elif fd == self._wakeups:
                os.read(self._wakeups, 4096)
            else:
                self._poll.unregister(fd)
                self.stop_reason = self.stop_reason or f"{self._watched[fd]} has ended"
        self._reap()

    def stop(self) -> None:
        """End all parts and everything that they started."""
        # Without a server no flow can say what became of it, and each would try for long.
        self._end_flows(_ORPHAN_SECONDS if "server" in self.ended else _FLOW_SECONDS)
        for pid in self._pids():
            if self._names[pid] != "server":
                ask(pid)
        self._wait_while(lambda: any(self._names[pid] != "server" for pid in self._pids()), _WORKER_SECONDS)
        server = {pid for pid in self._pids() if self._names[pid] == "server"}
        kill_children(keep=server)
        for pid in server:
            ask(pid)
        self._wait_while(lambda: server & set(self._pids()), _SERVER_SECONDS)
        kill_children(keep=set())
        sweep(self._state.token)

    def _end_flows(self, seconds: float) -> None:
        """Ask what the workers run to end, again while they start more."""
        asked: set[int] = set()

        def running() -> list[int]:
            workers = [pid for pid in self._pids() if self._names[pid] != "server"]
            flows = [child for worker in workers for child in list_children(worker)]
            for pid in flows:
                if pid not in asked:
                    ask(pid)
                    asked.add(pid)
            return flows

        self._wait_while(running, seconds)

    def _wait_while(self, condition: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while condition() and time.monotonic() < deadline:
            self.look(_LOOK_SECONDS)

    def _pids(self) -> list[int]:
        return [pid for pid, name in self._names.items() if name not in self.ended]

    def _spawn(
        self, part: str, arguments: Sequence[str], fds: Sequence[int], environment: Mapping[str, str]
    ) -> None:
        """Start a program in a session of its own, with its output in its log."""
        log = os.open(self._plan.logs / f"{part}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        pid = os.fork()
        if pid:
            os.close(log)
            self._note(part, pid)
            return
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (log, 1), (log, 2)):
                os.dup2(source, target)
            for fd in fds:
                os.set_inheritable(fd, True)
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            os.chdir(self._plan.home)  # no settings file of wherever the command was typed
            command = [sys.executable, "-P", "-m", f"{_PROGRAMS}.{part}", *arguments]
            os.execve(sys.executable, command, environment)
        except BaseException:  # noqa: BLE001  (the last frame of a forked process)
            traceback.print_exc()
        finally:
            os._exit(127)

    def _note(self, part: str, pid: int) -> None:
        self._names[pid] = part
        if part != _FORKER:
            self._state.pids[part] = pid
        if pid in self._gone:  # it ended before its line was read
            self._end(part, self._gone.pop(pid))

    def _read_reports(self) -> None:
        found, self._rest = parse_reports(self._rest + os.read(self._reports, 65536))
        for report in found:
            match report.event:
                case Event.STARTED:
                    self._note(report.part, report.pid)
                case Event.READY:
                    self.ready.add(report.part)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid in self._names:
                    self._end(self._names[pid], status)
                else:
                    self._gone[pid] = status

    def _end(self, part: str, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        if part == _FORKER and code == 0:
            self.ended[part] = ""
            return
        self.ended[part] = f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"

    def _watch(self, pid: int, what: str) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.stop_reason = f"{what} has ended"
            return
        self._watched[fd] = what
        self._poll.register(fd, select.POLLIN)

    def _catch_signals(self) -> int:
        """Let signals end a wait; return the file descriptor that says so."""
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _wake)
        for number in STOP_SIGNALS:
            signal.signal(number, self._take_stop)
        return reading

    def _take_stop(self, number: int, _: object) -> None:
        self.stop_reason = self.stop_reason or f"it got {signal.Signals(number).name}"


def _wake(number: int, frame: object) -> None:
    """Let a signal interrupt a wait instead of being ignored."""
