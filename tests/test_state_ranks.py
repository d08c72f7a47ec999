"""Snapshots of two gloo ranks: the same names under DDP and FSDP2, and training that goes on exactly."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from prefect_torch_elastic.checkpoint.state import take_snapshot  # noqa: E402
from tests.checkpoint_memory import MemoryCheckpoint, whole  # noqa: E402

WORLD_SIZE = 2
WIDTH = 5  # not a multiple of the ranks: the parts are uneven


def build(kind: str, make_optimizer: Any = None) -> dict[str, Any]:
    """Return the state of one rank; all ranks begin with the same weights."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH), nn.BatchNorm1d(WIDTH)
    )
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0])
        fully_shard(model)
    elif kind == "ddp":
        model = DistributedDataParallel(model, forward_sync_buffers=False)
    make_optimizer = make_optimizer or torch.optim.AdamW
    optimizer = make_optimizer(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return {"optimizer": optimizer, "scheduler": scheduler, "model": model}


def train(state: dict[str, Any], first: int, last: int) -> list[float]:
    """Train on batches that depend on the step only, each rank on its half."""
    losses: list[float] = []
    for step in range(first, last):
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        mine = batch[dist.get_rank() :: WORLD_SIZE]
        loss = (state["model"](mine) - mine).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["scheduler"].step()
        losses.append(loss.item())
    return losses


def check_names_and_copies() -> None:
    """DDP and FSDP2 give the names of the plain module, and nothing is copied or gathered."""
    names: dict[str, list[str]] = {}
    for kind in ("plain", "ddp", "fsdp2"):
        state = build(kind)
        train(state, 0, 1)
        snapshot = take_snapshot(state)
        names[kind] = list(snapshot.tensors)
        weight = next(state["model"].parameters())
        kept = snapshot.tensors["model/0.weight"]
        assert local(kept).data_ptr() == local(weight).data_ptr()
        assert hasattr(kept, "placements") == (kind == "fsdp2")
        moment = snapshot.tensors["optimizer/state/model/0.weight/exp_avg"]
        assert hasattr(moment, "placements") == (kind == "fsdp2")
        assert "model/3.running_mean" in snapshot.leader_only
        assert "model/0.weight" not in snapshot.leader_only
    assert names["ddp"] == names["plain"] == names["fsdp2"]


def check_resume(before: str, after: str, make_optimizer: Any = None) -> None:
    state = build(before, make_optimizer)
    train(state, 0, 3)
    checkpoint = MemoryCheckpoint.of(take_snapshot(state), ranks=WORLD_SIZE)
    expected = train(state, 3, 6)
    again = build(after, make_optimizer)
    checkpoint.load(again, rank=dist.get_rank(), world_size=WORLD_SIZE)
    losses = train(again, 3, 6)
    assert losses == pytest.approx(expected, abs=0 if before == after else 1e-6), (before, after)
    assert again["scheduler"].get_last_lr() == state["scheduler"].get_last_lr()


def check_first_step() -> None:
    """A save before the first step changes neither weights nor gradients nor the optimizer."""
    for kind in ("ddp", "fsdp2"):
        state = build(kind)
        before = [whole(parameter).clone() for parameter in state["model"].parameters()]
        take_snapshot(state)
        after = list(state["model"].parameters())
        assert all(torch.equal(one, whole(other)) for one, other in zip(before, after, strict=True))
        assert all(parameter.grad is None for parameter in after)
        assert not state["optimizer"].state


def check_random_state() -> None:
    """Each rank gets its own random state back, not rank 0's."""
    random.seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    checkpoint = MemoryCheckpoint.take({"x": 1})
    everyone: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, checkpoint.rank_values[0])
    shared = MemoryCheckpoint(tensors={}, values=checkpoint.values, rank_values=everyone)
    drawn = (random.random(), torch.rand(1).item())
    shared.load({"x": 1}, rank=dist.get_rank(), world_size=WORLD_SIZE)
    assert (random.random(), torch.rand(1).item()) == drawn
    gathered: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(gathered, drawn)
    assert gathered[0] != gathered[1]


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def run_rank(rank: int, folder: str) -> None:
    """All checks in one pair of processes: to start them takes longer than to run them."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    check_names_and_copies()
    check_first_step()
    for before in ("ddp", "fsdp2"):
        for after in ("ddp", "fsdp2"):
            check_resume(before, after)
    check_resume("fsdp2", "fsdp2", Rowwise)
    check_resume("fsdp2", "fsdp2", momentum)
    check_random_state()
    (Path(folder) / f"passed-{rank}").touch()
    dist.destroy_process_group()
    os._exit(0)  # as real ranks do: a thread of gloo that still runs makes C++ abort at the interpreter's end


class Rowwise(torch.optim.Optimizer):
    """Keeps one number for each row, in a tensor of another shape than the parameter's."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                rows = parameter.grad.reshape(parameter.shape[0], -1).square().sum(1, keepdim=True)
                kept = self.state[parameter]
                kept["rows"] = kept["rows"] * 0.5 + rows if "rows" in kept else rows
                parameter.sub_(parameter.grad * (group["lr"] / (1 + kept["rows"].sum())))


def momentum(parameters: Any, lr: float) -> Any:
    return torch.optim.SGD(parameters, lr=torch.tensor(lr), momentum=0.9)


@pytest.mark.timeout(90)
def test_two_ranks_save_and_resume_under_ddp_and_fsdp2_c052(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", socket.if_indextoname(1))  # loopback
    torch.multiprocessing.spawn(run_rank, args=(str(tmp_path),), nprocs=WORLD_SIZE)
    assert {path.name for path in tmp_path.glob("passed-*")} == {"passed-0", "passed-1"}
