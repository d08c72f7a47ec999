"""A plain function in a pool's job: run by Prefect's engine, its value or exception sent to the driver."""

from __future__ import annotations

import tempfile
import traceback
from pathlib import Path

from prefect.states import Failed

from prefect_torch_elastic import parcel
from prefect_torch_elastic.dispatch.endings import Ending
from prefect_torch_elastic.dispatch.versions import render_differences
from prefect_torch_elastic.errors import TransferError
from prefect_torch_elastic.hosting.arrival import Arrival
from prefect_torch_elastic.hosting.bodies import BodyEnd, LoadedCall, run_body
from prefect_torch_elastic.hosting.ownrun import OwnRun
from prefect_torch_elastic.hosting.persistence import persist, persist_outcome
from prefect_torch_elastic.hosting.reports import Report, put_error, report_stop
from prefect_torch_elastic.pickles import type_name
from prefect_torch_elastic.runlog import CallStatus
from prefect_torch_elastic.wire import GangStatus


def host_body(arrival: Arrival, own: OwnRun) -> Report:
    """Run the function of a call that arrived, and put what it returns into the run folder."""
    order = arrival.order

    def load() -> LoadedCall:
        try:
            return arrival.payload.load(key=arrival.record.key)
        except (Exception, SystemExit) as error:  # any error: loading runs code of the user's modules
            raise _not_loadable(arrival, error) from error

    end = run_body(
        own,
        load,
        task_name=order.task_name,
        grace_seconds=float(order.fields["grace_seconds"]),
        log_prints=order.log_prints,
    )
    if end.stopped:
        return report_stop(own, state=end.state)
    if not end.begun:
        assert end.error, "it says why nothing was loaded"
        own.logger.error("%s", describe_error(end.error), exc_info=end.error)
        return _report_error(arrival, own, end.error)
    if end.error is not None:
        return _report_error(arrival, own, end.error, end=end)
    return _report_value(arrival, own, end)


def _report_value(arrival: Arrival, own: OwnRun, end: BodyEnd) -> Report:
    record = arrival.record
    with tempfile.TemporaryDirectory(prefix="torch-elastic-") as folder:
        path = Path(folder) / "result"
        try:
            parcel.write_parcel(path, end.value, key=record.key)
        except TransferError as error:
            kind = type_name(end.value)
            problem = TransferError(
                f"the result of `{arrival.order.task_name}` ({kind}) cannot be sent back: {error}. "
                "Return a path or plain data."
            )
            own.logger.error("%s", problem)
            return _report_error(arrival, own, problem)
        part = persist_outcome(record, CallStatus.SUCCEEDED, attempt=1, log=own.logger, result=path)
    return Report(ending=Ending(status=GangStatus.SUCCEEDED, attempt=1, result=part), state=end.state)


def _report_error(
    arrival: Arrival, own: OwnRun, error: BaseException, *, end: BodyEnd | None = None
) -> Report:
    record = arrival.record
    log, stopped = own.logger, own.stop_requested
    part = persist(lambda: put_error(record, error), log=log, give_up=stopped)
    persist_outcome(record, CallStatus.FAILED, attempt=1, log=log, give_up=stopped)
    ending = Ending(
        status=GangStatus.FAILED,
        attempt=1,
        error=part,
        message=describe_error(error),
        traceback="".join(traceback.format_exception(error)),
    )
    return Report(ending=ending, state=end.state if end else Failed(message=describe_error(error)))


def describe_error(error: BaseException) -> str:
    """Return type and text of any exception, of one whose `__str__` raises too."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  (any error: it is code of the user's)
        return "".join(traceback.format_exception_only(error)).strip()


def _not_loadable(arrival: Arrival, error: BaseException) -> TransferError:
    text = f"`{arrival.order.task_name}` cannot be loaded in the work pool: {describe_error(error)}. "
    cure = "Install there what it imports, or name its files in `include_files`."
    return TransferError("\n".join([text + cure, render_differences(arrival.differences)]).rstrip())
