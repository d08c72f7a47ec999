"""Which store, run and checkpoint a command means."""

from __future__ import annotations

import os
import re
from typing import Any

from prefect_torch_elastic.aging import list_runs
from prefect_torch_elastic.cli import UsageError
from prefect_torch_elastic.errors import CheckpointError, SpecError
from prefect_torch_elastic.runfolder import STORE_VARIABLE, resolve_store
from prefect_torch_elastic.runkey import name_folder
from prefect_torch_elastic.runlog import Commit, RunLog
from prefect_torch_elastic.store import Store, open_store
from prefect_torch_elastic.store.blocks import fetch_credentials

_AGE = re.compile(r"(\d+(?:\.\d+)?)([dhw])")
_SECONDS = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_LEAST_AGE_SECONDS = 86400.0


def find_store(url: str | None, credentials: str | None) -> Store:
    """Return the store that a command names, or the default one.

    Args:
        url: A URL or a directory.
        credentials: A Prefect block, `type-slug/block-name`.

    Raises:
        UsageError: If there is no such block.
        StoreError: If the URL names no store, or Prefect cannot be asked for the block.
    """
    if url is None:
        url = os.environ.get(STORE_VARIABLE) or _default_store()
    return open_store(url, find_credentials(credentials or None))


def find_credentials(reference: str | None) -> dict[str, Any] | None:
    """Return what a Prefect block holds, `type-slug/block-name`; None for no reference.

    Raises:
        UsageError: If there is no such block.
        StoreError: If Prefect cannot be asked for it.
    """
    try:
        return None if reference is None else fetch_credentials(reference, option="--credentials")
    except SpecError as error:
        raise UsageError(str(error)) from error


def find_run(store: Store, key: str | None) -> str:
    """Return the run's folder: the one with this key, or the only one that there is.

    Raises:
        UsageError: If there is none, or if there are several and none was named.
    """
    if key is not None:
        folder = name_folder(key)
        if "log" not in store.list_folders(folder):
            raise UsageError(f"there is no run `{key}` in `{store.url}`. `checkpoints list` shows which are.")
        return folder
    runs = list_runs(store)
    if len(runs) == 1:
        return runs[0]
    if not runs:
        raise UsageError(f"there is no run in `{store.url}`.")
    names = ", ".join(f"`{name}`" for name in runs[:6])
    raise UsageError(f"`{store.url}` has {len(runs)} runs: {names}. Name one with `--run`.")


def find_checkpoint(
    url: str | None, credentials: str | None, run: str | None, step: int | None
) -> tuple[Store, str, Commit]:
    """Return the store, the run's folder there and the checkpoint that a command means.

    Raises:
        UsageError: As `find_store` and `find_run`.
        CheckpointError: As `find_commit`.
    """
    store = find_store(url, credentials)
    folder = find_run(store, run)
    return store, folder, find_commit(store, folder, step)


def find_commit(store: Store, folder: str, step: int | None) -> Commit:
    """Return the newest checkpoint that can be loaded, or the newest one of a step.

    Raises:
        CheckpointError: If there is none.
    """
    commits = RunLog(store, folder).refresh().commits
    found = next((commit for commit in commits if step is None or commit.step == step), None)
    if found is not None:
        return found
    if step is None:
        raise CheckpointError(f"the run `{folder}` has no checkpoint that can be loaded.")
    steps = ", ".join(str(commit.step) for commit in commits) or "none"
    raise CheckpointError(f"the run `{folder}` has no checkpoint of step {step}. It has: {steps}.")


def parse_age(text: str) -> float:
    """Return the seconds of an age such as `30d`.

    Raises:
        UsageError: If it is none, or less than a day: a live run may write nothing for hours.
    """
    found = _AGE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"`--older-than {text}` is no age. Write days, weeks or hours: `30d`, `4w`, `36h`.")
    seconds = float(found[1]) * _SECONDS[found[2]]
    if seconds < _LEAST_AGE_SECONDS:
        raise UsageError(
            f"`--older-than {text}` is less than a day, and a live run may write nothing for hours. "
            "Pass `1d` or more."
        )
    return seconds


def _default_store() -> str:
    from prefect.settings import get_current_settings

    return resolve_store(None, from_environment=None, home=get_current_settings().home).url
