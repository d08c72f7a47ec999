"""The call of a gang that arrived at this machine, as the rooms that form gangs know it."""

from __future__ import annotations

import time

from prefect_torch_elastic.calls import Call, PoolJob
from prefect_torch_elastic.hosting.arrival import Arrival
from prefect_torch_elastic.hosting.ownrun import OwnRun
from prefect_torch_elastic.patience import Patience
from prefect_torch_elastic.spec import restore_spec
from prefect_torch_elastic.spec_values import hide_secrets


def describe_call(arrival: Arrival, own: OwnRun) -> Call:
    """Return the call.

    Args:
        arrival: What was fetched.
        own: This job's flow run: it says when to stop.
    """
    order, log = arrival.order, own.logger
    return Call(
        payload=arrival.payload,
        spec=restore_spec(order.fields),
        identity=arrival.identity,
        record=arrival.record,
        place=arrival.source.place,
        credentials=arrival.source.credentials,
        flow_run_id=order.flow_run_id,
        task_run_id=order.task_run_id,
        task_run_name=order.task_run_name,
        task_name=order.task_name,
        owner=None,
        patience=Patience(
            url=hide_secrets(arrival.source.place.url),
            warn=log.warning,
            cancelled=own.stop_requested,
        ),
        retries=order.retries,
        log_prints=order.log_prints,
        log=log,
        show=own.show,
        job=_describe_job(own),
    )


def _describe_job(own: OwnRun) -> PoolJob:
    run = own.run
    created = run.created if run else None
    return PoolJob(
        flow_run_id=str(own.id),
        sent_at=created.timestamp() if created else time.time(),
        work_pool=(run.work_pool_name or "") if run else "",
        work_pool_id=str(run.work_pool_id or "") if run else "",
    )
