"""Credentials: a Prefect block becomes JSON in the driver, and the JSON becomes options of obstore in a rank.

The JSON travels over a socket to the ranks and goes to no file, log or message. Keys that expire are asked
for again: obstore calls a provider here, or renews its tokens itself (GCS, Azure, web identity, EC2 role).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect_torch_elastic.errors import StoreError
from prefect_torch_elastic.store.awskeys import AwsProvider, FixedKeys, can_read_profiles

_SECRET_CHARACTERS = 6  # anything shorter is a placeholder, and part of ordinary words
_SECRET_FIELDS = ("secret", "token", "key", "password", "signature", "connection_string")
_DEVELOPMENT_STORAGE = (  # the account that every Azurite has, as Microsoft publishes it
    "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1"
    "OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==;"
    "BlobEndpoint=http://127.0.0.1:10000/devstoreaccount1"
)


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How obstore reaches a service."""

    config: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    provider: Callable[[], Any] | None = field(default=None, repr=False)
    endpoint: str = ""
    """The URL that was asked for; empty for the service's own."""
    client_options: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)


def describe_credentials(block: Any) -> dict[str, Any]:
    """Return what a Prefect credentials block holds as JSON, for ranks that have no Prefect.

    Args:
        block: `AwsCredentials`, `MinIOCredentials`, `GcpCredentials` or `AzureBlobStorageCredentials`, told
            by its class name. Files that it names are read here: the ranks' machines may not have them.

    Raises:
        StoreError: If it is another block, or a file that it names cannot be read.
    """
    for kind in type(block).__mro__:
        describe = _DESCRIBE.get(kind.__name__)
        if describe is not None:
            return {name: value for name, value in describe(block).items() if value not in (None, "", {})}
    raise StoreError(
        f"`store_credentials` is a `{type(block).__name__}`, which no store takes. "
        f"Pass one of {', '.join(f'`{name}`' for name in _DESCRIBE)}."
    )


def connect(scheme: str, credentials: Mapping[str, Any] | None) -> Connection:
    """Return how obstore reaches the service of a URL scheme.

    Args:
        scheme: `s3`, `gs` or `az`.
        credentials: From `describe_credentials`; None or without keys takes them from the environment.

    Raises:
        StoreError: If the credentials are for another service.
    """
    given = dict(credentials or {})
    expected = {"s3": "aws", "gs": "gcp", "az": "azure"}[scheme]
    if (kind := given.get("kind", expected)) != expected:
        raise StoreError(
            f"`store_credentials` are for `{kind}`, and `{scheme}://` needs `{expected}`. "
            "Pass the block of the store's own service."
        )
    return {"s3": _connect_s3, "gs": _connect_gcs, "az": _connect_azure}[scheme](given)


def find_secrets(credentials: Mapping[str, Any] | None) -> list[str]:
    """Return the secret texts in credentials and environment, to keep them out of messages; longest first."""
    named: dict[str, Any] = {
        name: value for name, value in os.environ.items() if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))
    }
    given = dict(credentials or {})
    named |= given | dict(given.get("service_account_info", {}))
    for name in ("connection_string", "AZURE_STORAGE_CONNECTION_STRING"):
        named |= _split_connection_string(str(named.get(name, "")))
    secrets = {
        value
        for name, value in named.items()
        if isinstance(value, str)
        and len(value) >= _SECRET_CHARACTERS
        and any(word in name.lower() for word in _SECRET_FIELDS)
    }
    return sorted(secrets, key=len, reverse=True)


def _describe_aws(block: Any) -> dict[str, Any]:
    role = getattr(block, "assume_role_arn", None)
    parameters = block.assume_role_kwargs.get_params_override() if role else None
    return {
        "kind": "aws",
        "access_key_id": block.aws_access_key_id,
        "secret_access_key": _reveal(block.aws_secret_access_key),
        "session_token": _reveal(block.aws_session_token),
        "profile_name": block.profile_name,
        "role_arn": role,
        "role_parameters": parameters,
        **_describe_aws_client(block),
    }


def _describe_minio(block: Any) -> dict[str, Any]:
    return {
        "kind": "aws",
        "access_key_id": block.minio_root_user,
        "secret_access_key": _reveal(block.minio_root_password),
        **_describe_aws_client(block),
    }


def _describe_aws_client(block: Any) -> dict[str, Any]:
    parameters = block.aws_client_parameters
    certificate = getattr(parameters, "verify_cert_path", None)
    verify = getattr(parameters, "verify", None)
    if certificate is None and isinstance(verify, (str, Path)):
        certificate = verify
    return {
        "region": block.region_name,
        "endpoint_url": parameters.endpoint_url,
        "certificate": _read_file(certificate) if certificate else None,
        "allow_invalid_certificates": True if verify is False else None,
    }


def _describe_gcp(block: Any) -> dict[str, Any]:
    info = _reveal(block.service_account_info)
    if not info and block.service_account_file:
        info = _read_file(block.service_account_file)
    if isinstance(info, str):
        info = json.loads(info)
    return {"kind": "gcp", "service_account_info": info}


def _describe_azure(block: Any) -> dict[str, Any]:
    return {
        "kind": "azure",
        "connection_string": _reveal(block.connection_string),
        "account_url": block.account_url,
        "client_id": block.client_id,
        "tenant_id": block.tenant_id,
        "client_secret": _reveal(block.client_secret),
    }


_DESCRIBE: dict[str, Callable[[Any], dict[str, Any]]] = {
    "AwsCredentials": _describe_aws,
    "MinIOCredentials": _describe_minio,
    "GcpCredentials": _describe_gcp,
    "AzureBlobStorageCredentials": _describe_azure,
}


def _connect_s3(given: dict[str, Any]) -> Connection:
    endpoint = given.get("endpoint_url") or _first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    region = given.get("region") or _first("AWS_REGION", "AWS_DEFAULT_REGION") or "us-east-1"
    config: dict[str, Any] = {
        "region": region,
        "conditional_put": "etag",  # whatever the environment says: the log depends on it
        "unsigned_payload": True,  # crc32c is checked end to end, and SHA-256 of every block costs a core
    }
    if endpoint:
        # Of the names that obstore takes, the one that no variable overrides.
        config["aws_endpoint_url_s3"] = endpoint
        config["virtual_hosted_style_request"] = False
    provider: Callable[[], Any] | None = None
    if given.get("role_arn") or given.get("profile_name"):
        provider = AwsProvider(given)
    elif given.get("access_key_id") and given.get("secret_access_key"):
        # A provider, not the options of the same names: the environment's session token would join those.
        provider = FixedKeys(
            access_key_id=given["access_key_id"],
            secret_access_key=given["secret_access_key"],
            token=given.get("session_token"),
        )
    elif not any(name in os.environ for name in _AWS_VARIABLES) and can_read_profiles():
        provider = AwsProvider(given)
    return Connection(
        config=config, provider=provider, endpoint=endpoint, client_options=_render_tls_options(given)
    )


_AWS_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)


def _connect_gcs(given: dict[str, Any]) -> Connection:
    config: dict[str, Any] = {}
    if info := given.get("service_account_info"):
        config["service_account_key"] = json.dumps(info)
    return Connection(config=config, endpoint=_first("GOOGLE_BASE_URL"))


def _connect_azure(given: dict[str, Any]) -> Connection:
    text = given.get("connection_string", "")
    if not given and "AZURE_STORAGE_ACCOUNT_NAME" not in os.environ:
        text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    if text:
        return _parse_connection_string(text)
    config: dict[str, Any] = {}
    endpoint = given.get("account_url") or _first("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    if given.get("account_url"):
        config["account_name"] = endpoint.partition("//")[2].partition(".")[0]
    config |= {name: given[name] for name in ("client_id", "tenant_id", "client_secret") if name in given}
    if endpoint:
        config["endpoint"] = endpoint.rstrip("/")
    return Connection(config=config, endpoint=endpoint)


def _parse_connection_string(text: str) -> Connection:
    if "UseDevelopmentStorage=true" in text:
        text = _DEVELOPMENT_STORAGE
    fields = _split_connection_string(text)
    protocol = fields.get("DefaultEndpointsProtocol", "https")
    suffix = fields.get("EndpointSuffix", "core.windows.net")
    name = fields.get("AccountName", "")
    endpoint = fields.get("BlobEndpoint") or f"{protocol}://{name}.blob.{suffix}"
    name = name or endpoint.partition("//")[2].partition(".")[0]
    config: dict[str, Any] = {"account_name": name, "endpoint": endpoint.rstrip("/")}
    if "AccountKey" in fields:
        config["account_key"] = fields["AccountKey"]
    elif "SharedAccessSignature" in fields:
        config["sas_key"] = fields["SharedAccessSignature"]
    return Connection(config=config, endpoint=endpoint)


def _split_connection_string(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.strip().split(";") if "=" in part)


def _render_tls_options(given: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if certificate := given.get("certificate"):
        options["root_certificate"] = certificate
    if given.get("allow_invalid_certificates"):
        options["allow_invalid_certificates"] = True
    return options


def _first(*variables: str) -> str:
    return next((os.environ[name] for name in variables if os.environ.get(name)), "")


def _reveal(value: Any) -> Any:
    """Return a pydantic secret's value, or the value itself."""
    return value.get_secret_value() if hasattr(value, "get_secret_value") else value


def _read_file(path: str | Path) -> str:
    try:
        return Path(path).expanduser().read_text()
    except OSError as error:
        raise StoreError(
            f"`{path}`, which the credentials block names, cannot be read: {error.strerror or error}. "
            "Correct the block, or copy the file to this machine."
        ) from error
