"""The automations of the guide: Prefect takes them as they are, and the events of a gang set them off."""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import yaml

from prefect_torch_elastic.artifacts.gangevents import EventName, EventSource, GangEvent
from prefect_torch_elastic.artifacts.gangnews import GangNews
from prefect_torch_elastic.incidents import Incident, IncidentKind
from prefect_torch_elastic.runfacts import GangEnd
from prefect_torch_elastic.wire import Progress

GUIDE = Path(__file__).parent.parent / "docs" / "automations.md"
DRIVER, JOB, TASK = (UUID(int=number) for number in (1, 2, 3))
SOURCE = EventSource(
    call="c0ffee",
    title="train-1",
    task_run_id=str(TASK),
    task_run_name="train-1",
    flow_run_ids=(str(DRIVER), str(JOB)),
    work_pool="gpu",
    work_pool_id=str(UUID(int=4)),
)
TROUBLE, NAN = "A gang is preempted or hangs", "The validation loss is NaN"
LINK = "http://prefect.example.com/v2/artifacts/artifact/1"


def read_automations() -> dict[str, dict[str, Any]]:
    """Return the YAML blocks of the guide by the names of their automations."""
    blocks = re.findall(r"^```yaml\n(.*?)^```$", GUIDE.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {one["name"]: one for one in map(yaml.safe_load, blocks)}


def send_incident(kind: IncidentKind) -> list[GangEvent]:
    incident = Incident(number=1, kind=kind, sentence="rank 1 sleeps.", cure="Wake it.", rank=1)
    return collect(lambda news: news.tell_incident(incident, at=0.0, link=LINK))


def send_metrics(**metrics: Any) -> list[GangEvent]:
    report = Progress(step=3, total_steps=None, metrics=metrics, phase="")
    return collect(lambda news: news.take(report, at=0.0))


def collect(tell: Any) -> list[GangEvent]:
    events: list[GangEvent] = []
    tell(GangNews(SOURCE, store_url="s3://b/runs", folder="run", send=lambda event, _: events.append(event)))
    return events


def receive(event: GangEvent) -> Any:
    """Return an event as the server has it."""
    from prefect.server.events.schemas.events import ReceivedEvent

    now = datetime.now(UTC)
    return ReceivedEvent.model_validate({**asdict(event), "occurred": now, "received": now, "id": uuid4()})


def is_set_off(name: str, events: list[GangEvent]) -> bool:
    """Whether one of the events fires the trigger, by the server's own rules."""
    from prefect.server.events.schemas.automations import EventTrigger

    trigger = EventTrigger.model_validate(read_automations()[name]["trigger"])
    assert trigger.immediate, "it would wait for the end of a time span"
    return any(trigger.covers(receive(event)) for event in events)


def act_on(name: str, event: GangEvent) -> Any:
    """Return what the server would act on, for the first action of the automation."""
    from prefect.server.events.schemas.automations import Automation, TriggeredAction

    automation = Automation.model_validate({**read_automations()[name], "id": uuid4()})
    fields = {
        "automation": automation,
        "triggered": datetime.now(UTC),
        "triggering_labels": {},
        "triggering_event": receive(event),
        "action": automation.actions[0],
    }
    return TriggeredAction.model_validate(fields)


def names_of(fields: Any) -> set[str]:
    """Return the names of all fields, those of triggers and actions with what they are in."""
    if isinstance(fields, list):
        return {name for one in fields for name in names_of(one)}
    if not isinstance(fields, dict):
        return set()
    return set(fields) | names_of(fields.get("trigger")) | names_of(fields.get("actions"))


@pytest.mark.parametrize("name", [TROUBLE, NAN])
def test_automation_has_no_field_that_prefect_ignores(name):
    from prefect.events.schemas.automations import AutomationCore

    fields = read_automations()[name]
    taken = AutomationCore.model_validate(fields).model_dump(mode="json")
    assert names_of(fields) <= names_of(taken)


@pytest.mark.parametrize("kind", [IncidentKind.PREEMPTION, IncidentKind.SUSPICION, IncidentKind.HANG])
def test_automation_tells_of_preemptions_and_hangs(kind):
    assert is_set_off(TROUBLE, send_incident(kind))


@pytest.mark.parametrize("kind", [IncidentKind.FAILURE, IncidentKind.NODE])
def test_automation_does_not_tell_of_other_incidents(kind):
    assert not is_set_off(TROUBLE, send_incident(kind))


async def test_message_of_the_automation_says_what_happened_and_where_to_read_on():
    triggered = act_on(TROUBLE, send_incident(IncidentKind.HANG)[0])
    subject, body = await triggered.action.render(triggered)
    assert subject == "train-1: hang"
    assert body.splitlines() == ["rank 1 sleeps.", "Wake it.", LINK]


def test_automation_cancels_when_the_validation_loss_is_nan():
    assert is_set_off(NAN, send_metrics(loss=1.0, val_loss=math.nan))


@pytest.mark.parametrize("metrics", [{"val_loss": 0.5}, {"loss": math.nan}], ids=["finite", "other metric"])
def test_automation_does_not_cancel_for_other_values(metrics):
    assert not is_set_off(NAN, send_metrics(**metrics))


async def test_automation_cancels_the_flow_run_of_the_driver():
    triggered = act_on(NAN, send_metrics(val_loss=math.nan)[0])
    assert await triggered.action.flow_run(triggered) == DRIVER


def test_guide_names_all_events():
    guide = GUIDE.read_text()
    assert [name for name in EventName if f"`{name}`" not in guide] == []


def test_guide_says_which_ends_of_a_gang_are_which_event():
    sent = {end: collect(lambda news, end=end: news.end(end, at=0.0, reason=""))[-1].event for end in GangEnd}
    rows = re.findall(r"^\| `(gang\.\w+)` \|", GUIDE.read_text(), flags=re.MULTILINE)
    assert {name.removeprefix("prefect-torch-elastic.") for name in sent.values()} <= set(rows)
