"""A quarter of an hour in which nothing is wrong: whatever looks like a hang, no gang is ended for it.

`PTE_SOAK_SECONDS` makes it shorter or longer.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefect_torch_elastic.dev.plan import StackPlan
from tests.conftest import ScriptRunner
from tests.poolfarm import Farm

SECONDS = float(os.environ.get("PTE_SOAK_SECONDS", "900"))
SERVER_SECONDS = 20.0  # how long the server is away
MARGIN_SECONDS = 300.0

pytestmark = [pytest.mark.soak, pytest.mark.timeout(SECONDS + MARGIN_SECONDS + 60)]

TRAINING = """
import json, os, subprocess, sys, time
from pathlib import Path
from prefect import flow
from prefect_torch_elastic import elastic_task, get_context

SECONDS, FOLDER = float(sys.argv[1]), Path(sys.argv[2])

class Slow:
    def state_dict(self):
        time.sleep(20.0)
        return {"n": 1}

    def load_state_dict(self, state): ...

def compute(seconds):
    import torch

    until, matrix = time.monotonic() + seconds, torch.rand(300, 300)
    while time.monotonic() < until:
        matrix = torch.tanh(matrix @ matrix)

@elastic_task(nproc_per_node=2, max_restarts=0, max_attempts=1, store=str(FOLDER / "store"), run_key="soak")
def train():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    context = get_context()
    until, step, scenes = time.monotonic() + SECONDS, 0, []

    def make_steps(count):
        nonlocal step
        for _ in range(count):
            dist.all_reduce(torch.ones(3))
            time.sleep(0.05)
            step += 1
            context.report({"loss": 1.0 / step}, step=step)

    def evaluate_everywhere():  # as long as it takes, without `phase`
        compute(40.0)
        dist.barrier()

    def evaluate_on_one():
        if context.rank == 0:
            compute(30.0)
        dist.barrier()

    def save_slowly():
        context.checkpoint.save({"slow": Slow()}, step=step)

    def pause_each():
        for rank in range(2):
            if context.rank == rank:
                orders = f"kill -STOP {os.getpid()}; sleep 5; kill -CONT {os.getpid()}"
                subprocess.run(["sh", "-c", orders], check=True)
            dist.barrier()

    time.sleep(30.0)  # a first step that compiles
    while True:
        for scene in (evaluate_everywhere, evaluate_on_one, save_slowly, pause_each):
            make_steps(200)
            scene()
            scenes.append(scene.__name__)
        over = torch.tensor([float(time.monotonic() > until)])
        dist.broadcast(over, src=0)
        if over.item():
            make_steps(20)
            return {"steps": step, "scenes": scenes, "restarts": context.restart_count}

@flow
def soaking():
    return train()

print("RESULT", json.dumps(soaking()), flush=True)
"""


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[Farm]:
    plan = StackPlan(home=tmp_path / "farm")
    plan.logs.mkdir(parents=True)
    started = Farm(plan=plan)
    started.start_server()
    yield started
    started.close()


def test_gang_that_only_looks_stuck_is_left_alone(farm: Farm, tmp_path: Path, run_script: ScriptRunner):
    script = run_script.start(TRAINING, args=[str(SECONDS), str(tmp_path)], env=farm.environment)
    began = time.monotonic()
    time.sleep(SECONDS / 2)
    farm.end("server", signal.SIGTERM)
    time.sleep(SERVER_SECONDS)
    farm.start_server()
    ended = script.wait(SECONDS / 2 + MARGIN_SECONDS)
    assert "RESULT" in ended.stdout, ended.stderr[-6000:]
    result = json.loads(ended.stdout.split("RESULT", 1)[1])
    assert result["restarts"] == 0
    assert set(result["scenes"]) == {"evaluate_everywhere", "evaluate_on_one", "save_slowly", "pause_each"}
    assert "The ranks start again" not in ended.stderr
    assert time.monotonic() - began >= SECONDS
