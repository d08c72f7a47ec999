"""Artifacts of one task run in the Prefect API: each is created once, found again, and changed in place.

An artifact is known by its key and its task run, so a driver that comes back goes on with those of the one
before it, and one whose creation got no answer is not created twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import sha256
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import ArtifactFilter
from prefect.client.schemas.sorting import ArtifactSort
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

from prefect_torch_elastic.artifacts.tables import clean_text

_KEY_CHARACTERS = 60
_FOREIGN = re.compile(r"[^a-z0-9]+")


class ArtifactKind(StrEnum):
    """The kinds that both UIs of Prefect show well."""

    PROGRESS = "progress"
    MARKDOWN = "markdown"


@dataclass(frozen=True, kw_only=True)
class Document:
    """What an artifact shows.

    Attributes:
        key: Names it, see `render_key`.
        kind: Of the artifact.
        description: Markdown, on its card.
        data: Per cent of a progress, markdown otherwise.
        flow_run_id: On whose page it is; empty for the task run's.
    """

    key: str
    kind: ArtifactKind
    description: str
    data: float | str
    flow_run_id: str = ""


def render_key(kind: str, name: str, number: int | None = None) -> str:
    """Return the key of an artifact: small letters, digits and dashes are all that the API accepts."""
    safe = _FOREIGN.sub("-", name.lower()).strip("-")[:_KEY_CHARACTERS].strip("-")
    if safe != name:  # names that look alike afterwards stay apart
        safe = f"{safe}-{sha256(name.encode(errors='replace')).hexdigest()[:8]}".lstrip("-")
    return f"{kind}-{safe}" if number is None else f"{kind}-{safe}-{number}"


class Publisher:
    """Shows documents as artifacts of one task run; all of it in one thread, which waits for the API.

    Args:
        open_client: Opens a client of the API; it is called when the first document is shown.
        flow_run_id: Of the task run, empty without a flow.
        task_run_id: The task run.
    """

    def __init__(
        self,
        open_client: Callable[[], AbstractContextManager[SyncPrefectClient]],
        *,
        flow_run_id: str,
        task_run_id: str,
    ) -> None:
        self._open_client = open_client
        self._flow_run_id, self._task_run_id = flow_run_id, task_run_id
        self._stack = ExitStack()
        self._client: SyncPrefectClient | None = None
        self._ids: dict[tuple[str, str], UUID] = {}
        self._shown: dict[tuple[str, str], Document] = {}

    @property
    def client(self) -> SyncPrefectClient:
        """The client, opened at the first use."""
        if self._client is None:
            self._client = self._stack.enter_context(self._open_client())
        return self._client

    def publish(self, document: Document) -> UUID:
        """Show a document in the place of its older version, and return the artifact's id.

        Raises:
            Exception: What the client raises. It may be called again then, also if the API has heard it.
        """
        document = _clean(document)
        key = (document.key, document.flow_run_id)
        if key not in self._ids and (found := self._find(document)) is not None:
            self._ids[key] = found
        if key in self._ids and self._shown.get(key) == document:
            return self._ids[key]
        if key not in self._ids or not self._update(self._ids[key], document):
            self._ids[key] = self._create(document)
        self._shown[key] = document
        return self._ids[key]

    def close(self) -> None:
        """Close the client; in the same thread."""
        self._stack.close()

    def _find(self, document: Document) -> UUID | None:
        field = "flow_run_id" if document.flow_run_id else "task_run_id"
        where = {field: {"any_": [document.flow_run_id or self._task_run_id]}}
        known = ArtifactFilter.model_validate({"key": {"any_": [document.key]}, **where})
        found = self.client.read_artifacts(artifact_filter=known, sort=ArtifactSort.UPDATED_DESC, limit=1)
        return found[0].id if found else None

    def _create(self, document: Document) -> UUID:
        flow_run_id = document.flow_run_id or self._flow_run_id
        body = ArtifactCreate(
            key=document.key,
            type=str(document.kind),
            description=document.description,
            data=document.data,
            flow_run_id=UUID(flow_run_id) if flow_run_id else None,
            task_run_id=None if document.flow_run_id else UUID(self._task_run_id),
        )
        return self.client.create_artifact(body).id

    def _update(self, artifact_id: UUID, document: Document) -> bool:
        """Return False if somebody has deleted it."""
        body = {"description": document.description, "data": document.data}
        try:
            # not `update_artifact`: it sends the whole page as an event too, and floods the graph with dots
            self.client.request("PATCH", "/artifacts/{id}", json=body, path_params={"id": artifact_id})
        except ObjectNotFound:
            return False
        except PrefectHTTPStatusError as error:
            if error.response.status_code != 404:
                raise
            return False
        return True


def _clean(document: Document) -> Document:
    data = document.data
    return replace(
        document,
        description=clean_text(document.description),
        data=clean_text(data) if isinstance(data, str) else data,
    )
