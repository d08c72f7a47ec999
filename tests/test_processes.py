"""What Linux is asked about processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from typing import Any

import pytest

from prefect_torch_elastic.node import processes
from tests.gangs import lives, wait_until, wait_until_gone

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def start():
    """`start(**options)` starts a process that sleeps; it is killed after the test."""
    started: list[subprocess.Popen[Any]] = []

    def run(command=SLEEP, **options) -> subprocess.Popen[Any]:
        started.append(subprocess.Popen(command, **options))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def test_threads_are_counted_with_those_of_native_libraries():
    before = processes.count_threads()
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    assert processes.count_threads() == before + 1
    release.set()
    thread.join()


def test_open_gpus_are_found_without_asking_a_driver(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_SELF", tmp_path)
    (tmp_path / "fd").mkdir()
    for number, target in enumerate(["/dev/nvidia0", "/dev/null", "/dev/nvidiactl", "/dev/nvidia0"]):
        (tmp_path / "fd" / str(number)).symlink_to(target)
    assert processes.find_open_gpus() == ["/dev/nvidia0", "/dev/nvidiactl"]


def test_children_are_listed(start):
    child = start()
    assert child.pid in processes.list_children()


def test_tree_has_grandchildren_and_what_each_has_done(run_script):
    script = run_script.start(
        """
import os, time
reader, writer = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.write(writer, b"x" * 5000)
        deadline = time.process_time() + 0.1
        while time.process_time() < deadline:
            pass
        for _ in range(30):
            time.sleep(0.001)
        print("there", flush=True)
    time.sleep(60)
time.sleep(60)
"""
    )
    wait_until(lambda: "there" in script.stdout, 20.0)
    tree = processes.list_tree(script.process.pid)
    assert (len(tree), tree[0]) == (3, script.process.pid)
    seconds, size, switches = processes.read_effort(tree[2])
    assert seconds >= 0.09
    assert size >= 5000
    assert switches >= 30


def test_tree_is_bounded(monkeypatch):
    monkeypatch.setattr(processes, "list_children", lambda pid: [pid + 1, pid + 2, pid + 3])
    assert len(processes.list_tree(1)) == 256


def test_process_that_is_gone_has_done_nothing():
    assert processes.list_tree(2**22 - 1) == [2**22 - 1]
    assert processes.read_effort(2**22 - 1) == [0.0, 0.0, 0.0]


def test_stopped_process_is_seen(start):
    child = start()
    assert not processes.is_stopped(child.pid)
    child.send_signal(signal.SIGSTOP)
    assert wait_until(lambda: processes.is_stopped(child.pid), 5.0) < 5
    child.send_signal(signal.SIGCONT)
    assert wait_until(lambda: not processes.is_stopped(child.pid), 5.0) < 5


def test_process_with_a_bracket_in_its_name_is_no_trouble(start, tmp_path):
    odd = tmp_path / "a) T ("
    odd.symlink_to("/bin/sleep")
    child = start([str(odd), "60"])
    assert not processes.is_stopped(child.pid)


def test_process_that_is_gone_is_not_stopped():
    assert not processes.is_stopped(2**22 - 1)


def test_kernel_tells_where_a_process_waits(start):
    child = start()
    text = processes.describe(child.pid)
    assert f"/proc/{child.pid}/wchan:" in text
    assert "State:" in text


def test_kernel_tells_nothing_of_a_process_that_is_gone():
    assert processes.describe(2**22 - 1) == ""


def test_group_is_killed_and_known_to_be_gone(start):
    leader = start(start_new_session=True)
    assert processes.kill_group(leader.pid, 0)
    assert processes.kill_group(leader.pid)
    leader.wait()
    assert not processes.kill_group(leader.pid)


def test_marked_processes_are_killed_and_no_others(start):
    mark = uuid.uuid4().hex
    marked = start(env={**os.environ, processes.MARK: mark}, start_new_session=True)
    others = [start(env={**os.environ, processes.MARK: mark + "x"}), start()]
    wait_until(lambda: processes.is_marked(marked.pid, mark), 5.0)
    assert processes.kill_marked(mark) == [marked.pid]
    assert marked.wait() == -signal.SIGKILL
    assert all(lives(other.pid) for other in others)


def test_mark_of_a_process_that_is_gone_is_not_found(start):
    mark = uuid.uuid4().hex
    child = start(env={**os.environ, processes.MARK: mark})
    child.kill()
    child.wait()
    assert not processes.is_marked(child.pid, mark)
    assert processes.kill_marked(mark) == []


def test_child_that_ends_is_reaped_at_once():
    child = os.fork()
    if child == 0:
        os._exit(0)
    started = time.monotonic()
    processes.reap(child, timeout_seconds=10.0)
    assert time.monotonic() - started < 5
    with pytest.raises(ChildProcessError):
        os.waitpid(child, 0)


def test_child_that_does_not_end_is_killed(start):
    child = start()
    child.send_signal(signal.SIGSTOP)
    processes.reap(child.pid, timeout_seconds=0.05)
    assert not lives(child.pid)


def test_stranger_is_never_killed_by_reap(start):
    mark = start()
    processes.reap(1, timeout_seconds=0.0)
    processes.reap(os.getppid(), timeout_seconds=0.0)
    assert lives(mark.pid)


def test_subreaper_ends_orphans_of_its_children(run_script):
    """A rank's helpers that called `setsid` come to the agent when the rank dies."""
    result = run_script(
        """
import os, subprocess, sys, time
from prefect_torch_elastic.node import processes
processes.adopt_orphans()
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
kept = subprocess.Popen(sleep)
reader, writer = os.pipe()
rank = os.fork()
if rank == 0:
    helpers = [subprocess.Popen(sleep, start_new_session=True).pid, subprocess.Popen(sleep).pid]
    os.write(writer, " ".join(map(str, helpers)).encode())
    os._exit(0)
os.waitpid(rank, 0)
helpers = [int(pid) for pid in os.read(reader, 100).split()]
killed = processes.kill_children(keep={kept.pid})
print(sorted(killed) == sorted(helpers), kept.poll() is None, processes.list_children() == [kept.pid])
kept.kill()
"""
    )
    assert result.stdout.split() == ["True", "True", "True"], result.stderr


def test_orphans_that_have_ended_are_reaped_and_others_are_left():
    ended, kept = (_fork_and_leave() for _ in range(2))
    wait_until(lambda: not lives(ended) and not lives(kept), 5.0)
    processes.reap_orphans(keep={kept})
    with pytest.raises(ChildProcessError):
        os.waitpid(ended, os.WNOHANG)
    assert os.waitpid(kept, 0)[0] == kept


def test_orphan_that_lives_is_not_waited_for(start):
    child = start()
    started = time.monotonic()
    processes.reap_orphans(keep=set())
    assert time.monotonic() - started < 5
    assert child.poll() is None


def test_child_that_cannot_be_killed_is_given_up_at_the_deadline(monkeypatch):
    stuck = 2**22 - 1  # in the kernel for ever: on a dead disk, in a GPU driver
    monkeypatch.setattr(processes, "list_children", lambda: [stuck])
    monkeypatch.setattr(processes, "_REAP_SECONDS", 0.1)
    started = time.monotonic()
    processes.kill_children(keep=set())
    assert 0.1 <= time.monotonic() - started < 5


def _fork_and_leave() -> int:
    child = os.fork()
    if child == 0:
        os._exit(0)
    return child


def test_process_dies_with_its_parent(run_script):
    script = run_script.start(
        """
import os, time
from prefect_torch_elastic.node import processes
if os.fork() == 0:
    processes.die_with_parent()
    print(os.getpid(), flush=True)
time.sleep(60)
"""
    )
    wait_until(lambda: script.stdout.endswith("\n"), 20.0)
    child = int(script.stdout)
    assert lives(child)
    os.kill(script.process.pid, signal.SIGKILL)
    assert wait_until_gone([child], 5.0) < 5


def test_files_are_closed_except_those_to_keep():
    pid = os.fork()
    if pid == 0:
        fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
        processes.close_all_but(fds[1], fds[3])
        open_now = {int(name) for name in os.listdir("/proc/self/fd")}
        os._exit(0 if {0, 1, 2, fds[1], fds[3]} <= open_now and fds[0] not in open_now else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
