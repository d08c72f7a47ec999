"""What only a GPU can show: warm fork then CUDA, devices, NCCL settings, an out-of-memory device.

`python -m pytest tests/gpu -m gpu`; under 5 minutes on one GPU. Gangs of two ranks need two GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from prefect import flow

from prefect_torch_elastic import GangFailed, SpecError, elastic_task, get_context
from prefect_torch_elastic.node.devices import list_visible_gpus

GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(GPUS == 0, reason="no CUDA device on this machine"),
]
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, this machine shows {GPUS}")


def in_flow(body: Callable[[], Any]) -> Any:
    """Run `body` as a flow, so that gangs of one test share a warm launcher."""
    return flow(name=body.__name__)(body)()


def open_gpus(process: psutil.Process) -> list[str]:
    """GPU devices that a process has open: a context would show here."""
    found = []
    for name in os.listdir(f"/proc/{process.pid}/fd"):
        try:
            target = os.readlink(f"/proc/{process.pid}/fd/{name}")
        except OSError:
            continue
        if target.startswith("/dev/nvidia"):
            found.append(target)
    return found


def test_gpu_rank_uses_cuda_after_a_warm_fork_twice_c011(prefect_server: str):
    @elastic_task(nproc_per_node=1)
    def train(size: int) -> tuple[str, float]:
        device = get_context().device
        return str(device), (
            torch.ones(size, size, device=device) @ torch.ones(size, size, device=device)
        ).mean().item()

    def two_gangs() -> list[tuple[str, float]]:
        return [train(64), train(128)]

    assert in_flow(two_gangs) == [("cuda:0", 64.0), ("cuda:0", 128.0)]


def test_gpu_flow_that_touched_cuda_still_gets_a_working_gang_c011(prefect_server: str):
    @elastic_task(nproc_per_node=1)
    def train() -> float:
        return torch.ones(3, device="cuda").sum().item()

    def touch_then_train() -> float:
        torch.zeros(1, device="cuda")
        return train()

    assert in_flow(touch_then_train) == 3.0


def test_gpu_counting_opens_no_device_c018():
    script = (
        "from prefect_torch_elastic.node.devices import list_visible_gpus; import os, torch;"
        "print(len(list_visible_gpus(dict(os.environ))), torch.cuda.is_initialized())"
    )
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(list_visible_gpus(dict(os.environ)))), "False"]


def test_gpu_auto_takes_one_rank_for_each_device(prefect_server: str):
    @elastic_task(nproc_per_node="gpu")
    def train() -> int:
        return get_context().world_size

    assert in_flow(lambda: train()) == GPUS


def test_gpu_rank_sees_only_its_gangs_device_c066(prefect_server: str):
    @elastic_task(nproc_per_node=1)
    def train() -> int:
        return torch.cuda.device_count()

    assert in_flow(lambda: train()) == 1


def test_gpu_gang_asks_for_more_processes_than_devices_c018(prefect_server: str):
    @elastic_task(nproc_per_node=GPUS + 1)
    def train() -> None: ...

    with pytest.raises((GangFailed, SpecError), match=rf"asked for {GPUS + 1} processes, {GPUS} GPU"):
        in_flow(lambda: train())


def test_gpu_second_gang_is_told_who_has_the_devices_c019(prefect_server: str):
    @elastic_task(nproc_per_node=GPUS)
    def hold() -> int:
        import time

        time.sleep(8)
        return 1

    @elastic_task(nproc_per_node=GPUS)
    def want() -> int:
        return 2

    def both() -> int:
        import time

        first = hold.submit()
        time.sleep(5)
        try:
            with pytest.raises(GangFailed, match="other gangs on this node hold"):
                want()
        finally:
            first.result()
        return want()

    assert in_flow(both) == 2


def test_gpu_memory_that_runs_out_is_named(prefect_server: str):
    @elastic_task(nproc_per_node=1, max_restarts=0)
    def train() -> None:
        held = []
        while True:
            held.append(torch.empty(4 << 30, dtype=torch.uint8, device="cuda"))

    with pytest.raises(GangFailed) as caught:
        in_flow(lambda: train())
    assert caught.value.category == "DeviceOutOfMemory"
    assert caught.value.rank == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, id="defaults"),
        pytest.param(
            {
                "nccl_collective_timeout_seconds": 77,
                "nccl_heartbeat_timeout_seconds": 88,
                "nccl_async_error_handling": True,
                "nccl_enable_monitoring": True,
            },
            {
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
                "TORCH_NCCL_ENABLE_MONITORING": "1",
                "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "88",
            },
            id="on",
        ),
        pytest.param(
            {"nccl_async_error_handling": False, "nccl_enable_monitoring": False, "run_timeout_seconds": 100},
            {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"},
            id="off",
        ),
    ],
)
def test_gpu_nccl_settings_reach_the_process_group(
    prefect_server: str, fields: dict[str, Any], expected: dict[str, str]
):
    @elastic_task(nproc_per_node=1, **fields)
    def train() -> tuple[dict[str, str], float, float]:
        context = get_context()
        context.init_process_group()
        tensor = torch.ones(4, device=context.device)
        torch.distributed.all_reduce(tensor)
        backend = torch.distributed.distributed_c10d._get_default_group()._get_backend(context.device)
        timeout = backend.options._timeout.total_seconds()
        names = [name for name in os.environ if name.startswith("TORCH_NCCL_")]
        return {name: os.environ[name] for name in names}, timeout, tensor.sum().item()

    environment, timeout, total = in_flow(lambda: train())
    assert expected.items() <= environment.items()
    assert timeout == fields.get("nccl_collective_timeout_seconds", 600)
    assert total == 4.0


@two_gpus
def test_gpu_ranks_have_a_device_each_and_reduce_over_nccl(prefect_server: str):
    @elastic_task(nproc_per_node=2)
    def train() -> tuple[str, float]:
        context = get_context()
        context.init_process_group()
        tensor = torch.ones(4, device=context.device) * (context.rank + 1)
        torch.distributed.all_reduce(tensor)
        return torch.cuda.get_device_name(context.device), tensor[0].item()

    assert in_flow(lambda: train())[1] == 3.0


def test_gpu_launcher_and_agents_open_no_device(prefect_server: str):
    @elastic_task(nproc_per_node=1)
    def train() -> list[list[str]]:
        agent = psutil.Process(os.getppid())
        launcher = agent.parent()
        assert launcher is not None
        return [open_gpus(agent), open_gpus(launcher)]

    agent, _launcher = in_flow(lambda: train())
    # The launcher counts with NVML, which opens control devices but makes no context.
    assert not [device for device in agent if "nvidia-uvm" in device or device == "/dev/nvidia0"]
