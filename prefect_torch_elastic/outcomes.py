"""How a call ended, kept in the run folder: a driver that is run again returns the result without a gang.

A result is rank 0's parcel as it came, below `calls/<digest>/`, signed with the key of its flow run. Prefect
may fail to persist what a task returned; the copy here is found by the task's retries and by every later run
of the same flow run. `CallRecord.keep` writes it before the value is returned.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_torch_elastic import parcel
from prefect_torch_elastic.errors import StoreError, TransferError
from prefect_torch_elastic.parts import PartDamaged, fetch_part, put_file
from prefect_torch_elastic.runlog import CallStatus, Outcome, RunLog, StoredPart
from prefect_torch_elastic.store import Store

Found = tuple[Outcome, memoryview]


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """What the run folder knows about one call.

    Attributes:
        store: The store.
        folder: Name of the run folder.
        log: The run's log.
        call: Digest of the call.
        key: Secret of this call, from `derive_key`.
        warn: Called with a sentence when something here cannot be trusted or written.
    """

    store: Store
    folder: str
    log: RunLog
    call: str
    key: bytes
    warn: Any

    def find(self) -> Found | None:
        """Return the outcome of a call that has succeeded, and its verified parcel; None if it has to run.

        Raises:
            StoreError: If the store cannot be read.
        """
        outcome = self.log.refresh().outcomes.get(self.call)
        if outcome is None or outcome.status is not CallStatus.SUCCEEDED:
            return None
        try:
            return outcome, self._fetch(outcome.result)
        except (PartDamaged, TransferError) as error:
            self.warn(
                f"This call has an outcome from attempt {outcome.attempt}, which is not used: {error} "
                "The function runs again."
            )
        self.append(CallStatus.REFUSED, attempt=outcome.attempt)
        return None

    def keep(self, status: CallStatus, *, attempt: int, result: Path | None = None) -> None:
        """Record how the call ended, or warn that it cannot be: a value at hand is worth more than this."""
        try:
            self.append(status, attempt=attempt, result=None if result is None else self.put_result(result))
        except (StoreError, OSError) as error:
            self.warn(
                f"The outcome (`{status}`) cannot be written to the run folder: {error} "
                "If this flow run is started again, the function runs again."
            )

    def put_result(self, path: Path) -> StoredPart:
        """Write a result, which belongs to the call once `append` has named it.

        Raises:
            StoreError: If the store cannot be written.
        """
        # two drivers of one call never share an object
        return put_file(self.store, self.folder, self.name_part("result"), path)

    def append(self, status: CallStatus, *, attempt: int, result: StoredPart | None = None) -> None:
        """Record how the call ended.

        Raises:
            StoreError: If the store cannot be written.
        """
        self.log.append(Outcome(call=self.call, status=status, attempt=attempt, result=result), epoch=None)

    def name_part(self, kind: str) -> str:
        """Return a new key below the run folder for an object of this call."""
        return f"calls/{self.call}/{kind}-{secrets.token_hex(4)}"

    def _fetch(self, result: StoredPart | None) -> memoryview:
        if result is None:
            raise PartDamaged("it names no result.")
        data = fetch_part(self.store, self.folder, result)
        parcel.verify_bytes(data, f"{self.store.url}/{self.folder}/{result.key}", key=self.key)
        return data


def derive_key(secret: bytes, call: str) -> bytes:
    """Return the key of one call: a parcel of another call of the same flow run does not fit."""
    return hmac.new(secret, f"call {call}".encode(), hashlib.sha256).digest()
