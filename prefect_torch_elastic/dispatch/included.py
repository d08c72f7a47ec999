"""Which files the entries of `include_files` name: files, folders and globs below the function's folder."""

from __future__ import annotations

import glob
import os
from collections.abc import Generator, Iterable
from pathlib import Path

from prefect_torch_elastic.dispatch.local_modules import is_foreign_folder
from prefect_torch_elastic.errors import SpecError


def find_included_files(entries: Iterable[str], *, base: Path) -> Generator[tuple[str, Path], None, None]:
    """Yield the files that the entries name, with their places relative to `base`.

    A folder stands for all files below it, except for hidden ones, `__pycache__` and virtual environments;
    whoever wants one of those names it. Links are followed, wherever they lead.

    Raises:
        SpecError: If an entry is empty, leaves `base`, or matches no file.
    """
    base = Path(os.path.abspath(base))
    for entry in entries:
        if not entry.strip():
            raise SpecError("an entry of `include_files` is empty. Name a file, a folder or a glob.")
        path = Path(os.path.normpath(base / entry))
        if not path.is_relative_to(base):
            raise SpecError(
                f"`{entry}` of `include_files` is outside of `{base}`, the folder of the function's file. "
                "Name what is in this folder, move the file there, or open it by URL inside the function."
            )
        found = False
        for file in _list_files(path, base):
            found = True
            yield file.relative_to(base).as_posix(), file
        if not found:
            raise SpecError(
                f"`{entry}` of `include_files` matches no file. It is looked up in `{base}`, the folder of "
                "the function's file: correct the entry, or remove it."
            )


def _list_files(path: Path, base: Path) -> Generator[Path, None, None]:
    if path.exists():  # its name may have a `[` in it
        matches = [path]
    else:
        pattern = path.relative_to(base)
        names = sorted(glob.glob(str(pattern), root_dir=base, recursive=True))
        matches = [base / name for name in names if not _is_in_foreign_folder(Path(name), pattern, base)]
    for match in matches:
        if match.is_dir():
            yield from _list_folder(match, ())
        elif match.is_file():
            yield match


def _is_in_foreign_folder(name: Path, pattern: Path, base: Path) -> bool:
    """Whether a glob has wandered into a folder that it does not name."""
    folders = [base / parent for parent in [name, *name.parents] if parent.name not in pattern.parts]
    return any(folder.is_dir() and is_foreign_folder(folder) for folder in folders if folder != base)


def _list_folder(folder: Path, inside: tuple[Path, ...]) -> Generator[Path, None, None]:
    real = folder.resolve()
    if real in inside:  # a link to a folder that it lies in
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if not is_foreign_folder(path):
                yield from _list_folder(path, (*inside, real))
        elif path.is_file():
            yield path
