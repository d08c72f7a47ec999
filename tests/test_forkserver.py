"""The warm start: children are the owner's, end with exact codes, and keep nothing of the server."""

from __future__ import annotations

import os
import signal
import uuid

import pytest

from prefect_torch_elastic.node import processes
from tests.gangs import kill, lives, wait_until, wait_until_gone

# An owner with a server. A function of the script is a target that children can run.
OWNER = """
import json, os, signal, subprocess, sys, threading, time
from pathlib import Path
from prefect_torch_elastic.node import forkserver, processes, zygote
from prefect_torch_elastic.node.forkserver import Child, ForkServer, ServerLost

find = zygote._find_target
zygote._find_target = lambda name, owner: globals().get(name) or find(name, owner)

def child(target, spec=None, *, fds=(), environment=None, directory="/"):
    environment = environment or {}
    return Child(target=target, spec=spec or {}, fds=list(fds), directory=directory, environment=environment)

def wait(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def say(value):
    print(json.dumps(value), flush=True)

def sleep(spec, fds):
    time.sleep(60)

def import_modules(names, path):
    return server.fork_server(names, path, waiting=lambda seconds: None)

processes.adopt_orphans()
"""
START = "server = ForkServer.fork_from_here()\n"


@pytest.fixture
def owner(run_script):
    """`owner(text)` runs a script that owns a fork server and returns what it said, line by line."""
    import json

    def run(text: str, **options):
        result = run_script(OWNER + text, **options)
        assert result.rc == 0, result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()]

    return run


def test_children_end_with_their_exact_codes(owner):
    (codes,) = owner(
        """
def leave(spec, fds):
    return spec["code"]
def die(spec, fds):
    os.kill(os.getpid(), spec["signal"])
def fail(spec, fds):
    raise ValueError("told in the log")
"""
        + START
        + """
children = [child("leave", {"code": 0}), child("leave", {"code": 7}), child("fail")]
children += [child("die", {"signal": number}) for number in (9, 11, 15)]
say([wait(pid) for pid in server.fork(children)])
server.close()
"""
    )
    assert codes == [0, 7, 70, -9, -11, -15]


def test_children_belong_to_the_owner_and_lead_groups_of_their_own(owner):
    parents, groups, children = owner(
        """
def tell(spec, fds):
    os.write(fds[0], f"{os.getppid()} {os.getpgid(0)} {os.getpid()};".encode())
    return 0
"""
        + START
        + """
reader, writer = os.pipe()
pids = server.fork([child("tell", fds=[writer]) for _ in range(3)])
children = processes.list_children()
[wait(pid) for pid in pids]
said = [entry.split() for entry in os.read(reader, 1000).decode().split(";") if entry]
say([int(entry[0]) == os.getpid() for entry in said])
say(sorted(int(entry[1]) for entry in said) == sorted(pids))
say(sorted(set(children) - {server.pid}) == sorted(pids) or len(children) < 4)
"""
    )
    assert parents == [True, True, True]
    assert groups
    assert children


def test_child_has_its_environment_directory_and_no_open_file_but_its_own(owner, tmp_path):
    environment, directory, fds = owner(
        """
def tell(spec, fds):
    open_now = [int(name) for name in os.listdir("/proc/self/fd")]
    target = [os.readlink(f"/proc/self/fd/{fd}") for fd in open_now if os.path.exists(f"/proc/self/fd/{fd}")]
    extra = [name for name in target if "socket" in name or "secret" in name]
    os.write(fds[0], json.dumps([dict(os.environ), os.getcwd(), [extra, len(open_now)]]).encode())
    return 0
"""
        + f"""
secret = open({str(tmp_path / "secret")!r}, "w")
"""
        + START
        + f"""
reader, writer = os.pipe()
(pid,) = server.fork([child("tell", fds=[writer], environment={{"A": "1"}}, directory={str(tmp_path)!r})])
wait(pid)
for part in json.loads(os.read(reader, 10000)):
    say(part)
"""
    )
    assert environment == {"A": "1"}
    assert directory == str(tmp_path)
    assert fds == [[], 5]  # 0 to 2, the pipe, and the listing itself


def test_children_start_with_the_signals_of_a_fresh_process(owner):
    (handlers,) = owner(
        """
def tell(spec, fds):
    numbers = (signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1, signal.SIGINT)
    os.write(fds[0], json.dumps([str(signal.getsignal(number)) for number in numbers]).encode())
    return 0
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, lambda *_: None)
"""
        + START
        + """
reader, writer = os.pipe()
(pid,) = server.fork([child("tell", fds=[writer])])
wait(pid)
say(json.loads(os.read(reader, 10000)))
"""
    )
    assert handlers[:3] == ["0", "0", "0"] or handlers[:3] == ["Handlers.SIG_DFL"] * 3
    assert "default_int_handler" in handlers[3]


def test_more_children_than_fit_in_one_message_are_forked(owner):
    (codes,) = owner(
        """
def leave(spec, fds):
    return spec["number"] % 7 if len(fds) == 3 else 99
"""
        + START
        + """
fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
pids = server.fork([child("leave", {"number": number}, fds=fds) for number in range(100)])
say([wait(pid) for pid in pids])
"""
    )
    assert codes == [number % 7 for number in range(100)]


def test_children_go_on_when_the_server_is_killed(owner):
    lost, alive, code = owner(
        START
        + """
(pid,) = server.fork([child("sleep")])
os.kill(server.pid, signal.SIGKILL)
try:
    server.fork([child("sleep")])
except ServerLost as error:
    say(str(error))
say(os.waitpid(pid, os.WNOHANG) == (0, 0))
os.kill(pid, signal.SIGKILL)
say(wait(pid))
server.close()
"""
    )
    assert "is gone or does not answer" in lost
    assert alive
    assert code == -9


def test_children_go_on_when_the_server_is_closed(owner):
    (alive, gone) = owner(
        START
        + """
(pid,) = server.fork([child("sleep")])
server.close()
say(os.waitpid(pid, os.WNOHANG) == (0, 0))
say(not Path(f"/proc/{server.pid}").exists())
os.kill(pid, signal.SIGKILL)
"""
    )
    assert alive
    assert gone


def test_server_that_is_stopped_can_be_closed(owner, monkeypatch):
    (gone,) = owner(
        START
        + """
forkserver._CLOSE_SECONDS = 0.1
os.kill(server.pid, signal.SIGSTOP)
server.close()
say(not Path(f"/proc/{server.pid}").exists())
"""
    )
    assert gone


def test_server_that_fails_by_itself_kills_no_child(owner):
    lost, alive = owner(
        START
        + """
(pid,) = server.fork([child("sleep")])
forkserver.send_request(server._socket, {"op": "fork"})  # without children: it raises
os.waitpid(server.pid, 0)
try:
    server.fork([child("sleep")])
except ServerLost as error:
    say(str(error))
time.sleep(0.2)
say(os.waitpid(pid, os.WNOHANG) == (0, 0))
os.kill(pid, signal.SIGKILL)
"""
    )
    assert "is gone or does not answer" in lost
    assert alive


def test_fork_that_fails_at_the_second_child_leaves_none_and_the_server_goes_on(owner, tmp_path):
    lost, ended, code = owner(
        f"FAILED = Path({str(tmp_path / 'failed')!r})"
        + """
def leave(spec, fds):
    return 3

real, forks = os.fork, []  # counted along a line of descent: server, middle, first child, second child

def fork():
    forks.append(1)
    if len(forks) == 4 and not FAILED.exists():
        FAILED.touch()
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return real()

os.fork = fork
"""
        + START
        + """
try:
    server.fork([child("sleep") for _ in range(3)])
except ServerLost as error:
    say(str(error))
left = [pid for pid in processes.list_children() if pid != server.pid]
say([wait(pid) for pid in left])
say(wait(server.fork([child("leave")])[0]))
"""
    )
    assert "could not fork: no process or no memory" in lost
    assert ended == [-9]
    assert code == 3


def test_server_is_not_forked_from_a_process_with_threads(owner):
    (refused,) = owner(
        """
threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
try:
    ForkServer.fork_from_here()
except ServerLost as error:
    say(str(error))
"""
    )
    assert "before any thread is started" in refused


# ---------------------------------------------------------------- the owner dies


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["sigkill", "sigterm"])
def test_nobody_outlives_the_owner(run_script, number):
    mark = uuid.uuid4().hex
    script = run_script.start(
        OWNER
        + """
def have_children(spec, fds):
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    started = [subprocess.Popen(command).pid, subprocess.Popen(command, start_new_session=True).pid]
    if (forked := os.fork()) == 0:
        os.setsid()
        time.sleep(60)
    os.write(fds[0], json.dumps([os.getpid(), *started, forked]).encode())
    time.sleep(60)
"""
        + START
        + """
reader, writer = os.pipe()
server.fork([child("have_children", fds=[writer], environment=dict(os.environ))])
say([server.pid, *json.loads(os.read(reader, 1000))])
time.sleep(60)
""",
        env={processes.MARK: mark},
    )
    wait_until(lambda: script.stdout.endswith("\n"), 20.0)
    pids = [int(pid) for pid in script.stdout.strip("[]\n").split(",")]
    assert all(lives(pid) for pid in pids)
    kill(script.process.pid, number)
    try:
        assert wait_until_gone(pids, 10.0) < 10
    finally:
        processes.kill_marked(mark)


# ---------------------------------------------------------------- preloading


@pytest.fixture
def modules(tmp_path):
    """A folder with modules that do what modules of users do at import."""
    (tmp_path / "calm.py").write_text("VALUE = 7\n")
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    (tmp_path / "broken.py").write_text("raise ImportError('needs a library')\n")
    return tmp_path


def test_modules_are_imported_once_for_all_children(owner, modules):
    preloaded, values = owner(
        """
def tell(spec, fds):
    return sys.modules["calm"].VALUE
"""
        + START
        + f"""
gang, preloaded = import_modules(["calm"], [{str(modules)!r}, *sys.path])
say([preloaded.safe, preloaded.threads, preloaded.culprit])
say([wait(pid) for pid in gang.fork([child("tell"), child("tell")])])
gang.close()
server.close()
"""
    )
    assert preloaded == [True, 1, ""]
    assert values == [7, 7]


def test_module_that_starts_a_thread_is_named(owner, modules):
    (preloaded, code) = owner(
        """
def leave(spec, fds):
    return 3
"""
        + START
        + f"""
gang, preloaded = import_modules(["calm", "threaded", "json"], [{str(modules)!r}, *sys.path])
say([preloaded.safe, preloaded.threads, preloaded.culprit])
gang.close()
say(wait(server.fork([child("leave")])[0]))
"""
    )
    assert preloaded == [False, 2, "threaded"]
    assert code == 3  # only the gang's own server is thrown away


def test_module_that_cannot_be_imported_is_left_to_the_ranks(owner, modules):
    (preloaded,) = owner(
        START
        + f"""
_, preloaded = import_modules(["broken", "missing", "calm"], [{str(modules)!r}, *sys.path])
say(preloaded.safe)
"""
    )
    assert preloaded is True


def test_wait_for_an_import_that_is_broken_off_ends_the_importing_server_only(owner, modules):
    (modules / "slow.py").write_text("import time\ntime.sleep(60)\n")
    asked, left, code = owner(
        """
def leave(spec, fds):
    return 3

class Stop(Exception):
    pass

asked = []

def waiting(seconds):
    asked.append(seconds)
    if len(asked) == 2:
        raise Stop

forkserver._CLOSE_SECONDS = 0.1
"""
        + START
        + f"""
try:
    server.fork_server(["slow"], [{str(modules)!r}, *sys.path], waiting=waiting)
except Stop:
    say(asked)
say(processes.list_children() == [server.pid])
say(wait(server.fork([child("leave")])[0]))
"""
    )
    assert 0 < asked[0] < asked[1] < 5
    assert left
    assert code == 3


# ---------------------------------------------------------------- a real rank

RANK = """
from dataclasses import asdict
import numpy, torch
import prefect_torch_elastic.node.rank as rank_main
from prefect_torch_elastic import parcel
from prefect_torch_elastic.rankstate import RankState
torch.rand(1), numpy.random.rand(1)

def draw():
    import random
    import numpy, torch
    numbers = [random.random(), float(torch.rand(1)), float(numpy.random.rand(1)[0])]
    return numbers, torch.get_num_threads(), os.getpid()

def make_rank(number, threads):
    order = rank_main.RankOrder(
        call=str(FOLDER / "call"), secret="00", prefix=str(FOLDER / f"rank-{number}"), search_path=sys.path,
        threads=threads, collective_timeout_seconds=None, non_retryable=[],
    )
    log = os.open(FOLDER / f"log-{number}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
    fds = [log, RankState.create_file("x"), os.open(os.devnull, os.O_WRONLY)]
    environment = {**os.environ, "RANK": "0"}
    return child("rank", asdict(order), fds=fds, environment=environment, directory=str(FOLDER))
"""


def test_ranks_draw_different_numbers_and_have_the_threads_they_were_given(owner, tmp_path):
    codes, values = owner(
        f"FOLDER = Path({str(tmp_path)!r})\n"
        + RANK
        + """
server = ForkServer.fork_from_here()
parcel.write_parcel(FOLDER / "call", (draw, (), {}), key=bytes([0]))
orders = [make_rank(0, 1), make_rank(1, 1), make_rank(2, 2)]
say([wait(pid) for pid in server.fork(orders)])
say([parcel.read_parcel(FOLDER / f"rank-{number}.result", key=bytes([0])) for number in range(3)])
""",
        env={"OPENBLAS_NUM_THREADS": "1"},  # as for a launcher: its threads start with the import of numpy
    )
    assert codes == [0, 0, 0], [path.read_text() for path in tmp_path.glob("log-*")]
    numbers, threads, pids = zip(*values, strict=True)
    assert all(len(set(column)) == 3 for column in zip(*numbers, strict=True))
    assert threads == (1, 1, 2)
    assert len({*pids, os.getpid()}) == 4
