"""The flows of `test_pool_tasks.py`: a script, so its functions travel by value.

python tour.py FOLDER FLOW...
"""

import asyncio
import hashlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import corpus
from answers import answer_all, describe
from prefect import flow, get_run_logger, tags, task, unmapped
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import INPUTS, NO_CACHE
from prefect.context import FlowRunContext, TaskRunContext
from prefect.runtime import flow_run
from prefect.settings import get_current_settings
from prefect.states import Failed

from prefect_torch_elastic import elastic_task, get_context, pool_task

FOLDER = Path(sys.argv[1])


def wait_for(*names: str, seconds: float = 100.0) -> None:
    """Wait for files of the folder."""
    deadline = time.monotonic() + seconds
    while missing := [name for name in names if not (FOLDER / name).exists()]:
        assert time.monotonic() < deadline, f"{missing} did not come"
        time.sleep(0.05)


# ---------------------------------------------------------------- data, then train


@pool_task(work_pool="data", cache_policy=INPUTS)
def prepare(source: str) -> dict[str, str]:
    """Tokenize, once; what travels is a reference."""
    with (FOLDER / "prepared").open("a") as file:
        file.write(f"{source}\n")
    tokens = FOLDER / "tokens"
    tokens.write_text("to be or not")
    return {"uri": str(tokens)}


@elastic_task(nproc_per_node=2, work_pool="train", max_restarts=0)
def train(reference: dict[str, str]) -> dict[str, Any]:
    """Read the tokens in each rank."""
    context = get_context()
    words = Path(reference["uri"]).read_text().split()
    print(f"rank {context.rank} has {len(words)} words")
    get_run_logger().info("rank %s logs", context.rank)
    get_run_logger().warning("rank %s warns", context.rank)
    return {
        "world_size": context.world_size,
        "words": len(words),
        "flow_run_id": context.flow_run_id,
        "task_run_id": context.task_run_id,
    }


@task(cache_policy=INPUTS)
def double(number: int) -> int:
    """Be a task of a body."""
    return 2 * number


@pool_task(
    work_pool="data",
    env={"GIVEN": "by the task"},
    include_files=["words.txt"],
    cache_policy=NO_CACHE,
    log_prints=True,
)
def look(tensor: Any, array: Any, path: Path, recipe: corpus.Recipe, blob: bytes) -> dict[str, Any]:
    """Say what arrived, and where it arrived."""
    import kit

    get_run_logger().info("looking at %s", path)
    print("printed in the body")
    create_markdown_artifact(markdown="# Looked", key="looked")
    run = FlowRunContext.get()
    assert run is not None
    assert run.flow_run is not None
    return {
        "tensor": [type(tensor).__name__, tensor.tolist()],
        "array": [type(array).__name__, str(array.dtype), array.tolist()],
        "path": [isinstance(path, Path), str(path)],
        "recipe": [recipe == corpus.Recipe("plain", 7), corpus.__file__],
        "blob": [len(blob), hashlib.sha256(blob).hexdigest()],
        "included": Path("words.txt").read_text(),
        "weight": kit.weigh("to be"),
        "cached": [double(number, return_state=True).name for number in (1, 1)],
        "variables": {k: v for k, v in os.environ.items() if k in SHOWN or k.startswith("PREFECT")},
        "max_retries": get_current_settings().client.max_retries,
        "flow_run_id": str(run.flow_run.id),
        "in_a_task": TaskRunContext.get() is not None,
        "pid": os.getpid(),
    }


SHOWN = ("GIVEN", "ONLY_THE_CALLER_HAS", "HOME")


def arguments() -> dict[str, Any]:
    """Return what JSON cannot carry, and more than an API takes."""
    import numpy
    import torch

    return {
        "tensor": torch.arange(6.0).reshape(2, 3),
        "array": numpy.array([0.5, 1.5], dtype=numpy.float32),
        "path": Path("/some/where"),
        "recipe": corpus.Recipe("plain", 7),
        "blob": b"\x00\xff" * (5 << 19),
    }


@pool_task(work_pool="data", log_prints=True)
def nest(reference: dict[str, str]) -> dict[str, Any]:
    """Call a gang of another pool from a body."""
    print("the body calls a gang")
    return {"trained": train(reference), "flow_run_id": str(flow_run.id)}


measure = pool_task(work_pool="data", name="measure")(corpus.measure)


@flow
def tour() -> dict[str, Any]:
    """Data, then train, with a few more looks at once."""
    reference = prepare("raw/v3")
    here = look.with_options(work_pool=None, include_files=[], env={})
    with tags("tagged"):
        futures = {
            "look": look.submit(**arguments()),
            "train": train.submit(reference),
            "measure": measure.submit("not to be"),
            "nest": nest.submit(reference),
        }
    values = {name: future.result() for name, future in futures.items()}
    return {
        **values,
        "here": here(**arguments()),
        "prepare": reference,
        "flow_run_id": str(flow_run.id),
        "pid": os.getpid(),
        "task_run_ids": {name: str(future.task_run_id) for name, future in futures.items()},
    }


@flow
def again() -> dict[str, Any]:
    """Ask for the same data in another flow run."""
    state = prepare("raw/v3", return_state=True)
    return {"name": state.name, "value": state.result(), "flow_run_id": str(flow_run.id)}


# ---------------------------------------------------------------- several at once


@pool_task(work_pool="data")
def meet(me: str, everybody: list[str]) -> str:
    """Return when everybody is here."""
    (FOLDER / me).touch()
    wait_for(*everybody)
    return me.upper()


@pool_task(work_pool="train")
async def meet_async(me: str, everybody: list[str]) -> str:
    """Do the same, as a coroutine."""
    (FOLDER / me).touch()
    await asyncio.to_thread(wait_for, *everybody)
    return me.upper()


@flow
async def together() -> dict[str, Any]:
    """Run two of a `map`, one that was submitted, and one that is awaited, which wait for each other."""
    names = ["meet-map-1", "meet-map-2", "meet-submit", "meet-await"]
    mapped = meet.map(names[:2], unmapped(names))
    submitted = meet.submit(names[2], names)
    awaited = await meet_async(names[3], names)
    return {"values": [*(await asyncio.to_thread(mapped.result)), submitted.result(), awaited]}


# ---------------------------------------------------------------- what goes wrong


@pool_task(work_pool="data")
def raise_own() -> None:
    """Raise an exception of the user's."""
    raise corpus.BadCorpusError("there are no words", code=7)


@pool_task(work_pool="data")
def raise_unpicklable() -> None:
    """Raise what cannot travel."""
    error = RuntimeError("this holds a lock")
    error.lock = threading.Lock()  # pyright: ignore[reportAttributeAccessIssue]
    raise error


@pool_task(work_pool="data")
def return_failed() -> Any:
    """Return a state, as Prefect allows it."""
    return Failed(message="the corpus is empty")


@elastic_task(nproc_per_node=2, work_pool="train", max_restarts=0)
def raise_in_rank() -> None:
    """Raise in one of two ranks."""
    if get_context().rank == 1:
        raise corpus.BadCorpusError("rank 1 has no words", code=8)
    time.sleep(60)


@flow
def failing() -> dict[str, Any]:
    """Let four steps fail at once, and return what the caller sees of them."""
    steps = (raise_own, raise_unpicklable, return_failed, raise_in_rank)
    futures = {step.name: step.submit() for step in steps}
    seen: dict[str, Any] = {}
    for name, future in futures.items():
        future.wait()
        seen[name] = {
            "state": future.state.name,
            "message": future.state.message,
            "is_own": isinstance(future.result(raise_on_failure=False), corpus.BadCorpusError),
            **describe(future.result(raise_on_failure=False)),
        }
    return {"flow_run_id": str(flow_run.id), **seen}


@pool_task(work_pool="data", retries=1)
def fail_once() -> str:
    """Fail when it is called for the first time."""
    if (first := FOLDER / "failed-once").exists():
        return str(flow_run.id)
    first.write_text(str(flow_run.id))
    raise ValueError("the first try fails")


@elastic_task(nproc_per_node=2, work_pool="train", retries=1, max_restarts=0)
def resume() -> dict[str, Any]:
    """Fail when two of three steps are saved, and go on from there."""
    import torch

    context = get_context()
    state = {"weight": torch.zeros(1)}
    first = context.checkpoint.load(state)
    for step in range(first, 3):
        state["weight"] += 1
        context.checkpoint.save(state, step=step + 1, wait=True)
        if first == 0 and step == 1:
            raise ValueError("the first try fails")
    return {"first": first, "weight": state["weight"].item(), "attempt": context.attempt}


@flow
def retrying() -> dict[str, Any]:
    """Let a body and a gang fail once."""
    futures = {"fail_once": fail_once.submit(), "resume": resume.submit()}
    values = {name: future.result() for name, future in futures.items()}
    ids = {name: str(future.task_run_id) for name, future in futures.items()}
    return {"flow_run_id": str(flow_run.id), "task_run_ids": ids, **values}


def without() -> dict[str, Any]:
    """Call a step without a flow."""
    return {"value": measure("to be")}


if __name__ == "__main__":
    answer_all([tour, again, together, failing, retrying, without])
