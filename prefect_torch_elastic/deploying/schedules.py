"""When a deployment runs: one schedule of ours, found again by its slug, beside those that people made."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, TypeAlias

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import NoSchedule
from prefect.schedules import Cron, Interval, Schedule

from prefect_torch_elastic.deploying.report import Change, Outcome
from prefect_torch_elastic.errors import SpecError

SLUG = "deploy"

Wish: TypeAlias = DeploymentScheduleCreate | Literal[False] | None
"""What a deployment shall have: a schedule, none of ours, or what it has."""


def choose_schedule(
    *,
    cron: str | None,
    interval: float | timedelta | None,
    timezone: str | None,
    schedule: Schedule | Literal[False] | None,
) -> Wish:
    """Return the one schedule that somebody asked for.

    Raises:
        SpecError: If there are two, or a value is not accepted.
    """
    given = {"cron": cron, "interval": interval, "schedule": schedule}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise SpecError(f"{' and '.join(f'`{name}`' for name in names)} both say when to run. Pass one.")
    if timezone is not None and names not in (["cron"], ["interval"]):
        raise SpecError(f"`timezone={timezone!r}` belongs to `cron` or `interval`, and neither is given.")
    if schedule is False or not names:
        return schedule  # pyright: ignore[reportReturnType]  (False or None)
    value = given[names[0]]
    try:
        if cron is not None:
            schedule = Cron(cron, timezone=timezone)
        elif interval is not None:
            schedule = Interval(interval, timezone=timezone)
        assert schedule is not None
        wish = DeploymentScheduleCreate.from_schedule(schedule)
    except (ValueError, TypeError) as error:  # pydantic's too
        zone = f" with `timezone={timezone!r}`" if timezone else ""
        raise SpecError(f"`{names[0]}={value!r}`{zone} is no schedule: {error}") from error
    if isinstance(wish.schedule, NoSchedule):
        raise SpecError("`schedule` says nothing. Pass `Cron(...)`, `Interval(...)` or `RRule(...)`.")
    return wish.model_copy(update={"slug": SLUG})


def apply_schedule(client: SyncPrefectClient, deployment: DeploymentResponse, wish: Wish) -> Change | None:
    """Make the deployment's schedule the one that is asked for; None if there is none and none was asked."""
    ours = next((one for one in deployment.schedules if one.slug == SLUG), None)
    if wish is None:
        details = tuple(_describe(one) for one in deployment.schedules)
        return Change(thing="schedule", outcome=Outcome.UNCHANGED, details=details) if details else None
    if wish is False:
        if ours is None:
            return None
        client.delete_deployment_schedule(deployment.id, ours.id)
        return Change(thing="schedule", outcome=Outcome.REMOVED, details=(_describe(ours),))
    # One that a plain `flow.deploy` made, or a person, is not made a second time.
    ours = ours or next((one for one in deployment.schedules if _is_same(one, wish)), None)
    if ours is None:
        client.create_deployment_schedules(deployment.id, [wish])
        return Change(thing="schedule", outcome=Outcome.CREATED, details=(_describe(wish),))
    stops = ours.active and not wish.active
    if _is_same(ours, wish) and not stops:
        return Change(thing="schedule", outcome=Outcome.UNCHANGED, details=(_describe(ours),))
    client.update_deployment_schedule(
        deployment.id,
        ours.id,
        schedule=None if _is_same(ours, wish) else wish.schedule,
        parameters=wish.parameters,
        active=False if stops else None,
    )
    after = wish.model_copy(update={"active": ours.active and wish.active})
    detail = f"{_describe(ours)} -> {_describe(after)}"
    return Change(thing="schedule", outcome=Outcome.CHANGED, details=(detail,))


_Any: TypeAlias = DeploymentSchedule | DeploymentScheduleCreate


def _is_same(one: _Any, other: _Any) -> bool:
    return _facts(one) == _facts(other)


def _facts(one: _Any) -> dict[str, Any]:
    """Return what makes a schedule another one; not its anchor, which by default is the time of the call."""
    facts = one.schedule.model_dump(mode="json", exclude={"anchor_date"})
    return {**facts, "timezone": facts.get("timezone") or "UTC", "parameters": one.parameters}


def _describe(one: _Any) -> str:
    facts = _facts(one)
    kind = next((name for name in ("cron", "interval", "rrule") if name in facts), "never")
    value = f"every {timedelta(seconds=facts[kind])}" if kind == "interval" else f"{kind} `{facts.get(kind)}`"
    parameters = f", with {facts['parameters']}" if facts["parameters"] else ""
    return f"{value}, {facts['timezone']}{parameters}{'' if one.active else ', paused'}"
