"""The chronicle of a call as a document in its run folder: signed, read by the gang that comes next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prefect_torch_elastic.chronicle import Chronicle
from prefect_torch_elastic.dispatch.documents import parse_document, sign_document
from prefect_torch_elastic.errors import ObjectMissing, TransferError
from prefect_torch_elastic.outcomes import CallRecord


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """Where a call's chronicle is kept.

    Attributes:
        record: Of the call.
    """

    record: CallRecord

    @property
    def key(self) -> str:
        """Of the document in the store."""
        return f"{self.record.folder}/calls/{self.record.call}/chronicle"

    def load(self) -> Chronicle | None:
        """Return what the gangs before have left, None if there were none.

        Raises:
            StoreError: If the store cannot be read.
            TransferError: If the document cannot be trusted or understood.
        """
        try:
            data = self.record.store.get(self.key)
        except ObjectMissing:
            return None
        body = parse_document(data, self.key, key=self.record.key)
        try:
            return Chronicle.from_json(body)
        except ValueError as error:
            raise TransferError(f"`{self.key}` is not understood: {error}. It was not used.") from error

    def save(self, body: dict[str, Any]) -> None:
        """Write what `Chronicle.to_json` gave.

        Raises:
            StoreError: If the store cannot be written.
        """
        self.record.store.put(self.key, sign_document(body, key=self.record.key))
