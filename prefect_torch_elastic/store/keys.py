"""Keys: relative paths without surprises, the same in every store, and what is said of a short object."""

from __future__ import annotations

import re

from prefect_torch_elastic.errors import StoreError

TEMPORARY = ".tmp-"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_KEY_BYTES = 900  # S3 takes 1024 for prefix and key together


def check_key(key: str) -> str:
    """Return the key of an object.

    Raises:
        StoreError: If it could leave the store, or if not all stores take it.
    """
    if not key:
        raise StoreError("an object's key is empty. Name the object: `run/log/000000000001.json`.")
    if reason := _find_fault(key):
        raise StoreError(f"the key {key!r} {reason}. Keys are relative paths: `run/log/000000000001.json`.")
    return key


def check_folder(prefix: str) -> str:
    """Return the folder that `prefix` names, without a slash at its end; "" is the whole store.

    Raises:
        StoreError: As for `check_key`.
    """
    folder = prefix.removesuffix("/")
    return check_key(folder) if folder else ""


def describe_short_object(key: str, url: str, start: int, length: int, size: int) -> str:
    """Return the message about an object that ends before the bytes that were asked for."""
    return (
        f"`{key}` in `{url}` is cut short: {length} bytes from {start} were asked for, it ends after {size}. "
        "Verify the checkpoint, or take an older one."
    )


def _find_fault(key: str) -> str:
    parts = key.split("/")
    if key.startswith("/"):
        return "is absolute"
    if "" in parts:
        return "has an empty part"
    if "." in parts or ".." in parts:
        return "has a part that means another folder"
    if _CONTROL.search(key) or "\\" in key:
        return "has a backslash or a control character in it"
    if any(part.startswith(TEMPORARY) for part in parts):
        return f"has a part that begins with `{TEMPORARY}`, as unfinished files do"
    if len(key.encode()) > _KEY_BYTES:
        return f"is longer than {_KEY_BYTES} bytes"
    return ""
