"""Writing what must not be lost to a store that may be away for a while: hours of training hang on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from prefect_torch_elastic.errors import StoreError
from prefect_torch_elastic.hosting.asking import rest
from prefect_torch_elastic.logentries import StoredPart
from prefect_torch_elastic.outcomes import CallRecord
from prefect_torch_elastic.runlog import CallStatus

PATIENCE_SECONDS = 1800.0
_PAUSE_SECONDS = 10.0

T = TypeVar("T")


def persist(
    write: Callable[[], T],
    *,
    log: Any,
    patience_seconds: float = PATIENCE_SECONDS,
    give_up: Callable[[], bool] = lambda: False,
) -> T:
    """Return what `write` returns, which is called again as long as the store, or a disk, is away.

    Args:
        write: Writes; it may be called several times.
        log: Gets one warning.
        patience_seconds: How long to repeat.
        give_up: Whether to stop repeating; it is asked several times a second.

    Raises:
        StoreError, OSError: If it is still away then. A file that is missing or forbidden stays so, and is
            not tried again.
    """
    deadline, said = time.monotonic() + patience_seconds, False
    while True:
        try:
            return write()
        except (FileNotFoundError, PermissionError):
            raise
        except (StoreError, OSError) as error:
            if time.monotonic() >= deadline or give_up():
                raise
            if not said:
                log.warning("The run folder cannot be written, which is tried again for a while: %s", error)
            said = True
        rest(_PAUSE_SECONDS, give_up)


def persist_outcome(
    record: CallRecord,
    status: CallStatus,
    *,
    attempt: int,
    log: Any,
    result: Path | None = None,
    give_up: Callable[[], bool] = lambda: False,
) -> StoredPart | None:
    """Record how a call ended, and return where its result is; one that was written is not written again.

    Args:
        record: Of the call.
        status: How it ended.
        attempt: In which attempt.
        log: Gets a warning when the store is away.
        result: The file of the result.
        give_up: Whether to stop repeating; without effect where there is a result to save.

    Raises:
        StoreError, OSError: See `persist`.
    """
    if result is None:
        persist(lambda: record.append(status, attempt=attempt), log=log, give_up=give_up)
        return None
    stored = persist(lambda: record.put_result(result), log=log)
    persist(lambda: record.append(status, attempt=attempt, result=stored), log=log)
    return stored
