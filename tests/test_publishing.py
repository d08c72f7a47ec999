"""A run's pages in a real Prefect API: where they show, and that they are the same over processes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

from prefect_torch_elastic.artifacts.runpages import make_pointer
from prefect_torch_elastic.calls import PoolJob
from prefect_torch_elastic.dispatch.phases import Phase
from prefect_torch_elastic.incidents import Incident, IncidentKind
from prefect_torch_elastic.runfacts import GangFacts, RankFacts, RunFacts
from tests.hosted import begin_run, client, create_run, read_run, read_state, set_state

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("prefect_server")]

UI = "http://ui/v2"
FACTS = RunFacts(
    run_key="gpt",
    title="train-1",
    began_at=1000.0,
    seen_at=1100.0,
    gangs=(GangFacts(attempt=1, began_at=1000.0, nodes=1),),
    step=41,
    total_steps=100,
    metrics={"loss": 2.5},
)


class Shown:
    """The pages of a task run, and what was said of them."""

    def __init__(self, *, job: PoolJob | None = None) -> None:
        self.flow_run_id, self.task_run_id, self.job = str(create_run()), str(uuid4()), job
        self.facts = FACTS
        self.lines: list[str] = []
        self.pages = self.open()

    def open(self) -> Any:
        from prefect_torch_elastic.publishing import RunPages

        def keep(text: str, *values: Any) -> None:
            self.lines.append(text % values)

        call: Any = SimpleNamespace(
            flow_run_id=self.flow_run_id,
            task_run_id=self.task_run_id,
            job=self.job,
            log=SimpleNamespace(info=keep, warning=keep),
        )
        self.pages = RunPages(call, lambda: self.facts, find_ui=lambda: UI)
        return self.pages

    def publish(self) -> None:
        self.pages.refresh(attempt=1, has_steps=True)
        self.pages.close(within_seconds=20.0)

    def read(self, **where: str) -> dict[str, Any]:
        from prefect.client.schemas.filters import ArtifactFilter

        wanted = where or {"task_run_id": self.task_run_id}
        known = ArtifactFilter.model_validate({name: {"any_": [one]} for name, one in wanted.items()})
        with client() as api:
            return {str(found.key): found for found in api.read_artifacts(artifact_filter=known)}


@pytest.fixture
def shown() -> Iterator[Shown]:
    shown = Shown()
    yield shown
    shown.pages.close(within_seconds=1.0)


def test_pages_are_on_the_task_run_and_its_flow_run(shown: Shown):
    shown.publish()
    found = shown.read()
    assert set(found) == {"progress-gpt-1", "metrics-gpt", "run-report-gpt"}
    assert {str(artifact.flow_run_id) for artifact in found.values()} == {shown.flow_run_id}
    assert (found["progress-gpt-1"].type, found["progress-gpt-1"].data) == ("progress", 41.0)
    assert [line for line in shown.lines if f"{UI}/artifacts/artifact/" in line]


def test_pages_are_changed_in_place_by_the_next_process(shown: Shown):
    shown.publish()
    before = {key: artifact.id for key, artifact in shown.read().items()}
    shown.facts = RunFacts(**{**vars(FACTS), "step": 80})
    shown.open()
    shown.publish()
    after = shown.read()
    assert {key: artifact.id for key, artifact in after.items()} == before
    assert after["progress-gpt-1"].data == 80.0


def test_incident_has_a_page_and_its_address_is_said(shown: Shown):
    said, linked = list[str](), list[str]()
    incident = Incident(number=1, kind=IncidentKind.FAILURE, category="UserError", sentence="it broke")
    shown.pages.add_incident(
        incident, number=3, at=1050.0, evidence="", folder="/attempt", said=said.append, linked=linked.append
    )
    shown.pages.close(within_seconds=20.0)
    page = shown.read()["incident-gpt-3"]
    assert "It broke" in page.data
    assert said == linked == [f"{UI}/artifacts/artifact/{page.id}"]


def test_page_of_a_job_leads_to_the_report_of_its_task():
    job = PoolJob(flow_run_id=str(create_run()), sent_at=1000.0)
    shown = Shown(job=job)
    shown.publish()
    report = shown.read()["run-report-gpt"]
    pointer = shown.read(flow_run_id=job.flow_run_id)
    assert set(pointer) == {make_pointer(FACTS, link="", flow_run_id="").key}
    assert str(report.id) in pointer["report-link-gpt"].data


def test_slow_rank_is_named_once(shown: Shown):
    ranks = [RankFacts(rank=rank, node=0, steps=50, step_seconds=1.0) for rank in range(4)]
    slow = RankFacts(rank=4, node=1, steps=50, step_seconds=2.0)
    shown.facts = RunFacts(**{**vars(FACTS), "ranks": (*ranks, slow)})
    shown.publish()
    assert sum("Rank 4 on node 1 is slow" in line for line in shown.lines) == 1


def test_api_that_is_away_is_said_once_and_holds_nobody_up(shown: Shown, caplog: pytest.LogCaptureFixture):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    caplog.set_level(logging.CRITICAL)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        said, linked = list[str](), list[str]()
        incident = Incident(number=1, kind=IncidentKind.FAILURE, sentence="it broke")
        shown.pages.add_incident(
            incident, number=1, at=1.0, evidence="", folder="", said=said.append, linked=linked.append
        )
        shown.pages.refresh(attempt=1, has_steps=True)
        shown.pages.close(within_seconds=1.0)
    assert (said, linked) == ([""], [])
    assert len([line for line in shown.lines if "does not answer" in line]) <= 1
    assert shown.read() == {}


def test_phase_names_the_state_of_a_run_that_goes_on():
    own = begin_run()
    own.show(Phase.SUSPECTED, "rank 1 makes no steps")
    state = read_state(own.id)
    assert (state.name, state.is_running(), state.message) == ("Suspected", True, "rank 1 makes no steps")
    own.show(Phase.RUNNING, "it moves")
    assert read_state(own.id).name == "Running"


def test_phase_takes_nothing_back_when_the_run_is_being_cancelled():
    from prefect.states import Cancelling

    own = begin_run()
    set_state(own.id, Cancelling())
    own.show(Phase.SUSPECTED, "rank 1 makes no steps")
    assert read_state(own.id).is_cancelling()


def test_phase_is_not_shown_after_the_end():
    from prefect.states import Completed

    own = begin_run()
    own.end(Completed())
    own.show(Phase.SUSPECTED, "late")
    assert read_state(UUID(str(own.id))).is_completed()
    assert read_run(own.id).state_name == "Completed"
