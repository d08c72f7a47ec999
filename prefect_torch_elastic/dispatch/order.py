"""What a driver orders from a work pool, and the command that names the order. Pure."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

from prefect_torch_elastic.dispatch.documents import check_part, parse_document, sign_document
from prefect_torch_elastic.errors import SpecError, TransferError
from prefect_torch_elastic.jsonfields import (
    Check,
    check_fields,
    check_flag,
    check_one_of,
    check_optional,
    check_text,
    check_text_mapping,
    check_texts,
    check_whole_number,
    check_word,
    short,
)
from prefect_torch_elastic.logentries import StoredPart
from prefect_torch_elastic.spec import Spec
from prefect_torch_elastic.spec_values import hide_secrets

_WORD = re.compile(r"[0-9A-Za-z][0-9A-Za-z-]{0,63}")
# A run folder is what `runkey.name_folder` makes of a run key.
_ORDER_KEY = re.compile(
    r"(?P<folder>[0-9A-Za-z_=][0-9A-Za-z._=-]{0,127})"
    r"/calls/(?P<call>[0-9A-Za-z]{1,64})/order-[0-9A-Za-z]{1,64}"
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class CallKind(StrEnum):
    """What runs in the pool: a plain function in one process, or a gang of ranks."""

    BODY = "body"
    GANG = "gang"


@dataclass(frozen=True, kw_only=True)
class CallOrder:
    """One call, as the driver sends it to a work pool.

    Attributes:
        kind: What to run.
        task_name: Name of the Prefect task.
        root: Id of the outermost flow run, or of a task run without a flow; the key derives from it.
        run_key: Name of the run that the call belongs to.
        call: Digest of the call.
        parcel: Function and arguments.
        code: Archive of the user's own modules and files, None if the other side needs none.
        code_sha256: Of that archive, empty if there is none: it has no signature of its own.
        modules: Modules that the call names.
        fields: The fields of the `Spec`.
        flow_run_id: The driver's flow run, empty without one.
        task_run_id: The driver's task run.
        task_run_name: Its name.
        retries: Of the Prefect task.
        log_prints: Of the Prefect task; None follows the settings of the other side.
        versions: From `collect_versions` of the driver.
    """

    kind: CallKind
    task_name: str
    root: str
    run_key: str
    call: str
    parcel: StoredPart
    code: StoredPart | None
    code_sha256: str
    modules: list[str]
    fields: dict[str, Any]
    flow_run_id: str
    task_run_id: str
    task_run_name: str
    retries: int
    log_prints: bool | None
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class CallReference:
    """Where an order is, as the command line of the other side says it. There is no secret in it.

    Attributes:
        store: URL of the store.
        order: Key of the order, `RUN FOLDER/calls/DIGEST/order-NONCE`.
        root: Id of the outermost flow run, from which the key derives.
        store_credentials: The block with the store's credentials, `type-slug/block-name`; may be empty.

    Raises:
        SpecError: If a value is none that a driver writes.
    """

    store: str
    order: str
    root: str
    store_credentials: str = ""

    def __post_init__(self) -> None:
        if not _is_argument(self.store):
            raise _odd("--store", self.store, "URL of a store")
        if not _ORDER_KEY.fullmatch(self.order):
            raise _odd("--call", self.order, "key `RUN FOLDER/calls/DIGEST/order-NONCE`")
        if not _WORD.fullmatch(self.root):
            raise _odd("--root", self.root, "id of a flow run or of a task run")
        if self.store_credentials and not _is_argument(self.store_credentials):
            raise _odd("--store-credentials", self.store_credentials, "name `TYPE/BLOCK`")

    @property
    def folder(self) -> str:
        """Name of the run folder."""
        return self._parts()["folder"]

    @property
    def call(self) -> str:
        """Digest of the call."""
        return self._parts()["call"]

    def _parts(self) -> dict[str, str]:
        match = _ORDER_KEY.fullmatch(self.order)
        assert match is not None  # it was looked at when this was made
        return match.groupdict()


def render_command(reference: CallReference, *, nproc_per_node: int | str | None = None) -> list[str]:
    """Return the command that carries out the order, word by word.

    Args:
        reference: The order.
        nproc_per_node: Of a gang: the job imports torch for it while the order is fetched.
    """
    command = ["python", "-m", "prefect_torch_elastic.node", "--store", reference.store]
    command += ["--call", reference.order, "--root", reference.root]
    if reference.store_credentials:
        command += ["--store-credentials", reference.store_credentials]
    if nproc_per_node is not None:
        command += ["--nproc-per-node", str(nproc_per_node)]
    return command


def render_order(order: CallOrder, *, key: bytes) -> bytes:
    """Return the order as a signed document.

    Raises:
        TransferError: If JSON cannot carry a field.
    """
    return sign_document(dataclasses.asdict(order), key=key)


def parse_order(data: bytes | memoryview, name: str, *, key: bytes) -> CallOrder:
    """Return the order of a signed document.

    Raises:
        TransferError: As `parse_document`, or because a field is unknown, missing, or of another type.
    """
    body = parse_document(data, name, key=key)
    try:
        order = CallOrder(**check_fields("order", body, _ORDER))
        for field, part in (("parcel", order.parcel), ("code", order.code)):
            if part is not None and not part.key.startswith(f"calls/{order.call}/"):
                raise ValueError(f"`order.{field}.key` is {short(part.key)}, not below `calls/{order.call}`")
    except ValueError as error:
        raise TransferError(
            f"`{name}` cannot be carried out: {error}. {_name_writer(body)}"
            "Install the same version of `prefect-torch-elastic` on both sides."
        ) from error
    return order


def _check_spec(name: str, value: object) -> dict[str, Any]:
    return check_fields(name, value, _SPEC)


def _name_writer(body: dict[str, Any]) -> str:
    """Return who wrote an order that this version does not understand."""
    versions = body.get("versions")
    if not isinstance(versions, dict):
        return ""
    version = cast("dict[str, Any]", versions).get("prefect_torch_elastic")
    return f"It was written by version {short(version)}. "


def _is_argument(value: str) -> bool:
    """Whether a word of the command line can only be read as a value."""
    return bool(value) and not value.startswith("-") and not _CONTROL.search(value)


def _odd(option: str, value: str, expected: str) -> SpecError:
    return SpecError(
        f"`{option} {hide_secrets(value)!r}` names no call: it is not the {expected}. "
        "A driver writes this command: see `command` in the job variables of the flow run."
    )


def _same(_: str, value: object) -> object:
    return value


# Their values were checked when the `Spec` was made, and the signature says that they are still those.
_SPEC: dict[str, Check] = {field.name: _same for field in dataclasses.fields(Spec)}
_ORDER: dict[str, Check] = {
    "kind": check_one_of(CallKind),
    "task_name": check_text,
    "root": check_word,
    "run_key": check_text,
    "call": check_word,
    "parcel": check_part,
    "code": check_optional(check_part),
    "code_sha256": check_text,
    "modules": check_texts,
    "fields": _check_spec,
    "flow_run_id": check_text,
    "task_run_id": check_text,
    "task_run_name": check_text,
    "retries": check_whole_number,
    "log_prints": check_optional(check_flag),
    "versions": check_text_mapping,
}
