"""The warm start: a single-threaded process that imported torch once and forks ranks on request.

A server is forked from its owner (launcher or agent) right after `import torch`, before any thread exists.
Children are double-forked, so the owner (a child subreaper) becomes their parent: it learns their exact exit
status, and a dead server kills no rank. A server can also fork a server: the new one imports the modules
that a call names, and if that starts a thread or opens a GPU, only the new one is thrown away.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefect_torch_elastic.channel import (
    ChannelClosed,
    is_readable,
    receive_request,
    send_request,
    wait_readable,
)
from prefect_torch_elastic.node import processes, zygote

_REPLY_SECONDS = 60.0
_PRELOAD_SECONDS = 300.0
_WAIT_SECONDS = 0.2
_CLOSE_SECONDS = 2.0
_CHILDREN_AT_ONCE = 64  # their open files travel in one message, and Linux takes at most 253 of those


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
            zygote.serve(theirs, owner)
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
