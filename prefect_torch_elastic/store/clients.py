"""A client of obstore for one bucket, with our deadlines and none of its own retries."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any

from prefect_torch_elastic.errors import MissingExtraError, StoreError
from prefect_torch_elastic.store.answers import name_settings
from prefect_torch_elastic.store.credentials import Connection

_CONNECT_TIMEOUT = timedelta(seconds=5)
_KINDS = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}


def open_client(
    scheme: str,
    bucket: str,
    prefix: str,
    connection: Connection,
    *,
    secrets: Sequence[str],
    request_timeout_seconds: float,
) -> Any:
    """Return obstore's store for one bucket.

    Args:
        scheme: `s3`, `gs` or `az`.
        bucket: Its name.
        prefix: Of all keys.
        connection: Credentials and endpoint.
        secrets: Texts that no message may contain.
        request_timeout_seconds: For one request, its body included.

    Raises:
        StoreError: If the options cannot be used.
    """
    kind = getattr(load_obstore().store, _KINDS[scheme])
    timeout = timedelta(seconds=request_timeout_seconds)
    try:
        return kind(
            bucket,
            prefix=prefix or None,
            config=connection.config,
            credential_provider=connection.provider,
            client_options={
                "timeout": timeout,
                "connect_timeout": min(_CONNECT_TIMEOUT, timeout),
                "allow_http": connection.endpoint.startswith("http://"),
                **connection.client_options,
            },
            retry_config={"max_retries": 0, "retry_timeout": timeout},
        )
    except Exception as error:  # noqa: BLE001  (obstore raises its own and built-in errors alike)
        raise _refuse(scheme, bucket, str(error), secrets) from None  # its own account may hold a key


def _refuse(scheme: str, bucket: str, said: str, secrets: Sequence[str]) -> StoreError:
    reason = said.partition("\n")[0]
    for secret in secrets:
        reason = reason.replace(secret, "***")
    return StoreError(
        f"`{scheme}://{bucket}` cannot be opened: {reason}. "
        f"Check the URL, and {name_settings(scheme)} or the `store_credentials=` block."
    )


def load_obstore() -> ModuleType:
    """Return obstore, with its stores.

    Raises:
        MissingExtraError: If it is not installed.
    """
    try:
        import obstore
        import obstore.store  # pyright: ignore[reportUnusedImport]  (an attribute of `obstore` from here on)
    except ModuleNotFoundError as error:
        cure = "pip install 'prefect-torch-elastic[store]'"
        raise MissingExtraError(f"an object store needs `obstore`. Run `{cure}`.") from error
    return obstore
