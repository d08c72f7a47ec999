"""What it costs to watch gangs on Kubernetes, and how late their phases are seen; on the simulated cluster.

`python -m pytest tests/benchmarks -m benchmark -k observer`; results are the last lines, JSON for programs.
The observer runs in a process of its own. It is compared with itself on fewer gangs: what one gang costs may
not depend on how many there are.
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.observer_lives import Life, create_gang, finish_running, live, observed, wait_for
from tests.benchmarks.rounds import RESULTS

FEW, MANY, NNODES, LARGE = 50, 200, 8, 1000
MOST_MB = 300.0
MOST_SECONDS = 2.0
GROWTH = 1.2  # how much the CPU seconds of one gang may differ; they are not the same twice

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1500)]


def publish(bench: str, value: float, unit: str, *, target: float, **details: object) -> None:
    """Write one result to the file that the end of the test run prints."""
    result = {"bench": bench, "ours": round(value, 4), "peer": None, "ratio": None, "unit": unit, **details}
    with Path(os.environ[RESULTS]).open("a") as file:
        line = f"{bench}: {value:.3f} {unit} (target <= {target:g})"
        file.write(f"{line}\n{json.dumps({**result, 'target': target})}\n")


def test_observer_costs_no_more_for_a_gang_when_there_are_many(tmp_path: Path):
    few = live(tmp_path, gangs=FEW, nnodes=NNODES)
    many = live(tmp_path, gangs=MANY, nnodes=NNODES)
    publish_costs(few, many)
    publish(
        "observer-latency",
        statistics.median(many.latencies),
        "s",
        target=MOST_SECONDS,
        seen=len(many.latencies),
        slowest=round(max(many.latencies), 3),
        few=round(statistics.median(few.latencies), 3),
    )
    assert many.requests_per_gang <= few.requests_per_gang
    assert many.steady_requests <= few.steady_requests
    assert many.cpu_seconds_per_gang <= GROWTH * few.cpu_seconds_per_gang
    assert statistics.median(many.latencies) <= MOST_SECONDS


def publish_costs(few: Life, many: Life) -> None:
    """Write down what a gang costs among few and among many."""
    publish(
        "observer-requests",
        many.steady_requests,
        "requests/gang-minute",
        target=round(few.steady_requests, 4),
        few=round(few.steady_requests, 4),
        whole_life={"few": round(few.requests_per_gang, 3), "many": round(many.requests_per_gang, 3)},
        asked=many.asked,
    )
    publish(
        "observer-cpu",
        many.steady_cpu_seconds,
        "s/gang-minute",
        target=round(GROWTH * few.steady_cpu_seconds, 4),
        few=round(few.steady_cpu_seconds, 4),
        whole_life={"few": round(few.cpu_seconds_per_gang, 4), "many": round(many.cpu_seconds_per_gang, 4)},
    )


def runs_again(jobset: dict[str, Any]) -> bool:
    """Return whether all pods of the second attempt run."""
    status = jobset.get("status", {})
    return status.get("restarts") == 1 and all(role["ready"] for role in status["replicatedJobsStatus"])


def test_observer_needs_little_memory_for_a_gang_of_a_thousand_pods(tmp_path: Path):
    with observed(tmp_path, gpus=LARGE) as (cluster, observer, recorder):
        create_gang(cluster, "large", nnodes=LARGE)
        wait_for(cluster, recorder, "Running", 1)
        finish_running(cluster, exit_code=1, most=1)  # all pods are listed to find the one that failed
        cluster.wait_for(lambda: ("large", "Restarting") in observer.sightings(), 120)
        cluster.wait_for(lambda: runs_again(cluster.jobset("large") or {}), 120)
        peak_mb = observer.cost().peak_mb
        publish("observer-memory", peak_mb, "MB", target=MOST_MB, pods=LARGE, asked=dict(observer.asked()))
    assert peak_mb <= MOST_MB
