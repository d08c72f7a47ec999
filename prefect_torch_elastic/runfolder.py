"""The run folder: where a run's log, results, logs of ranks and evidence are.

```
<store>/<run key>/log/000000000017.json         see `runlog`
                 /calls/<digest>/...            results of calls, see `outcomes`
                 /checkpoints/...               see `checkpoint.layout`
<local>/<run key>/attempts/0001/call            function and arguments, gone when the attempt ends
                               /launcher.log    what launcher and agents said
                               /node-0/rank-0.log, rank-0.stacks, rank-0.error.json
```
`<local>` is the store itself if that is a directory, else `torch-elastic` in Prefect's home.
"""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from prefect_torch_elastic.errors import SpecError, StoreError
from prefect_torch_elastic.spec_values import REMOTE_SCHEMES, hide_secrets
from prefect_torch_elastic.store import parse_directory

STORE_VARIABLE = "PREFECT_INTEGRATIONS_TORCH_ELASTIC_STORE"


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

    @contextmanager
    def hold(self) -> Generator[None, None, None]:
        """Keep the attempt, whose call was written, from being removed however long its ranks say nothing."""
        with self.call.open("rb") as file:
            with suppress(OSError):  # some network file systems have no locks: there it is kept for a week
                fcntl.flock(file, fcntl.LOCK_SH)
            yield

    def tidy(self) -> None:
        """Remove what nobody needs after the attempt: parcels, also half-written ones, and empty reports."""
        patterns = ("call", "call.*.tmp", "node-*/*.result", "node-*/*.error", "node-*/*.tmp")
        for parcel in [file for pattern in patterns for file in self.path.glob(pattern)]:
            parcel.unlink(missing_ok=True)
        for file in self.path.glob("node-*/*.stacks"):
            with suppress(OSError):
                if not file.stat().st_size:
                    file.unlink()


@dataclass(frozen=True, kw_only=True)
class RunPlace:
    """Where a run's files are.

    Attributes:
        url: The store: log, checkpoints and results of calls.
        local: Directory of this machine for the files of attempts; the store itself if it is a directory.
        is_default: Whether nobody chose the store: what is worthless in it may go by itself.
    """

    url: str
    local: Path
    is_default: bool = False


def resolve_store(
    store: str | None, *, from_environment: str | None, home: Path, work_pool: str | None = None
) -> RunPlace:
    """Return where runs are: the block's store, the environment's, or a directory under Prefect's home.

    Args:
        store: The block's.
        from_environment: What `STORE_VARIABLE` says.
        home: Prefect's home on this machine.
        work_pool: Where the call runs; another machine does not see this one's home.

    Raises:
        SpecError: If the URL names no store that a gang can use.
    """
    default = home / "torch-elastic"
    if work_pool and not (store or from_environment):
        raise SpecError(
            f"`store` is not set, and the machines of `work_pool={work_pool!r}` cannot see this one's home. "
            f"Pass `store=` a URL that both reach (`s3://`, `gs://`, `az://`, or `file://` and the path of a "
            f"shared disk), or set `{STORE_VARIABLE}`."
        )
    url = store or from_environment or str(default)
    if (path := parse_directory(url)) is not None:
        return RunPlace(url=str(path), local=path, is_default=not (store or from_environment))
    if urlsplit(url).scheme in REMOTE_SCHEMES:
        return RunPlace(url=url, local=default)
    raise SpecError(
        f"`store={hide_secrets(url)!r}` cannot be used by a gang. "
        "Pass a directory, or a URL that starts with `file://`, `s3://`, `gs://` or `az://`."
    )


def create_attempt(local: Path, folder: str, *, after: int = 0) -> AttemptFolder:
    """Make the folder of the run's next attempt; two callers never get the same one.

    Args:
        local: Directory of the runs on this machine.
        folder: Name of the run folder.
        after: Highest number that the run's log knows: other machines may have had attempts too.

    Raises:
        StoreError: If the folder cannot be made.
    """
    attempts = local / folder / "attempts"
    try:
        local.mkdir(parents=True, exist_ok=True)
        while True:
            attempts.parent.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):  # another process removed the empty folder: make it again
                attempts.mkdir(exist_ok=True)
                after = max(
                    [after, *(int(entry.name) for entry in attempts.iterdir() if entry.name.isdigit())]
                )
                path = attempts / f"{after + 1:04}"
                if _make(path):
                    return AttemptFolder(number=after + 1, path=path)
    except OSError as error:
        raise StoreError(
            f"the run folder cannot be made in `{local}`: {error.strerror or error}. "
            f"Pass `store=` a directory that can be written, or set `{STORE_VARIABLE}`."
        ) from error


def is_held(attempt: Path) -> bool:
    """Whether a driver on this machine waits for the gang of an attempt, see `AttemptFolder.hold`."""
    try:
        with (attempt / "call").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no call, or there are no locks
        return False
    return False


def _make(folder: Path) -> bool:
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True
