"""Where runs are kept: one interface over a directory and over S3, GCS and Azure, with put-if-absent.

`open_store` finds the right one by its URL, `probe_store` tries it before anything relies on it. No torch.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from prefect_torch_elastic.errors import SpecError, StoreError
from prefect_torch_elastic.spec_values import hide_secrets

SCHEMES = ("file", "s3", "gs", "az", "memory")
REQUEST_TIMEOUT_SECONDS = 60.0
RETRY_SECONDS = 180.0
_PROBE_FOLDER = ".probe"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredObject:
    """One object of a listing."""

    key: str
    size: int
    modified: float
    """Unix time of the store's own clock."""


class Store(Protocol):
    """Objects under keys such as `run/log/000000000001.json`.

    Every method raises StoreError when the store cannot do it within its deadlines, with the cure; a key that
    is absolute or has an empty part or a `..` is refused in the same way. All methods may be called from
    several threads.
    """

    @property
    def url(self) -> str:
        """Names the store in messages; there is no secret in it."""
        ...

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write the whole object in one step, over an older one; it is durable when this returns.

        Args:
            key: Name of the object.
            data: The bytes. They are not copied, so they must not change until this returns.
        """
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write the object unless there is one already, and say whether it is ours.

        Args:
            key: Name of the object.
            data: The bytes, with a nonce in them: an object that holds the same bytes counts as ours, which
                settles a write whose answer was lost.
        """
        ...

    def get(self, key: str) -> memoryview:
        """Return the object's bytes.

        Raises:
            ObjectMissing: If there is none.
        """
        ...

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        """Return exactly `length` bytes from `start`; an object that ends before is a StoreError.

        Raises:
            ObjectMissing: If there is no such object.
        """
        ...

    def stream(self, key: str, length: int) -> Iterator[memoryview]:
        """Yield the first `length` bytes of an object, in order, in pieces: memory for a piece is enough.

        Raises:
            ObjectMissing: If there is no such object.
            StoreError: If it is shorter than `length`.
        """
        ...

    def list(self, prefix: str, *, after: str = "") -> Iterator[StoredObject]:
        """Yield what lies below the folder `prefix` ("" is all), sorted by key; only keys > `after`."""
        ...

    def list_folders(self, prefix: str) -> Sequence[str]:
        """Return the names of the folders directly in `prefix`, sorted."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove the objects; those that are gone already are fine."""
        ...


def open_store(
    url: str,
    credentials: Mapping[str, Any] | None = None,
    *,
    request_timeout_seconds: float = REQUEST_TIMEOUT_SECONDS,
    retry_seconds: float = RETRY_SECONDS,
) -> Store:
    """Return the store at `url`. Nothing is sent or written yet.

    Args:
        url: A directory, or `file://`, `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`;
            `memory://` is a new, empty store of this process, for unit tests.
        credentials: From `describe_credentials`; None takes them from the environment.
        request_timeout_seconds: How long one request may take.
        retry_seconds: How long failing requests of one operation are repeated. An operation takes at most
            this and one more request.

    Raises:
        StoreError: If the URL names no store.
        SpecError: If a `file://` URL names no directory of this machine.
        MissingExtraError: If the store needs `obstore` and it is not installed.
    """
    _check_url(url)
    if (path := parse_directory(url)) is not None:
        from prefect_torch_elastic.store.directory import DirectoryStore

        return DirectoryStore(path)
    from prefect_torch_elastic.store.objects import open_objects

    return open_objects(
        url, credentials, request_timeout_seconds=request_timeout_seconds, retry_seconds=retry_seconds
    )


def parse_directory(url: str) -> Path | None:
    """Return the directory that a store is, None for a URL of another scheme.

    Raises:
        SpecError: If a `file://` URL names no directory of this machine.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"", "file"}:
        return None
    if parts.scheme and (parts.netloc not in {"", "localhost"} or not parts.path):
        raise SpecError(
            f"`store={hide_secrets(url)!r}` names no directory of this machine. "
            "Write three slashes: `file:///data/runs`."
        )
    return Path(unquote(parts.path) if parts.scheme else url).expanduser().absolute()


def probe_store(store: Store) -> None:
    """Try once all that a run needs: write, refuse a second write, read, list, delete.

    Raises:
        StoreError: If the store cannot be used, with the reason and the cure.
    """
    key = f"{_PROBE_FOLDER}/{secrets.token_hex(8)}"
    try:
        first = store.create(key, b"first")
        second = store.create(key, b"second")
        found = bytes(store.get(key))
        listed = [entry.key for entry in store.list(_PROBE_FOLDER) if entry.key == key]
    finally:
        # Without this a failed probe leaves one small object; its own error matters more.
        with suppress(StoreError):
            store.delete([key])
    if second or not first or found != b"first":
        raise StoreError(
            f"`{store.url}` overwrites an object that must be written only once: it ignores the condition "
            "`If-None-Match: *`, without which two gangs could take the same run. Use a store that honours "
            "it: AWS S3, GCS, Azure, MinIO, Ceph, or a directory; `rclone serve s3` does not."
        )
    if not listed:
        raise StoreError(
            f"`{store.url}` does not list an object right after it was written. "
            "Use a store with consistent listings, or pass the endpoint itself instead of a cache before it."
        )


def _check_url(url: str) -> None:
    shown = hide_secrets(url)
    try:
        parts = urlsplit(url)
    except ValueError:  # its text may show what is hidden
        raise StoreError(f"`store={shown!r}` is no URL: see its brackets and special characters.") from None
    if parts.scheme and parts.scheme not in SCHEMES:
        raise StoreError(
            f"`store={shown!r}` has the unknown scheme `{parts.scheme}`. "
            "Use a directory, `file://`, `s3://`, `gs://` or `az://`."
        )
    if parts.scheme not in {"", "file"} and ("@" in parts.netloc or parts.query or parts.fragment):
        raise StoreError(
            f"`store={shown!r}` carries more than a bucket and a prefix. Leave keys, tokens and options "
            "out of the URL: pass them as `store_credentials=`, or set the environment variables."
        )
