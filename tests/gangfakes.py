"""A cluster, an observer and an API of runs in memory, which do what a test tells them to."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import SetStateStatus, StateAbortDetails
from prefect.exceptions import ObjectNotFound
from prefect.states import Pending
from prefect.types._datetime import now

from prefect_torch_elastic.kubernetes.answers import ClusterError
from prefect_torch_elastic.kubernetes.naming import FLOW_RUN_LABEL, WORKER_ANNOTATION
from prefect_torch_elastic.kubernetes.observer import Sighting
from prefect_torch_elastic.kubernetes.phases import GangPhase
from prefect_torch_elastic.kubernetes.podfailures import PodFailure
from prefect_torch_elastic.kubernetes.resources import Kind
from prefect_torch_elastic.kubernetes.status import GangReading


def make_status(phase: GangPhase, message: str = "", **facts: Any) -> GangReading:
    return GangReading(phase=phase, message=message or f"It is {phase.lower()}.", **facts)


def make_run(state: State[Any] | None = None, **fields: Any) -> FlowRun:
    return FlowRun(
        flow_id=uuid.uuid4(), name="happy-owl", state=state or Pending(name="Submitting"), **fields
    )


def make_jobset(run_id: object, *, worker: str = "here", **status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "namespace": "ml",
            "name": "train-1",
            "uid": f"uid-{uuid.uuid4().hex[:6]}",
            "labels": {FLOW_RUN_LABEL: str(run_id)},
            "annotations": {WORKER_ANNOTATION: worker},
        },
        "spec": {},
        "status": status,
    }


def refuse(status: int, reason: str = "", **facts: Any) -> ClusterError:
    return ClusterError(f"HTTP {status} {reason}", status=status, reason=reason, **facts)


class FakeCluster:
    """Keeps objects; `errors` by (verb, kind) are raised, each once, before anything is done."""

    def __init__(self, *, gets_while_leaving: int = 0) -> None:
        self.objects: dict[tuple[Kind, str, str], dict[str, Any]] = {}
        self.errors: dict[tuple[str, Kind], list[Exception]] = {}
        self.calls: list[tuple[str, Kind, str]] = []
        self.is_closed = False
        self._leaving: dict[tuple[Kind, str, str], int] = {}
        self._gets_while_leaving = gets_while_leaving
        self._numbers = itertools.count(1)

    def add(self, jobset: dict[str, Any]) -> dict[str, Any]:
        meta = jobset["metadata"]
        self.objects[Kind.JOBSET, meta["namespace"], meta["name"]] = jobset
        return jobset

    def create(self, kind: Kind, namespace: str, body: Any, *, dry_run: bool = False) -> dict[str, Any]:
        name = body["metadata"]["name"]
        self._note("create", kind, name)
        if (kind, namespace, name) in self.objects:
            raise refuse(409, "AlreadyExists")
        stored = {**body, "metadata": {**body["metadata"], "uid": f"uid-{next(self._numbers)}"}}
        self.objects[kind, namespace, name] = stored
        return stored

    def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None:
        self._note("get", kind, name)
        key = (kind, namespace, name)
        if key in self._leaving:
            self._leaving[key] -= 1
            if self._leaving[key] < 0:
                self.objects.pop(key, None)
                del self._leaving[key]
        return self.objects.get(key)

    def list(self, kind: Kind, namespace: str, *, labels: str = "", **_: Any) -> Any:
        self._note("list", kind, namespace)
        items = [thing for key, thing in self.objects.items() if key[:2] == (kind, namespace)]
        return SimpleNamespace(items=items, resource_version="1")

    def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None = None, **_: Any) -> bool:
        self._note("delete", kind, name)
        key = (kind, namespace, name)
        there = self.objects.get(key)
        if there is None or (uid and there["metadata"]["uid"] != uid):
            return False
        there["metadata"]["deletionTimestamp"] = "2026-11-29T13:10:00Z"
        self._leaving.setdefault(key, self._gets_while_leaving)
        return True

    def patch(self, kind: Kind, namespace: str, name: str, body: Any) -> dict[str, Any]:
        self._note("patch", kind, name)
        there = self.objects[kind, namespace, name]
        there["metadata"].setdefault("annotations", {}).update(body["metadata"]["annotations"])
        return there

    def close(self) -> None:
        self.is_closed = True

    def deleted(self) -> list[str]:
        return [name for verb, kind, name in self.calls if (verb, kind) == ("delete", Kind.JOBSET)]

    def secrets(self) -> list[dict[str, Any]]:
        return [thing for key, thing in self.objects.items() if key[0] is Kind.SECRET]

    def _note(self, verb: str, kind: Kind, name: str) -> None:
        self.calls.append((verb, kind, name))
        if errors := self.errors.get((verb, kind)):
            raise errors.pop(0)


class FakeObserver:
    """Says what a test tells it to."""

    def __init__(
        self, cluster: Any, *, namespaces: Any, labels: str, listen: Callable[[Sighting], None], warn: Any
    ) -> None:
        self.namespaces, self.labels, self.listen = list(namespaces), labels, listen
        self.last: dict[str, Sighting] = {}
        self.is_running = False

    def start(self) -> None:
        self.is_running = True

    def close(self) -> None:
        self.is_running = False

    def add_namespace(self, namespace: str) -> None:
        self.namespaces.append(namespace)

    def sighting(self, uid: str) -> Sighting | None:
        return self.last.get(uid)

    def say(
        self, uid: str, phase: GangPhase, message: str = "", failure: PodFailure | None = None, **facts: Any
    ) -> None:
        self.last[uid] = sight(uid, phase, message, failure, **facts)
        self.listen(self.last[uid])


def sight(
    uid: str, phase: GangPhase, message: str = "", failure: PodFailure | None = None, **facts: Any
) -> Sighting:
    return Sighting(
        namespace="ml",
        name="train-1",
        uid=uid,
        flow_run_id="",
        jobset={},
        status=make_status(phase, message, **facts),
        failure=failure,
    )


class FakeRuns:
    """An API with some runs, and the rule of Prefect that matters: a run that ran does not wait again."""

    def __init__(self, *runs: FlowRun) -> None:
        self.runs = {run.id: run for run in runs}
        self.states = {run.id: [run.state] for run in runs if run.state}
        self.between: State[Any] | None = None  # set by somebody else right before the next state of ours
        self.set: list[tuple[str, str, bool]] = []
        self.workers: list[Any] = []
        self.errors: list[Exception] = []
        self.refusals = 0  # so many of the next states are refused

    async def read_flow_run(self, flow_run_id: uuid.UUID) -> FlowRun:
        self._fail()
        if flow_run_id not in self.runs:
            raise ObjectNotFound(http_exc=Exception("no such run"))
        return self.runs[flow_run_id]

    async def read_flow_runs(
        self, *, flow_run_filter: Any, limit: int, offset: int = 0, **_: Any
    ) -> list[FlowRun]:
        self._fail()
        if flow_run_filter.id is None:
            types = flow_run_filter.state.type.any_
            return [run for run in self.runs.values() if run.state and run.state.type in types][offset:]
        return [self.runs[one] for one in flow_run_filter.id.any_ if one in self.runs]

    async def read_workers_for_work_pool(self, name: str) -> list[Any]:
        return self.workers

    async def read_flow_run_states(self, flow_run_id: uuid.UUID) -> list[State[Any]]:
        self._fail()
        return self.states[flow_run_id]

    async def update_flow_run_labels(self, flow_run_id: uuid.UUID, labels: dict[str, Any]) -> None:
        self._fail()
        run = self.runs[flow_run_id]
        self.runs[flow_run_id] = run.model_copy(update={"labels": {**run.labels, **labels}})

    async def set_flow_run_state(self, flow_run_id: uuid.UUID, state: State[Any], force: bool = False) -> Any:
        self._fail()
        if self.between:
            self.put(self.runs[flow_run_id], self.between)
            self.between = None
        run = self.runs[flow_run_id]
        assert run.state
        same = run.state.is_pending() and run.state.name == state.name
        if self.refusals:
            self.refusals -= 1
            details = StateAbortDetails(reason="a rule")
            return SimpleNamespace(status=SetStateStatus.ABORT, state=None, details=details)
        if not force and state.is_pending() and (run.state.is_running() or same):
            details = StateAbortDetails(reason="it ran already")
            return SimpleNamespace(status=SetStateStatus.ABORT, state=None, details=details)
        self.set.append((state.type.value, str(state.name), force))
        self.put(run, state)
        return SimpleNamespace(status=SetStateStatus.ACCEPT, state=self.state(run))

    def put(self, run: FlowRun, state: State[Any], **fields: Any) -> None:
        kept = state.model_copy(update={"timestamp": now("UTC")})  # the server's clock
        self.states.setdefault(run.id, []).append(kept)
        self.runs[run.id] = run.model_copy(update={"state": kept, **fields})

    def state(self, run: FlowRun) -> State[Any]:
        state = self.runs[run.id].state
        assert state
        return state

    def _fail(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


class Clock:
    """Time that passes when somebody sleeps, or a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
