"""The driver's side of a gang here: launchers that wait for the next gang, and a sure end of each."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace

import pytest

from prefect_torch_elastic import local
from prefect_torch_elastic.channel import Channel, ChannelClosed
from prefect_torch_elastic.evidence import Category, parse_diagnosis
from prefect_torch_elastic.local import GangCancelled, Launcher, LauncherPool, launcher_environment, run_gang
from prefect_torch_elastic.node import __main__, processes
from prefect_torch_elastic.rankstate import StopReason
from prefect_torch_elastic.wire import GangEnded, GangStatus, Notice, Quit, RunGang, StopGang
from tests.gangs import kill, lives, wait_until

REPOSITORY = str(Path(local.__file__).parents[1])
ORDER = RunGang(
    run_key="run",
    attempt=1,
    folder="",
    call="",
    secret="",
    fields={},
    environment={},
    directory="/",
    search_path=[],
    modules=[],
)
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
# A launcher's program that leaves when it is told so, or when its driver is gone.
OBEY = """
import socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
if log := sys.stdin.read():
    open(log, "w").write("told")
channel.recv(100)
"""


class Owner:
    """A flow run's context."""

    _token: object | None = object()


class Far:
    """The other end of a launcher's channel, played by the test."""

    def __init__(self, channel: Channel, launcher: Launcher) -> None:
        self.channel, self.launcher = channel, launcher
        self.received: list[object] = []

    def expect(self, kind: type) -> None:
        deadline = time.monotonic() + 10.0
        while not any(isinstance(message, kind) for message in self.received):
            assert time.monotonic() < deadline, f"no {kind.__name__}"
            self.received += self.channel.receive(0.1)


@pytest.fixture
def log(tmp_path):
    return tmp_path / "launcher.log"


@pytest.fixture
def played(log):
    """A launcher whose process does nothing and whose channel the test speaks on."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(SLEEP)
    launcher = Launcher(process, Channel(ours), "no mark", (), log)
    far = Far(Channel(theirs), launcher)
    yield far
    process.kill()
    process.wait()
    ours.close()
    theirs.close()


@pytest.fixture
def pool(monkeypatch):
    """A pool whose launchers are small programs."""

    def start(environment, *, key, log):
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(
            [sys.executable, "-c", OBEY, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL if log else subprocess.PIPE,
        )
        theirs.close()
        return Launcher(process, Channel(ours), "no mark", key, log)

    monkeypatch.setattr(local, "start_launcher", start)
    monkeypatch.setattr(local, "_KEEP_SECONDS", 0.01)
    pool = LauncherPool()
    yield pool
    pool.close()


# ---------------------------------------------------------------- the pool


def test_next_gang_of_a_flow_gets_the_warm_launcher(pool, log):
    owner = Owner()
    first = pool.acquire({"A": "1"}, owner=owner, log=log)
    pool.release(first, owner=owner)
    assert pool.acquire({"A": "1"}, owner=owner, log=log) is first
    pool.release(first, owner=owner)


def test_two_gangs_at_once_get_two_launchers(pool, log):
    owner = Owner()
    launchers = [pool.acquire({}, owner=owner, log=log) for _ in range(2)]
    assert launchers[0] is not launchers[1]
    for launcher in launchers:
        pool.release(launcher, owner=owner)


def test_gang_with_another_environment_gets_another_launcher(pool, log):
    owner = Owner()
    first = pool.acquire({"OMP_NUM_THREADS": "1"}, owner=owner, log=log)
    pool.release(first, owner=owner)
    other = pool.acquire({"OMP_NUM_THREADS": "2"}, owner=owner, log=log)
    assert other is not first
    assert first.alive
    other.close()


def test_gang_of_another_flow_gets_another_launcher(pool, log):
    owner, stranger = Owner(), Owner()
    first = pool.acquire({}, owner=owner, log=log)
    pool.release(first, owner=owner)
    other = pool.acquire({}, owner=stranger, log=log)
    assert other is not first
    other.close()


def test_launcher_that_died_while_it_waited_is_replaced(pool, log):
    owner = Owner()
    first = pool.acquire({}, owner=owner, log=log)
    pool.release(first, owner=owner)
    first.process.kill()
    first.process.wait()
    second = pool.acquire({}, owner=owner, log=log)
    assert second is not first
    assert first.channel.fileno() == -1
    second.close()


def test_first_gang_gets_the_launcher_that_was_started_ahead_and_tells_it_its_log(pool, log):
    pool.start_ahead({"A": "1"})
    ahead = pool._ahead
    launcher = pool.acquire({"A": "1"}, owner=None, log=log)
    assert launcher is ahead
    assert wait_until(lambda: log.exists() and log.read_text() == "told", 10.0) < 10
    second = pool.acquire({"A": "1"}, owner=None, log=log)
    assert second is not launcher
    for one in (launcher, second):
        pool.release(one, owner=None)
        assert not one.alive


@pytest.mark.parametrize(
    "environment", [pytest.param({"A": "1"}, id="it-died"), pytest.param({"A": "2"}, id="other-environment")]
)
def test_launcher_that_was_started_ahead_in_vain_is_replaced(pool, log, environment):
    pool.start_ahead({"A": "1"})
    ahead = pool._ahead
    if environment == {"A": "1"}:
        ahead.process.kill()
        ahead.process.wait()
    launcher = pool.acquire(environment, owner=None, log=log)
    assert launcher is not ahead
    assert not ahead.alive
    assert ahead.channel.fileno() == -1
    launcher.close()


def test_launcher_that_was_started_ahead_ends_with_the_pool(pool):
    pool.start_ahead({})
    ahead = pool._ahead
    pool.close()
    assert not ahead.alive


def test_launcher_without_a_flow_ends_with_its_gang(pool, log):
    launcher = pool.acquire({}, owner=None, log=log)
    pool.release(launcher, owner=None)
    assert not launcher.alive


def test_launcher_ends_when_its_flow_has_ended(pool, log):
    owner = Owner()
    launcher = pool.acquire({}, owner=owner, log=log)
    pool.release(launcher, owner=owner)
    time.sleep(0.05)
    assert launcher.alive
    owner._token = None
    assert wait_until(lambda: not launcher.alive, 10.0) < 10


def test_launcher_ends_when_its_flow_was_forgotten(pool, log):
    owner = Owner()
    launcher = pool.acquire({}, owner=owner, log=log)
    pool.release(launcher, owner=owner)
    del owner
    gc.collect()
    assert wait_until(lambda: not launcher.alive, 10.0) < 10


def test_launcher_ends_after_idle_time(pool, log, monkeypatch):
    monkeypatch.setattr(local, "IDLE_SECONDS", 0.05)
    owner = Owner()
    launcher = pool.acquire({}, owner=owner, log=log)
    pool.release(launcher, owner=owner)
    assert wait_until(lambda: not launcher.alive, 10.0) < 10


def test_only_so_many_launchers_wait(pool, log, monkeypatch):
    monkeypatch.setattr(local, "MOST_IDLE", 2)
    owner = Owner()
    launchers = [pool.acquire({"N": str(number)}, owner=owner, log=log) for number in range(3)]
    for launcher in launchers:
        pool.release(launcher, owner=owner)
    assert [launcher.alive for launcher in launchers] == [False, True, True]


def test_thread_that_looks_after_launchers_ends_with_the_last_one(pool, log):
    def keepers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if "launchers" in thread.name}

    owner, others = Owner(), keepers()  # those of other pools come and go
    for _ in range(2):
        pool.release(pool.acquire({}, owner=owner, log=log), owner=owner)
        assert len(keepers() - others) == 1
        pool.close()
        assert wait_until(lambda: not keepers() - others, 10.0) < 10


def test_empty_log_of_a_launcher_is_removed_at_its_end(pool, log):
    log.touch()
    pool.release(pool.acquire({}, owner=None, log=log), owner=None)
    assert not log.exists()
    log.write_text("Traceback")
    pool.release(pool.acquire({}, owner=None, log=log), owner=None)
    assert log.read_text() == "Traceback"


# ---------------------------------------------------------------- one gang


def run(played, *, listen=lambda _: None, cancelled=lambda: False, grace_seconds=0.2):
    return run_gang(played.launcher, ORDER, listen=listen, cancelled=cancelled, grace_seconds=grace_seconds)


def test_gang_ends_with_what_the_launcher_says(played):
    ended = GangEnded(status=GangStatus.SUCCEEDED, result="/runs/rank-0.result")
    played.channel.send(Notice(level=20, text="started"))
    played.channel.send(ended)
    heard = []
    assert run(played, listen=heard.append) == ended
    assert heard == [Notice(level=20, text="started")]
    played.expect(RunGang)


def test_launcher_that_is_killed_ends_the_gang_as_infrastructure(played):
    played.channel.close()
    played.launcher.process.kill()
    diagnosis = parse_diagnosis(run(played).diagnosis)
    assert diagnosis.category is Category.LAUNCHER_LOST
    assert "SIGKILL" in diagnosis.summary


def test_what_a_dead_launcher_left_is_swept(played, monkeypatch):
    monkeypatch.setattr(played.launcher, "mark", "mark-of-this-test")
    left = subprocess.Popen(
        SLEEP, env={**os.environ, processes.MARK: "mark-of-this-test"}, start_new_session=True
    )
    wait_until(lambda: processes.is_marked(left.pid, "mark-of-this-test"), 5.0)
    played.channel.close()
    played.launcher.process.kill()
    run(played)
    assert left.wait(10) == -signal.SIGKILL


def play_stop(played) -> threading.Thread:
    """Answer a stop as a launcher does: the gang has ended."""

    def answer() -> None:
        played.expect(StopGang)
        played.channel.send(GangEnded(status=GangStatus.STOPPED))

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_cancelled_task_ends_its_gang_first(played):
    thread = play_stop(played)
    with pytest.raises(GangCancelled):
        run(played, cancelled=lambda: True)
    thread.join(10)
    assert StopGang(reason=StopReason.CANCELLED, grace_seconds=0.2) in played.received
    assert lives(played.launcher.process.pid)


def test_exception_of_any_kind_ends_the_gang_first(played):
    class Timeout(BaseException):
        pass

    def listen(_):
        raise Timeout

    played.channel.send(Notice(level=20, text="x"))
    thread = play_stop(played)
    with pytest.raises(Timeout):
        run(played, listen=listen)
    thread.join(10)
    assert any(isinstance(message, StopGang) for message in played.received)


def test_launcher_that_does_not_stop_its_gang_is_killed(played, monkeypatch):
    monkeypatch.setattr(local, "_STOP_MARGIN_SECONDS", 0.0)
    with pytest.raises(GangCancelled):
        run(played, cancelled=lambda: True, grace_seconds=0.05)
    assert played.launcher.process.returncode == -signal.SIGKILL


def test_second_interrupt_ends_the_gang_at_once(played):
    interrupts = iter([KeyboardInterrupt(), KeyboardInterrupt()])

    def listen(_):
        if (error := next(interrupts, None)) is not None:
            raise error

    def answer() -> None:
        played.expect(StopGang)
        played.channel.send(Notice(level=20, text="still stopping"))
        while not any(getattr(message, "grace_seconds", None) == 0.0 for message in played.received):
            played.received += played.channel.receive(0.1)
        played.channel.send(GangEnded(status=GangStatus.STOPPED))

    played.channel.send(Notice(level=20, text="x"))
    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(played, listen=listen, grace_seconds=60.0)
    thread.join(10)
    assert StopGang(reason=StopReason.CANCELLED, grace_seconds=0.0) in played.received


# ---------------------------------------------------------------- a real launcher


def test_node_without_torch_names_the_extra(tmp_path, log):
    fake = tmp_path / "torch"
    fake.mkdir()
    (fake / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    launcher = local.start_launcher(environment, key=(), log=log)
    try:
        ended = run_gang(launcher, ORDER, listen=lambda _: None, cancelled=lambda: False, grace_seconds=1.0)
    finally:
        launcher.close()
    diagnosis = parse_diagnosis(ended.diagnosis)
    assert diagnosis.category is Category.SETUP_FAILED
    assert "`torch` is not installed" in diagnosis.summary
    assert "pip install 'prefect-torch-elastic[torch]'" in diagnosis.summary
    assert diagnosis.non_retryable


def test_launcher_is_marked_in_a_session_of_its_own_and_has_one_file_of_ours(log, monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\ncut -d ' ' -f 6 /proc/$$/stat\necho $$ $PTE_MARK $*\nls /proc/$$/fd\n")
    program.chmod(0o755)
    monkeypatch.setattr(local.sys, "executable", str(program))
    launcher = local.start_launcher(dict(os.environ), key=(), log=log)
    launcher.process.wait(10)
    session, line, *fds = log.read_text().splitlines()
    pid, mark, *arguments = line.split()
    assert session == pid == str(launcher.process.pid)
    assert mark == launcher.mark
    assert arguments[:3] == ["-P", "-m", "prefect_torch_elastic.node"]
    assert set(fds) <= {"0", "1", "2", "10", "255", arguments[arguments.index("--channel") + 1]}
    with pytest.raises(ChannelClosed):
        list(launcher.channel.receive(5.0))
    launcher.close()


def test_log_of_a_launcher_is_for_its_owner_only_whatever_the_umask(log, monkeypatch):
    monkeypatch.setattr(local.sys, "executable", "/bin/true")
    before = os.umask(0)
    try:
        launcher = local.start_launcher(dict(os.environ), key=(), log=log)
    finally:
        os.umask(before)
    assert log.stat().st_mode & 0o777 == 0o600
    launcher.close()


@pytest.mark.parametrize(
    ("said", "logs"),
    [pytest.param(b"/a/log", ["/a/log"], id="told"), pytest.param(b"", [], id="whoever-started-it-is-gone")],
)
def test_launcher_without_a_log_waits_for_its_name(monkeypatch, said, logs):
    served = []
    program = SimpleNamespace(run_launcher=lambda connection, log, parent: served.append(log))
    monkeypatch.setitem(sys.modules, "prefect_torch_elastic.node.launcher", program)
    monkeypatch.setattr(__main__.gc, "disable", lambda: None)
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(said)))
    ours, theirs = socket.socketpair()
    with ours:
        __main__._launch(Namespace(channel=theirs.detach(), log=None, parent=1))
    assert served == logs


# ---------------------------------------------------------------- its environment


def test_environment_of_a_launcher_places_it_in_no_other_gang_c021():
    stale = {
        "RANK": "3",
        "MASTER_ADDR": "10.0.0.1",
        "PET_NNODES": "2",
        "TORCHELASTIC_RUN_ID": "x",
        "PTE_X": "1",
    }
    clean = launcher_environment({**stale, "PATH": "/bin"}, nproc_per_node=2)
    assert not clean.keys() & stale.keys()
    assert clean["PATH"] == "/bin"


@pytest.mark.parametrize(
    ("installed", "path"),
    [
        pytest.param(True, ["/my/code"], id="installed"),
        pytest.param(False, [REPOSITORY, "/my/code"], id="plain-checkout"),
    ],
)
def test_environment_of_a_launcher_finds_our_package_and_keeps_the_users_path(monkeypatch, installed, path):
    monkeypatch.setattr(local, "_is_installed", lambda: installed)
    clean = launcher_environment({"PYTHONPATH": "/my/code"}, nproc_per_node=1)
    assert clean["PYTHONPATH"].split(os.pathsep) == path


@pytest.mark.parametrize(
    ("environment", "nproc", "threads"),
    [({}, 2, "1"), ({}, "auto", "1"), ({}, 1, None), ({"OMP_NUM_THREADS": "4"}, 2, "4")],
)
def test_environment_limits_threads_when_there_are_several_ranks(environment, nproc, threads):
    assert launcher_environment(environment, nproc_per_node=nproc).get("OMP_NUM_THREADS") == threads


def test_gang_stays_on_loopback_unless_the_user_says_otherwise():
    assert launcher_environment({}, nproc_per_node=1)["GLOO_SOCKET_IFNAME"] == "lo"
    chosen = launcher_environment({"GLOO_SOCKET_IFNAME": "eth0"}, nproc_per_node=1)
    assert chosen["GLOO_SOCKET_IFNAME"] == "eth0"


def test_close_ends_a_launcher_that_does_not_listen(played, monkeypatch):
    monkeypatch.setattr(local, "_QUIT_SECONDS", 0.05)
    kill(played.launcher.process.pid, signal.SIGSTOP)
    played.launcher.close()
    assert played.launcher.process.returncode == -signal.SIGKILL
    assert Quit() in list(played.channel.receive(1.0))
