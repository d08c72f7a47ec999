"""Inside a fork server: one thread, torch imported, and a fork for each request of the owner.

A server touches neither CUDA nor an event loop, and makes no thread, lock or process group: a forked child
would inherit their state without the threads that they wait for.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from prefect_torch_elastic import compat
from prefect_torch_elastic.channel import (
    ChannelClosed,
    receive_request,
    send_request,
)
from prefect_torch_elastic.node import processes, ranklog

_DYING_SECONDS = 1.0

Target = Callable[[dict[str, Any], list[int]], int]


def serve(connection: socket.socket, owner: int) -> NoReturn:
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
            return lambda _spec, fds: serve(socket.socket(fileno=fds[0]), owner)
