"""Where the key that signs pickles is: a secret block of the Prefect workspace.

Whoever may read that block can verify what a flow run signed, on any machine; the store alone forges nothing.
The first call of a workspace makes the block. A process asks once, and keeps what it got until `forget_key`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
import time
from concurrent.futures import Future
from typing import Any, cast

import httpx
from prefect.blocks.system import Secret
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import MissingContextError, ObjectAlreadyExists, ObjectNotFound
from prefect.logging import get_logger, get_run_logger
from prefect.settings import get_current_settings

from prefect_torch_elastic.errors import StoreError
from prefect_torch_elastic.spec_values import hide_secrets

BLOCK_NAME = "torch-elastic-signing-key"
PATIENCE_SECONDS = 60.0  # what a restart of a Prefect server takes, and then some

_REFERENCE = f"secret/{BLOCK_NAME}"
_VALUE = re.compile(r"torch-elastic-1:([0-9a-f]{64})")
_REQUEST_SECONDS = 10.0  # Prefect's client repeats what times out; its own 60 s would add up to minutes
_SECONDS_BETWEEN_TRIES = 1.0

# By API; a key that is being fetched is here already, so that calls that start together ask once.
_keys: dict[str, Future[bytes]] = {}
_lock = threading.Lock()


def fetch_run_secret(root: str) -> bytes:
    """Return the key of a flow run, 32 bytes, derived from the workspace's secret; the first call makes that.

    It blocks for the length of a request, and a minute or two longer while the Prefect API is away. Call it
    in a thread that knows Prefect's settings: they live in the context of the task.

    Args:
        root: Id of the outermost flow run, or of a task run without a flow.

    Raises:
        StoreError: If the secret can be neither read nor made.
    """
    settings = get_current_settings()
    api = settings.api.url or f"the server that Prefect starts for {settings.home}"
    return hmac.new(_ask_once(api), f"flow run {root}".encode(), hashlib.sha256).digest()


def forget_key() -> None:
    """Let the next call ask the API again: what was signed elsewhere does not fit the key of this process.

    Somebody may have removed the block, and another process has made it again since.
    """
    with _lock:
        for api in [api for api, asked in _keys.items() if asked.done()]:
            del _keys[api]


def _ask_once(api: str) -> bytes:
    while True:
        with _lock:
            asked = _keys.get(api)
            mine = _keys[api] = Future() if asked is None else asked
        if asked is not None:
            try:
                return asked.result()
            except StoreError as error:  # one exception of its own for each thread: they carry tracebacks
                raise StoreError(str(error)) from error
            except _Abandoned:
                continue
        try:
            mine.set_result(_fetch_or_create(api))
        except BaseException as error:
            with _lock:
                del _keys[api]  # the next call asks again
            mine.set_exception(error if isinstance(error, StoreError) else _Abandoned())
            raise
        return mine.result()


class _Abandoned(Exception):  # noqa: N818  (a verdict)
    """The thread that asked for the key was stopped; another one has to."""


def _fetch_or_create(api: str) -> bytes:
    deadline, said = time.monotonic() + PATIENCE_SECONDS, False
    while True:
        try:
            with get_client(sync_client=True, httpx_settings={"timeout": _REQUEST_SECONDS}) as client:
                return _parse(_read(client) or _create(client))
        except StoreError:
            raise
        except Exception as error:  # of httpx, of Prefect, of pydantic: whatever answers at that address
            if not _may_pass(error) or time.monotonic() > deadline:
                raise _describe(error, api) from error
            if not said:
                said = True
                _find_logger().warning(
                    "The Prefect API, which keeps the key that signs pickles, does not answer (%s). "
                    "It is asked for %.0f s more.",
                    _name(error),
                    PATIENCE_SECONDS,
                )
        time.sleep(_SECONDS_BETWEEN_TRIES)


def _read(client: SyncPrefectClient) -> object:
    try:
        block = client.read_block_document_by_name(BLOCK_NAME, block_type_slug="secret", include_secrets=True)
    except ObjectNotFound:
        return None
    return block.data.get("value", "")


def _create(client: SyncPrefectClient) -> object:
    value = f"torch-elastic-1:{secrets.token_hex(32)}"
    try:
        cast("Any", Secret)(value=value).save(BLOCK_NAME, _sync=True)  # `_sync` is not in its signature
    except ValueError as error:  # Prefect's for a name that is taken: another driver was faster
        if not isinstance(error.__cause__, ObjectAlreadyExists):
            raise
    return _read(client)  # what the API keeps, and not what was sent


def _parse(value: object) -> bytes:
    match = _VALUE.fullmatch(value) if isinstance(value, str) else None
    if match:
        return bytes.fromhex(match[1])
    if isinstance(value, str) and value.startswith("****"):
        raise StoreError(
            f"the block `{_REFERENCE}`, which holds the key that signs pickles, is shown to this process as "
            "asterisks. Use an API key that may read the secrets of blocks: see `prefect config view`."
        )
    raise StoreError(
        f"the block `{_REFERENCE}` holds something else than the key that signs pickles; it is not shown. "
        f"Remove it with `prefect block delete {_REFERENCE}`, or save what it holds under another name: the "
        "next call makes it again, and calls whose results the old key signed run again."
    )


def _may_pass(error: Exception) -> bool:
    """Whether the API may do it in a moment: it restarts, is busy, or another driver is at it too."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500
    return isinstance(error, httpx.TransportError | ObjectAlreadyExists)


def _describe(error: Exception, api: str) -> StoreError:
    if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in {401, 403}:
        cure = (
            "Set `PREFECT_API_KEY` or `PREFECT_API_AUTH_STRING` to what may read that block; who starts the "
            "first run of a workspace has to be allowed to save blocks too."
        )
    else:
        cure = "See with `prefect config view` which API is asked; does `prefect block ls` answer?"
    return StoreError(
        f"the key that signs pickles, in the block `{_REFERENCE}` of `{hide_secrets(api)}`, can be neither "
        f"read nor made: {_name(error)}. {cure}"
    )


def _find_logger() -> Any:
    try:
        return get_run_logger()
    except MissingContextError:  # the other side asks before it is a flow run to Prefect
        return get_logger("torch_elastic")


def _name(error: Exception) -> str:
    """Return an error in one line, without the address that was asked."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP {error.response.status_code} {error.response.reason_phrase}"
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
