"""What control groups say about memory, in both versions of their files."""

from __future__ import annotations

import mmap
import os
import subprocess
from pathlib import Path

import pytest

from prefect_torch_elastic.node import memory

GIB = 2**30
NO_LIMIT_V1 = 9223372036854771712


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """`cgroup(membership, files)` makes control groups of this process."""

    def make(membership: str, files: dict[str, object]) -> None:
        monkeypatch.setattr(memory, "_ROOT", tmp_path / "cgroup")
        monkeypatch.setattr(memory, "_MEMBERSHIP", tmp_path / "membership")
        (tmp_path / "membership").write_text(membership)
        for name, content in files.items():
            file = tmp_path / "cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{content}\n")

    return make


V1 = "12:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n"
V2_EVENTS = "low 0\nhigh 0\nmax 7\noom 4\noom_kill 3\noom_group_kill 0"


def test_counter_of_a_pod_is_read_c003(cgroup):
    cgroup("0::/\n", {"memory.events": V2_EVENTS})
    assert memory.count_oom_kills() == 3


def test_counter_of_the_own_group_comes_first_on_a_host_c003(cgroup):
    slice_events = V2_EVENTS.replace("oom_kill 3", "oom_kill 99")
    files = {"user.slice/job/memory.events": V2_EVENTS, "user.slice/memory.events": slice_events}
    cgroup("0::/user.slice/job\n", files)
    assert memory.count_oom_kills() == 3


def test_counter_of_version_1_is_read_c003(cgroup):
    cgroup(V1, {"memory/docker/abc/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2"})
    assert memory.count_oom_kills() == 2


def test_counter_of_version_1_is_read_at_the_root_of_a_container_c003(cgroup):
    cgroup(V1, {"memory/memory.oom_control": "oom_kill_disable 0\noom_kill 5"})
    assert memory.count_oom_kills() == 5


def test_counter_of_a_mixed_host_is_found_under_unified(cgroup):
    cgroup("0::/job\n", {"unified/job/memory.events": V2_EVENTS})
    assert memory.count_oom_kills() == 3


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        pytest.param("0::/\n", {}, id="no-files"),
        pytest.param("", {}, id="no-groups"),
        pytest.param("3:cpu:/a\n", {"memory/a/memory.oom_control": "oom_kill 1"}, id="no-memory-controller"),
        pytest.param(V1, {"memory/docker/abc/memory.oom_control": "oom_kill_disable 0"}, id="old-kernel"),
    ],
)
def test_counter_is_none_where_there_is_none(cgroup, membership, files):
    cgroup(membership, files)
    assert memory.count_oom_kills() is None


def test_nothing_is_known_without_proc(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_MEMBERSHIP", tmp_path / "missing")
    assert memory.count_oom_kills() is None
    assert memory.read_memory_limit() is None


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        pytest.param("0::/\n", {"memory.max": 2 * GIB}, 2 * GIB, id="pod"),
        pytest.param("0::/\n", {"memory.max": "max"}, None, id="no-limit"),
        pytest.param(
            "0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": GIB}, GIB, id="of-the-slice-above"
        ),
        pytest.param("0::/a/b\n", {"a/b/memory.max": GIB, "a/memory.max": 4 * GIB}, GIB, id="smallest"),
        pytest.param("0::/../other\n", {"memory.max": GIB}, GIB, id="outside-the-namespace"),
        pytest.param(V1, {"memory/docker/abc/memory.limit_in_bytes": GIB}, GIB, id="version-1"),
        pytest.param(V1, {"memory/memory.limit_in_bytes": NO_LIMIT_V1}, None, id="version-1-no-limit"),
        pytest.param("0::/\n", {}, None, id="no-files"),
    ],
)
def test_limit_is_the_smallest_that_applies(cgroup, membership, files, limit):
    cgroup(membership, files)
    assert memory.read_memory_limit() == limit


def test_this_machine_can_be_asked():
    assert memory.count_oom_kills() is None or isinstance(memory.count_oom_kills(), int)
    limit = memory.read_memory_limit()
    assert limit is None or limit > 0
    assert Path("/proc/self/cgroup") == memory._MEMBERSHIP


def test_peak_memory_of_a_process_stays_when_the_memory_is_given_back():
    before = memory.read_peak_memory(os.getpid())
    size = before + (64 << 20)
    with mmap.mmap(-1, size) as taken:
        taken.write(b"x" * (32 << 20))
        for page in range(0, size, mmap.PAGESIZE):
            taken[page] = 1
    assert memory.read_peak_memory(os.getpid()) >= size


def test_process_that_has_ended_has_no_peak_memory():
    child = subprocess.Popen(["true"])
    child.wait()
    assert memory.read_peak_memory(child.pid) == 0
