"""The objects of gangs in all their states, and a scripted cluster that has them."""

from __future__ import annotations

import copy
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from prefect_torch_elastic.kubernetes.answers import ClusterError
from prefect_torch_elastic.kubernetes.client import Cluster, Listing
from prefect_torch_elastic.kubernetes.resources import Kind

LABELS = "app.kubernetes.io/managed-by=prefect-torch-elastic"
BEGAN = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
Thing = dict[str, Any]

# Shapes as captured from Kubernetes 1.36.2, JobSet 0.12.0, Kueue 0.19.2.


def stamp(seconds: float = 0.0) -> str:
    return (BEGAN + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(type: str, is_true: bool, reason: str, message: str = "", at: float = 0.0) -> Thing:
    return {
        "type": type,
        "status": str(is_true),
        "reason": reason,
        "message": message,
        "lastTransitionTime": stamp(at),
    }


def meta(name: str, uid: str, namespace: str = "ml", **more: Any) -> Thing:
    return {"name": name, "namespace": namespace, "uid": uid, "creationTimestamp": stamp(), **more}


def owned(kind: str, name: str, uid: str) -> list[Thing]:
    return [{"kind": kind, "name": name, "uid": uid, "controller": True}]


def jobset(name: str = "gang", *, suspend: bool = True, queue: str = "lq", **status: Any) -> Thing:
    labels = {"prefect-torch-elastic.io/flow-run": f"run-of-{name}"}
    if queue:
        labels["kueue.x-k8s.io/queue-name"] = queue
    podspec = {"terminationGracePeriodSeconds": 50, "containers": [{"name": "trainer", "env": ["..."] * 30}]}
    job = {"parallelism": 2, "completions": 2, "backoffLimit": 0, "template": {"spec": podspec}}
    return {
        "kind": "JobSet",
        "metadata": meta(name, f"uid-of-{name}", labels=labels, managedFields=[{"manager": "jobset"}]),
        "spec": {
            "suspend": suspend,
            "failurePolicy": {"maxRestarts": 2},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        },
        "status": status,
    }


def running(name: str = "gang") -> Thing:
    role = {"name": "node", "active": 1, "ready": 1, "succeeded": 0, "failed": 0, "suspended": 0}
    return jobset(name, suspend=False, replicatedJobsStatus=[role], restarts=0)


def starting(name: str = "gang") -> Thing:
    role = {"name": "node", "active": 1, "ready": 0, "succeeded": 0, "failed": 0, "suspended": 0}
    return jobset(name, suspend=False, replicatedJobsStatus=[role], restarts=0)


def failed(name: str = "gang") -> Thing:
    words = "jobset failed due to reaching max number of restarts (first failed job: gang-node-0)"
    return jobset(name, suspend=False, conditions=[condition("Failed", True, "ReachedMaxRestarts", words)])


def workload(
    name: str = "gang", *, admitted: bool = False, suffix: str = "16d98", kind: str = "JobSet"
) -> Thing:
    waits = "couldn't assign flavors: insufficient unused quota for nvidia.com/gpu in flavor f, 8 more needed"
    quota = condition("QuotaReserved", admitted, "QuotaReserved" if admitted else "Pending", waits)
    return {
        "kind": "Workload",
        "metadata": meta(
            f"jobset-{name}-{suffix}",
            f"workload-of-{name}-{suffix}",
            labels={"kueue.x-k8s.io/job-uid": f"uid-of-{name}"},
            ownerReferences=owned(kind, name, f"uid-of-{name}"),
        ),
        "spec": {
            "active": True,
            "queueName": "lq",
            "podSets": [{"name": "node", "count": 2, "template": {"spec": {"containers": []}}}],
        },
        "status": {
            "conditions": [quota, *([condition("Admitted", True, "Admitted")] if admitted else [])],
            **({"admission": {"clusterQueue": "cq"}} if admitted else {}),
        },
    }


def job(name: str = "gang", *, ready: int = 0, conditions: Sequence[Thing] = ()) -> Thing:
    return {
        "kind": "Job",
        "metadata": meta(
            f"{name}-node-0", f"job-of-{name}", ownerReferences=owned("JobSet", name, f"uid-of-{name}")
        ),
        "spec": {"parallelism": 2, "completions": 2, "template": {"spec": {"containers": []}}},
        "status": {"active": 2, "ready": ready, "conditions": list(conditions)},
    }


def failing(name: str = "gang") -> Thing:
    words = "Job has reached the specified backoff limit"
    return job(name, conditions=[condition("FailureTarget", True, "BackoffLimitExceeded", words)])


def pod(index: int, *, name: str = "gang", phase: str = "Running", exit_code: int | None = None) -> Thing:
    state: Thing = {"running": {"startedAt": stamp()}}
    if exit_code is not None:
        state = {"terminated": {"exitCode": exit_code, "reason": "Error", "finishedAt": stamp(5)}}
    return {
        "kind": "Pod",
        "metadata": meta(
            f"{name}-node-0-{index}-abcde",
            f"pod-{index}-of-{name}",
            labels={
                "jobset.sigs.k8s.io/jobset-name": name,
                "batch.kubernetes.io/job-completion-index": str(index),
            },
            ownerReferences=owned("Job", f"{name}-node-0", f"job-of-{name}"),
        ),
        "spec": {"nodeName": f"machine-{index}", "containers": [{"name": "trainer", "env": ["..."] * 30}]},
        "status": {"phase": phase, "containerStatuses": [{"name": "trainer", "state": state}]},
    }


def refusal(status: int, **facts: Any) -> ClusterError:
    return ClusterError(f"cannot list: {status}", status=status, **facts)


FORBIDDEN = refusal(403, reason="Forbidden", user="worker")
NOT_INSTALLED = refusal(404, not_installed=True)
EXPIRED = refusal(410, reason="Expired")
AWAY = refusal(0, may_pass=True)


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return BEGAN + timedelta(seconds=self.seconds - 1000.0)


class ScriptedWatch:
    """Tells what its script says: pairs are events, errors are raised, numbers are seconds that pass."""

    def __init__(self, script: Sequence[Any], clock: Clock) -> None:
        self._script, self._clock = list(script), clock
        self.closed = threading.Event()

    def __iter__(self) -> Iterator[tuple[str, Thing]]:
        for item in self._script:
            if isinstance(item, tuple):
                yield item
            elif isinstance(item, Exception):
                raise item
            elif item is math.inf:
                assert self.closed.wait(10)
                return
            else:
                self._clock.seconds += item

    def close(self) -> None:
        self.closed.set()


class ScriptedCluster:
    """Objects, what watches tell of them, and which questions fail; and a record of all that was asked."""

    def __init__(self, clock: Clock, *things: Thing) -> None:
        self.clock = clock
        self.things: dict[tuple[Kind, str], Thing] = {}
        self.scripts: dict[Kind, list[Sequence[Any]]] = {}
        self.errors: dict[Kind, list[ClusterError]] = {}
        self.watches: list[ScriptedWatch] = []
        self.asked: Counter[str] = Counter()
        self.position: tuple[int, int] | None = None
        self._version = 0
        self.put(*things)

    def put(self, *things: Thing) -> None:
        for thing in things:
            self._version += 1
            thing["metadata"]["resourceVersion"] = str(self._version)
            self.things[Kind(thing["kind"].lower()), thing["metadata"]["name"]] = thing

    def delete(self, thing: Thing) -> Thing:
        return self.things.pop((Kind(thing["kind"].lower()), thing["metadata"]["name"]))

    def list(self, kind: Kind, namespace: str, *, labels: str = "", **_: Any) -> Listing:
        of_one = "=" in labels and labels != LABELS
        self.asked[f"list {kind}" + (" of one gang" if of_one else "")] += 1
        if queue := self.errors.get(kind):
            raise queue.pop(0)
        items = [
            copy.deepcopy(thing)
            for (is_kind, _), thing in self.things.items()
            if is_kind is kind and thing["metadata"]["namespace"] == namespace
        ]
        if of_one:
            label, value = labels.split("=")
            items = [item for item in items if item["metadata"]["labels"].get(label) == value]
        return Listing(items=items, resource_version=str(self._version))

    def watch(self, kind: Kind, namespace: str, **_: Any) -> ScriptedWatch:
        self.asked[f"watch {kind}"] += 1
        scripts = self.scripts.get(kind)
        self.watches.append(ScriptedWatch(scripts.pop(0) if scripts else (), self.clock))
        return self.watches[-1]

    def pending_position(self, namespace: str, local_queue: str, workload: str) -> tuple[int, int] | None:
        self.asked["position"] += 1
        return self.position


def as_cluster(scripted: ScriptedCluster) -> Cluster:
    return cast("Cluster", scripted)
