"""The observer in a process of its own, next to Prefect as in a worker: what it sees goes to a file.

`python observer_process.py KUBECONFIG LABELS FILE`; a line on stdin is answered with the cost so far.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import prefect.workers.base  # noqa: F401  (a worker has it in memory, too)

from prefect_torch_elastic.kubernetes.client import Cluster
from prefect_torch_elastic.kubernetes.observer import Observer, Sighting


def main(kubeconfig: str, labels: str, path: str) -> None:
    """Observe until stdin ends."""
    with Path(path).open("a", buffering=1) as file:

        def write(sighting: Sighting) -> None:
            row = {"at": time.time(), "gang": sighting.name, "phase": sighting.status.phase}
            file.write(f"{json.dumps(row)}\n")

        cluster = Cluster.connect(kubeconfig=kubeconfig)
        observer = Observer(cluster, namespaces=["default"], labels=labels, listen=write, warn=print)
        observer.start()
        for _ in sys.stdin:
            peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(json.dumps({"cpu_seconds": time.process_time(), "peak_mb": peak_mb}), flush=True)
        observer.close()
        cluster.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
