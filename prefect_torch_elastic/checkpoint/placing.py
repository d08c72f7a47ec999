"""How a file or a folder that is made for others appears at its path: whole, or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from prefect_torch_elastic.errors import CheckpointError


@contextmanager
def place_file(path: Path) -> Generator[Path]:
    """Give a path to write to; when the `with` ends well, what was written there is at `path`, on the disk.

    Raises:
        CheckpointError: If there is something at `path` already, or it cannot be written.
    """
    with _explain(path):
        _demand_free(path, path.exists() or path.is_symlink())
        with _clean(path) as temporary:
            yield temporary
            _sync(temporary)
            _demand_free(path, path.exists())
            os.rename(temporary, path)
            _sync(path.parent)


@contextmanager
def place_folder(path: Path) -> Generator[Path]:
    """Give an empty folder to write to; when the `with` ends well, it is at `path`, on the disk.

    Raises:
        CheckpointError: If there is something at `path` already, or it cannot be written.
    """
    with _explain(path):
        _demand_free(path, path.exists() and (not path.is_dir() or any(path.iterdir())))
        with _clean(path) as temporary:
            temporary.mkdir()
            yield temporary
            for file in temporary.iterdir():
                _sync(file)
            _sync(temporary)
            os.rename(temporary, path)  # over an empty folder at most
            _sync(path.parent)


@contextmanager
def _clean(path: Path) -> Generator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


@contextmanager
def _explain(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"`{path}` cannot be written: {error.strerror or error}. {_find_cure(error.errno)}"
        ) from error


def _find_cure(number: int | None) -> str:
    match number:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return "Free some space, or name a path on a larger disk."
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "Name a path in a directory that you may write to."
        case errno.ENAMETOOLONG:
            return "Name a shorter path."
        case errno.EEXIST | errno.ENOTDIR:  # from `mkdir`: a parent is a file
            return "Name a path whose parents are directories."
        case errno.ENOTEMPTY:  # somebody else was faster
            return "Name another path, or remove what is there."
        case _:
            return "Check the disk, or name a path on another one."


def _demand_free(path: Path, taken: bool) -> None:
    if taken:
        raise CheckpointError(f"`{path}` exists already. Name another path, or remove it first.")


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
