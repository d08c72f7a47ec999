"""The events of a gang that automations can wait for, and what each is related to."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from prefect_torch_elastic.artifacts.tables import clean_text

PREFIX = "prefect-torch-elastic"
_TEXT_CHARACTERS = 1000
_logger = logging.getLogger(__name__)


class EventName(StrEnum):
    """What happened; the name of the event is this behind `prefect-torch-elastic.`."""

    STARTED = "gang.started"
    RESTARTED = "gang.restarted"
    SUCCEEDED = "gang.succeeded"
    FAILED = "gang.failed"
    PREEMPTED = "gang.preempted"
    CANCELLED = "gang.cancelled"
    INCIDENT = "incident"
    CHECKPOINT = "checkpoint.saved"
    NOT_FINITE = "metric.not-finite"


@dataclass(frozen=True, kw_only=True)
class EventSource:
    """What the events of a run are about, and related to.

    Attributes:
        call: Digest of the call: events of a run over all its gangs have the same resource.
        title: What people call it.
        task_run_id, task_run_name: Of the driver.
        flow_run_ids: The driver's flow run first, then the one of the pool's job.
        work_pool, work_pool_id: Name and id, empty for gangs on the driver's machine.
    """

    call: str
    title: str
    task_run_id: str
    task_run_name: str = ""
    flow_run_ids: tuple[str, ...] = ()
    work_pool: str = ""
    work_pool_id: str = ""


@dataclass(frozen=True, kw_only=True)
class GangEvent:
    """One event, as `emit` sends it."""

    event: str
    resource: dict[str, str]
    related: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    payload: dict[str, Any] = field(default_factory=dict[str, Any])


def render_event(
    name: EventName, source: EventSource, *, labels: Mapping[str, str] | None = None, **payload: Any
) -> GangEvent:
    """Return an event.

    Args:
        name: What happened.
        source: To whom.
        labels: What automations can select by, on its resource.
        payload: What else is known; long texts are cut.
    """
    resource = {
        "prefect.resource.id": f"{PREFIX}.run.{source.call}",
        "prefect.resource.name": source.title,
        **{f"{PREFIX}.{label}": value for label, value in (labels or {}).items()},
    }
    cut = {key: _cut(value) for key, value in payload.items()}
    return GangEvent(event=f"{PREFIX}.{name}", resource=resource, related=render_related(source), payload=cut)


def render_related(source: EventSource) -> list[dict[str, str]]:
    """Return the runs and the pool, in the roles by which Prefect's automations find them."""
    related = [_relate("flow-run", run) for run in source.flow_run_ids if run]
    related.append(_relate("task-run", source.task_run_id, source.task_run_name))
    if source.work_pool_id:
        related.append(_relate("work-pool", source.work_pool_id, source.work_pool))
    return related


def emit(event: GangEvent, *, at: float) -> None:
    """Hand an event to Prefect's own thread, which sends it; whatever is wrong with it, the gang goes on."""
    from prefect.events import emit_event

    try:
        emit_event(
            event=event.event,
            resource=event.resource,
            related=event.related,
            payload=event.payload,
            occurred=datetime.fromtimestamp(at, UTC),
        )
    except Exception as error:
        _logger.debug("event `%s` was not sent", event.event, exc_info=error)


def _relate(kind: str, run_id: str, name: str = "") -> dict[str, str]:
    related = {"prefect.resource.id": f"prefect.{kind}.{run_id}", "prefect.resource.role": kind}
    return {**related, "prefect.resource.name": name} if name else related


def _cut(value: Any) -> Any:
    return clean_text(value[:_TEXT_CHARACTERS]) if isinstance(value, str) else value
