"""What a rank finds around it: torchrun's variables, random numbers of its own, nobody else's network."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from prefect_torch_elastic import GangFailed, elastic_task, get_context

if TYPE_CHECKING:
    from tests.conftest import ScriptRunner
    from tests.e2e.conftest import LiveFlow

Note = Callable[..., None]
TOPOLOGIES = [(1, 1), (1, 2), (2, 1)]
TOPOLOGY_IDS = [f"{nnodes}x{nproc}" for nnodes, nproc in TOPOLOGIES]

# What `is_torchelastic_launched` of torch and the cluster environments of Lightning look at, what Accelerate
# and HF Trainer read, and what DeepSpeed needs in order not to look for MPI.
TORCHRUN = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
}


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set variables of this process for a while."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name)
            if name in before:
                os.environ[name] = before[name]


@pytest.mark.parametrize(("nnodes", "nproc"), TOPOLOGIES, ids=TOPOLOGY_IDS)
def test_rank_looks_like_one_of_torchrun_c063_c064_c067(in_flow: LiveFlow, nnodes: int, nproc: int):
    """Also after a restart. A framework that finds all of it starts no processes of its own."""

    @elastic_task(nnodes=nnodes, nproc_per_node=nproc, max_restarts=1)
    def train():
        import torch.distributed as dist

        context = get_context()
        dist.init_process_group("gloo")
        rows: list[Any] = [None] * context.world_size
        dist.all_gather_object(rows, (dict(os.environ), context, dist.is_torchelastic_launched()))
        dist.barrier()
        if context.restart_count == 0:
            raise RuntimeError("once more")
        return rows

    rows = in_flow(train)
    world = nnodes * nproc
    assert len(rows) == world
    for rank, (variables, context, is_torchelastic) in enumerate(rows):
        assert is_torchelastic
        assert not TORCHRUN - variables.keys()
        numbers = {name: int(variables[name]) for name in TORCHRUN if variables[name].isdigit()}
        assert numbers["RANK"] == numbers["ROLE_RANK"] == context.rank == rank
        assert numbers["LOCAL_RANK"] == context.local_rank == rank % nproc
        assert numbers["GROUP_RANK"] == context.node_rank == rank // nproc
        assert numbers["WORLD_SIZE"] == numbers["ROLE_WORLD_SIZE"] == context.world_size == world
        assert numbers["LOCAL_WORLD_SIZE"] == context.local_world_size == nproc
        assert numbers["GROUP_WORLD_SIZE"] == context.nnodes == nnodes
        assert numbers["TORCHELASTIC_RESTART_COUNT"] == context.restart_count == 1
        assert numbers["MASTER_PORT"] == context.master_port
        assert variables["MASTER_ADDR"] == context.master_addr == "127.0.0.1"
        # `Trainer(devices=context.local_world_size, num_nodes=context.nnodes)` is right in every gang
        assert context.local_world_size * context.nnodes == context.world_size


def test_gang_starts_one_process_per_rank_and_one_flow_run_c064(in_flow: LiveFlow, note: Note, notes: Path):
    @elastic_task(nproc_per_node=2)
    def train():
        import psutil

        note(os.getpid())
        time.sleep(0.2)
        return len(psutil.Process().children())

    assert in_flow(train) == 0
    assert len(set(notes.read_text().split())) == 2


def test_gang_of_one_is_a_distributed_run_c066(in_flow: LiveFlow):
    """HF Trainer takes DataParallel over all GPUs unless it finds a distributed environment."""

    @elastic_task(nproc_per_node=1)
    def train():
        import torch.distributed as dist

        # What `TrainingArguments` asks for before it counts GPUs.
        distributed = int(os.environ.get("LOCAL_RANK", -1)) != -1 and "RANK" in os.environ
        dist.init_process_group("gloo")
        return distributed, dist.get_world_size()

    assert in_flow(train) == (True, 1)


def test_ranks_get_disjoint_samples_c066(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=2)
    def train():
        import torch
        import torch.distributed as dist

        context = get_context()
        context.init_process_group()
        whole = torch.utils.data.DataLoader(list(range(20)), batch_size=2, shuffle=True)  # pyright: ignore
        mine = [int(x) for batch in context.prepare_data_loader(whole) for x in batch]
        rows: list[Any] = [None, None]
        dist.all_gather_object(rows, mine)
        return rows

    first, second = in_flow(train)
    assert len(first) == len(second) == 10
    assert sorted(first + second) == list(range(20))


def test_trackers_find_one_run_over_restarts_and_retries_c071(in_flow: LiveFlow, note: Note, notes: Path):
    names = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_RUN_GROUP", "WANDB_MODE", "PTE_TRACKER_RUN_ID")

    @elastic_task(nproc_per_node=2, max_restarts=1, retries=1, run_key="pretrain-{size}")
    def train(size: str):
        context = get_context()
        values = {name: os.environ.get(name) for name in (*names, "PTE_RUN_KEY", "PTE_ATTEMPT")}
        note((context.rank, context.run_key, context.attempt, context.restart_count, values))
        if context.attempt == 1:
            time.sleep(0.5 if context.rank else 0.1)
            raise RuntimeError("again")

    in_flow(lambda: train("7b"))
    rows = [eval(line) for line in notes.read_text().splitlines()]
    assert {row[1] for row in rows} == {row[4]["PTE_RUN_KEY"] for row in rows} == {"pretrain-7b"}
    assert {(row[2], row[3]) for row in rows} == {(1, 0), (1, 1), (2, 0)}
    assert all(row[4]["PTE_ATTEMPT"] == str(row[2]) for row in rows)
    assert len({row[4]["PTE_TRACKER_RUN_ID"] for row in rows}) == 1
    leader = {row[4]["WANDB_RUN_ID"] for row in rows if row[0] == 0}
    assert len(leader) == 1
    assert None not in leader
    assert {row[4]["WANDB_RESUME"] for row in rows if row[0] == 0} == {"allow"}
    assert {row[4]["WANDB_RUN_ID"] for row in rows if row[0] == 1} == {None}


def test_run_key_differs_between_task_runs_c071(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=2)
    def train(_: int):
        context = get_context()
        return context.run_key, context.task_run_id, context.flow_run_id, context.attempt

    rows = [in_flow(lambda number=number: train(number)) for number in (1, 1, 2)]
    assert len({row[0] for row in rows}) == 3
    assert len({row[1] for row in rows}) == 3
    assert len({row[2] for row in rows}) == 1
    assert all(row[2] and row[3] == 1 for row in rows)


@pytest.mark.parametrize("nproc", [1, 2])
def test_variables_left_by_others_change_nothing_c021(in_flow: LiveFlow, nproc: int):
    stale = {
        "RANK": "7",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "5",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": "3",
        "NODE_RANK": "3",
        "MASTER_ADDR": "10.9.9.9",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "old",
        "TORCHELASTIC_RESTART_COUNT": "4",
        "PET_NNODES": "4",
        "PET_NPROC_PER_NODE": "8",
    }

    @elastic_task(nproc_per_node=nproc, max_restarts=0)
    def train(how: str):
        import torch.distributed as dist

        if how == "fail":
            raise ValueError
        if how == "hang":
            time.sleep(60)
        dist.init_process_group("gloo")
        return dist.get_world_size(), get_context().restart_count, sorted(os.environ.keys() & stale.keys())

    with environment(**stale):
        before = dict(os.environ)
        result = in_flow(lambda: train("well"))
        in_flow(lambda: train("fail", return_state=True))
        hang = train.with_options(run_timeout_seconds=0.5, grace_seconds=0)
        in_flow(lambda: hang("hang", return_state=True))
        before.pop("PYTEST_CURRENT_TEST", None)
        assert dict(os.environ) == before
    assert result[:2] == (nproc, 0)
    assert not {"PET_NNODES", "PET_NPROC_PER_NODE"} & set(result[2])


def test_env_of_the_task_reaches_the_ranks_only(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=2, env={"MY_SETTING": "x", "NCCL_DEBUG": "WARN"})
    def train():
        return os.environ["MY_SETTING"], os.environ["NCCL_DEBUG"]

    assert in_flow(train) == ("x", "WARN")
    assert "MY_SETTING" not in os.environ


def test_rank_runs_in_the_directory_of_the_flow(in_flow: LiveFlow, tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)

    @elastic_task(nproc_per_node=1)
    def train():
        return os.getcwd()

    assert in_flow(train) == str(tmp_path)


def threads_of(in_flow: LiveFlow, nproc: int, **options: Any) -> tuple[Any, int]:
    @elastic_task(nproc_per_node=nproc, **options)
    def train():
        import torch

        return os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()

    return in_flow(train)


def test_ranks_have_one_thread_each_unless_the_environment_says_otherwise(
    in_flow: LiveFlow, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_of(in_flow, 2) == ("1", 1)
    assert threads_of(in_flow, 1) == (None, len(os.sched_getaffinity(0)))
    assert threads_of(in_flow, 2, env={"OMP_NUM_THREADS": "2"}) == ("2", 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_of(in_flow, 2) == ("2", 2)


def test_random_numbers_differ_between_ranks_and_restarts(in_flow: LiveFlow, note: Note, notes: Path):
    @elastic_task(nproc_per_node=2, max_restarts=1)
    def train():
        import random
        import uuid

        import numpy
        import torch

        note((torch.rand(1).item(), numpy.random.rand(), random.random(), uuid.uuid4().hex, os.urandom(4)))
        if get_context().restart_count == 0:
            time.sleep(0.3)
            raise RuntimeError("again")

    in_flow(train)
    in_flow(train)
    rows = [eval(line) for line in notes.read_text().splitlines()]
    assert len(rows) == 8
    for kind in zip(*rows, strict=True):
        assert len(set(kind)) == 8


def test_seeds_of_the_function_hold(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=2)
    def train():
        import random

        import numpy
        import torch

        torch.manual_seed(1)
        numpy.random.seed(1)
        random.seed(1)
        return torch.rand(2).tolist(), numpy.random.rand(2).tolist(), [random.random() for _ in range(2)]

    assert in_flow(train) == in_flow(train)


def test_timeout_of_the_block_reaches_every_process_group(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=2, nccl_collective_timeout_seconds=47)
    def train(backend: str | None):
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_group

        dist.init_process_group(backend)
        groups = [_get_default_group(), dist.new_group(), dist.new_group(backend="gloo")]
        cpu = __import__("torch").device("cpu")
        given = dist.new_group(timeout=timedelta(seconds=5))
        return [group._get_backend(cpu).options._timeout for group in [*groups, given]]

    for backend in ("gloo", None, "cpu:gloo"):
        timeouts = in_flow(lambda backend=backend: train(backend))
        assert timeouts == [timedelta(seconds=47)] * 3 + [timedelta(seconds=5)]


def test_rank_that_waits_for_a_finished_one_times_out_soon(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=2, nccl_collective_timeout_seconds=1.5, max_restarts=0)
    def train():
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        for _ in range(3 + dist.get_rank()):
            dist.all_reduce(torch.ones(1))
        time.sleep(30 if dist.get_rank() == 0 else 0)

    started = time.monotonic()
    error = in_flow(lambda: train(return_state=True)).result(raise_on_failure=False)
    assert time.monotonic() - started < 25
    assert isinstance(error, GangFailed)
    assert (error.rank, error.category) == (1, "CollectiveTimeout")


def test_nccl_settings_reach_the_ranks_on_and_off(in_flow: LiveFlow):
    names = (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TORCH_NCCL_ENABLE_MONITORING",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    )

    @elastic_task(nproc_per_node=1)
    def train():
        return [os.environ.get(name) for name in names]

    assert in_flow(train) == ["1", None, None]
    on = train.with_options(
        nccl_async_error_handling=True, nccl_enable_monitoring=True, nccl_heartbeat_timeout_seconds=30
    )
    assert in_flow(on) == ["1", "1", "30"]
    off = train.with_options(nccl_async_error_handling=False, nccl_enable_monitoring=False)
    assert in_flow(off) == ["0", "0", None]


@contextlib.contextmanager
def foreign_listeners(*ports: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for port in ports:
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", port))
            except OSError:
                continue  # somebody else's: as good as ours
            listener.listen()
        yield


def test_three_gangs_run_at_once_beside_foreign_listeners_c019(prefect_server: str, no_leftovers: None):
    from prefect import flow
    from prefect.task_runners import ThreadPoolTaskRunner

    @elastic_task(nproc_per_node=2, max_restarts=0)
    def train(number: int):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor(number)
        for _ in range(10):
            dist.all_reduce(total)
            time.sleep(0.05)
            total //= 2
        return int(total)

    @flow(task_runner=ThreadPoolTaskRunner(max_workers=3))  # pyright: ignore[reportArgumentType,reportCallIssue]
    def main():
        return [future.result() for future in train.map([1, 2, 3])]

    with foreign_listeners(29500, 29400):
        assert main() == [1, 2, 3]


def test_two_flow_processes_run_gangs_at_once_c019(
    run_script: ScriptRunner, prefect_server: str, no_leftovers: None
):
    script = """
import os, time
from prefect import flow
from prefect_torch_elastic import elastic_task

@elastic_task(nproc_per_node=2, nnodes=2, max_restarts=0)
def train():
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    time.sleep(1)
    dist.barrier()
    return int(total)

@flow
def main():
    return train()

if __name__ == "__main__":
    print("total", main())
"""
    with foreign_listeners(29500, 29400):
        running = [run_script.start(script) for _ in range(2)]
        results = [script.wait(60) for script in running]
    assert [(result.rc, "total 4" in result.stdout) for result in results] == [(0, True)] * 2


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_has_workers_of_its_own_in_a_rank(in_flow: LiveFlow, method: str):
    @elastic_task(nproc_per_node=2, max_restarts=0)
    def train():
        import torch

        loader = torch.utils.data.DataLoader(
            torch.arange(8),  # pyright: ignore[reportArgumentType]
            batch_size=2,
            num_workers=1,
            multiprocessing_context=method,
        )
        return [batch.tolist() for batch in loader]

    before = set(os.listdir("/dev/shm"))
    assert in_flow(train) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert set(os.listdir("/dev/shm")) <= before


def test_exit_handlers_of_the_function_run(in_flow: LiveFlow, note: Note, notes: Path):
    @elastic_task(nproc_per_node=2)
    def train():
        import atexit

        atexit.register(note, "saved")

    in_flow(train)
    assert notes.read_text().split() == ["saved", "saved"]


def test_launchers_of_other_environments_do_not_pile_up(in_flow: LiveFlow, monkeypatch: pytest.MonkeyPatch):
    from prefect_torch_elastic import local

    monkeypatch.setattr(local, "MOST_IDLE", 1)

    @elastic_task(nproc_per_node=2)
    def train():
        return os.environ["EPOCH"]

    for epoch in ("0", "1"):
        assert in_flow(train.with_options(env={"EPOCH": epoch})) == epoch
    children = psutil.Process().children()
    assert sum("prefect_torch_elastic.node" in " ".join(child.cmdline()) for child in children) == 1


def test_cold_start_makes_no_difference_to_the_function(in_flow: LiveFlow, read_logs: Callable[..., Any]):
    @elastic_task(nproc_per_node=2, max_restarts=1, start_method="spawn")
    def train():
        import torch
        import torch.distributed as dist

        context = get_context()
        if context.restart_count == 0:
            raise RuntimeError("once more")
        dist.init_process_group("gloo")
        print("a line of the leader")
        rows: list[Any] = [None, None]
        dist.all_gather_object(rows, (torch.rand(1).item(), torch.get_num_threads(), sorted(os.environ)))
        return rows, context.restart_count

    state = in_flow(lambda: train(return_state=True))
    (first, second), restarts = state.result()
    assert restarts == 1
    assert first[0] != second[0]
    assert first[1] == second[1] == 1
    assert set(first[2]) >= TORCHRUN
    lines = [line.message for line in read_logs(state, has="line of the leader")]
    assert "[rank 0] a line of the leader" in lines
    assert any("ranks started (cold)" in line for line in lines)


def test_module_that_starts_a_thread_is_named_and_the_gang_starts_cold(
    in_flow: LiveFlow, read_logs: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "threads_7f3a.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n"
        "class Config: width = 8\n"
    )
    from threads_7f3a import Config  # pyright: ignore[reportMissingImports]

    @elastic_task(nproc_per_node=2)
    def train(config: Any):
        return config.width

    state = in_flow(lambda: train(Config(), return_state=True))
    assert state.result() == 8
    lines = [line.message for line in read_logs(state, has="cold")]
    assert any("`threads_7f3a` started 1 thread" in line for line in lines)
    assert any("ranks started (cold)" in line for line in lines)


def test_gang_runs_when_the_interpreter_itself_starts_a_thread(
    run_script: ScriptRunner, prefect_server: str, tmp_path: Path
):
    """Coverage tools and debuggers do that, in a `sitecustomize`."""
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n"
    )
    result = run_script(
        """
from prefect import flow
from prefect_torch_elastic import elastic_task

@elastic_task(nproc_per_node=2)
def train():
    return 16

@flow
def main():
    return train()

if __name__ == "__main__":
    print("result", main())
""",
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert "result 16" in result.stdout, result.stderr[-2000:]


@pytest.mark.parametrize(("nnodes", "nproc"), TOPOLOGIES, ids=TOPOLOGY_IDS)
def test_gang_listens_on_loopback_only(in_flow: LiveFlow, tmp_path: Path, nnodes: int, nproc: int):
    @elastic_task(nnodes=nnodes, nproc_per_node=nproc)
    def train():
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        (tmp_path / f"ready-{dist.get_rank()}").touch()
        while not (tmp_path / "seen").exists():
            time.sleep(0.02)

    found: list[Any] = []

    def look() -> None:
        deadline = time.monotonic() + 30
        while len(list(tmp_path.glob("ready-*"))) < nnodes * nproc and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "prefect_torch_elastic.node" in process.cmdline():
                    found.extend(process.net_connections("inet"))
        (tmp_path / "seen").touch()

    watcher = threading.Thread(target=look)
    watcher.start()
    in_flow(train)
    watcher.join()
    listening = [connection for connection in found if connection.status == psutil.CONN_LISTEN]
    assert listening
    addresses = {str(connection.laddr.ip).removeprefix("::ffff:") for connection in listening}
    assert addresses <= {"127.0.0.1", "::1"}
