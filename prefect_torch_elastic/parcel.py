"""How a call and its result travel: one signed file, written once and mapped by all ranks that read it.

Layout: magic, HMAC-SHA256 over all that follows except the padding, then `(offset, length)` of the pickle and
of each buffer, then the bytes, each part 64-byte aligned. A reader maps the file copy-on-write, so eight
ranks that get a 1 GB tensor share one gigabyte of page cache until they write to it.
"""

from __future__ import annotations

import hashlib
import hmac
import mmap
import os
import pickle
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect_torch_elastic import pickles
from prefect_torch_elastic.errors import TransferError

_MAGIC = b"PTEPARC1"
_ALIGN = 64
_HEAD = struct.Struct("!8s32sI")  # magic, mac, number of parts
_PART = struct.Struct("!QQ")  # offset, length


def write_parcel(path: Path, value: object, *, key: bytes) -> int:
    """Write `value` to `path` in one atomic step and return the size in bytes.

    Args:
        path: The file; its folder exists.
        value: Anything that cloudpickle carries.
        key: Secret of the run; `read_parcel` refuses a file that was not written with it.

    Raises:
        TransferError: If `value` cannot be pickled.
    """
    return _write(path, *pickles.dump(value), key=key)


def write_call(path: Path, call: tuple[Any, ...], *, key: bytes) -> tuple[int, list[str]]:
    """Write a function with its arguments, and return the size and the modules that its ranks will import.

    A node imports these modules once, ahead of its ranks.

    Raises:
        TransferError: If something in `call` cannot be pickled.
    """
    head, buffers = pickles.dump(call)
    modules = [*pickles.list_modules(head), *pickles.list_hidden_modules(call[0])]
    return _write(path, head, buffers, key=key), modules


def verify_parcel(path: Path, *, key: bytes) -> None:
    """Check that `path` is whole and was written with `key`; nothing is unpickled.

    Raises:
        TransferError: If it is not.
    """
    verify_bytes(_map(path, mmap.ACCESS_READ), str(path), key=key)


def verify_bytes(data: memoryview, name: str, *, key: bytes) -> None:
    """Check a parcel that lies in memory; `name` says in the error where it came from.

    Raises:
        TransferError: If it is not whole, or was not written with `key`.
    """
    mac, table, parts = _parse(data, name)
    check = hmac.new(key, table, hashlib.sha256)
    for part in parts:
        check.update(part)
    if not hmac.compare_digest(mac, check.digest()):
        raise TransferError(
            f"`{name}` was not written by this run, or it was changed since: its signature does not match. "
            "It was not loaded. Run the task again; if it repeats, see whether another thread changes the "
            "arguments during the call, or who else writes to this folder."
        )


def read_parcel(path: Path, *, key: bytes | None) -> Any:
    """Return the object in `path`; its tensors and arrays stay in the mapped file until they are written to.

    Args:
        path: A file of `write_parcel`.
        key: Secret of the run, or None when this process's own agent has verified the file already.

    Raises:
        TransferError: If the signature does not match.
    """
    data = _map(path, mmap.ACCESS_COPY)  # once: another file may have the name a moment later
    if key is not None:
        verify_bytes(data, str(path), key=key)
    return load_verified(data, str(path))


def load_verified(data: memoryview, name: str) -> Any:
    """Return the object of a parcel that was verified; its tensors use the memory of `data`."""
    _, _, parts = _parse(data, name)
    return pickles.load(parts[0], parts[1:])


def _write(path: Path, head: bytes, buffers: Sequence[pickle.PickleBuffer], *, key: bytes) -> int:
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    table, offset = b"", _align(_HEAD.size + _PART.size * len(parts))
    for part in parts:
        table += _PART.pack(offset, part.nbytes)
        offset = _align(offset + part.nbytes)
    mac = hmac.new(key, table, hashlib.sha256)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(_HEAD.pack(_MAGIC, bytes(32), len(parts)) + table)
            for part in parts:
                file.write(bytes(_align(file.tell()) - file.tell()))
                file.write(part)
                mac.update(part)
            size = file.tell()
            file.seek(0)
            file.write(_HEAD.pack(_MAGIC, mac.digest(), len(parts)))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return size


def _map(path: Path, access: int) -> memoryview:
    """Map the file; the mapping lives as long as a view of it."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise TransferError(f"`{path}` cannot be read: it is empty. It was not loaded.")
        return memoryview(mmap.mmap(file.fileno(), 0, access=access))


def _parse(view: memoryview, name: str) -> tuple[bytes, memoryview, list[memoryview]]:
    try:
        magic, mac, count = _HEAD.unpack_from(view)
        if magic != _MAGIC:
            raise ValueError("it is not a parcel")
        table = view[_HEAD.size : _HEAD.size + _PART.size * count]
        spans = list(_PART.iter_unpack(table))
        if any(offset + length > view.nbytes for offset, length in spans):
            raise ValueError("it is cut short")
    except (struct.error, ValueError) as error:
        raise TransferError(f"`{name}` cannot be read: {error}. It was not loaded.") from error
    return mac, table, [view[offset : offset + length] for offset, length in spans]


def _align(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN
