"""How a dispatched call ended: the document that the pool's job leaves in the run folder for the driver.

It is written after the result and before the final state of the child run, so a driver that finds it needs no
API to know how the call ended.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from uuid import UUID

from prefect_torch_elastic.dispatch.documents import check_part, parse_document, sign_document
from prefect_torch_elastic.errors import ObjectMissing, TransferError
from prefect_torch_elastic.jsonfields import (
    Check,
    check_fields,
    check_mapping,
    check_one_of,
    check_optional,
    check_text,
    check_whole_number,
)
from prefect_torch_elastic.logentries import StoredPart
from prefect_torch_elastic.outcomes import CallRecord
from prefect_torch_elastic.signing import forget_key
from prefect_torch_elastic.wire import GangStatus

MAX_PULSE_BYTES = 256  # a job writes a few words


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a call ended in the pool.

    Attributes:
        status: As of a gang.
        attempt: The last attempt, 0 for a body.
        restarts: That the gang has spent.
        diagnosis: Fields of the `Diagnosis` of a gang that failed.
        result: The value's parcel.
        error: The exception's parcel, where it could be pickled.
        message: What a body raised, as `Type: text`.
        traceback: Of that, as text.
    """

    status: GangStatus
    attempt: int = 0
    restarts: int = 0
    diagnosis: dict[str, Any] = field(default_factory=dict[str, Any])
    result: StoredPart | None = None
    error: StoredPart | None = None
    message: str = ""
    traceback: str = ""


class EndingKind(StrEnum):
    """What an ending is good for."""

    FINAL = "ending"
    SETBACK = "setback"  # of one attempt; whoever started the machines decides whether another one comes


def put_ending(
    record: CallRecord, child_id: UUID, ending: Ending, *, kind: EndingKind = EndingKind.FINAL
) -> None:
    """Leave the ending of a child run for its driver.

    Raises:
        StoreError: If the store cannot be written.
    """
    data = sign_document({**dataclasses.asdict(ending), "child": str(child_id)}, key=record.key)
    record.store.put(_name(kind, record, child_id), data)


def fetch_ending(record: CallRecord, child_id: UUID, *, kind: EndingKind = EndingKind.FINAL) -> Ending | None:
    """Return the ending that a child run left, None if there is none.

    One that cannot be trusted makes the next call ask for the signing key again: it may have been replaced.

    Raises:
        TransferError: If it cannot be trusted or understood.
        StoreError: If the store cannot be read.
    """
    name = _name(kind, record, child_id)
    try:
        data = record.store.get(name)
    except ObjectMissing:
        return None
    try:
        body = parse_document(data, f"{record.store.url}/{name}", key=record.key)
    except TransferError:
        forget_key()
        raise
    try:
        fields = check_fields("ending", body, _FIELDS)
        if (child := fields.pop("child")) != str(child_id):  # somebody copied it
            raise ValueError(f"it is the ending of flow run {child}")
        return Ending(**fields)
    except ValueError as error:
        raise TransferError(
            f"`{record.store.url}/{name}` is not understood: {error}. "
            "Install the same version of `prefect-torch-elastic` on both sides."
        ) from error


@dataclass(frozen=True, kw_only=True)
class StoreEvidence:
    """What the store knows of a child run that somebody waits for."""

    record: CallRecord
    child_id: UUID

    def has_ending(self) -> bool:
        """Whether the child has left its ending."""
        name = _name(EndingKind.FINAL, self.record, self.child_id)
        return any(found.key == name for found in self.record.store.list(name.rpartition("/")[0]))

    def pulse(self) -> str:
        """Return what changes as long as the child's job lives, empty before its first sign."""
        try:
            data = self.record.store.get(name_pulse(self.record, self.child_id))
        except ObjectMissing:
            return ""
        # nobody signs it: whatever lies there, it is only compared with what lay there before
        return bytes(data[:MAX_PULSE_BYTES]).decode(errors="replace")


def name_pulse(record: CallRecord, child_id: UUID) -> str:
    """Return the key of the object that a living job writes again and again."""
    return _name("alive", record, child_id)


def _name(kind: str, record: CallRecord, child_id: UUID) -> str:
    return f"{record.folder}/calls/{record.call}/{kind}-{child_id}"


_FIELDS: dict[str, Check] = {
    "child": check_text,
    "status": check_one_of(GangStatus),
    "attempt": check_whole_number,
    "restarts": check_whole_number,
    "diagnosis": check_mapping,
    "result": check_optional(check_part),
    "error": check_optional(check_part),
    "message": check_text,
    "traceback": check_text,
}
