"""A whole path for tests: a driver's script, a work pool of type `torch-elastic`, its worker, and a cluster.

Everything but the cluster is real: the Prefect server, the worker's process, the driver's process, and the
pods' processes, which run the program that they would run in a container. The cluster is simulated, or a real
control plane (`PTE_TEST_KUBECONFIG`) whose pods our kubelet runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from prefect_torch_elastic.dispatch.childruns import TASK_RUN_LABEL
from prefect_torch_elastic.kubernetes.naming import FLOW_RUN_LABEL
from tests.conftest import RunningScript, ScriptRunner
from tests.hosted import cancel_run, client, wait_for
from tests.poolruns import Api
from tests.simulators.cluster import Cluster

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun, TaskRun

T = TypeVar("T")

START_SECONDS = (
    90.0  # two busy cores need half a minute for a worker, a driver, and two pods that import torch
)
IMAGE = "training:1"
LIMITS = {
    "nnodes": 2,
    "nproc_per_node": 1,
    "cpu": "1",
    "memory": "1Gi",
    "max_restarts": 0,
    "grace_seconds": 10,
}

_WORKER = """
import asyncio, signal, sys
from prefect_torch_elastic.kubernetes.worker import TorchElasticWorker

async def main():
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    for number in (signal.SIGTERM, signal.SIGINT):  # `prefect worker start` makes SIGINT of SIGTERM
        loop.add_signal_handler(number, task.cancel)
    options = dict(work_pool_name=sys.argv[1], prefetch_seconds=1, heartbeat_interval_seconds=10)
    await TorchElasticWorker(name=sys.argv[2], **options).start()

asyncio.run(main())
"""

# What every driver's script begins with. Its steps leave marks in a folder, which tests look for.
PRELUDE = """
import json, os, sys, time
from pathlib import Path
from prefect import flow, runtime
from prefect_torch_elastic import GangFailed, elastic_task, get_context, pool_task

FOLDER, POOL, STORE, LIMITS = Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])

def train(folder: str, steps: int, seconds: float = 0.02, fail: str = "") -> dict:
    import signal
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    context = get_context()
    state = {"sum": torch.zeros(1)}
    begun = context.checkpoint.load(state)
    for step in range(begun, steps):
        value = torch.tensor([float(step * (context.rank + 1))])
        dist.all_reduce(value)
        state["sum"] += value
        context.report({"sum": state["sum"].item()}, step=step + 1)
        Path(folder, f"rank-{context.rank}").write_text(str(step + 1))
        if step == 5 and context.rank == 1 and context.attempt == 1:
            if fail == "raise":
                raise ValueError("the data of rank 1 is bad")
            if fail == "raise-once" and context.restart_count == 0:
                raise ValueError("the data of rank 1 is bad, once")
            if fail == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        context.checkpoint.save_if_due(state, step=step + 1)
        time.sleep(seconds)
    return {
        "begun": begun, "sum": state["sum"].item(), "preemptions": context.preemption_count,
        "attempt": context.attempt, "world_size": context.world_size,
        "restarts": context.restart_count,
    }

def learn(folder: str, steps: int, seconds: float = 0.02, deaf_at: int = -1) -> dict:
    # A small model, every loss of it and its weights in the end. After `deaf_at` preemptions it does not look
    # for stops: told to end, rank 1 dies at once, and rank 0 of the broken collective. It keeps its quota
    # while the mark `held` is there.
    import signal
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    context = get_context()
    deaf = context.preemption_count == deaf_at
    if deaf:
        def refuse(*_):
            if context.rank == 1:
                raise RuntimeError("interrupted in the middle of a step")
        signal.signal(signal.SIGTERM, refuse)
    torch.manual_seed(7)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = torch.zeros(steps)
    state = {"model": model, "optimizer": optimizer, "losses": losses}
    begun = context.checkpoint.load(state)
    Path(folder, f"begun-{context.preemption_count}-{context.rank}").write_text(str(begun))
    for step in range(begun, steps):
        generator = torch.Generator().manual_seed(1000 * step + context.rank)
        data = torch.randn(4, 8, generator=generator)
        loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        for tensor in (total, *(parameter.grad for parameter in model.parameters())):
            dist.all_reduce(tensor)
        optimizer.step()
        losses[step] = total
        context.report({"loss": total.item()}, step=step + 1)
        Path(folder, f"rank-{context.rank}").write_text(str(step + 1))
        if not deaf:
            context.checkpoint.save_if_due(state, step=step + 1)
        elif step % 5 == 0:
            context.checkpoint.save(state, step=step + 1, wait=True)
        time.sleep(seconds)
    while Path(folder, "held").exists():
        time.sleep(0.05)
    weights = [parameter.detach().numpy().tobytes().hex() for parameter in model.parameters()]
    return {
        "begun": begun, "losses": losses.tolist(), "weights": weights,
        "preemptions": context.preemption_count, "attempt": context.attempt,
    }
"""


@dataclass
class KueueRun:
    """One flow run of a driver's script, on its way through the cluster.

    Attributes:
        lab: Where it runs.
        folder: Where its steps leave marks.
        script: The driver.
    """

    lab: KueueLab
    folder: Path
    script: RunningScript

    def child(self) -> FlowRun | None:
        """Return the child run, the newest if there are several; None before there is one."""
        runs = self.children()
        return runs[-1] if runs else None

    def children(self) -> list[FlowRun]:
        """Return the child runs of this run's drivers, oldest first."""
        mark = self.folder / "flow-runs"
        parents = mark.read_text().split() if mark.exists() else []
        with client() as api:
            runs = [run for parent in parents for run in Api(client=api).children(parent)]
        return sorted(runs, key=lambda run: str(run.created))

    def jobset(self) -> dict[str, Any]:
        """Return the JobSet of the child run, once it is there."""
        found = self.lab.until(self._find_jobset, "the JobSet", self)
        assert found
        return found

    def pods(self, *, phase: str = "") -> list[str]:
        """Return the names of the pods that the gang has now, the leader's first."""
        jobset = self._find_jobset()
        found = self.lab.cluster.pods(jobset["metadata"]["name"], phase=phase) if jobset else []
        return sorted(pod["metadata"]["name"] for pod in found)

    def ended_pods(self) -> list[dict[str, Any]]:
        """Return the pods of the gang of which the container has ended: their names and exit codes."""
        jobset = self._find_jobset()
        found = self.lab.cluster.pods(jobset["metadata"]["name"]) if jobset else []
        return [
            {"name": pod["metadata"]["name"], "exit_code": ended["exitCode"]}
            for pod in found
            for container in pod.get("status", {}).get("containerStatuses", [])
            if (ended := container["state"].get("terminated"))
        ]

    def lines(self, *, has: str = "") -> list[str]:
        """Return the lines on the page of the child run, once one of them contains `has`."""
        child = self.child()
        assert child
        with client() as api:
            return Api(client=api).logs(flow_run=child.id, has=has)

    def task_run(self) -> TaskRun:
        """Return the driver's task run."""
        with client() as api:
            return Api(client=api).task_run(self._task_run_id())

    def task_state(self) -> str:
        """Return the name of the state that the driver's task run shows."""
        state = self.task_run().state
        return (state.name or "") if state else ""

    def events(self, name: str, *, count: int) -> list[dict[str, Any]]:
        """Return what the worker told of the gang, by the end of the name, once there are so many, in order.

        The pages of the run tell some of it too, in events of their own.
        """
        child = self.child()
        assert child
        chosen = {
            "event": {"name": [f"prefect-torch-elastic.gang.{name}"]},
            "related": {"id": [f"prefect.flow-run.{child.id}"]},
            "order": "ASC",
        }
        with client() as api:

            def look() -> list[dict[str, Any]]:
                answer = api.request("POST", "/events/filter", json={"filter": chosen})
                found = [one for one in answer.json()["events"] if "preemptions" in one["payload"]]
                return found if len(found) >= count else []

            return wait_for(look)

    def _find_jobset(self) -> dict[str, Any] | None:
        child = self.child()
        label = f"{FLOW_RUN_LABEL}={child.id}" if child else ""
        cluster = self.lab.cluster
        found = cluster.api.list("jobsets", namespace=cluster.namespace, labels=label) if label else []
        return found[0] if found else None

    def state(self) -> str:
        """Return the name of the child run's state, empty before there is one."""
        child = self.child()
        return (child.state.name or "") if child and child.state else ""

    def message(self) -> str:
        child = self.child()
        return (child.state.message or "") if child and child.state else ""

    def wait_for_state(self, *names: str, seconds: float = START_SECONDS) -> str:
        """Wait until the child run has one of these states, and return its message."""
        self.lab.until(lambda: self.state() in names, f"state {' or '.join(names)}", self, seconds)
        return self.message()

    def step(self) -> int:
        """Return the last step that all ranks have done."""
        marks = [self.folder / f"rank-{rank}" for rank in range(2)]
        return min(int(mark.read_text() or 0) if mark.exists() else 0 for mark in marks)

    def wait_for_step(self, step: int, *, seconds: float = START_SECONDS) -> None:
        self.lab.until(lambda: self.step() >= step, f"step {step}", self, seconds)

    def wait_for_begin(self, *, preemptions: int, seconds: float = START_SECONDS) -> int:
        """Return where the ranks of `learn` began after so many preemptions, once they have."""
        mark = self.folder / f"begun-{preemptions}-0"
        return int(self.lab.until(lambda: mark.exists() and mark.read_text(), str(mark), self, seconds))

    def result(self, *, seconds: float = START_SECONDS) -> Any:
        """Return what the flow returned."""
        ended = self.script.wait(seconds)
        assert "RESULT" in ended.stdout, f"{ended.stderr[-5000:]}\n{self.lab.tell()}"
        return json.loads(ended.stdout.split("RESULT", 1)[1])

    def error(self, *, seconds: float = START_SECONDS) -> str:
        """Return the error that the flow ended with, as `Type: text`."""
        ended = self.script.wait(seconds)
        assert "ERROR" in ended.stdout, f"{ended.stdout}\n{ended.stderr[-5000:]}\n{self.lab.tell()}"
        return ended.stdout.split("ERROR", 1)[1].strip()

    def history(self) -> list[str]:
        """Return the names of the child run's states, in order, without repetitions in a row."""
        child = self.child()
        assert child
        with client() as api:
            states = sorted(api.read_flow_run_states(child.id), key=lambda state: state.timestamp)
        names = [state.name or "" for state in states]
        return [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]

    def task_history(self) -> list[str]:
        """Return the names of the task run's states, in order."""
        with client() as api:
            task = Api(client=api).task_run(self._task_run_id())
            return [name for name, _ in Api(client=api).history(str(task.id))]

    def cancel(self) -> None:
        """Cancel the child run, as its page does."""
        child = self.child()
        assert child
        cancel_run(child.id)

    def kill_driver(self) -> None:
        self.script.process.kill()
        self.script.process.wait()

    def _task_run_id(self) -> str:
        child = self.child()
        assert child
        return str(child.labels[TASK_RUN_LABEL])


@dataclass
class KueueLab:
    """A work pool, its worker and a cluster; flows are started in it.

    Attributes:
        cluster: The cluster.
        folder: For everything that is written.
        pool: Name of the work pool.
        runner: Starts the drivers.
        worker_prelude: Statements that the worker's program begins with, such as shorter patience.
    """

    cluster: Cluster
    folder: Path
    pool: str
    runner: ScriptRunner
    since: float = field(default_factory=time.time)
    worker: subprocess.Popen[bytes] | None = None
    worker_prelude: str = ""

    @property
    def store(self) -> str:
        return f"file://{self.folder / 'store'}"

    def start_worker(self, name: str = "worker") -> None:
        """Start the worker; some seconds later it takes what waits in the pool."""
        with (self.folder / "worker.log").open("ab") as log:
            self.worker = subprocess.Popen(
                [sys.executable, "-P", "-c", self.worker_prelude + _WORKER, self.pool, name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PREFECT_HOME": str(self.folder / "worker-home")},
                cwd=self.folder,
                start_new_session=True,
            )

    def end_worker(self, number: int = signal.SIGKILL) -> None:
        """End the worker by a signal, and wait until it is gone."""
        if self.worker is not None:
            self.worker.send_signal(number)
            self.worker.wait(30)
            self.worker = None

    def start(self, body: str, **limits: Any) -> KueueRun:
        """Start a driver whose flow calls `pretrain`, an elastic task over `train`, in `body`."""
        folder = self.folder / f"run-{uuid.uuid4().hex[:6]}"
        folder.mkdir()
        fields = {**LIMITS, "queue": "lq", "namespace": self.cluster.namespace, **limits}
        script = f"""{PRELUDE}
@elastic_task(name="pretrain", work_pool=POOL, store=STORE, **LIMITS)
def pretrain(folder: str, steps: int, seconds: float = 0.02, fail: str = "") -> dict:
    return train(folder, steps, seconds, fail)

@elastic_task(name="study", work_pool=POOL, store=STORE, **LIMITS)
def study(folder: str, steps: int, seconds: float = 0.02, deaf_at: int = -1) -> dict:
    return learn(folder, steps, seconds, deaf_at)

@flow(name="training")
def training():
    with (FOLDER / "flow-runs").open("a") as mark:
        print(runtime.flow_run.id, file=mark)
{_indent(body)}

try:
    print("RESULT", json.dumps(training()), flush=True)
except BaseException as error:
    print("ERROR", f"{{type(error).__name__}}: {{error}}", flush=True)
    raise
"""
        arguments = [str(folder), self.pool, self.store, json.dumps(fields)]
        return KueueRun(lab=self, folder=folder, script=self.runner.start(script, args=arguments))

    def children(self) -> list[FlowRun]:
        """Return the child runs of this lab's pool, oldest first."""
        from prefect.client.schemas.filters import WorkPoolFilter, WorkPoolFilterName

        with client() as api:
            runs = api.read_flow_runs(
                work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[self.pool]))
            )
        return sorted(runs, key=lambda run: str(run.created))

    def until(
        self, look: Callable[[], T], what: str, run: KueueRun | None = None, seconds: float = START_SECONDS
    ) -> T:
        """Return the first true answer, or fail with what everybody has said."""
        deadline = time.monotonic() + seconds
        while not (found := look()):
            over = run is not None and run.script.process.poll() is not None
            if time.monotonic() > deadline or (over and not look()):
                said = f"{run.script.stdout[-500:]}{run.script.stderr[-4000:]}" if run else ""
                raise AssertionError(f"{what} did not come within {seconds:g} s:\n{said}\n{self.tell()}")
            time.sleep(0.1)
        return found

    def tell(self) -> str:
        """Return what worker, pods and cluster say, for a test that fails."""
        log = self.folder / "worker.log"
        worker = log.read_text(errors="replace")[-4000:] if log.exists() else ""
        pods = [
            f"--- {pod['metadata']['name']}\n{self.cluster.log(pod['metadata']['name'])[-2000:]}"
            for pod in self.cluster.pods()
        ]
        return "\n".join(["=== worker", worker, "=== pods", *pods, "=== cluster", self.cluster.describe()])

    def preempt(self, name: str = "high", *, pods: int = 2, seconds: int = 1) -> None:
        """Submit a plain gang of a higher priority that takes the quota for some seconds."""
        self.cluster.api.create(
            "jobsets", render_preemptor(name, pods, seconds), namespace=self.cluster.namespace
        )

    def end_preemptor(self, name: str = "high") -> None:
        """Give its quota back before its time."""
        self.cluster.api.delete("jobsets", name, namespace=self.cluster.namespace)


@contextmanager
def open_lab(
    cluster: Cluster, folder: Path, *, worker_prelude: str = "", **defaults: Any
) -> Iterator[KueueLab]:
    """Give a work pool of our type on a cluster, with a worker; `defaults` are those of the pool's form."""
    pool = f"train-{uuid.uuid4().hex[:6]}"
    folder.mkdir(parents=True, exist_ok=True)
    values = {"image": IMAGE, "cluster_config": str(cluster.kubeconfig), "namespace": cluster.namespace}
    make_pool(pool, {**values, **defaults})
    runner = ScriptRunner(folder=folder / "scripts")
    lab = KueueLab(cluster=cluster, folder=folder, pool=pool, runner=runner, worker_prelude=worker_prelude)
    lab.start_worker()
    try:
        yield lab
    finally:
        lab.end_worker()
        for script in runner.running:
            script.end()


def make_pool(name: str, defaults: Mapping[str, Any]) -> None:
    """Create a work pool of our type whose form has these defaults."""
    from prefect.client.schemas.actions import WorkPoolCreate

    from prefect_torch_elastic.kubernetes.worker import TorchElasticWorker

    template = TorchElasticWorker.get_default_base_job_template()
    for variable, value in defaults.items():
        template["variables"]["properties"][variable]["default"] = value
    with client() as api:
        api.create_work_pool(WorkPoolCreate(name=name, type="torch-elastic", base_job_template=template))


def render_preemptor(name: str, pods: int, seconds: int) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": IMAGE,
        "command": ["sh", "-c", f"trap 'exit 143' TERM; sleep {seconds}"],
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
    }
    job = {
        "parallelism": pods,
        "completions": pods,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "containers": [container],
            }
        },
    }
    labels = {"kueue.x-k8s.io/queue-name": "lq", "kueue.x-k8s.io/priority-class": "high"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "suspend": True,
            "ttlSecondsAfterFinished": 0,
            "replicatedJobs": [{"name": "w", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _indent(body: str) -> str:
    return "\n".join(f"    {line}" for line in body.strip().splitlines())


def expected_sum(steps: int) -> float:
    """Return the sum that two ranks of `train` have in the end."""
    return float(sum(3 * step for step in range(steps)))
