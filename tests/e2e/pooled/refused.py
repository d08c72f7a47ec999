"""The flows of `test_pool_refusals.py`: steps that cannot run, or cannot run yet.

python refused.py FOLDER FLOW...
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from answers import answer_all, describe
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run

from prefect_torch_elastic import elastic_task, pool_task

FOLDER = Path(sys.argv[1])
STORE = (FOLDER / "store").as_uri()
STORE_VARIABLE = "PREFECT_INTEGRATIONS_TORCH_ELASTIC_STORE"
# Where the driver finds its bucket, and where a step does.
HERE, THERE = os.environ.get("DRIVERS_S3", ""), os.environ.get("STEPS_S3", "")


def body(value: Any = 1) -> Any:
    """Leave a trace, for nobody should call this."""
    (FOLDER / "was-called").touch()
    return value


def gang() -> None:
    """Do so in a rank."""
    (FOLDER / "was-called").touch()


step = pool_task(work_pool="data", store=STORE, retries=2)(body)


def call_without_a_store() -> Any:
    """Call a step when nobody has said where calls go."""
    given = os.environ.pop(STORE_VARIABLE)
    try:
        return pool_task(work_pool="data")(body)()
    finally:
        os.environ[STORE_VARIABLE] = given


REFUSED: dict[str, Callable[[], Any]] = {
    "missing": lambda: step.with_options(work_pool="datta")(),
    "bare": lambda: step.with_options(work_pool="bare")(),
    "two-nodes": lambda: elastic_task(nnodes=2, nproc_per_node=1, work_pool="docker", store=STORE)(gang)(),
    "lock": lambda: step(threading.Lock()),
    "command": lambda: step.with_options(job_variables={"command": "true"})(),
    "no-file": lambda: step.with_options(include_files=["nowhere.txt"])(),
    "no-store": call_without_a_store,
    "path": lambda: step.with_options(store=str(FOLDER / "store"))(),
    "memory": lambda: step.with_options(store="memory://calls")(),
}


@flow
def refusals() -> dict[str, Any]:
    """Ask for what cannot be, one after the other."""
    seen: dict[str, Any] = {"flow_run_id": str(flow_run.id)}
    for name, call in REFUSED.items():
        try:
            seen[name] = {"value": call()}
        except Exception as error:  # noqa: BLE001  (whatever it is, the tests look at it)
            seen[name] = describe(error)
    return seen


# ---------------------------------------------------------------- not yet


def pause(is_paused: bool) -> None:
    """Pause the pool of the data steps, or let it go on."""
    with get_client(sync_client=True) as client:
        client.update_work_pool("data", WorkPoolUpdate(is_paused=is_paused))


def wait_for_message(task_run_id: Any, text: str, *, seconds: float = 60.0) -> str:
    """Return what a task run says, once it says that."""
    deadline = time.monotonic() + seconds
    with get_client(sync_client=True) as client:
        while True:
            said = ""
            with suppress(ObjectNotFound):  # Prefect writes it down when it gets round to it
                state = client.read_task_run(task_run_id).state
                said = f"{state.name}: {state.message}" if state else ""
            if text in said or time.monotonic() > deadline:
                return said
            time.sleep(0.3)


def outcome_of(future: Any) -> dict[str, Any]:
    """Return how a task run ended."""
    future.wait()
    value = future.result(raise_on_failure=False)
    seen = describe(value) if isinstance(value, BaseException) else {"value": value}
    return {"state": future.state.name, "task_run_id": str(future.task_run_id), **seen}


def go_on() -> str:
    """Be what the paused pool runs in the end."""
    return "went on"


def get_lost() -> None:
    """Be what arrives elsewhere."""


@flow
def waiting() -> dict[str, Any]:
    """Ask for what nobody runs, for what is paused, and for what arrives where there is nothing."""
    plain = pool_task(work_pool="data", store=STORE, run_key="one-key")(go_on)
    idle = {"work_pool": "idle", "inadmissible_grace_seconds": 4}
    os.environ["AWS_ENDPOINT_URL"] = HERE
    env = {**{k: v for k, v in os.environ.items() if k.startswith("AWS_")}, "AWS_ENDPOINT_URL": THERE}
    elsewhere = {"work_pool": "train", "store": "s3://bucket/runs", "env": env}
    pause(True)
    try:
        futures = {
            "idle-body": step.with_options(**idle, retries=0).submit(),
            "idle-gang": elastic_task(nproc_per_node=1, store=STORE, **idle)(gang).submit(),
            "elsewhere": pool_task(**elsewhere)(get_lost).submit(),
            "paused": plain.submit(),
        }
        reason = wait_for_message(futures["paused"].task_run_id, "paused")
        second = plain.with_options(name="other").submit()
        second.wait()
    finally:
        pause(False)
    return {
        "flow_run_id": str(flow_run.id),
        "reason": reason,
        "same-key": outcome_of(second),
        **{name: outcome_of(future) for name, future in futures.items()},
    }


if __name__ == "__main__":
    answer_all([refusals, waiting])
