"""How long a call in a work pool takes until user code runs, against a child flow run that starts torchrun.

`python -m pytest tests/benchmarks -m benchmark -k dispatch`; results are the last lines, JSON for programs.
Pool, worker and its poll interval are the same for both. How long a call waits for the worker's next poll is
luck: every round gets the mean of all rounds instead of its own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from prefect_torch_elastic.dev.plan import StackPlan
from prefect_torch_elastic.dev.stack import DevStack
from tests.benchmarks import dispatch_moments, rounds
from tests.benchmarks.dispatch_moments import BACK, OURS, PEER, POLL, even_out, render_medians, split_round

TARGET = 0.9
NPROC = 2
SCRIPT = Path(dispatch_moments.__file__).with_name("dispatch_flow.py")

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(900)]


def test_dispatch_to_a_pool_is_faster_than_a_child_flow_with_torchrun(tmp_path: Path):
    with DevStack(StackPlan(home=tmp_path / "stack", pools={"train": "process"})) as stack:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(tmp_path), str(NPROC), str(rounds.ROUNDS)],
            env={
                **stack.child_environment(),
                "PYTHONPATH": str(SCRIPT.parents[2]),
                "PREFECT_LOGGING_LEVEL": "ERROR",
            },
            timeout=800,
        )
    assert done.returncode == 0
    taken = json.loads((tmp_path / "rounds.json").read_text())
    ours = [split_round(one, OURS) for one in taken["ours"][1:]]  # the first round was to warm both up
    peer = [split_round(one, PEER) for one in taken["peer"][1:]]
    poll = statistics.mean(one.seconds[POLL] for one in [*ours, *peer])
    mine, theirs = even_out(ours, poll), even_out(peer, poll)
    rounds.publish(
        "dispatch",
        mine,
        theirs,
        target=TARGET,
        worker_poll=round(poll, 3),
        parts={"ours": render_medians(ours), "peer": render_medians(peer)},
    )
    # the peer's driver waits with `run_deployment`, which looks every 5 s unless it is told otherwise
    rounds.publish("dispatch-back", [one.seconds[BACK] for one in ours], [one.seconds[BACK] for one in peer])
    assert statistics.median(mine) <= TARGET * statistics.median(theirs)
