"""GPUs are counted without a context and held by one gang at a time."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.node import devices
from prefect_torch_elastic.node.devices import GpuLease, list_visible_gpus
from prefect_torch_elastic.ranks import decide_processes

HOLD = """
import sys, time
from pathlib import Path
from prefect_torch_elastic.node import devices
devices._LOCKS = Path(sys.argv[3])
lease = devices.GpuLease()
print(",".join(lease.acquire(sys.argv[1].split(","), int(sys.argv[2]))), flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def lock_folder(tmp_path, monkeypatch):
    """Give the test its own locks: real ones may be held by real gangs."""
    monkeypatch.setattr(devices, "_LOCKS", tmp_path)
    return tmp_path


@pytest.fixture
def lease():
    made: list[GpuLease] = []

    def make() -> GpuLease:
        made.append(GpuLease())
        return made[-1]

    yield make
    for each in made:
        each.release()


def holder(run_script, visible: str, count: int):
    """Start another process that holds GPUs, and return it with what it got."""
    script = run_script.start(HOLD, args=[visible, str(count), str(devices._LOCKS)])
    while not script.stdout.endswith("\n"):
        assert script.process.poll() is None, script.stderr
    return script, script.stdout.strip().split(",")


# ---------------------------------------------------------------- counting


@pytest.mark.parametrize(
    ("variable", "count", "visible"),
    [
        pytest.param(None, 2, ["0", "1"], id="all"),
        pytest.param("4,5", 2, ["4", "5"], id="some-c018"),
        pytest.param(" GPU-8932f937-d72c , MIG-1 ", 2, ["GPU-8932f937-d72c", "MIG-1"], id="names"),
        pytest.param("", 0, [], id="hidden"),
        pytest.param("-1", 0, [], id="hidden-by-minus-one"),
        pytest.param(None, 0, [], id="none"),
        pytest.param("0", 0, [], id="no-driver"),
    ],
)
def test_visible_gpus_follow_the_environment(monkeypatch, variable, count, visible):
    monkeypatch.setattr(devices, "_count_gpus", lambda: count)
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert list_visible_gpus(environment) == visible


def test_more_processes_than_gpus_are_refused_with_their_ids_c018(monkeypatch):
    monkeypatch.setattr(devices, "_count_gpus", lambda: 2)
    visible = list_visible_gpus({"CUDA_VISIBLE_DEVICES": "4,5"})
    with pytest.raises(SpecError, match=r"asked for 4 processes, 2 GPUs visible \(4,5\)"):
        decide_processes(4, gpu_count=len(visible), cpu_count=16, visible_devices="4,5")


def test_counting_touches_no_cuda_c011():
    torch = pytest.importorskip("torch")
    list_visible_gpus({})
    assert not torch.cuda.is_initialized()


# ---------------------------------------------------------------- leases


def test_two_gangs_of_one_process_get_disjoint_gpus_c019(lease):
    visible = ["0", "1", "2", "3"]
    assert (lease().acquire(visible, 2), lease().acquire(visible, 2)) == (["0", "1"], ["2", "3"])


def test_two_processes_get_disjoint_gpus_c019(lease, run_script):
    _, theirs = holder(run_script, "0,1,2,3", 3)
    assert theirs == ["0", "1", "2"]
    assert lease().acquire(["0", "1", "2", "3"], 1) == ["3"]


def test_gang_that_finds_too_few_gpus_is_told_who_has_them_c019(lease, run_script):
    holder(run_script, "0,1", 1)
    with pytest.raises(SpecError) as refused:
        lease().acquire(["0", "1"], 2)
    assert str(refused.value).startswith(
        "asked for 2 GPUs, 1 of 2 are free (1); other gangs on this node hold 0."
    )


def test_gang_that_was_refused_holds_nothing(lease):
    first = lease()
    first.acquire(["0", "1"], 1)
    with pytest.raises(SpecError):
        lease().acquire(["0", "1"], 2)
    first.release()
    assert lease().acquire(["0", "1"], 2) == ["0", "1"]


def test_gpus_are_free_again_when_their_holder_is_killed_c019(lease, run_script):
    script, theirs = holder(run_script, "0,1", 2)
    assert theirs == ["0", "1"]
    os.kill(script.process.pid, signal.SIGKILL)
    script.process.wait()
    assert lease().acquire(["0", "1"], 2) == ["0", "1"]


def test_gpus_are_free_again_after_release(lease):
    first = lease()
    first.acquire(["0"], 1)
    first.release()
    first.release()
    assert lease().acquire(["0"], 1) == ["0"]


def test_gpus_that_are_not_needed_are_not_held(lease):
    assert lease().acquire(["0", "1", "2"], 1) == ["0"]
    assert lease().acquire(["1", "2"], 2) == ["1", "2"]


def test_no_gpu_is_given_twice_when_many_gangs_ask_at_once_c019(lease):
    visible = [str(index) for index in range(16)]
    with ThreadPoolExecutor(8) as threads:
        given = list(threads.map(lambda _: _try(lease(), visible), range(16)))
    held = [device for devices in given for device in devices]
    assert len(held) == len(set(held))


def _try(lease: GpuLease, visible: list[str]) -> list[str]:
    try:
        return lease.acquire(visible, 1)
    except SpecError:  # a moment in which another gang looked at all of them
        return []


def test_ids_with_odd_characters_make_one_lock_file_each(lease, lock_folder):
    lease().acquire(["GPU-8932/../x"], 1)
    (folder,) = lock_folder.iterdir()
    assert [path.name for path in folder.iterdir()] == ["gpu-GPU-8932----x.lock"]
    assert folder.stat().st_mode & 0o777 == 0o700
