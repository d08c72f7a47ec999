"""Four ways to keep a state in S3, each with the settings that its users get.

No client hashes payloads: over HTTPS none of them does, and over plain HTTP boto3 and s3fs would.
"""

# pyright: reportMissingImports=false
# (the peers come with the extra `benchmark`, which only benchmarks need)

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from prefect_torch_elastic.checkpoint.session import CheckpointSession
from prefect_torch_elastic.spec import CheckpointPolicy
from prefect_torch_elastic.store import open_store

State = dict[str, Tensor]
REGION = "us-east-1"
BUCKET = "bucket"
_SIGNING = {"s3": {"payload_signing_enabled": False, "addressing_style": "path"}}


class Client(Protocol):
    """Saves and loads the state of one rank; `number` counts the saves."""

    def save(self, state: State, number: int) -> None: ...

    def load(self, state: State, number: int) -> None: ...


class Ours:
    """The session that `get_context().checkpoint` is; a save that is waited for.

    Retention is off, because no peer has one.
    """

    def __init__(self, credentials: dict[str, Any], rank: int, world_size: int, port: int) -> None:
        self._session = CheckpointSession(
            open_store(f"s3://{BUCKET}", credentials),
            "ours",
            rank=rank,
            world_size=world_size,
            address=("127.0.0.1", port),
            policy=CheckpointPolicy(keep_last=10_000),
        )

    def save(self, state: State, number: int) -> None:
        self._session.save(state, step=number, wait=True)

    def load(self, state: State, number: int) -> None:
        assert self._session.load(state) == number


class Connector:
    """s3torchconnector's DCP writer and reader; its public classes take no endpoint, their `fs` does."""

    def __init__(self, credentials: dict[str, Any], rank: int, world_size: int, port: int) -> None:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client

        _export(credentials)
        self._config = S3ClientConfig(force_path_style=True)
        self._client = S3Client(
            region=REGION, endpoint=credentials["endpoint_url"], s3client_config=self._config
        )

    def save(self, state: State, number: int) -> None:
        from s3torchconnector.dcp import S3StorageWriter
        from s3torchconnector.dcp.s3_file_system import S3FileSystem

        writer = S3StorageWriter(REGION, _path("s3torchconnector", number), s3client_config=self._config)
        writer.fs = S3FileSystem(REGION, s3_client=self._client)
        save(state, storage_writer=writer)

    def load(self, state: State, number: int) -> None:
        from s3torchconnector.dcp import S3StorageReader
        from s3torchconnector.dcp.s3_file_system import S3FileSystem

        reader = S3StorageReader(REGION, _path("s3torchconnector", number), s3client_config=self._config)
        constructor = reader._reader_constructor
        reader.fs = S3FileSystem(REGION, s3_client=self._client, reader_constructor=constructor)
        load(state, storage_reader=reader)


class Fsspec:
    """DCP's own writer and reader for any fsspec file system, here s3fs."""

    def __init__(self, credentials: dict[str, Any], rank: int, world_size: int, port: int) -> None:
        import s3fs  # noqa: F401  (what fsspec looks for)

        self._options: dict[str, Any] = {
            "key": credentials["access_key_id"],
            "secret": credentials["secret_access_key"],
            "client_kwargs": {"endpoint_url": credentials["endpoint_url"], "region_name": REGION},
            "config_kwargs": _SIGNING,
        }

    def save(self, state: State, number: int) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        # Its default, `sync_files=True`, would sync all disks of the machine.
        writer = FsspecWriter(_path("fsspec", number), sync_files=False, **self._options)
        save(state, storage_writer=writer)

    def load(self, state: State, number: int) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        load(state, storage_reader=FsspecReader(_path("fsspec", number), **self._options))


class Boto:
    """`torch.save` and boto3's `upload_fileobj`, an object for each rank."""

    def __init__(self, credentials: dict[str, Any], rank: int, world_size: int, port: int) -> None:
        import boto3
        from botocore.config import Config

        self._rank = rank
        self._s3: Any = boto3.client(
            "s3",
            region_name=REGION,
            endpoint_url=credentials["endpoint_url"],
            aws_access_key_id=credentials["access_key_id"],
            aws_secret_access_key=credentials["secret_access_key"],
            config=Config(**_SIGNING),  # pyright: ignore[reportArgumentType]
        )

    def save(self, state: State, number: int) -> None:
        buffer = io.BytesIO()
        torch.save({name: local(tensor) for name, tensor in state.items()}, buffer)
        buffer.seek(0)
        self._s3.upload_fileobj(buffer, BUCKET, f"boto3/{number}/{self._rank}")

    def load(self, state: State, number: int) -> None:
        buffer = io.BytesIO()
        self._s3.download_fileobj(BUCKET, f"boto3/{number}/{self._rank}", buffer)
        buffer.seek(0)
        for name, tensor in torch.load(buffer, weights_only=True).items():
            local(state[name]).copy_(tensor)


CLIENTS: dict[str, Callable[[dict[str, Any], int, int, int], Client]] = {
    "ours": Ours,
    "s3torchconnector": Connector,
    "boto3": Boto,
    "fsspec": Fsspec,
}


def local(tensor: Any) -> Tensor:
    """Return what this rank has of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _path(client: str, number: int) -> str:
    return f"s3://{BUCKET}/{client}/{number}"


def _export(credentials: dict[str, Any]) -> None:
    os.environ["AWS_ACCESS_KEY_ID"] = credentials["access_key_id"]
    os.environ["AWS_SECRET_ACCESS_KEY"] = credentials["secret_access_key"]
