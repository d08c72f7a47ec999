"""The driver of the dispatch benchmark: a flow that calls ours and the peer in turn, in the same pool.

`python dispatch_flow.py FOLDER NPROC ROUNDS` writes the moments of all rounds to `FOLDER/rounds.json`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import dispatch_peer  # beside this file, as the modules of a user's flow are
import dispatch_rank
from prefect import flow, tags
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.deployments import run_deployment

from prefect_torch_elastic import elastic_task

POOL = "train"
FOLDER, NPROC, ROUNDS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])


@elastic_task(nproc_per_node=NPROC, gpu=0, work_pool=POOL)
def train(out: str) -> int:
    return dispatch_rank.note_first_line(out)


def deploy_peer() -> str:
    """Deploy the peer's flow to the pool, and return the name of its deployment."""
    script = Path(dispatch_peer.__file__)
    loaded: Any = flow.from_source(
        source=str(script.parent), entrypoint=f"{script.name}:{dispatch_peer.launch_torchrun.fn.__name__}"
    )
    loaded.deploy("bench", work_pool_name=POOL, build=False, push=False, ignore_warnings=True)
    return f"{loaded.name}/bench"


def call_peer(deployment: str, out: str) -> None:
    parameters = {"script": dispatch_rank.__file__, "out": out, "nproc": NPROC}
    run = cast("Any", run_deployment)(deployment, parameters=parameters, tags=[Path(out).name])
    assert run.state.is_completed(), run.state


def take_round(name: str, call: Callable[[str], Any]) -> dict[str, Any]:
    """Make one call, and return when what happened; `dispatch_moments` makes sense of it."""
    out = FOLDER / name
    with tags(name):
        called = time.time()
        call(str(out))
        back = time.time()
    with get_client(sync_client=True) as client:
        (child,) = client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[name])))
        states = client.read_flow_run_states(child.id)
    return {
        "called": called,
        "created": cast("Any", child.created).timestamp(),
        "states": [[state.type.value, state.timestamp.timestamp()] for state in states],
        "ranks": [json.loads(line) for line in out.read_text().splitlines()],
        "back": back,
    }


@flow
def main() -> dict[str, list[dict[str, Any]]]:
    deployment = deploy_peer()
    taken: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
    for number in range(ROUNDS + 1):  # the first one warms both up
        taken["peer"].append(take_round(f"peer-{number}", lambda out: call_peer(deployment, out)))
        taken["ours"].append(take_round(f"ours-{number}", train))
    return taken


if __name__ == "__main__":
    (FOLDER / "rounds.json").write_text(json.dumps(main()))
