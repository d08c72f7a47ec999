"""`deploy`: the pools that a flow needs, and its deployment, made once and from then on only changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, cast

from prefect.client.orchestration import get_client
from prefect.flows import Flow
from prefect.schedules import Schedule
from prefect.utilities.urls import url_for

from prefect_torch_elastic.deploying.deployment import apply_deployment, describe_deployment
from prefect_torch_elastic.deploying.pools import create_pool, plan_pools
from prefect_torch_elastic.deploying.report import Change, DeployReport, Outcome
from prefect_torch_elastic.deploying.schedules import apply_schedule, choose_schedule
from prefect_torch_elastic.deploying.source import load_flow, locate_flow
from prefect_torch_elastic.deploying.steps import Step, find_steps
from prefect_torch_elastic.deploying.warnings import list_warnings
from prefect_torch_elastic.errors import SpecError

__all__ = ["Change", "DeployReport", "Outcome", "Step", "deploy", "find_steps", "load_flow"]


def deploy(
    flow: Flow[Any, Any],
    *,
    work_pool: str,
    name: str = "default",
    pools: Mapping[str, str] | None = None,
    parameters: Mapping[str, Any] | None = None,
    job_variables: Mapping[str, Any] | None = None,
    cron: str | None = None,
    interval: float | timedelta | None = None,
    timezone: str | None = None,
    schedule: Schedule | Literal[False] | None = None,
    tags: Sequence[str] | None = None,
) -> DeployReport:
    """Deploy a flow whose steps run in work pools, and create the pools that are missing.

    Calling it again changes only what is different; what is None stays as it is. Pools that exist are left
    alone, whatever their type. The code is deployed where it lies: workers of `work_pool` need its folder.

    Args:
        flow: A flow at the top level of a Python file.
        work_pool: Where the flow itself runs, the driver.
        name: Of the deployment.
        pools: Types of pools by name, for those that are missing; `process` if nothing is said. Names that
            no step has are created too: for steps that `find_steps` cannot see.
        parameters: Of the flow's runs.
        job_variables: For the driver's worker, such as `{"env": {"NAME": "value"}}`.
        cron: When it runs, such as `"0 2 * * *"`.
        interval: How often it runs; a number is seconds.
        timezone: Of `cron` or `interval`, such as `"Europe/Berlin"`; UTC if nothing is said.
        schedule: Of `prefect.schedules`, instead of these three. The anchor of an interval counts when the
            schedule is created or its interval changes. False removes the schedule that an earlier `deploy`
            made. Schedules that people added, and the pause button of ours, are left alone.
        tags: Of the deployment.

    Returns:
        What was created, changed, or left as it is, and what keeps it from running.

    Raises:
        SpecError: If a value is not accepted, or the flow's code is in no file that a worker could load.

    Example:
        ```python
        from prefect_torch_elastic import deploy

        print(deploy(pretraining, work_pool="driver", cron="0 2 * * *"))
        ```
    """
    if not isinstance(cast("object", flow), Flow):
        raise SpecError(f"`deploy` takes a flow, not `{flow!r}`. Pass the function that is below `@flow`.")
    source, steps, types = locate_flow(flow), find_steps(flow), dict(pools or {})
    wish = choose_schedule(cron=cron, interval=interval, timezone=timezone, schedule=schedule)
    wanted = describe_deployment(
        flow,
        source,
        name=name,
        work_pool=work_pool,
        parameters=parameters,
        job_variables=job_variables,
        tags=tags,
    )
    names = [work_pool, *(step.work_pool for step in steps if step.work_pool), *types]
    with get_client(sync_client=True) as client:
        plans = plan_pools(client, names, types)
        made = [create_pool(client, plan, asked=plan.name in types) for plan in plans]
        deployment, change = apply_deployment(client, wanted)
        timing = apply_schedule(client, deployment, wish)
        warnings = tuple(
            list_warnings(
                client,
                [plan.name for plan in plans],
                driver=work_pool,
                steps=steps,
                source=source,
                job_variables=job_variables or {},
            )
        )
    return DeployReport(
        name=wanted.full_name,
        deployment_id=deployment.id,
        changes=(*made, change, *([timing] if timing else [])),
        steps=tuple(steps),
        warnings=warnings,
        url=url_for("deployment", deployment.id) or "",
    )
