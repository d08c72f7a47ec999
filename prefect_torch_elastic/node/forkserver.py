"""The warm start: a single-threaded process that imported torch once and forks ranks on request.

A server is forked from its owner (launcher or agent) right after `import torch`, before any thread exists.
Children are double-forked, so the owner (a child subreaper) becomes their parent: it learns their exact exit
status, and a dead server kills no rank. A server can also fork a server: the new one imports the modules
that a call names, and if that starts a thread or opens a GPU, only the new one is thrown away.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from prefect_torch_elastic import compat
from prefect_torch_elastic.channel import (
    ChannelClosed,
    is_readable,
    receive_request,
    send_request,
    wait_readable,
)
from prefect_torch_elastic.node import processes, ranklog

_REPLY_SECONDS = 60.0
_PRELOAD_SECONDS = 300.0
_WAIT_SECONDS = 0.2
_DYING_SECONDS = 1.0
_CLOSE_SECONDS = 2.0
_CHILDREN_AT_ONCE = 64  # their open files travel in one message, and Linux takes at most 253 of those

Target = Callable[[dict[str, Any], list[int]], int]


class ServerLost(Exception):  # noqa: N818  (an end, not a mistake)
    """The fork server is gone or does not answer; running ranks do not care."""


@dataclass(frozen=True, kw_only=True)
class Child:
    """A process to fork.

    Attributes:
        target: `rank`, `agent` or `server`.
        spec: JSON for the target.
        environment: Its whole environment.
        directory: Its working directory.
        fds: Open files that it inherits, in an order that the target knows.
    """

    target: str
    spec: dict[str, Any]
    environment: dict[str, str]
    directory: str
    fds: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, kw_only=True)
class Preloaded:
    """What importing modules did to a server; forking is safe only with one thread and no open GPU."""

    threads: int
    gpus: list[str]
    culprit: str

    @property
    def safe(self) -> bool:
        return self.threads == 1 and not self.gpus


class ForkServer:
    """The owner's handle on a server; `modules` are those that it imported for gangs."""

    def __init__(self, connection: socket.socket, pid: int, modules: frozenset[str] = frozenset()) -> None:
        self._socket = connection
        self.pid = pid
        self.modules = modules

    @classmethod
    def fork_from_here(cls) -> ForkServer:
        """Fork a server from this process, which must have one thread only."""
        if processes.count_threads() > 1:
            raise ServerLost("a fork server can only be forked before any thread is started")
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        owner = os.getpid()
        pid = os.fork()
        if pid == 0:
            processes.close_all_but(theirs.fileno())
            ours.detach()
            _serve(theirs, owner)
        theirs.close()
        return cls(ours, pid)

    @classmethod
    def fork_if_safe(cls) -> ForkServer | None:
        """Fork a server from this process; None, and a line in the log, if it has threads already."""
        try:
            return cls.fork_from_here()
        except ServerLost as error:
            logging.getLogger(__name__).warning("%s: everything here starts cold", error)
            return None

    def fork_server(
        self, modules: Sequence[str], search_path: Sequence[str], *, waiting: Callable[[float], None]
    ) -> tuple[ForkServer, Preloaded]:
        """Fork a server from this one and import `modules` in it.

        Args:
            modules: Names of modules.
            search_path: `sys.path` for them.
            waiting: Called now and then with the seconds so far; what it raises ends the new server.

        Raises:
            ServerLost: If either server is gone or does not answer in time.
        """
        ours, theirs = socket.socketpair()
        child = Child(
            target="server",
            spec={},
            environment=dict(os.environ),
            directory=os.getcwd(),
            fds=[theirs.fileno()],
        )
        try:
            (pid,) = self.fork([child])
        finally:
            theirs.close()
        server = ForkServer(ours, pid, self.modules | frozenset(modules))
        request = {"op": "preload", "modules": list(modules), "path": list(search_path)}
        try:
            return server, Preloaded(**server._ask(request, _PRELOAD_SECONDS, waiting=waiting))
        except BaseException:
            server.close()
            raise

    def fork(self, children: Sequence[Child]) -> list[int]:
        """Fork `children` in order and return their pids; they are this process's children now.

        Raises:
            ServerLost: If the server is gone or does not answer in time.
        """
        pids: list[int] = []
        for start in range(0, len(children), _CHILDREN_AT_ONCE):
            some = children[start : start + _CHILDREN_AT_ONCE]
            fds = [fd for child in some for fd in child.fds]
            requests = [{**child.__dict__, "fds": len(child.fds)} for child in some]
            try:
                pids += self._ask({"op": "fork", "children": requests}, _REPLY_SECONDS, fds)["pids"]
                if len(pids) < start + len(some):
                    raise ServerLost(
                        f"the fork server (pid {self.pid}) could not fork: no process or no memory"
                    )
            except ServerLost:
                for pid in pids:  # all or none: the caller starts all of them in another way
                    processes.kill_group(pid)
                raise
        return pids

    def close(self) -> None:
        """End the server; what it forked goes on."""
        with contextlib.suppress(OSError, ChannelClosed):
            send_request(self._socket, {"op": "quit"})
        self._socket.close()
        processes.reap(self.pid, timeout_seconds=_CLOSE_SECONDS)

    def _ask(
        self,
        request: dict[str, Any],
        timeout_seconds: float,
        fds: Sequence[int] = (),
        *,
        waiting: Callable[[float], None] | None = None,
    ) -> dict[str, Any]:
        started = time.monotonic()
        try:
            send_request(self._socket, request, fds)
            while waiting and not is_readable(self._socket, _WAIT_SECONDS):
                waiting(time.monotonic() - started)
                if time.monotonic() - started > timeout_seconds:
                    break
            wait_readable(self._socket, started + timeout_seconds)
            return receive_request(self._socket)[0]
        except (OSError, ChannelClosed, TimeoutError) as error:
            raise ServerLost(f"the fork server (pid {self.pid}) is gone or does not answer") from error


# ---------------------------------------------------------------- in the server


def _serve(connection: socket.socket, owner: int) -> NoReturn:
    """Answer requests until the owner is gone, then end what the forked processes left behind."""
    code, groups = 1, set[int]()
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is the owner's business
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        compat.forget_exit_handlers()  # ranks must not run handlers that the owner or a preload registered
        ranklog.patch_get_run_logger()
        _limit_threads()
        gc.collect()
        gc.freeze()  # keeps the pages of what is imported shared between the ranks
        while True:
            request, fds = receive_request(connection)
            match request["op"]:
                case "fork":
                    pids = _fork_children(request["children"], fds, connection, owner)
                    groups = {group for group in groups if processes.kill_group(group, 0)} | set(pids)
                    send_request(connection, {"pids": pids})
                case "preload":
                    send_request(connection, _preload(request["modules"], request["path"]))
                    gc.collect()
                    gc.freeze()
                case _:
                    os._exit(0)
            for fd in fds:
                os.close(fd)
    except ChannelClosed:  # the owner is gone; a server that fails by itself kills no rank
        code = 0
        for group in groups:
            processes.kill_group(group)
        _sweep_for_a_dead_launcher(owner)
    finally:
        os._exit(code)


def _sweep_for_a_dead_launcher(owner: int) -> None:
    """A dead agent's descendants go to the launcher, which ends them; a dead launcher's to nobody."""
    deadline = time.monotonic() + _DYING_SECONDS  # its files are closed before its children are handed on
    while os.getppid() == owner and time.monotonic() < deadline:
        time.sleep(0.001)
    mark = os.environ.get(processes.MARK)
    if mark and os.getppid() != owner and not processes.is_marked(os.getppid(), mark):
        processes.kill_marked(mark)


def _limit_threads() -> None:
    # A parallel region here would hang the first one of every child (libgomp keeps its pool over a fork).
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def _preload(modules: list[str], search_path: list[str]) -> dict[str, Any]:
    culprit = ""
    sys.path[:] = search_path or sys.path
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException:  # noqa: BLE001  (the ranks import it too, and report it)
            sys.modules.pop(name, None)
        _limit_threads()
        if not culprit and (processes.count_threads() > 1 or processes.find_open_gpus()):
            culprit = name
    return {
        "threads": processes.count_threads(),
        "gpus": processes.find_open_gpus(),
        "culprit": culprit,
    }


def _fork_children(
    requests: list[dict[str, Any]], fds: list[int], connection: socket.socket, owner: int
) -> list[int]:
    """Fork through one intermediate process, whose exit hands all children to the owner."""
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        pids: list[int] = []
        try:
            for request in requests:
                mine, fds = fds[: request["fds"]], fds[request["fds"] :]
                pid = os.fork()
                if pid == 0:
                    connection.detach()
                    _become(request, mine, owner)
                with contextlib.suppress(OSError):
                    os.setpgid(pid, pid)  # on both sides, so that an early killpg finds the group
                pids.append(pid)
            os.write(writer, ",".join(map(str, pids)).encode())
        except OSError:  # no process or no memory: all or none
            for pid in pids:
                processes.kill_group(pid)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(middle, 0)
    return [int(pid) for pid in answer.split(b",") if pid]


def _become(request: dict[str, Any], fds: list[int], owner: int) -> NoReturn:
    """In the forked child: cut all ties with the server and run the target."""
    code = 70
    try:
        os.setpgid(0, 0)
        _wait_for_adoption(owner)
        processes.die_with_parent()
        if os.getppid() != owner:
            os._exit(71)
        kept = _move_high(fds)
        processes.close_all_but(*kept)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        code = _find_target(request["target"], owner)(request["spec"], kept)
    except BaseException:  # noqa: BLE001  (this process ends here, whatever it was)
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _wait_for_adoption(owner: int) -> None:
    while os.getppid() != owner:
        if not os.path.exists(f"/proc/{owner}"):
            os._exit(71)
        time.sleep(0.0002)


def _move_high(fds: list[int]) -> list[int]:
    """Duplicate files above the standard ones, close-on-exec, so that targets may overwrite 0 to 2."""
    import fcntl

    return [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in fds]


def _find_target(name: str, owner: int) -> Target:
    match name:
        case "rank":
            from prefect_torch_elastic.node import rank

            return rank.run_rank
        case "agent":
            from prefect_torch_elastic.node import agent

            return agent.run_agent
        case _:
            return lambda _spec, fds: _serve(socket.socket(fileno=fds[0]), owner)
