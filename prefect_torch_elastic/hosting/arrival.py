"""What arrives at a pool's job: the order of a call, verified and compared with this machine; its parts."""

from __future__ import annotations

import hashlib
import hmac
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prefect.settings import get_current_settings

from prefect_torch_elastic import parcel
from prefect_torch_elastic.calls import open_and_probe, open_record
from prefect_torch_elastic.dispatch.code import unpack_code
from prefect_torch_elastic.dispatch.order import CallOrder, CallReference, parse_order
from prefect_torch_elastic.dispatch.versions import (
    Difference,
    collect_versions,
    compare_versions,
    render_differences,
)
from prefect_torch_elastic.errors import ObjectMissing, StoreError, TransferError
from prefect_torch_elastic.hosting.asking import ask_api
from prefect_torch_elastic.hosting.ownrun import OwnRun
from prefect_torch_elastic.logentries import StoredPart
from prefect_torch_elastic.outcomes import CallRecord
from prefect_torch_elastic.parts import PartDamaged, fetch_part
from prefect_torch_elastic.runfolder import RunPlace, resolve_store
from prefect_torch_elastic.runkey import CallIdentity
from prefect_torch_elastic.store.blocks import fetch_credentials

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a call lies.

    Attributes:
        reference: As the command line has it.
        record: What the run folder knows about the call.
        place: The store, and the directory of this machine for the files of attempts.
        credentials: For the store.
    """

    reference: CallReference
    record: CallRecord
    place: RunPlace
    credentials: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class FetchedPayload:
    """Function and arguments as the driver wrote them, in a file whose signature was checked."""

    path: Path
    modules: list[str]

    def write(self, path: Path, *, key: bytes) -> list[str]:  # noqa: ARG002  (it is signed already)
        """Put the file where the ranks read it."""
        shutil.copyfile(self.path, path)
        return self.modules

    def load(self, *, key: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return the function and its arguments, unpickled in this process."""
        return parcel.read_parcel(self.path, key=key)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A call that was fetched from the run folder; nothing of it was unpickled yet.

    Attributes:
        order: What to run.
        source: Where it was.
        payload: Function and arguments.
        differences: Between driver and this machine; none is fatal, or this would not exist.
    """

    order: CallOrder
    source: Source
    payload: FetchedPayload
    differences: list[Difference]

    @property
    def record(self) -> CallRecord:
        """What the run folder knows about the call."""
        return self.source.record

    @property
    def identity(self) -> CallIdentity:
        """Which run and call this is."""
        return CallIdentity(root=self.order.root, run_key=self.order.run_key, digest=self.order.call)


def open_source(reference: CallReference, own: OwnRun) -> Source:
    """Open the store that a call is in; an API that is away, which keeps the keys, is waited for.

    Raises:
        SpecError: If there is no such store, or no such credentials block.
        StoreError: If it cannot be used from here.
    """
    place = resolve_store(reference.store, from_environment=None, home=get_current_settings().home)
    block = reference.store_credentials
    credentials = _ask(own, lambda: fetch_credentials(block, option="store_credentials")) if block else {}
    store = open_and_probe(place, credentials)
    identity = CallIdentity(root=reference.root, run_key=reference.folder, digest=reference.call)
    return Source(
        reference=reference,
        record=_ask(own, lambda: open_record(store, identity, own.logger.warning)),
        place=place,
        credentials=credentials,
    )


def _ask(own: OwnRun, work: Callable[[], T]) -> T:
    return ask_api(lambda _: work(), outage=own.outage, give_up=own.stop_requested)


def receive(source: Source, *, folder: Path) -> Arrival:
    """Fetch a call into `folder` and make its code importable in this process.

    Raises:
        StoreError: If this machine does not see what the driver wrote, or it was damaged.
        TransferError: If it was not signed by its driver, or this machine cannot unpickle it.
    """
    record = source.record
    name = f"{record.store.url}/{source.reference.order}"
    order = parse_order(_fetch_order(source), name, key=record.key)
    differences = compare_versions(order.versions, collect_versions())
    if fatal := [one for one in differences if one.fatal]:
        raise TransferError(f"`{order.task_name}` cannot be loaded here: {render_differences(fatal)}")
    path = folder / "call"
    path.write_bytes(_fetch(record, order.parcel))
    parcel.verify_parcel(path, key=record.key)
    if order.code:
        unpack_code(_fetch_code(record, order.code, order.code_sha256), folder / "code")
        sys.path.insert(0, str(folder / "code"))
    return Arrival(
        order=order,
        source=source,
        payload=FetchedPayload(path=path, modules=order.modules),
        differences=differences,
    )


def _fetch_order(source: Source) -> memoryview:
    store, order = source.record.store, source.reference.order
    try:
        return store.get(order)
    except ObjectMissing as error:
        raise StoreError(
            f"`{store.url}` has no `{order}` here, though the driver wrote it there: the two "
            "machines do not see the same store. Use a URL that both reach (`s3://`, `gs://`, `az://`), or "
            "mount the same disk at the same path. Or its driver has given it up: then nobody needs this run."
        ) from error


def _fetch_code(record: CallRecord, part: StoredPart, sha256: str) -> bytes:
    data = bytes(_fetch(record, part))
    # a checksum is easy to hit on purpose, and this is imported
    if not hmac.compare_digest(hashlib.sha256(data).hexdigest(), sha256):
        raise TransferError(
            f"`{record.store.url}/{record.folder}/{part.key}` is not the code that the driver packed, and "
            "was not used. Run the task again; if it repeats, see who else writes to the store."
        )
    return data


def _fetch(record: CallRecord, part: StoredPart) -> memoryview:
    try:
        return fetch_part(record.store, record.folder, part)
    except PartDamaged as error:
        raise StoreError(f"the call cannot be read: {error} Run the task again.") from error
