"""A store in a directory: every object a file that appears whole and is on the disk when `put` returns.

A write goes to a temporary file in the object's own folder, is flushed to the disk, and takes its name in one
step: by `rename` where it may replace another, by `link` where it may not. A process that is killed in
between leaves a file named `.tmp-...`, which no listing shows. Symbolic links below the root are not
followed by listings.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from prefect_torch_elastic.errors import ObjectMissing, StoreError
from prefect_torch_elastic.store import StoredObject
from prefect_torch_elastic.store.keys import TEMPORARY, check_folder, check_key, describe_short_object

_STALE_SECONDS = 3600.0  # no single object takes an hour to write
_STREAM_BYTES = 2 << 20  # of one piece of a stream
_FOLDER_TRIES = 100  # another process may remove an empty folder again and again
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class DirectoryStore:
    """A directory as a store; see `Store` for what its methods do.

    Args:
        root: The directory. The first write makes it.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)

    def __repr__(self) -> str:
        return f"DirectoryStore({self._root!r})"

    @property
    def url(self) -> str:
        return self._root

    @property
    def path(self) -> Path:
        """The directory itself."""
        return Path(self._root)

    def put(self, key: str, data: bytes | memoryview) -> None:
        target = self._locate(key)
        with self._explain("write", key, size=memoryview(data).nbytes):
            temporary = self._write_temporary(target, data)
            try:
                os.rename(temporary, target)
            except BaseException:
                _remove(temporary)
                raise
            _sync_folder(os.path.dirname(target))

    def create(self, key: str, data: bytes) -> bool:
        target = self._locate(key)
        with self._explain("write", key, size=len(data)):
            if os.path.lexists(target):
                return self._is_ours(target, data)
            temporary = self._write_temporary(target, data)
            try:
                os.link(temporary, target)
            except FileExistsError:
                return self._is_ours(target, data)
            except OSError as error:
                if error.errno in _NO_LINKS:
                    raise StoreError(
                        f"`{self._root}` is on a file system without hard links ({error.strerror}), so no "
                        "file can be written only if it is absent. Use a local disk, NFS or Lustre, or the "
                        "object store itself (`s3://`, `gs://`, `az://`) instead of a mount of it."
                    ) from error
                raise
            finally:
                _remove(temporary)
            _sync_folder(os.path.dirname(target))
            return True

    def get(self, key: str) -> memoryview:
        with self._explain("read", key), open(self._locate(key), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            return self._read(key, file.fileno(), 0, size)

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        with self._explain("read", key), open(self._locate(key), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if start + length > size:
                raise StoreError(describe_short_object(key, self._root, start, length, size))
            return self._read(key, file.fileno(), start, length)

    def stream(self, key: str, length: int) -> Iterator[memoryview]:
        for start in range(0, length, _STREAM_BYTES):
            yield self.get_range(key, start, min(_STREAM_BYTES, length - start))

    def list(self, prefix: str, *, after: str = "") -> Iterator[StoredObject]:
        folder = check_folder(prefix)
        with self._explain("list", folder):
            self._demand_root()
            yield from self._walk(folder, after)

    def list_folders(self, prefix: str) -> Sequence[str]:
        folder = check_folder(prefix)
        with self._explain("list", folder):
            self._demand_root()
            entries = _scan(os.path.join(self._root, folder))
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    def delete(self, keys: Iterable[str]) -> None:
        folders: set[str] = set()
        for key in keys:
            target = self._locate(key)
            with self._explain("delete", key), suppress(*_MISSING):
                os.unlink(target)
            folders.add(os.path.dirname(target))
        for folder in sorted(folders, key=len, reverse=True):
            while len(folder) > len(self._root) and _remove_folder(folder):
                folder = os.path.dirname(folder)

    def _locate(self, key: str) -> str:
        return os.path.join(self._root, check_key(key))

    def _write_temporary(self, target: str, data: bytes | memoryview) -> str:
        """Write `data` to a new file beside `target`, flush it to the disk, and return its path."""
        folder = os.path.dirname(target)
        path = os.path.join(folder, f"{TEMPORARY}{secrets.token_hex(8)}")
        file = self._open_new(folder, path)
        try:
            try:
                view = memoryview(data).cast("B")
                while view.nbytes:
                    view = view[os.write(file, view) :]
                os.fsync(file)
            finally:
                os.close(file)
        except BaseException:
            _remove(path)
            raise
        return path

    def _open_new(self, folder: str, path: str) -> int:
        for _ in range(_FOLDER_TRIES):
            with suppress(FileNotFoundError):
                return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            _make_folder(folder)
        raise StoreError(
            f"the folder `{folder}` is removed as fast as it is made. "
            f"See what else deletes in `{self._root}`."
        )

    def _read(self, key: str, file: int, start: int, length: int) -> memoryview:
        data = os.pread(file, length, start)
        while len(data) < length:  # a read ends early at 2 GiB, and on network file systems
            more = os.pread(file, length - len(data), start + len(data))
            if not more:
                raise StoreError(describe_short_object(key, self._root, start, length, start + len(data)))
            data += more
        return memoryview(data)

    def _is_ours(self, target: str, data: bytes) -> bool:
        try:
            with open(target, "rb") as file:
                return file.read(len(data) + 1) == data
        except FileNotFoundError:
            return False  # deleted in between: it was there, and not ours

    def _walk(self, folder: str, after: str) -> Iterator[StoredObject]:
        """Yield a folder's objects as object stores sort them: `a.b` before `a/b`, as `.` is before `/`."""
        entries: list[tuple[str, os.DirEntry[str]]] = []
        for entry in _scan(os.path.join(self._root, folder)):
            key = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                below = f"{key}/"
                if below > after or after.startswith(below):
                    entries.append((below, entry))
            elif key > after and entry.is_file(follow_symlinks=False):
                entries.append((key, entry))
        for key, entry in sorted(entries, key=lambda pair: pair[0]):
            if key.endswith("/"):
                yield from self._walk(key.removesuffix("/"), after)
                continue
            with suppress(FileNotFoundError):  # deleted since
                status = entry.stat(follow_symlinks=False)
                yield StoredObject(key=key, size=status.st_size, modified=status.st_mtime)

    def _demand_root(self) -> None:
        try:
            os.stat(self._root)
        except FileNotFoundError as error:
            raise StoreError(
                f"the directory `{self._root}` does not exist, so it is not known what is in it. "
                "See whether the path is right and the disk is mounted."
            ) from error

    @contextmanager
    def _explain(self, verb: str, key: str, *, size: int = 0) -> Generator[None]:
        """Turn what the system says about one object into a StoreError with the cure."""
        try:
            yield
        except OSError as error:
            if verb == "read" and isinstance(error, _MISSING):
                self._demand_root()
                raise ObjectMissing(f"`{key}` is not in `{self._root}`.") from error
            said = error.strerror or str(error)
            raise StoreError(
                f"cannot {verb} `{key}` in `{self._root}`: {said}. {self._advise(error, size)}"
            ) from error

    def _advise(self, error: OSError, size: int) -> str:
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT:
                free = shutil.disk_usage(_find_existing(self._root)).free
                return (
                    f"It needs {size / 1e6:.1f} MB, {free / 1e6:.1f} MB are free. "
                    "Make room, or keep fewer checkpoints."
                )
            case errno.EACCES | errno.EPERM | errno.EROFS:
                return f"Give user {os.getuid()} the right to read and write there, or pass another `store=`."
            case errno.ENOTDIR | errno.EEXIST | errno.EISDIR:
                return (
                    "A file is where a folder has to be, or the reverse. Remove it, or pass another `store=`."
                )
            case errno.ENAMETOOLONG:
                return "Use a shorter `run_key` or directory."
            case _:
                return "See whether the disk is healthy and still mounted."


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(TEMPORARY)]
    except FileNotFoundError:
        return []  # no such folder, or removed since: nothing is in it


def _make_folder(folder: str) -> None:
    """Make a folder and what is missing above it, and put each new name on the disk."""
    if os.path.isdir(folder):
        return
    above = os.path.dirname(folder)
    _make_folder(above)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        if not os.path.isdir(folder):
            raise
    except FileNotFoundError:
        return  # the folder above was removed again by a deletion: the caller tries again
    _sync_folder(above)


def _sync_folder(folder: str) -> None:
    """Put the names in a folder on the disk."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # the object was deleted at once, and its folder with it
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:  # some network file systems sync no folders
            raise
    finally:
        os.close(file)


def _remove(path: str) -> None:
    with suppress(OSError):  # what is left is a temporary file, which nobody sees
        os.unlink(path)


def _remove_folder(folder: str) -> bool:
    """Remove a folder that holds nothing but old temporary files, and say whether it is gone."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            age_seconds = time.time() - entry.stat(follow_symlinks=False).st_mtime
            if not entry.name.startswith(TEMPORARY) or age_seconds < _STALE_SECONDS:
                return False
            _remove(entry.path)
    try:
        os.rmdir(folder)
    except OSError:
        return False  # not empty, or in use: the next deletion tries again
    return True


def _find_existing(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path
