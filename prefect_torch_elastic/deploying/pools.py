"""The work pools of a deployment: made with their type's default template when they are missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import WorkPool
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.utilities.asyncutils import run_coro_as_sync
from prefect.workers.utilities import (
    get_available_work_pool_types,
    get_default_base_job_template_for_infrastructure_type,
)

from prefect_torch_elastic.deploying.report import Change, Outcome
from prefect_torch_elastic.dispatch.pools import PROCESS_TYPE
from prefect_torch_elastic.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """A pool that a deployment needs.

    Attributes:
        name: Its name.
        type: Of its workers, if it has to be made.
        template: Its base job template, if it has to be made.
        existing: The pool, if it is there.
    """

    name: str
    type: str
    template: dict[str, Any] | None = None
    existing: WorkPool | None = None


def plan_pools(client: SyncPrefectClient, names: list[str], types: Mapping[str, str]) -> list[PoolPlan]:
    """Return what is there and what has to be made; nothing is made yet.

    Raises:
        SpecError: If a type is not known.
    """
    return [_plan_pool(client, name, types.get(name, PROCESS_TYPE)) for name in dict.fromkeys(names)]


def _plan_pool(client: SyncPrefectClient, name: str, type: str) -> PoolPlan:
    try:
        return PoolPlan(name=name, type=type, existing=client.read_work_pool(name))
    except ObjectNotFound:
        template: Any = run_coro_as_sync(get_default_base_job_template_for_infrastructure_type(type))
    if template is None:
        known = ", ".join(f"`{one}`" for one in run_coro_as_sync(get_available_work_pool_types()) or ())
        raise SpecError(f"pool `{name}`: there is no type `{type}`. This Prefect knows {known}.")
    return PoolPlan(name=name, type=type, template=template)


def create_pool(client: SyncPrefectClient, plan: PoolPlan, *, asked: bool) -> Change:
    """Make the pool if it is missing.

    Args:
        client: Of Prefect's API.
        plan: What `plan_pools` returned.
        asked: Whether somebody named the type; one that is there keeps its own.
    """
    thing = f"work pool `{plan.name}`"
    pool = plan.existing
    if pool is None:
        wish = WorkPoolCreate(name=plan.name, type=plan.type, base_job_template=plan.template or {})
        try:
            pool = client.create_work_pool(wish)
            return Change(thing=thing, outcome=Outcome.CREATED, details=(f"type `{pool.type}`",))
        except ObjectAlreadyExists:  # somebody was faster
            pool = client.read_work_pool(plan.name)
    details = (f"type `{pool.type}`, not `{plan.type}`: it was there already",)
    is_other = asked and pool.type != plan.type
    return Change(thing=thing, outcome=Outcome.UNCHANGED, details=details if is_other else ())
