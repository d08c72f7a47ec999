"""Where a step of a flow ran: its process, its worker, and the work pool of its flow run."""

import os
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client


def here() -> dict[str, Any]:
    """Return the process that this is, and the worker and flow run that it was started for, if any."""
    return {
        "pid": os.getpid(),
        "worker": os.environ.get("PREFECT__WORKER_NAME"),
        "flow_run": os.environ.get("PREFECT__FLOW_RUN_ID"),
    }


def describe(places: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return pools, workers and process ids of the steps, by step; the pool is the one that Prefect knows."""
    report: dict[str, Any] = {"pools": {}, "workers": {}, "pids": {}}
    with get_client(sync_client=True) as client:
        for step, place in places.items():
            run = client.read_flow_run(UUID(place["flow_run"])) if place["flow_run"] else None
            report["pools"][step] = run.work_pool_name if run else None
            report["workers"][step] = place["worker"]
            report["pids"][step] = place["pid"]
    return report
