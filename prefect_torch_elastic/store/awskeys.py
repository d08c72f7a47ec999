"""Keys of AWS that obstore asks for when it needs them, and again before they end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prefect_torch_elastic.errors import MissingExtraError, StoreError

_BOTO_SECONDS = 600.0  # botocore renews its keys 15 minutes before they end: asking every 10 is in time


def can_read_profiles() -> bool:
    """Say whether there are profiles in `~/.aws`, and boto3 to read them."""
    folder = Path("~/.aws").expanduser()
    there = "AWS_PROFILE" in os.environ or any((folder / name).exists() for name in ("credentials", "config"))
    return there and find_spec("boto3") is not None


class AwsProvider:
    """Asks boto3 for keys, each time they are about to end: a profile, an assumed role, or `~/.aws`.

    Args:
        given: From `describe_credentials`.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = dict(given)
        self._session: Any = None

    def __repr__(self) -> str:
        return "AwsProvider()"

    def __call__(self) -> dict[str, Any]:
        session = self._open_session()
        if role := self._given.get("role_arn"):
            request = {"RoleSessionName": "prefect-torch-elastic", **self._given.get("role_parameters", {})}
            keys = session.client("sts").assume_role(RoleArn=role, **request)["Credentials"]
            return {
                "access_key_id": keys["AccessKeyId"],
                "secret_access_key": keys["SecretAccessKey"],
                "token": keys["SessionToken"],
                "expires_at": keys["Expiration"],
            }
        found = session.get_credentials()
        if found is None:
            raise StoreError(
                "boto3 finds no credentials. Run `aws configure`, or set `AWS_ACCESS_KEY_ID` and "
                "`AWS_SECRET_ACCESS_KEY`, or pass `store_credentials=`."
            )
        keys = found.get_frozen_credentials()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=_BOTO_SECONDS),
        }

    def _open_session(self) -> Any:
        if self._session is None:
            try:
                import boto3  # pyright: ignore[reportMissingTypeStubs]
            except ModuleNotFoundError as error:
                raise MissingExtraError(
                    "`store_credentials` with a profile or a role needs `boto3`. Run `pip install boto3`."
                ) from error
            self._session = boto3.Session(
                aws_access_key_id=self._given.get("access_key_id"),
                aws_secret_access_key=self._given.get("secret_access_key"),
                aws_session_token=self._given.get("session_token"),
                profile_name=self._given.get("profile_name"),
                region_name=self._given.get("region"),
            )
        return self._session


class FixedKeys:
    """Keys that do not change."""

    def __init__(self, **keys: str | None) -> None:
        self._keys = keys

    def __repr__(self) -> str:
        return "FixedKeys()"

    def __call__(self) -> dict[str, Any]:
        return {**self._keys, "expires_at": None}
