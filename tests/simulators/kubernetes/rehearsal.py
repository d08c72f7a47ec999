"""Plays a captured scenario to the controllers on a virtual clock, with pods that follow a script.

A scenario is data: a queue, actions with the second at which they happen, and the plan of each pod in an
annotation (`run=8;stop=2;exit.1=42`: seconds until it ends, seconds it takes to stop, exit code of index 1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulators.kubernetes.conditions import list_owned
from tests.simulators.kubernetes.jobpods import INDEX
from tests.simulators.kubernetes.kueue_evictions import PodsReadyPolicy
from tests.simulators.kubernetes.objects import Obj, format_time
from tests.simulators.kubernetes.onlooker import Write
from tests.simulators.kubernetes.runner import Controllers
from tests.simulators.kubernetes.storage import Storage

PLAN = "kubelet.cp/plan"
TICK_SECONDS = 0.1
START_SECONDS = 0.3
EPOCH = 1_790_000_000.0
STOPPED = 143


@dataclass(kw_only=True)
class Clock:
    """Time that passes when it is told to."""

    now: float = EPOCH

    def __call__(self) -> float:
        return self.now


@dataclass(kw_only=True)
class ScriptedKubelet:
    """Runs pods by their plan: status only, no processes."""

    storage: Storage
    clock: Clock
    is_cordoned: bool = False
    started: dict[str, float] = field(default_factory=dict)
    stopped: dict[str, float] = field(default_factory=dict)

    def step(self) -> None:
        """Move every pod on by one."""
        for pod in self.storage.list("pods"):
            self._move(pod)

    def _move(self, pod: Obj) -> None:
        uid, phase = pod["metadata"]["uid"], pod["status"]["phase"]
        plan, index = read_plan(pod), pod["metadata"]["annotations"].get(INDEX, "0")
        if phase in ("Succeeded", "Failed"):
            if "deletionTimestamp" in pod["metadata"]:
                self.storage.finish_pod_deletion(pod["metadata"]["namespace"], pod["metadata"]["name"])
        elif "deletionTimestamp" in pod["metadata"]:
            since = self.stopped.setdefault(uid, self.clock.now)
            if self.clock.now - since >= plan.get("stop", 0.5):
                self.end(pod, STOPPED)
        elif not pod["spec"].get("nodeName"):
            if not self.is_cordoned:
                self._change(pod, lambda obj: obj["spec"].update(nodeName="node-0"))
                self.started[uid] = self.clock.now + START_SECONDS
        elif phase == "Pending":
            if self.clock.now >= self.started[uid]:
                self._change(pod, _mark_running, status=True)
        elif self.clock.now - self.started[uid] >= plan.get(f"run.{index}", plan.get("run", 60.0)):
            self.end(pod, int(plan.get(f"exit.{index}", 0)))

    def end(self, pod: Obj, exit_code: int) -> None:
        """Let the pod's container end."""
        when = format_time(self.clock.now)

        def mark(obj: Obj) -> None:
            obj["status"]["phase"] = "Failed" if exit_code else "Succeeded"
            for condition in obj["status"].get("conditions", ()):
                if condition["type"] == "Ready":
                    condition["status"] = "False"
            ended = {"exitCode": exit_code, "finishedAt": when}
            name = obj["spec"]["containers"][0]["name"]
            obj["status"]["containerStatuses"] = [{"name": name, "state": {"terminated": ended}}]

        self._change(pod, mark, status=True)

    def _change(self, pod: Obj, change: Callable[[Obj], None], *, status: bool = False) -> None:
        metadata = pod["metadata"]
        self.storage.mutate("pods", metadata["namespace"], metadata["name"], change, status=status)


def read_plan(pod: Obj) -> dict[str, float]:
    """Return what a pod's annotation says about its life."""
    text = pod["metadata"]["annotations"].get(PLAN) or "run=60"
    parts = (part.partition("=") for part in text.replace("never", "inf").split(";"))
    return {name: float(value) for name, _, value in parts}


def _mark_running(pod: Obj) -> None:
    pod["status"]["phase"] = "Running"
    pod["status"]["conditions"] = [
        *pod["status"].get("conditions", ()),
        {"type": "Ready", "status": "True"},
    ]


class Rehearsal:
    """One scenario under way.

    Args:
        scenario: What `tests/fixtures/simulator` holds.
        batch_seconds: See `Controllers`.
    """

    def __init__(self, scenario: Obj, *, batch_seconds: float = 1.0) -> None:
        self.clock = Clock()
        self.storage = Storage(self.clock)
        policy = scenario.get("podsReady")
        pods_ready = PodsReadyPolicy(**policy) if policy else None
        self.controllers = Controllers(
            self.storage, self.clock, batch_seconds=batch_seconds, pods_ready=pods_ready
        )
        self.kubelet = ScriptedKubelet(storage=self.storage, clock=self.clock)
        self.namespace: str = scenario["namespace"]
        self.actions: list[Obj] = sorted(scenario["actions"], key=lambda action: action["at"])
        self.seconds: float = scenario["seconds"]
        self._subscription = self.storage.subscribe()
        for name, value in (("low", 100), ("normal", 500), ("high", 1000)):
            self.storage.create("workloadpriorityclasses", {"metadata": {"name": name}, "value": value})
        self.queue: str = scenario.get("queue", "")
        if self.queue:
            self._create_queue()

    def _create_queue(self) -> None:
        quota = {"cpu": "100", "memory": "1000Gi", "nvidia.com/gpu": "8"}
        resources = [{"name": name, "nominalQuota": value} for name, value in quota.items()]
        flavors = [{"name": "default-flavor", "resources": resources}]
        spec = {
            "preemption": {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": [{"coveredResources": list(quota), "flavors": flavors}],
        }
        self.storage.create("clusterqueues", {"metadata": {"name": self.queue}, "spec": spec})
        metadata = {"name": "lq", "namespace": self.namespace}
        self.storage.create("localqueues", {"metadata": metadata, "spec": {"clusterQueue": self.queue}})

    def play(self) -> list[Write]:
        """Run the scenario to its end; return every write in order."""
        waiting = list(self.actions)
        end = EPOCH + self.seconds
        while self.clock.now < end:
            while waiting and waiting[0]["at"] <= self.clock.now - EPOCH:
                self.act(waiting.pop(0))
            self.controllers.step()
            self.kubelet.step()
            self.controllers.step()
            self.clock.now += TICK_SECONDS
        self.controllers.close()
        writes: list[Write] = []
        while (write := self._subscription.get(0)) is not None:
            writes.append(write)
        return writes

    def act(self, action: Obj) -> None:
        """Do one thing that a person or another controller does."""
        storage, namespace, name = self.storage, self.namespace, action.get("name", "")
        match action["do"]:
            case "create":
                metadata = {"name": name, "namespace": namespace, "labels": action.get("labels", {})}
                storage.create("jobsets", {"metadata": metadata, "spec": action["spec"]})
            case "delete":
                storage.delete("jobsets", namespace, name, propagation=action["propagation"])
            case "suspend":
                storage.mutate(
                    "jobsets", namespace, name, lambda obj: obj["spec"].update(suspend=action["value"])
                )
            case "label":
                storage.mutate(
                    "jobsets", namespace, name, lambda obj: obj["metadata"]["labels"].update(action["labels"])
                )
            case "activate":
                workload = self.find_workload(name)["metadata"]["name"]
                storage.mutate(
                    "workloads", namespace, workload, lambda obj: obj["spec"].update(active=action["value"])
                )
            case "hold":
                storage.mutate(
                    "clusterqueues",
                    "",
                    self.queue,
                    lambda obj: obj["spec"].update(stopPolicy=action["value"]),
                )
            case "cordon":
                self.kubelet.is_cordoned = action["value"]
            case "delete-pod" | "evict-pod":
                self._remove_pod(name, evict=action["do"] == "evict-pod")
            case other:
                raise ValueError(f"no such action: `{other}`")

    def _remove_pod(self, prefix: str, *, evict: bool) -> None:
        pod = next(pod for pod in self.storage.list("pods") if pod["metadata"]["name"].startswith(prefix))
        name = pod["metadata"]["name"]
        mark = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
        if evict:
            self.storage.mutate(
                "pods",
                self.namespace,
                name,
                lambda obj: obj["status"]["conditions"].append(mark),
                status=True,
            )
        self.storage.delete("pods", self.namespace, name)

    def find_workload(self, jobset: str) -> Obj:
        """Return the Workload of a JobSet."""
        owner = self.storage.get("jobsets", self.namespace, jobset)
        assert owner is not None, jobset
        return list_owned(self.storage, owner, "Workload")[0]
