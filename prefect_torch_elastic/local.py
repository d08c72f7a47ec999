"""The gang as processes on this machine, from the driver's side: launchers, messages, and a sure end.

A launcher serves the elastic tasks of one flow run, one gang at a time: the first gang pays for
`import torch`, the next ones start warm. It ends with the flow run, after idle minutes, or with this process.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from prefect_torch_elastic import compat
from prefect_torch_elastic.channel import Channel, ChannelClosed
from prefect_torch_elastic.diagnosis import diagnose_lost_launcher
from prefect_torch_elastic.node import processes
from prefect_torch_elastic.node.interfaces import find_interface
from prefect_torch_elastic.pod import NNODES_VARIABLE, POD_IP_VARIABLE
from prefect_torch_elastic.rankstate import StopReason
from prefect_torch_elastic.wire import GangEnded, GangStatus, Message, Notice, Quit, RunGang, StopGang

IDLE_SECONDS = 120.0
_LOOK_SECONDS = 0.1
MOST_IDLE = 8  # a flow that changes its environment before each gang would collect them
_KEEP_SECONDS = 0.5
_QUIT_SECONDS = 5.0
_STOP_MARGIN_SECONDS = 12.0  # launcher and agents kill what is left 8 s after the grace

Listener = Callable[[Message], None]


class GangCancelled(BaseException):
    """The task was asked to stop while its gang ran; the gang is over."""


@dataclass(eq=False)
class Launcher:
    """A launcher process and the channel to it; one that was started ahead of its gang has no log yet."""

    process: subprocess.Popen[bytes]
    channel: Channel
    mark: str
    key: tuple[Any, ...]
    log: Path | None

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def write_to(self, log: Path) -> None:
        """Tell a launcher that was started ahead where its log is; before that it starts nothing."""
        assert self.process.stdin, "it was told when it was started"
        self.log = log
        with suppress(OSError), self.process.stdin as pipe:  # its death is noticed by the channel
            pipe.write(os.fsencode(log))

    def close(self) -> None:
        """End the process and everything that it started."""
        if self.log is None:
            self.process.kill()
        with suppress(ChannelClosed):
            self.channel.send(Quit())
        self.channel.close()
        try:
            self.process.wait(_QUIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            processes.kill_marked(self.mark)
        with suppress(OSError):
            if self.log is not None and not self.log.stat().st_size:
                self.log.unlink()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Idle:
    """A launcher that waits, for whom, and until when at most."""

    launcher: Launcher
    owner: weakref.ref[Any]
    until: float

    def is_over(self) -> bool:
        owner = self.owner()
        return owner is None or compat.flow_has_ended(owner) or time.monotonic() >= self.until


class LauncherPool:
    """Launchers that wait for the next gang of their flow run.

    Nothing tells us that a flow run has ended (its context may sit in a reference cycle for long), so a
    thread looks, as long as there is a launcher that waits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Idle] = []
        self._ahead: Launcher | None = None
        self._keeper: threading.Thread | None = None

    def start_ahead(self, environment: Mapping[str, str]) -> None:
        """Start a launcher for the first gang before that is known: it imports torch meanwhile.

        Only for gangs without an owner. If the gang needs another environment, it gets another launcher.
        """
        self._ahead = start_launcher(environment, key=_make_key(environment, None), log=None)

    def acquire(self, environment: Mapping[str, str], *, owner: object | None, log: Path) -> Launcher:
        """Return a launcher whose processes have exactly this environment: a warm one, or a new one.

        The environment must be equal because libraries read much of it when they are imported.
        """
        key = _make_key(environment, owner)
        with self._lock:
            ahead, self._ahead = self._ahead, None
            for entry in list(self._idle):
                if entry.launcher.key == key and entry.owner() is owner:
                    self._idle.remove(entry)
                    if entry.launcher.alive:
                        return entry.launcher
                    entry.launcher.close()
        if ahead is not None and ahead.key == key and ahead.alive:
            ahead.write_to(log)
            return ahead
        if ahead is not None:
            ahead.close()
        return start_launcher(environment, key=key, log=log)

    def release(self, launcher: Launcher, *, owner: object | None) -> None:
        """Keep a launcher for the next gang of its owner; without an owner it ends now."""
        if owner is None or not launcher.alive:
            launcher.close()
            return
        until = time.monotonic() + IDLE_SECONDS
        with self._lock:
            self._idle.append(_Idle(launcher=launcher, owner=weakref.ref(owner), until=until))
            surplus, self._idle = self._idle[:-MOST_IDLE], self._idle[-MOST_IDLE:]
            if self._keeper is None:
                self._keeper = threading.Thread(
                    target=self._keep, name="prefect-torch-elastic launchers", daemon=True
                )
                self._keeper.start()
        for entry in surplus:
            entry.launcher.close()

    def close(self) -> None:
        """End all launchers that wait."""
        with self._lock:
            idle, self._idle = self._idle, []
            ahead, self._ahead = self._ahead, None
        for launcher in (ahead, *(entry.launcher for entry in idle)):
            if launcher is not None:
                launcher.close()

    def _keep(self) -> None:
        while True:
            time.sleep(_KEEP_SECONDS)
            with self._lock:
                over = [entry for entry in self._idle if entry.is_over()]
                self._idle = [entry for entry in self._idle if entry not in over]
                if not self._idle:
                    self._keeper = None
            for entry in over:
                with suppress(OSError):  # the others must be ended all the same
                    entry.launcher.close()
            if self._keeper is not threading.current_thread():
                return


pool = LauncherPool()
atexit.register(pool.close)


def start_launcher(environment: Mapping[str, str], *, key: tuple[Any, ...], log: Path | None) -> Launcher:
    """Start a launcher process in a session of its own, so that Ctrl-C reaches it through us only.

    Args:
        environment: Its whole environment.
        key: What it can be used for.
        log: Where it writes to. With None it waits for `Launcher.write_to`, and shares our output until then.
    """
    ours, theirs = socket.socketpair()
    environment, mark = mark_environment(environment)
    command = [sys.executable, "-P", "-m", "prefect_torch_elastic.node"]
    command += ["--channel", str(theirs.fileno()), "--parent", str(os.getpid())]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    with open(os.open(log, flags, 0o600), "ab") if log else nullcontext() as output:
        process = subprocess.Popen(
            [*command, *(["--log", str(log)] if log else [])],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL if log else subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    theirs.close()
    return Launcher(process, Channel(ours), mark, key, log)


def _make_key(environment: Mapping[str, str], owner: object | None) -> tuple[Any, ...]:
    return (id(owner), sys.executable, tuple(sorted(environment.items())))


def run_gang(
    launcher: Launcher,
    order: RunGang,
    *,
    listen: Listener,
    cancelled: Callable[[], bool],
    stop_reason: Callable[[], StopReason] = lambda: StopReason.CANCELLED,
    grace_seconds: float,
) -> GangEnded:
    """Run one gang and return how it ended; whatever interrupts this call, the gang ends first.

    Args:
        launcher: An idle launcher.
        order: The gang.
        listen: Called with every message on the way.
        cancelled: Asked several times a second whether to stop.
        stop_reason: What ranks are told then.
        grace_seconds: What ranks get between SIGTERM and SIGKILL when the call is interrupted.

    Raises:
        GangCancelled: If `cancelled` said so; the gang is over.
    """
    try:
        launcher.channel.send(order)
        while True:
            for message in launcher.channel.receive(_LOOK_SECONDS):
                if isinstance(message, GangEnded):
                    _tell_killed(message, listen, grace_seconds)
                    return message
                listen(message)
            if cancelled():
                raise GangCancelled("the task was asked to stop while its gang ran")
    except ChannelClosed:
        return _lost(launcher)
    except BaseException as error:  # timeouts, cancellation and Ctrl-C of Prefect arrive as any exception
        reason = StopReason.TIMED_OUT if isinstance(error, TimeoutError) else stop_reason()
        _stop(launcher, StopGang(reason=reason, grace_seconds=grace_seconds), listen)
        raise


def _stop(launcher: Launcher, order: StopGang, listen: Listener) -> None:
    """End the gang within its grace; a second Ctrl-C meanwhile ends it at once."""
    deadline = time.monotonic() + order.grace_seconds + _STOP_MARGIN_SECONDS
    while True:
        try:
            launcher.channel.send(order)
            while time.monotonic() < deadline:
                for message in launcher.channel.receive(_LOOK_SECONDS):
                    if isinstance(message, GangEnded):
                        _tell_killed(message, listen, order.grace_seconds)
                        return
                    listen(message)
            break
        except ChannelClosed:
            break
        except KeyboardInterrupt:
            order = replace(order, grace_seconds=0.0)
            deadline = time.monotonic() + _STOP_MARGIN_SECONDS
    launcher.process.kill()
    _lost(launcher)


def _tell_killed(ended: GangEnded, listen: Listener, grace_seconds: float) -> None:
    if ended.killed:
        ranks = ", ".join(map(str, ended.killed))
        text = f"Ranks that did not leave within {grace_seconds:g} s and were killed: {ranks}."
        listen(Notice(level=logging.WARNING, text=text))


def _lost(launcher: Launcher) -> GangEnded:
    """The launcher is gone: its agents and ranks die with it (parent-death signals); sweep what is left."""
    try:
        code = launcher.process.wait(_QUIT_SECONDS)
    except subprocess.TimeoutExpired:
        launcher.process.kill()
        code = launcher.process.wait()
    deadline = time.monotonic() + _QUIT_SECONDS
    while processes.kill_marked(launcher.mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    logging.getLogger(__name__).debug("launcher %s is gone (%s)", launcher.process.pid, code)
    diagnosis = diagnose_lost_launcher(code, last_words=_last_line(launcher.log) if code > 0 else "")
    return GangEnded(status=GangStatus.FAILED, diagnosis=asdict(diagnosis))


def _last_line(log: Path | None) -> str:
    if log is None:
        return ""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1][:200] if lines else ""


def mark_environment(environment: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return the environment of a process that forks ranks, and the mark that all it starts will carry."""
    mark = secrets.token_hex(8)
    # OpenBLAS starts its threads when numpy is imported, and a process with threads cannot be forked
    return {**environment, "OPENBLAS_NUM_THREADS": "1", processes.MARK: mark}, mark


def launcher_environment(environment: Mapping[str, str], *, nproc_per_node: int | str) -> dict[str, str]:
    """Return the environment that a launcher's processes import their libraries with."""
    from prefect_torch_elastic.node.environment import with_thread_limit, without_stale_variables

    clean = without_stale_variables(environment)
    _choose_interface(clean)
    if not _is_installed():
        parts = (str(Path(__file__).parents[1]), environment.get("PYTHONPATH", ""))
        clean["PYTHONPATH"] = os.pathsep.join(part for part in parts if part)
    return with_thread_limit(clean, nproc=1 if nproc_per_node == 1 else 2)


def _choose_interface(environment: dict[str, str]) -> None:
    """Keep the ranks of one machine to themselves; those of several listen where their peers call."""
    if int(environment.get(NNODES_VARIABLE) or 1) == 1:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
    elif name := find_interface(environment.get(POD_IP_VARIABLE, "")):
        environment.setdefault("GLOO_SOCKET_IFNAME", name)  # NCCL looks for the fastest one itself


def _is_installed() -> bool:
    """Whether a fresh interpreter finds this package by itself; from a plain checkout it does not."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution("prefect-torch-elastic")
    except PackageNotFoundError:
        return False
    return True
