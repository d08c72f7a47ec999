"""The run folder on a directory: where a run's calls, logs and evidence are, and what is removed when.

```
<store>/<run key>/attempts/0001/call            function and arguments, gone when the attempt ends
                               /launcher.log    what launcher and agents said
                               /node-0/rank-0.log, rank-0.stacks, rank-0.error.json
```
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from prefect_torch_elastic.errors import SpecError, StoreError

STORE_VARIABLE = "PREFECT_INTEGRATIONS_TORCH_ELASTIC_STORE"
_SAFE = re.compile(r"[^A-Za-z0-9._=-]+")
_NAME_CHARACTERS = 100


@dataclass(frozen=True, kw_only=True)
class AttemptFolder:
    """One gang's folder, in a run that may have had others."""

    number: int
    path: Path

    @property
    def call(self) -> Path:
        """The parcel with function and arguments."""
        return self.path / "call"

    @property
    def launcher_log(self) -> Path:
        """What the launcher that was started for this attempt said, and its agents; later gangs share it."""
        return self.path / "launcher.log"

    def tidy(self) -> None:
        """Remove what nobody needs after the attempt: parcels, also half-written ones, and empty reports."""
        patterns = ("call", "call.*.tmp", "node-*/*.result", "node-*/*.error", "node-*/*.tmp")
        for parcel in [file for pattern in patterns for file in self.path.glob(pattern)]:
            parcel.unlink(missing_ok=True)
        for file in self.path.glob("node-*/*.stacks"):
            with suppress(OSError):
                if not file.stat().st_size:
                    file.unlink()


def resolve_store(store: str | None, *, from_environment: str | None, home: Path) -> Path:
    """Return the directory of the store: the block's, the environment's, or one under Prefect's home.

    Raises:
        SpecError: If it is not a directory.
    """
    url = store or from_environment or str(home / "torch-elastic")
    parts = urlsplit(url)
    if parts.scheme and parts.scheme != "file":
        raise SpecError(
            f"`store={url!r}` cannot be used by a gang on this machine yet. "
            "Pass a directory or a `file://` URL."
        )
    if parts.scheme and (parts.netloc not in {"", "localhost"} or not parts.path):
        raise SpecError(
            f"`store={url!r}` names no directory of this machine. Write three slashes: `file:///data/runs`."
        )
    return Path(unquote(parts.path) if parts.scheme else url).expanduser().absolute()


def create_attempt(store: Path, run_key: str) -> AttemptFolder:
    """Make the folder of the run's next attempt; two callers never get the same one.

    Raises:
        StoreError: If the folder cannot be made.
    """
    attempts = store / name_folder(run_key) / "attempts"
    try:
        store.mkdir(parents=True, exist_ok=True)
        attempts.parent.mkdir(mode=0o700, exist_ok=True)
        attempts.mkdir(exist_ok=True)
        number = max((int(entry.name) for entry in attempts.iterdir() if entry.name.isdigit()), default=0)
        while True:
            number += 1
            path = attempts / f"{number:04}"
            with suppress(FileExistsError):
                path.mkdir()
                return AttemptFolder(number=number, path=path)
    except OSError as error:
        raise StoreError(
            f"the run folder cannot be made in `{store}`: {error.strerror or error}. "
            f"Pass `store=` a directory that can be written, or set `{STORE_VARIABLE}`."
        ) from error


def name_folder(run_key: str) -> str:
    """Return the run key as the name of one folder; keys that look alike afterwards stay apart."""
    safe = _SAFE.sub("-", run_key).strip("-.")[:_NAME_CHARACTERS]
    if safe == run_key:
        return safe
    return f"{safe or 'run'}-{hashlib.sha256(run_key.encode()).hexdigest()[:8]}"


def render_run_key(run_key: str | Callable[..., str] | None, arguments: Mapping[str, object]) -> str | None:
    """Return the run's own name, None if it has none.

    Args:
        run_key: A text, a template over the parameters, or a callable that gets them.
        arguments: The parameters of this call.

    Raises:
        SpecError: If the template does not fit the parameters, the callable raises, or the name is empty.
    """
    if run_key is None:
        return None
    if callable(run_key):
        try:
            name = str(run_key(**arguments))
        except Exception as error:
            raise SpecError(
                f"`run_key` (`{getattr(run_key, '__name__', run_key)}`) raised "
                f"{type(error).__name__}: {error}. It gets the parameters of the task by name."
            ) from error
    else:
        try:
            name = str(run_key).format(**arguments)
        except Exception as error:  # a parameter's own formatting may raise anything
            parameters = ", ".join(f"`{{{parameter}}}`" for parameter in arguments)
            raise SpecError(
                f"`run_key={run_key!r}` does not fit the task's parameters: {type(error).__name__}: {error}. "
                f"Use {parameters or 'plain text'}."
            ) from error
    if not name.strip():
        raise SpecError(f"`run_key={run_key!r}` gives an empty name. Pass a name, or leave it out.")
    return name
