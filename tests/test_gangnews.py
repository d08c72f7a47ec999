"""The events of a gang and its assets: which, how often, related to what, and without secrets."""

from __future__ import annotations

import math
from typing import Any

import pytest
from prefect.assets import Asset

from prefect_torch_elastic.artifacts.assets import MATERIALIZED, render_asset_key
from prefect_torch_elastic.artifacts.gangevents import EventSource, GangEvent, emit, render_related
from prefect_torch_elastic.artifacts.gangnews import CHECKPOINT_SECONDS, GangNews
from prefect_torch_elastic.incidents import Incident, IncidentKind
from prefect_torch_elastic.observations import CheckpointSaved
from prefect_torch_elastic.runfacts import GangEnd
from prefect_torch_elastic.wire import Progress, RankInfo, RanksStarted

SOURCE = EventSource(
    call="c0ffee",
    title="train-1",
    task_run_id="task",
    task_run_name="train-1",
    flow_run_ids=("driver", "job"),
    work_pool="gpus",
    work_pool_id="pool",
)


class Feed:
    """What a gang's news have sent."""

    def __init__(self, store_url: str = "s3://user:secret@bucket/runs?key=secret") -> None:
        self.events: list[GangEvent] = []
        self.news = GangNews(SOURCE, store_url=store_url, folder="run", send=self._keep)

    def _keep(self, event: GangEvent, at: float) -> None:
        self.events.append(event)

    @property
    def names(self) -> list[str]:
        return [event.event.removeprefix("prefect-torch-elastic.") for event in self.events]

    def start(self, *, round: int) -> None:
        rank = RankInfo(rank=0, local_rank=0, node_rank=0, pid=1, log="")
        started = RanksStarted(
            node=0, round=round, world_size=1, restart_count=round, warm=True, ranks=[rank]
        )
        self.news.take(started, at=0.0)

    def save(self, step: int, *, at: float) -> None:
        saved = CheckpointSaved(
            step=step,
            uuid="u",
            key=f"checkpoints/{step}",
            size_bytes=10,
            seconds=1.0,
            stall_seconds=0.0,
            metrics={},
        )
        self.news.take(saved, at=at)

    def report(self, **metrics: Any) -> None:
        self.news.take(Progress(step=3, total_steps=None, metrics=metrics, phase=""), at=0.0)


@pytest.fixture
def feed() -> Feed:
    return Feed()


def test_gang_starts_once_and_restarts_with_each_round(feed):
    feed.news.begin(1)
    for number in (0, 0, 1):  # two nodes in the first round
        feed.start(round=number)
    feed.news.begin(2)
    feed.start(round=0)
    assert feed.names == ["gang.started", "gang.restarted", "gang.started"]


def test_checkpoints_are_told_now_and_then_and_the_last_one_at_the_end(feed):
    for step in range(10):
        feed.save(step, at=step * CHECKPOINT_SECONDS / 10)
    assert [event.payload["step"] for event in feed.events] == [0, 0]
    feed.news.end(GangEnd.FAILED, at=99.0, reason="it broke")
    assert feed.names[2:] == ["checkpoint.saved", MATERIALIZED, "gang.failed"]
    assert feed.events[2].payload["step"] == 9


def test_model_is_an_asset_when_the_gang_has_succeeded(feed):
    feed.save(5, at=0.0)
    feed.news.end(GangEnd.SUCCEEDED, at=1.0, reason="")
    model = next(event for event in feed.events[2:] if event.event == MATERIALIZED)
    assert model.resource["prefect.resource.id"] == "s3://bucket/runs/run"
    assert model.payload == {"step": 5, "checkpoint": "s3://bucket/runs/run/checkpoints/5"}


@pytest.mark.parametrize("end", list(GangEnd), ids=str)
def test_gang_that_ends_says_how(feed, end):
    feed.news.end(end, at=1.0, reason="")
    assert feed.names[-1].startswith("gang.")


def test_nothing_secret_of_the_store_is_told(feed):
    feed.save(5, at=0.0)
    feed.news.end(GangEnd.SUCCEEDED, at=1.0, reason="")
    assert "secret" not in str(feed.events)


def test_metric_that_is_no_number_is_told_once(feed):
    feed.report(loss=1.0)
    feed.report(loss=math.nan, accuracy="high")
    feed.report(loss=math.inf)
    assert feed.names == ["metric.not-finite"]
    assert feed.events[0].resource["prefect-torch-elastic.metric"] == "loss"


def test_incident_can_be_selected_by_its_kind_and_leads_to_its_page(feed):
    incident = Incident(number=1, kind=IncidentKind.HANG, category="StoppedResponding", sentence="x" * 5000)
    feed.news.tell_incident(incident, at=1.0, link="http://ui/1")
    event = feed.events[0]
    assert event.resource["prefect-torch-elastic.kind"] == "hang"
    assert event.resource["prefect-torch-elastic.category"] == "StoppedResponding"
    assert event.payload["link"] == "http://ui/1"
    assert len(event.payload["sentence"]) == 1000


def test_events_are_related_to_runs_and_pool_and_the_run_of_the_driver_comes_first():
    related = [(one["prefect.resource.role"], one["prefect.resource.id"]) for one in render_related(SOURCE)]
    assert related == [
        ("flow-run", "prefect.flow-run.driver"),
        ("flow-run", "prefect.flow-run.job"),
        ("task-run", "prefect.task-run.task"),
        ("work-pool", "prefect.work-pool.pool"),
    ]


@pytest.mark.parametrize(
    ("url", "key"),
    [
        pytest.param("/data/runs", "file:///data/runs/run/c", id="directory"),
        pytest.param("file:///data/runs/", "file:///data/runs/run/c", id="file"),
        pytest.param("s3://bucket", "s3://bucket/run/c", id="bucket"),
        pytest.param("s3://me:word@bucket/a?region=x#y", "s3://bucket/a/run/c", id="secrets"),
        pytest.param("gs://bucket/a", "gs://bucket/a/run/c", id="gs"),
        pytest.param("memory://x", "", id="other scheme"),
        pytest.param("/data/my runs", "", id="space"),
        pytest.param("/" + "d" * 600, "", id="too long"),
    ],
)
def test_asset_key_is_one_that_prefect_accepts(url, key):
    assert render_asset_key(url, "run", "c") == key
    if key:
        assert Asset(key=key).key == key


def test_event_that_cannot_be_sent_harms_nobody(monkeypatch):
    def refuse(**_: Any) -> None:
        raise RuntimeError("no events today")

    monkeypatch.setattr("prefect.events.emit_event", refuse)
    emit(GangEvent(event="x", resource={}), at=0.0)
