"""Gangs whose nodes are separate processes with addresses of their own, as pods have them; no cluster needed.

The order is written as a driver writes it; each "pod" runs the same command, on its own loopback address, and
is ended as a kubelet ends one.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from prefect_torch_elastic.dispatch.order import CallKind, CallReference, render_command
from prefect_torch_elastic.outcomes import CallRecord, derive_key
from prefect_torch_elastic.payload import PythonPayload
from prefect_torch_elastic.runkey import CallIdentity
from prefect_torch_elastic.runlog import RunLog
from prefect_torch_elastic.signing import fetch_run_secret, forget_key
from prefect_torch_elastic.spec import build_spec
from prefect_torch_elastic.store import open_store
from tests.hosted import create_run

_gangs = count(1)
START_SECONDS = 60.0
_PROCESSES = 1 << 9


def _name_network(gang: int) -> str:
    """Return the first three numbers of the addresses of a gang; processes at the same time have others."""
    number = (os.getpid() % _PROCESSES) * 100 + gang % 100
    return f"127.{30 + number // 256 % 200}.{number % 256}"


@dataclass
class PodProcess:
    """One pod, as a process that heads a session."""

    process: subprocess.Popen[bytes]
    folder: Path

    def wait(self, seconds: float = START_SECONDS) -> int:
        """Wait for its end and return the code that a kubelet would see."""
        code = self.process.wait(seconds)
        return code if code >= 0 else 128 - code

    def terminate(self) -> None:
        """Do what a kubelet does first: SIGTERM for PID 1 only."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Take the whole pod away at once."""
        os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def last_words(self) -> dict[str, Any]:
        return json.loads((self.folder / "termination-log").read_text())

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")


@dataclass
class PodGang:
    """A call that waits in a store, and the pods that carry it out.

    Attributes:
        folder: For everything.
        store: The store's directory.
        run_id: The child run.
        record: What the run folder knows about the call.
        nnodes: Pods.
    """

    folder: Path
    store: Path
    run_id: UUID
    record: CallRecord
    reference: CallReference
    nnodes: int
    grace_seconds: float
    pods: list[PodProcess] = field(default_factory=list[PodProcess])

    def start(
        self, *nodes: int, attempt: int = 0, environment: Mapping[str, str] | None = None
    ) -> list[PodProcess]:
        """Start these pods, all without names, on loopback addresses that no other gang has."""
        network = _name_network(next(_gangs))
        addresses = [f"{network}.{node + 1}" for node in range(self.nnodes)]
        chosen = nodes or tuple(range(self.nnodes))
        started = [self._start(node, addresses, attempt, environment or {}) for node in chosen]
        self.pods += started
        return started

    def _start(
        self, node: int, addresses: list[str], attempt: int, environment: Mapping[str, str]
    ) -> PodProcess:
        folder = self.folder / f"pod-{len(self.pods)}-{node}-{attempt}-{time.monotonic_ns()}"
        (folder / "home").mkdir(parents=True)
        variables = {
            "PREFECT_TORCH_ELASTIC_CONTRACT": "1",
            "PREFECT_TORCH_ELASTIC_NNODES": str(self.nnodes),
            "PREFECT_TORCH_ELASTIC_LEADER": f"{addresses[0]}:29400",
            "PREFECT_TORCH_ELASTIC_GANG": "gang",
            "PREFECT_TORCH_ELASTIC_ATTEMPT": str(attempt),
            "PREFECT_TORCH_ELASTIC_GRACE_SECONDS": str(self.grace_seconds),
            "PREFECT_TORCH_ELASTIC_POD": f"gang-node-0-{node}-abcde",
            "PREFECT_TORCH_ELASTIC_POD_IP": addresses[node],
            "PREFECT_TORCH_ELASTIC_TERMINATION_LOG": str(folder / "termination-log"),
            "JOB_COMPLETION_INDEX": str(node),
            "PREFECT__FLOW_RUN_ID": str(self.run_id),
            "PREFECT_HOME": str(folder / "home"),
            **environment,
        }
        command = render_command(self.reference, nproc_per_node=1)
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **variables},
                cwd=folder,
                start_new_session=True,
            )
        return PodProcess(process=process, folder=folder)

    def tell(self) -> str:
        """Return what all pods have said, for a test that fails."""
        return "\n".join(f"--- {pod.folder.name}\n{pod.output[-3000:]}" for pod in self.pods)

    def end(self) -> None:
        for pod in self.pods:
            if pod.process.poll() is None:
                pod.kill()
                pod.process.wait()


def send_gang(
    folder: Path,
    function: Callable[..., Any],
    *args: Any,
    nnodes: int = 2,
    store: Path | None = None,
    **fields: Any,
) -> PodGang:
    """Write a call into a store, as a driver does for a pool, and return the gang to be."""
    from prefect_torch_elastic.dispatch.sending import send_call

    directory = store or folder / "store"
    directory.mkdir(parents=True, exist_ok=True)
    run_id = create_run()
    opened, digest = open_store(f"file://{directory}"), "c0ffee"
    forget_key()  # a test before this one may have removed the block that it comes from
    key = derive_key(fetch_run_secret(str(run_id)), digest)
    record = CallRecord(
        store=opened, folder="run", log=RunLog(opened, "run"), call=digest, key=key, warn=print
    )
    spec = {"nnodes": nnodes, "nproc_per_node": 1, "max_restarts": 0, "grace_seconds": 10, "work_pool": "k8s"}
    call: Any = SimpleNamespace(
        spec=build_spec({**spec, "store": f"file://{directory}", **fields}),
        identity=CallIdentity(root=str(run_id), run_key="run", digest=digest),
        record=record,
        patience=SimpleNamespace(wait_for=lambda work: work()),
        task_name="train",
        task_run_name="train-0",
        task_run_id="",
        flow_run_id="",
        retries=0,
        log_prints=None,
        log=logging.getLogger(__name__),
    )
    payload = PythonPayload(function=function, args=args, kwargs={}, warn=print)
    reference = send_call(call, payload, kind=CallKind.GANG, max_attempts=call.spec.max_attempts)
    return PodGang(
        folder=folder,
        store=directory,
        run_id=run_id,
        record=record,
        reference=reference,
        nnodes=nnodes,
        grace_seconds=call.spec.grace_seconds,
    )
