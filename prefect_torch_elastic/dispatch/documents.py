"""How driver and work pool leave each other JSON in the store: signed, and with every field checked. Pure.

Nothing is trusted that comes from a store: a document is used only if its signature fits, and then each field
has to be there and to have its type.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from typing import Any

from prefect_torch_elastic.errors import TransferError
from prefect_torch_elastic.jsonfields import (
    Check,
    check_fields,
    check_mapping,
    check_part_key,
    check_whole_number,
    refuse_constant,
    short,
)
from prefect_torch_elastic.logentries import StoredPart

MAX_DOCUMENT_BYTES = 16 << 20
_PURPOSE = b"prefect-torch-elastic document\n"  # the same key signs parcels, which begin differently
_MAC = re.compile(r"[0-9a-f]{64}")


def sign_document(body: Mapping[str, Any], *, key: bytes) -> bytes:
    """Return `body` as canonical JSON with its HMAC-SHA256, for `parse_document`.

    Raises:
        TransferError: If JSON cannot carry a value, or they are too many.
    """
    try:
        plain = json.loads(json.dumps(body, allow_nan=False))  # what the reader gets: keys are texts
        data = _canonical({"body": plain, "mac": _sign(plain, key=key)})
    except (TypeError, ValueError, RecursionError) as error:
        raise TransferError(
            f"a document for the work pool cannot be written: {error}. "
            "Pass texts, finite numbers, lists and mappings only, such as in `env` and `job_variables`."
        ) from error
    if len(data) > MAX_DOCUMENT_BYTES:
        raise TransferError(
            f"a document for the work pool has {len(data)} bytes, at most {MAX_DOCUMENT_BYTES} are read. "
            "Pass large values as arguments of the task, not in `env`, `job_variables` or `pod_template`."
        )
    return data


def parse_document(data: bytes | memoryview, name: str, *, key: bytes) -> dict[str, Any]:
    """Return the body of a signed document; its fields are still to be checked, see `jsonfields`.

    Args:
        data: The bytes.
        name: Says in the error where they came from.
        key: From `derive_key`, for the call that the document is of.

    Raises:
        TransferError: If it is cut short, is not what `sign_document` writes, or was signed with another key.
    """
    try:
        if len(data) > MAX_DOCUMENT_BYTES:
            raise ValueError(f"it has {len(data)} bytes, at most {MAX_DOCUMENT_BYTES} are read")
        document = json.loads(bytes(data).decode("ascii"), parse_constant=refuse_constant)
        parts = check_fields("document", document, {"body": check_mapping, "mac": _check_mac})
        expected = _sign(parts["body"], key=key)
    except (ValueError, RecursionError) as error:  # of JSON, of the decoder, of the checks
        raise TransferError(
            f"`{name}` is not whole, or no document of ours: {error}. It was not used. "
            "Run the task again; if it repeats, see who else writes to this folder."
        ) from error
    if not hmac.compare_digest(parts["mac"], expected):
        raise TransferError(
            f"`{name}` was not signed with the key of this call, or it was changed since. It was not used. "
            "See with `prefect config view` whether both sides use the same Prefect API and workspace, and "
            "whether the block with the signing key was made again meanwhile: the next try of the task asks "
            "for it anew. If it repeats, see who else writes to this folder."
        )
    return parts["body"]


def check_part(name: str, value: object) -> StoredPart:
    """Return what a reader needs to know of an object in the run folder."""
    return StoredPart(**check_fields(name, value, _PART))


def _check_mac(name: str, value: object) -> str:
    if not isinstance(value, str) or not _MAC.fullmatch(value):
        raise ValueError(f"`{name}` is {short(value)}, no signature")
    return value


def _sign(body: dict[str, Any], *, key: bytes) -> str:
    return hmac.new(key, _PURPOSE + _canonical(body), hashlib.sha256).hexdigest()


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


_PART: dict[str, Check] = {"key": check_part_key, "size": check_whole_number, "crc32c": check_whole_number}
