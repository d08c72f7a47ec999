"""What would keep the runs of a deployment waiting, or make them fail, as the workspace is now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prefect.client.orchestration import SyncPrefectClient

from prefect_torch_elastic.deploying.source import Source
from prefect_torch_elastic.deploying.steps import Step
from prefect_torch_elastic.dispatch.pools import PROCESS_TYPE, Pool, check_pool, explain_wait, fetch_pool
from prefect_torch_elastic.errors import SpecError


def list_warnings(
    client: SyncPrefectClient,
    names: Iterable[str],
    *,
    driver: str,
    steps: Sequence[Step],
    source: Source,
    job_variables: Mapping[str, Any],
) -> Iterator[str]:
    """Return what to do before the deployment can run.

    Args:
        client: Of Prefect's API.
        names: Of all pools, which exist.
        driver: Name of the flow's own pool.
        steps: Of the flow.
        source: Where the flow's code is.
        job_variables: For the driver's pool.
    """
    pools = {name: fetch_pool(client, name) for name in names}
    yield from filter(None, map(explain_wait, pools.values()))
    for step in steps:
        if step.work_pool:
            yield from _explain_step(step, pools[step.work_pool])
    own = pools[driver]
    if own.type != PROCESS_TYPE:
        yield (
            f"Work pool `{own.name}` is of type `{own.type}`: the flow's code has to be in `{source.folder}` "
            "where its runs start, such as in their image."
        )
    # Prefect takes a nested one as `env.NAME` too.
    if unknown := [name for name in job_variables if name.partition(".")[0] not in own.variables]:
        listed = ", ".join(f"`{name}`" for name in unknown)
        yield f"Work pool `{own.name}` of type `{own.type}` has no job variable {listed}. Leave it out."


def _explain_step(step: Step, pool: Pool) -> Iterator[str]:
    spec = step.spec
    try:
        check_pool(pool, kind=step.kind, nnodes=spec.nnodes, max_nodes=spec.max_nodes)
    except SpecError as error:
        yield f"The step `{step.name}` will fail: {error}"
