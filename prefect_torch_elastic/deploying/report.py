"""What `deploy` did, thing by thing, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import UUID

from prefect_torch_elastic.deploying.steps import Step


class Outcome(StrEnum):
    """What happened to one thing."""

    CREATED = "created"
    CHANGED = "changed"
    REMOVED = "removed"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that a deployment needs, and what was done to it.

    Attributes:
        thing: Such as ``work pool `train` ``.
        outcome: What happened.
        details: The fields that changed, as `name: old -> new`; otherwise what is worth knowing.
    """

    thing: str
    outcome: Outcome
    details: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DeployReport:
    """What `deploy` found and did; printed, it reads as lines.

    Attributes:
        name: `flow/deployment`, as `prefect deployment run` takes it.
        deployment_id: Of the deployment.
        changes: Pools first, then the deployment, then its schedule.
        steps: The steps that the flow's code names.
        warnings: What keeps runs of the deployment waiting or makes them fail, each with its cure.
        url: The deployment's page in Prefect's UI; empty if there is no UI.
    """

    name: str
    deployment_id: UUID
    changes: tuple[Change, ...]
    steps: tuple[Step, ...]
    warnings: tuple[str, ...]
    url: str = ""

    @property
    def changed(self) -> bool:
        """Whether anything was created, changed or removed."""
        return any(change.outcome is not Outcome.UNCHANGED for change in self.changes)

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            "name": self.name,
            "deployment_id": str(self.deployment_id),
            "changed": self.changed,
            "changes": [
                {"thing": change.thing, "outcome": str(change.outcome), "details": list(change.details)}
                for change in self.changes
            ],
            "steps": [{"name": step.name, "work_pool": step.work_pool} for step in self.steps],
            "warnings": list(self.warnings),
            "url": self.url,
        }

    def __str__(self) -> str:
        return "\n".join(_render(self))


def _render(report: DeployReport) -> Iterator[str]:
    width = max(map(len, Outcome))
    for change in report.changes:
        yield f"{change.outcome:<{width}}  {change.thing}"
        yield from (f"{'':<{width}}    {detail}" for detail in change.details)
    for step in report.steps:
        where = f"in pool `{step.work_pool}`" if step.work_pool else "on the machine of the flow"
        yield f"{'step':<{width}}  `{step.name}` runs {where}"
    yield from (f"Warning: {warning}" for warning in report.warnings)
    yield f"Run it:  prefect deployment run '{report.name}'"
    if report.url:
        yield f"See it:  {report.url}"
