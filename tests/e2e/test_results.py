"""What travels to the ranks and back: functions, arguments, results, and what cannot."""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from prefect_torch_elastic import TransferError, elastic_task, get_context

if TYPE_CHECKING:
    from tests.conftest import ScriptRunner
    from tests.e2e.conftest import LiveFlow

Note = Callable[..., None]
MEGABYTE = 1 << 20


def refusal_of(state: Any) -> str:
    error = state.result(raise_on_failure=False)
    assert isinstance(error, TransferError), repr(error)
    return str(error)


def test_result_of_rank_0_comes_back(in_flow: LiveFlow):
    import torch

    @dataclass
    class Report:
        loss: float

    @elastic_task(nproc_per_node=2)
    def train(value: Any):
        return value, get_context().rank, type(value).__name__

    values = [None, 1.5, "é\n", {"a": [1, (2, b"3")]}, Path("/tmp/x"), {1, 2}, Report(0.5), float, len]
    for value in values:
        assert in_flow(lambda value=value: train(value)) == (value, 0, type(value).__name__)
    model = torch.nn.Linear(3, 2)
    back, _, _ = in_flow(lambda: train(model))
    assert torch.equal(back.weight, model.weight)
    assert back.weight.requires_grad
    assert torch.nn.functional.mse_loss(back(torch.ones(1, 3)), torch.ones(1, 2)).backward() is None
    for tensor in (
        torch.arange(6).reshape(2, 3).t(),
        torch.empty(0),
        torch.tensor(3.0),
        torch.ones(3).bfloat16(),
    ):
        assert torch.equal(in_flow(lambda tensor=tensor: train(tensor))[0], tensor)


def test_tensors_that_share_memory_still_share_it_in_the_rank(in_flow: LiveFlow):
    import torch

    @elastic_task(nproc_per_node=2)
    def train(pair: Any):
        first, second = pair
        first[0] = 7.0
        return second[0].item()

    base = torch.zeros(4)
    assert in_flow(lambda: train((base, base.view(2, 2).flatten()))) == 7.0
    assert base[0].item() == 0.0


def test_ranks_do_not_see_each_other_write_to_an_argument(in_flow: LiveFlow):
    import torch

    @elastic_task(nproc_per_node=2)
    def train(x: Any):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        x += dist.get_rank() + 1
        dist.barrier()
        sums: list[Any] = [None, None]
        dist.all_gather_object(sums, float(x.sum()))
        return sums

    assert in_flow(lambda: train(torch.zeros(1000))) == [1000.0, 2000.0]


@pytest.mark.parametrize("kind", ["lock", "generator", "open file", "socket inside a dict"])
def test_result_that_cannot_be_sent_is_said_and_not_tried_again_c006(
    in_flow: LiveFlow, note: Note, notes: Path, kind: str
):
    @elastic_task(nproc_per_node=2, max_restarts=2, retries=2)
    def train():
        note()
        match kind:
            case "lock":
                return threading.Lock()
            case "generator":
                return (i for i in range(3))
            case "open file":
                return open(os.devnull, "w")
            case _:
                return {"socket": socket.socket()}

    text = refusal_of(in_flow(lambda: train(return_state=True)))
    assert text.startswith("rank 0 returned a value (`")
    assert "cannot be sent to the flow" in text
    assert "Return a path or plain data" in text
    assert notes.read_text().count("\n") == 2


def test_result_of_other_ranks_need_not_be_sendable_c006(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=3)
    def train():
        return threading.Lock() if get_context().rank else 5

    assert in_flow(train) == 5


def test_result_that_is_a_function_comes_back_c006(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=2)
    def train():
        return lambda x: x + 1

    assert in_flow(train)(1) == 2


def test_result_that_only_the_rank_can_load_is_not_tried_again_c006(
    in_flow: LiveFlow, note: Note, notes: Path
):
    driver = os.getpid()

    @elastic_task(nproc_per_node=2, max_restarts=2, retries=2)
    def train():
        def load():
            if os.getpid() == driver:
                raise RuntimeError("libfoo is not here")

        class Result:
            def __reduce__(self):
                return load, ()

        note()
        return Result()

    text = refusal_of(in_flow(lambda: train(return_state=True)))
    assert "libfoo is not here" in text
    assert notes.read_text().count("\n") == 2


def test_argument_that_cannot_be_sent_is_named_before_anything_starts_c034(
    in_flow: LiveFlow, note: Note, notes: Path
):
    import torch

    @elastic_task(nproc_per_node=2, retries=2)
    def train(model: Any, lock: Any):
        note()

    text = refusal_of(in_flow(lambda: train(torch.nn.Linear(2, 2), threading.Lock(), return_state=True)))
    assert text.startswith("argument `lock` (_thread.lock) cannot be sent to where the function runs")
    assert not notes.exists()


def test_model_argument_is_not_hashed_by_prefect_c034(in_flow: LiveFlow, read_logs: Callable[..., Any]):
    import torch

    hashed: list[int] = []

    class Model(torch.nn.Linear):
        def __getstate__(self):
            hashed.append(1)
            return self.__dict__

    @elastic_task(nproc_per_node=2)
    def train(model: Any):
        return model.weight.sum().item()

    state = in_flow(lambda: train(Model(2, 2), return_state=True))
    assert isinstance(state.result(), float)
    assert len(hashed) == 2  # for the run key, by checksums, and for the parcel
    assert not [line for line in read_logs(state, has="ranks started") if line.level >= logging.WARNING]


def test_argument_that_cannot_be_hashed_is_named_once_when_caching_was_asked_for_c034(
    in_flow: LiveFlow, read_logs: Callable[..., Any]
):
    from prefect.cache_policies import INPUTS

    class Client:
        def __reduce__(self):
            import sys

            frame: Any = sys._getframe()
            while frame is not None:
                if frame.f_code.co_name == "hash_objects":
                    raise TypeError("clients have no hash")
                frame = frame.f_back
            return str, ("a client",)

    @elastic_task(nproc_per_node=2, cache_policy=INPUTS)
    def train(steps: int, client: Any):
        return client

    state = in_flow(lambda: train(3, Client(), return_state=True))
    assert state.result() == "a client"
    loud = [line.message for line in read_logs(state, has="client") if line.level >= logging.WARNING]
    (said,) = loud
    assert "`client`" in said
    assert "Client`" in said
    assert "not cached" in said
    assert "Traceback" not in said


def test_function_defined_inside_the_flow_carries_its_variables_c007(in_flow: LiveFlow):
    def job():
        width = 8

        @dataclass
        class Config:
            scale: int

        def helper(config: Config) -> int:
            return width * config.scale

        @elastic_task(nproc_per_node=2)
        def train():
            return helper(Config(2))

        return train()

    assert in_flow(job) == 16


def test_lambda_runs_in_a_gang_c007(in_flow: LiveFlow):
    double = elastic_task(nproc_per_node=2, name="double")(lambda x: 2 * x)
    assert in_flow(lambda: double(4)) == 8


def test_unsendable_variable_of_the_function_is_named_c007(in_flow: LiveFlow, note: Note, notes: Path):
    connection = socket.socket()

    @elastic_task(nproc_per_node=2)
    def train():
        note()
        return connection.fileno()

    with connection:
        text = refusal_of(in_flow(lambda: train(return_state=True)))
    assert "variable `connection` (socket.socket)" in text
    assert "`train`" in text
    assert not notes.exists()


def test_function_of_a_notebook_cell_runs_c007(run_script: ScriptRunner, prefect_server: str):
    """A notebook's `__main__` has no file, and its cells are executed one by one."""
    cells = [
        "from prefect import flow\nfrom prefect_torch_elastic import elastic_task\n",
        "class Config:\n    def __init__(self, width):\n        self.width = width\n",
        "@elastic_task(nproc_per_node=2)\ndef train(config):\n    return Config(config.width * FACTOR)\n",
        "FACTOR = 2\n@flow\ndef main():\n    return train(Config(8))\n",
        "back = main()\nprint('width', back.width, type(back) is Config)\n",
    ]
    result = run_script(
        "import __main__, sys\n"
        "del __main__.__file__\n"
        f"for number, cell in enumerate({cells!r}):\n"
        "    exec(compile(cell, f'<ipython-input-{number}>', 'exec'), __main__.__dict__)\n"
    )
    assert result.rc == 0, result.stderr
    assert "width 16 True" in result.stdout


def test_script_without_a_guard_runs_its_flow_once_c009(run_script: ScriptRunner, prefect_server: str):
    result = run_script(
        """
from prefect import flow
from prefect_torch_elastic import elastic_task, get_context

class Config:
    width = 8

@elastic_task(nproc_per_node=2, max_restarts=0)
def train(config):
    return config.width * get_context().world_size

@flow(name="unguarded")
def main():
    return train(Config())

print("result", main())
"""
    )
    assert result.rc == 0, result.stderr
    assert result.stdout.split("\n").count("result 16") == 1

    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName

    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_filter=FlowFilter(name=FlowFilterName(any_=["unguarded"])))
    assert len(runs) == 1


def test_large_argument_is_held_once_by_all_ranks_c077(in_flow: LiveFlow, read_logs: Callable[..., Any]):
    import torch

    megabytes = 300

    @elastic_task(nproc_per_node=4)
    def train(x: Any):
        import torch.distributed as dist

        def proportional_bytes() -> int:
            with open("/proc/self/smaps_rollup") as file:
                return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))

        dist.init_process_group("gloo")
        before = proportional_bytes()
        total = float(x.sum())
        dist.barrier()
        grown = torch.tensor(proportional_bytes() - before)
        dist.all_reduce(grown)
        return total, int(grown)

    data = torch.ones(megabytes * MEGABYTE // 4)
    state = in_flow(lambda: train(data, return_state=True))
    total, grown = state.result()
    assert total == data.numel()
    assert grown < 1.3 * megabytes * MEGABYTE
    warned = [line.message for line in read_logs(state, has="arguments are") if line.level == logging.WARNING]
    (said,) = warned
    assert "0.3 GiB" in said
    assert "path" in said


def test_parcels_of_the_attempt_are_gone_after_the_run(in_flow: LiveFlow, tmp_path: Path):
    import torch

    @elastic_task(nproc_per_node=2, store=str(tmp_path / "store"))
    def train(x: Any):
        print("a line")
        return x + 1

    result = in_flow(lambda: train(torch.ones(1000)))
    (attempt,) = (tmp_path / "store").rglob("attempts")
    assert sorted(path.name for path in attempt.rglob("*.*")) == ["rank-0.log", "rank-1.log"]
    kept = [path for path in attempt.parent.rglob("*") if path.is_file() and attempt not in path.parents]
    assert sorted(path.parent.parent.name for path in kept) == [
        *("calls", "calls"),  # the result, and what reports are made of
        attempt.parent.name,  # the log
    ]
    assert float(result.sum()) == 2000.0  # what was mapped from the parcel stays readable
    del result
    gc.collect()
