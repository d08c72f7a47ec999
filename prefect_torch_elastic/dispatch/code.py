"""The archive with the user's own modules and files that travels with a call."""

from __future__ import annotations

import io
import logging
import os
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from prefect_torch_elastic.dispatch.included import find_included_files
from prefect_torch_elastic.dispatch.local_modules import list_local_modules
from prefect_torch_elastic.errors import SpecError, TransferError

MAX_BYTES = 256 << 20
_ANY_DAY = (1980, 1, 1, 0, 0, 0)  # the first that a zip can name
_UNIX = 3
_NAMED = 3
_log = logging.getLogger(__name__)


def pack_code(
    function: Callable[..., Any],
    *,
    include_files: Sequence[str],
    base: Path,
    modules: Iterable[str] = (),
    warn: Callable[[str], object] = _log.warning,
) -> bytes | None:
    """Return a zip of the user's modules and files that a call needs, None when it needs none.

    Modules lie in it as they are imported: its top folder belongs on `sys.path`. The same files give the same
    bytes on any day. Sources are read as they are now, even if an older version was imported.

    Args:
        function: The user's function.
        include_files: Files, folders and globs below `base`. They lie at the same place below the top folder,
            and those inside a package that travels also in the package.
        base: The folder of the function's file, or the working directory if it has none.
        modules: Names of modules that the pickle of the call imports, for the classes of its arguments.
        warn: Is told what cannot travel and has to be installed on the other side.

    Raises:
        SpecError: If an entry of `include_files` leaves `base` or matches nothing, if two files want the
            same place, if a file cannot be read, or if all together are larger than 256 MiB.
    """
    contents = _Contents()
    try:
        for place, path in find_included_files(include_files, base=base):
            contents.add(place, path)
        included = list(contents.files.values())
        sources = list_local_modules(function, modules=modules, files=included, warn=warn)
        places = _place_modules(sources)
        for name, path in sources.items():
            contents.add(places[name], path)
        for place, path in _place_in_packages(included, sources, places):
            contents.add(place, path)
        contents.check()
        return _write_zip(contents.files) if contents.files else None
    except OSError as error:
        raise SpecError(
            f"the code of `{getattr(function, '__name__', function)}` cannot be sent to the work pool: "
            f"`{error.filename}` cannot be read ({error.strerror}). Correct its permissions, or move it away."
        ) from error


def unpack_code(data: bytes, folder: Path) -> None:
    """Write the files of an archive below `folder`, which is made if it is not there.

    Raises:
        TransferError: If the archive is damaged, or a name in it leaves the folder. Names are looked at
            before the first file is written.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            _check_entries(entries)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for entry in entries:
                _write_file(folder / entry.filename, archive.read(entry), entry.external_attr >> 16)
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, NotImplementedError, RuntimeError) as error:
        raise TransferError(
            f"the code archive of the call cannot be unpacked: {error}. Run the task again; if it repeats, "
            "see who else writes to the store."
        ) from error


class _Contents:
    """What goes into an archive, by place; it knows the limits."""

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}
        self._sizes: dict[str, int] = {}
        self._total = 0

    def add(self, place: str, path: Path) -> None:
        other = self.files.setdefault(place, path)
        if other is not path and not other.samefile(path):
            raise _refuse_place(place, other, path)
        if place in self._sizes:
            return
        try:
            place.encode()
        except UnicodeEncodeError as error:
            raise SpecError(f"the name of {str(path)!r} is not valid text. Rename the file.") from error
        self._sizes[place] = path.stat().st_size
        self._total += self._sizes[place]
        if self._total > MAX_BYTES:  # now, since somebody may have named a folder with all data sets
            raise self._refuse_size()

    def check(self) -> None:
        """Refuse a file whose name others need for their folder."""
        for place, path in self.files.items():
            for parent in map(str, PurePosixPath(place).parents):
                if parent in self.files:
                    raise _refuse_place(parent, self.files[parent], path)

    def _refuse_size(self) -> SpecError:
        largest = sorted(self._sizes, key=self._sizes.__getitem__, reverse=True)[:_NAMED]
        sizes = [f"`{self.files[place]}` ({self._sizes[place] >> 20} MiB)" for place in largest]
        return SpecError(
            f"the modules and `include_files` of this call are larger than {MAX_BYTES >> 20} MiB; the "
            f"largest so far: {', '.join(sizes)}. Leave data out of `include_files`: put it into a bucket or "
            "a shared folder, and open it by URL or path inside the function."
        )


def _refuse_place(place: str, one: Path, other: Path) -> SpecError:
    return SpecError(
        f"`{one}` and `{other}` would both be `{place}` in the work pool. Rename one of them, or take it out "
        "of `include_files`."
    )


def _place_modules(sources: Mapping[str, Path]) -> dict[str, str]:
    """Return where each module lies: as a folder if there are modules inside, even if it is a file here."""
    packages = {parent for name in sources for parent in _list_parents(name)}
    places: dict[str, str] = {}
    for name, path in sources.items():
        stem = name.replace(".", "/")
        is_package = path.name == "__init__.py" or name in packages
        places[name] = f"{stem}/__init__.py" if is_package else f"{stem}.py"
    return places


def _list_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _place_in_packages(
    included: Iterable[Path], sources: Mapping[str, Path], places: Mapping[str, str]
) -> list[tuple[str, Path]]:
    """Return second places of files that a package looks for next to its modules."""
    # Real folders: `sys.path` may lead through a link.
    folders = {path.parent.resolve(): PurePosixPath(places[name]).parent for name, path in sources.items()}
    found: list[tuple[str, Path]] = []
    for path in included:
        real = path.parent.resolve() / path.name
        home = next((parent for parent in real.parents if parent in folders), None)
        if home is not None and folders[home].parts:
            found.append((str(folders[home] / real.relative_to(home).as_posix()), path))
    return found


def _write_zip(files: Mapping[str, Path]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for place in sorted(files):
            entry = zipfile.ZipInfo(place, _ANY_DAY)
            runs = files[place].stat().st_mode & stat.S_IXUSR
            entry.external_attr = (stat.S_IFREG | (0o755 if runs else 0o644)) << 16
            entry.create_system = _UNIX
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[place].read_bytes())
    return stream.getvalue()


def _check_entries(entries: Sequence[zipfile.ZipInfo]) -> None:
    for entry in entries:
        parts = entry.filename.split("/")
        mode = entry.external_attr >> 16
        if not {"", ".", ".."}.isdisjoint(parts) or (stat.S_IFMT(mode) and not stat.S_ISREG(mode)):
            raise zipfile.BadZipFile(f"`{entry.filename}` is no file inside its folder")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise zipfile.BadZipFile(f"`{entry.filename}` is compressed in a way that is not ours")
    if sum(entry.file_size for entry in entries) > MAX_BYTES:
        raise zipfile.BadZipFile(f"it has more than {MAX_BYTES >> 20} MiB")


def _write_file(path: Path, data: bytes, mode: int) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o700 if mode & stat.S_IXUSR else 0o600), "wb") as file:
        file.write(data)
