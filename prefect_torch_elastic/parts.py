"""Objects of a run folder for another process: put whole, fetched in pieces, checked on the way in."""

from __future__ import annotations

import mmap
from pathlib import Path

from crc32c import crc32c

from prefect_torch_elastic.logentries import StoredPart
from prefect_torch_elastic.store import Store

_PIECE_BYTES = 32 << 20  # of one request, so that its deadline fits an object of any size


class PartDamaged(Exception):  # noqa: N818  (a verdict; whoever asked for the part says what follows from it)
    """An object is not what its entry says."""


def put_part(store: Store, folder: str, key: str, data: bytes | memoryview) -> StoredPart:
    """Write one object below a run folder, and return what a reader needs to know of it.

    Raises:
        StoreError: If the store cannot be written.
    """
    view = memoryview(data)
    store.put(f"{folder}/{key}", view)
    return StoredPart(key=key, size=view.nbytes, crc32c=crc32c(view))


def put_file(store: Store, folder: str, key: str, path: Path) -> StoredPart:
    """Write a file that is not empty, which is mapped and not read into memory; see `put_part`."""
    with path.open("rb") as file:
        return put_part(store, folder, key, memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))


def fetch_part(store: Store, folder: str, part: StoredPart) -> memoryview:
    """Return the bytes of an object, in memory that its owner may write to.

    Raises:
        PartDamaged: If it is gone, or has another size or checksum.
        StoreError: If the store cannot be read.
    """
    key = f"{folder}/{part.key}"
    name = f"{store.url}/{key}"
    sizes = {entry.key: entry.size for entry in store.list(key.rpartition("/")[0])}
    if key not in sizes:
        raise PartDamaged(f"`{name}` is gone.")
    if sizes[key] != part.size:
        raise PartDamaged(f"`{name}` has {sizes[key]} bytes instead of {part.size}.")
    data = memoryview(bytearray(part.size))
    for start in range(0, part.size, _PIECE_BYTES):
        length = min(_PIECE_BYTES, part.size - start)
        data[start : start + length] = store.get_range(key, start, length)
    if (found := crc32c(data)) != part.crc32c:
        raise PartDamaged(f"`{name}` has the checksum {found:08x} instead of {part.crc32c:08x}.")
    return data
