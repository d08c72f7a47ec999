"""`prefect-torch-elastic checkpoints prune`: checkpoints that need not stay, or whole runs that are old."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Literal, cast

import cyclopts

from prefect_torch_elastic.aging import is_old, list_runs, remove_run
from prefect_torch_elastic.checkpoint.manifest import render_size
from prefect_torch_elastic.cli import FAILED, UsageError
from prefect_torch_elastic.cli.parameters import Credentials, Json, RunKey, StoreUrl
from prefect_torch_elastic.cli.reading import find_run, find_store, parse_age
from prefect_torch_elastic.cli.rendering import print_json, print_lines
from prefect_torch_elastic.errors import SpecError, StoreError, Superseded
from prefect_torch_elastic.runlog import RunLog
from prefect_torch_elastic.spec import CheckpointPolicy, check_field
from prefect_torch_elastic.store import Store

_KeepLast = Annotated[int | None, cyclopts.Parameter(help="How many of the newest stay.")]
_KeepBest = Annotated[int | None, cyclopts.Parameter(help="How many with the best metric stay besides.")]
_Metric = Annotated[str | None, cyclopts.Parameter(help="The metric of `--keep-best`.")]
_Mode = Annotated[Literal["min", "max"], cyclopts.Parameter(help="Whether a small or a large one is good.")]
_KeepEvery = Annotated[int | None, cyclopts.Parameter(help="Multiples of this step stay besides.")]
_OlderThan = Annotated[
    str | None, cyclopts.Parameter(help="Remove whole runs in which nothing changed for so long: `30d`.")
]
_DryRun = Annotated[bool, cyclopts.Parameter(negative="", help="Only say what would go.")]
_FIELD = re.compile(r"checkpoint\.(\w+)=")


def prune(
    store: StoreUrl = None,
    /,
    *,
    run: RunKey = None,
    keep_last: _KeepLast = None,
    keep_best: _KeepBest = None,
    metric: _Metric = None,
    mode: _Mode = "min",
    keep_every_steps: _KeepEvery = None,
    older_than: _OlderThan = None,
    dry_run: _DryRun = False,
    credentials: Credentials = None,
    json: Json = False,
) -> int:
    """Remove checkpoints that need not stay, or runs that are old; a run's newest checkpoint always stays."""
    given = {"keep_last": keep_last, "keep_best": keep_best, "keep_every_steps": keep_every_steps}
    rules = {name: value for name, value in given.items() if value is not None}
    if bool(rules) == (older_than is not None):
        raise UsageError("say what stays (`--keep-last 3`), or which runs go (`--older-than 30d`); not both.")
    if older_than is not None:
        seconds = parse_age(older_than)
        result = _prune_runs(find_store(store, credentials), run, seconds, dry_run=dry_run)
    else:
        policy = _parse_policy(rules, metric=metric, mode=mode)
        result = _prune_checkpoints(find_store(store, credentials), run, policy, dry_run=dry_run)
    if json:
        print_json(result)
    else:
        print_lines([_say(row, dry_run=dry_run) for row in result] or ["nothing to remove"])
    return FAILED if any(row.get("problem") for row in result) else 0


def _parse_policy(rules: dict[str, int], *, metric: str | None, mode: str) -> CheckpointPolicy:
    if rules.get("keep_best") and not metric:
        raise UsageError("`--keep-best` needs `--metric`, such as `--metric loss`.")
    try:
        policy = check_field("checkpoint", {"keep_last": 1, **rules, "metric": metric, "mode": mode})
    except SpecError as error:
        in_options = _FIELD.sub(lambda found: f"--{found[1].replace('_', '-')} ", str(error))
        raise UsageError(in_options) from error
    return cast("CheckpointPolicy", policy)


def _prune_runs(store: Store, run: str | None, seconds: float, *, dry_run: bool) -> list[dict[str, Any]]:
    folders = [find_run(store, run)] if run is not None else list_runs(store)
    # Only who may write can ask the store for its time.
    now = time.time() if dry_run else None
    rows: list[dict[str, Any]] = []
    for folder in folders:  # one is removed before the next is looked at: that one may come alive meanwhile
        if is_old(store, folder, older_than_seconds=seconds, now=now):
            try:
                size, problem = _measure(store, folder) if dry_run else remove_run(store, folder), ""
            except (StoreError, Superseded) as error:  # it came alive just now: the others go on
                size, problem = 0, str(error)
            rows.append({"run": folder, "size_bytes": size, "problem": problem})
    return rows


def _measure(store: Store, folder: str) -> int:
    return sum(entry.size for entry in store.list(folder))


def _prune_checkpoints(
    store: Store, run: str | None, policy: CheckpointPolicy, *, dry_run: bool
) -> list[dict[str, Any]]:
    from prefect_torch_elastic.checkpoint.retention import choose_pruned
    from prefect_torch_elastic.checkpoint.retention import prune as remove

    folder = find_run(store, run)
    log = RunLog(store, folder)
    log.refresh()
    if dry_run:
        chosen = choose_pruned(log.state.commits, policy)
    else:
        chosen = remove(store, folder, log, policy=policy, epoch=None, collect=True)
    return [
        {"run": folder, "step": commit.step, "uuid": commit.uuid, "size_bytes": commit.size_bytes}
        for commit in chosen
    ]


def _say(row: dict[str, Any], *, dry_run: bool) -> str:
    if row.get("problem"):
        return f"not removed: {row['problem']}"
    verb = "would be removed" if dry_run else "removed"
    step = f"step {row['step']} of " if "step" in row else ""
    return f"{verb}: {step}{row['run']} ({render_size(row['size_bytes'])})"
