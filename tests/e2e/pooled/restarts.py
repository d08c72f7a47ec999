"""The flows of `test_pool_restarts.py`: steps that go on until the test lets them end.

python restarts.py FLOW FLOW_RUN_ID FOLDER STILL_SECONDS LOST_SECONDS
"""

import json
import sys
import time
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import flow
from prefect.flow_engine import load_flow_run, run_flow

from prefect_torch_elastic import elastic_task, get_context, pool_task
from prefect_torch_elastic.dispatch import verdicts

FOLDER = Path(sys.argv[3])
OPTIONS: dict[str, Any] = {"work_pool": "train", "nproc_per_node": 1, "max_restarts": 0, "grace_seconds": 5}


def note(what: str, name: str, **facts: Any) -> None:
    """Tell the test something."""
    with (FOLDER / "notes").open("a") as file:
        file.write(json.dumps({"what": what, "name": name, "at": time.time(), **facts}) + "\n")


def may_end(name: str) -> bool:
    """Whether the test lets a step end."""
    return (FOLDER / f"end-{name}").exists()


@pool_task(work_pool="train")
def prepare(name: str) -> str:
    note("begin", name)
    while not may_end(name):
        time.sleep(0.1)
    return f"{name} is prepared"


@elastic_task(**OPTIONS)
def wait(name: str, *, fails: bool = False) -> str:
    note("begin", name)
    lines = 0
    while not may_end(name):
        note("tick", name)
        if lines < 100:
            print(f"line {lines} of {name}")
        lines += 1
        time.sleep(1.0)
    if fails:
        raise ValueError(f"{name} failed")
    return f"{name} has waited"


@elastic_task(**OPTIONS, checkpoint={"every_steps": 1})
def train(name: str) -> dict[str, Any]:
    import torch
    from torch import distributed

    context, weights = get_context(), torch.zeros(1)
    if context.world_size > 1:
        context.init_process_group()
    first = step = context.checkpoint.load({"weights": weights})
    if context.rank == 0:
        note("begin", name, first=first, weights=float(weights), attempt=context.attempt)
    while True:
        stop = torch.tensor(float(may_end(name)))
        if context.world_size > 1:
            distributed.all_reduce(stop)
        if stop > 0:
            break
        time.sleep(1.0)
        weights += 1
        step += 1
        context.checkpoint.save_if_due({"weights": weights}, step=step)
        if context.rank == 0:
            note("step", name, step=step)
        if (FOLDER / f"fail-{name}-{step}").exists():
            raise ValueError(f"{name} failed")
    return {"first": first, "step": step, "weights": float(weights), "attempt": context.attempt}


def describe(name: str, future: Any) -> Any:
    """Return a step's value, or the text of its error, and tell the test that it came."""
    value = future.result(raise_on_failure=False)
    note("result", name)
    return f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else value


@flow
def restarted() -> dict[str, Any]:
    text = prepare("data")
    gangs = {
        "long": train.with_options(nproc_per_node=2).submit("long"),
        "good": wait.submit("good"),
        "bad": wait.submit("bad", fails=True),
    }
    return {"data": text, **{name: describe(name, gang) for name, gang in gangs.items()}}


@flow
def outlived() -> dict[str, Any]:
    steps = {
        "short": wait.submit("short"),
        "bad": wait.submit("bad", fails=True),
        "body": prepare.submit("body"),
        "long": wait.submit("long"),
    }
    return {name: describe(name, step) for name, step in steps.items()}


@flow
def killed() -> Any:
    return describe("train", train.with_options(max_attempts=4).submit("train"))


@flow
def retried() -> Any:
    prepare.with_options(retries=1)("data")
    return describe("train", train.with_options(max_attempts=1, retries=2).submit("train"))


@flow
def first() -> Any:
    return describe("first", train.with_options(run_key="shared").submit("first"))


@flow
def second() -> Any:
    return describe("second", train.with_options(run_key="shared").submit("second"))


@flow
def stored() -> dict[str, Any]:
    store = (FOLDER / "store").as_uri()
    steps = {name: wait.with_options(store=store).submit(name) for name in ("short", "long")}
    return {name: describe(name, step) for name, step in steps.items()}


if __name__ == "__main__":
    verdicts.STILL_SECONDS, verdicts.LOST_SECONDS = map(float, sys.argv[4:])
    print("RESULT", json.dumps(run_flow(globals()[sys.argv[1]], flow_run=load_flow_run(UUID(sys.argv[2])))))
