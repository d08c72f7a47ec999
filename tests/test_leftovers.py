"""The hunt itself: it finds what has left its parent, and nothing of strangers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.leftovers import MARK, kill, marked_processes, our_files, our_processes

SLEEP = "import time; time.sleep(60)"
DETACH = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
print(child.pid)
"""


def pids(processes) -> set[int]:
    return {process.pid for process in processes.values()}


def test_process_that_left_its_parent_is_found(run_script):
    orphan = int(run_script(DETACH).stdout)
    try:
        assert orphan in pids(our_processes())
    finally:
        for process in marked_processes().values():
            if process.pid == orphan:
                kill(process)


@pytest.mark.parametrize("mark", ["another session", None], ids=["other mark", "no mark"])
def test_process_of_a_stranger_is_not_ours(mark):
    environment = {key: value for key, value in os.environ.items() if key != MARK} | (
        {MARK: mark} if mark else {}
    )
    with subprocess.Popen([sys.executable, "-c", SLEEP], env=environment) as stranger:
        try:
            assert stranger.pid not in pids(our_processes())
        finally:
            stranger.kill()


def test_process_that_runs_our_module_is_found_without_a_mark():
    environment = {key: value for key, value in os.environ.items() if key != MARK}
    command = [sys.executable, "-c", SLEEP, "prefect_torch_elastic.node"]
    with subprocess.Popen(command, env=environment) as child:
        try:
            assert child.pid in pids(our_processes())
        finally:
            child.kill()


def test_shared_memory_and_temp_folders_are_found():
    shared = Path(f"/dev/shm/leftover-{os.getpid()}")
    folder = Path(tempfile.mkdtemp(prefix="prefect-torch-elastic-"))
    shared.write_bytes(b"x")
    try:
        assert {str(shared), str(folder)} <= our_files()
    finally:
        shared.unlink()
        folder.rmdir()
    assert not {str(shared), str(folder)} & our_files()


def test_script_that_hangs_fails_at_its_deadline(run_script):
    started = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match="still running after 1 s"):
        run_script("print('so far', flush=True)\n" + SLEEP, timeout_seconds=1.0)
    assert time.monotonic() - started < 20
    assert run_script.running[0].process.poll() is not None
