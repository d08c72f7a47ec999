"""What a pool's job says at its end, and how an exception travels with it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import State

from prefect_torch_elastic import parcel
from prefect_torch_elastic.dispatch.endings import Ending
from prefect_torch_elastic.errors import TransferError
from prefect_torch_elastic.evidence import Diagnosis
from prefect_torch_elastic.hosting.ownrun import OwnRun
from prefect_torch_elastic.hosting.stops import StopCause
from prefect_torch_elastic.logentries import StoredPart
from prefect_torch_elastic.outcomes import CallRecord
from prefect_torch_elastic.parts import put_file
from prefect_torch_elastic.pod import ExitCode, Why
from prefect_torch_elastic.wire import GangStatus


@dataclass(frozen=True, kw_only=True)
class Report:
    """The last words of a job.

    Attributes:
        ending: For the driver; None if there is none: the final state in the API says then whether it sends
            the call again.
        state: For the API; None leaves the run as it is, because another incarnation of it will come.
        exit_code: Of a pod in a gang.
        why: What its last words call it.
        message: For people, where neither diagnosis nor state has one.
        diagnosis: Of a gang that failed.
        is_victim: Whether the cause is elsewhere, so that this pod must not speak first.
    """

    ending: Ending | None
    state: State[Any] | None
    exit_code: ExitCode = ExitCode.DONE
    why: Why = Why.DONE
    message: str = ""
    diagnosis: Diagnosis | None = None
    is_victim: bool = False


def report_stop(own: OwnRun, *, state: State[Any] | None = None) -> Report:
    """Return what a job says that was stopped; one that was ended from outside may be sent again.

    A run that somebody else has called over leaves no ending: a Crashed one is sent again, as its state says.

    Args:
        own: The flow run of this process.
        state: Its final state, if it was asked for already.
    """
    state = state or own.stopped_state()  # it asks who sent a signal, so the cause is known after it
    if own.stop is not None and own.stop.cause is StopCause.CANCELLED:
        return Report(ending=Ending(status=GangStatus.STOPPED, message=own.stop_reason), state=state)
    return Report(ending=None, state=state)


def put_error(record: CallRecord, error: BaseException) -> StoredPart | None:
    """Write an exception for the driver, who raises it; None if it cannot be pickled.

    Raises:
        StoreError: If the store cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="torch-elastic-") as folder:
        path = Path(folder) / "error"
        try:
            parcel.write_parcel(path, error, key=record.key)
        except TransferError:  # its text travels
            return None
        return put_file(record.store, record.folder, record.name_part("error"), path)
