"""What the UI has of a run on this machine: its progress, its report, its incident, its events and assets."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from prefect_torch_elastic import elastic_task, get_context
from prefect_torch_elastic.arrivals import LOOK_SECONDS
from tests.hosted import client, wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LiveFlow


def read_artifacts(task_run_id: UUID) -> dict[str, Any]:
    """Return the artifacts of a task run by the kind in their keys, and how many there are."""
    from prefect.client.schemas.filters import ArtifactFilter

    wanted = ArtifactFilter.model_validate({"task_run_id": {"any_": [task_run_id]}})
    with client() as api:
        found = api.read_artifacts(artifact_filter=wanted)
    return {str(one.key).partition("-train-")[0]: one for one in found if one.key}


def read_events(task_run_id: UUID, prefix: str) -> list[Any]:
    with client() as api:
        body = {"filter": {"event": {"prefix": [prefix]}}, "limit": 50}
        events = api.request("POST", "/events/filter", json=body).json()["events"]
    mine = f"prefect.task-run.{task_run_id}"
    return [one for one in events if mine in [related["prefect.resource.id"] for related in one["related"]]]


@pytest.fixture(scope="module")
def told(in_flow: LiveFlow, tmp_path_factory: pytest.TempPathFactory) -> UUID:
    """The id of a task run whose gang failed once, saved, and reported a loss that is no number."""
    store = str(tmp_path_factory.mktemp("store"))

    @elastic_task(nproc_per_node=2, max_restarts=1, store=store, run_key="train-pages")
    def train():
        import torch

        context = get_context()
        state = {"model": torch.nn.Linear(2, 2)}
        context.checkpoint.load(state)
        for step in range(1, 4):
            loss = math.nan if step == 3 else 1 / step
            context.report({"loss": loss}, step=step, total_steps=3)
            time.sleep(0.2)
        context.checkpoint.save(state, step=3)
        if context.rank == 1 and context.restart_count == 0:
            raise ValueError("the batch has a hole")

    state = in_flow(lambda: train(return_state=True))
    assert state.is_completed(), state.message
    return state.state_details.task_run_id


def test_pages_of_a_run_are_few_and_on_its_task(told: UUID):
    found = read_artifacts(told)
    assert set(found) == {"progress", "metrics", "run-report", "incident"}
    assert all(one.flow_run_id for one in found.values())
    assert (found["progress"].type, found["progress"].data) == ("progress", 100.0)


def test_report_says_how_the_run_went(told: UUID):
    report = read_artifacts(told)["run-report"].data
    assert "succeeded" in report
    assert "the batch has a hole" in report


def test_incident_names_rank_and_cause(told: UUID):
    incident = read_artifacts(told)["incident"]
    assert "rank 1" in incident.description
    assert "ValueError: the batch has a hole" in incident.data


def test_events_tell_what_automations_wait_for(told: UUID):
    expected = {"gang.started", "gang.restarted", "gang.succeeded", "incident", "metric.not-finite"}

    def names() -> set[str]:
        prefix = "prefect-torch-elastic."
        return {one["event"].removeprefix(prefix) for one in read_events(told, prefix)}

    wait_for(lambda: expected <= names())
    assert expected <= names()


def test_model_is_an_asset_of_the_run_folder(told: UUID):
    assets = wait_for(lambda: read_events(told, "prefect.asset.materialization.succeeded"))
    assert any(one["resource"]["prefect.resource.id"].endswith("/train-pages") for one in assets)


def test_line_of_an_incident_leads_to_its_page(told: UUID, read_logs: Callable[..., Any]):
    incident = read_artifacts(told)["incident"]
    state: Any = type("State", (), {"state_details": type("Details", (), {"task_run_id": told})})
    lines = read_logs(state, has="the batch has a hole. See ")
    assert any(str(incident.id) in line.message for line in lines)


def test_slow_rank_is_named_though_all_ranks_take_equally_long(
    in_flow: LiveFlow, read_logs: Callable[..., Any], tmp_path: Path
):
    @elastic_task(nproc_per_node=2, max_restarts=0, store=str(tmp_path / "store"))
    def train():
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        context = get_context()
        first_look = ((time.time() + 3) // LOOK_SECONDS + 1) * LOOK_SECONDS
        until, step, goes_on = first_look + LOOK_SECONDS + 2, 0, torch.ones(1)
        while goes_on.item():
            time.sleep(0.16 if context.rank == 1 else 0.08)
            goes_on = torch.tensor([float(time.time() < until)])
            dist.all_reduce(goes_on, op=dist.ReduceOp.MIN)
            step += 1
            context.report({}, step=step)

    state = in_flow(lambda: train(return_state=True))
    assert state.is_completed(), state.message
    lines = read_logs(state, has="is slow")
    named = [line.message for line in lines if "is slow" in line.message]
    assert [line.partition(":")[0] for line in named] == ["Rank 1 on node 0 is slow"]
    assert "the others wait for it" in named[0]
    report = read_artifacts(state.state_details.task_run_id)["run-report"].data
    assert "Slower than the others: rank 1 (node 0)" in report


def test_chronicle_is_kept_in_the_run_folder(in_flow: LiveFlow, tmp_path: Path):
    @elastic_task(nproc_per_node=1, store=str(tmp_path / "store"))
    def train():
        return 1

    assert in_flow(lambda: train()) == 1
    assert len(list((tmp_path / "store").rglob("calls/*/chronicle"))) == 1


def test_state_is_suspected_until_the_gang_moves_again(in_flow: LiveFlow, tmp_path: Path):
    @elastic_task(nproc_per_node=1, store=str(tmp_path / "store"))
    def train():
        context = get_context()
        for step in range(1, 41):
            context.report({}, step=step, total_steps=40)
            time.sleep(13 if step == 30 else 0.05)

    def names() -> list[str]:
        with client() as api:
            states = api.read_task_run_states(state.state_details.task_run_id)
        return [one.name or "" for one in sorted(states, key=lambda one: one.timestamp)]

    state = in_flow(lambda: train(return_state=True))
    assert state.is_completed(), state.message
    assert wait_for(lambda: "Completed" in names())
    assert names()[-3:] == ["Suspected", "Running", "Completed"]
