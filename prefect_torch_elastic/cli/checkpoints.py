"""`prefect-torch-elastic checkpoints`: looking at checkpoints; `pruning` and `exchange` have the rest."""

from __future__ import annotations

import cyclopts

from prefect_torch_elastic.aging import list_runs
from prefect_torch_elastic.cli import FAILED, exchange, pruning
from prefect_torch_elastic.cli.parameters import Credentials, Json, RunKey, Step, StoreUrl
from prefect_torch_elastic.cli.reading import find_checkpoint, find_commit, find_run, find_store
from prefect_torch_elastic.cli.rendering import print_json, print_lines, show_progress
from prefect_torch_elastic.cli.summary import (
    CheckpointCheck,
    describe_checkpoint,
    describe_run,
    list_damaged,
    list_rows,
)
from prefect_torch_elastic.cli.tables import print_check, print_checkpoint, print_checkpoints, print_runs
from prefect_torch_elastic.runlog import Commit, RunLog
from prefect_torch_elastic.store import Store

app = cyclopts.App(
    name="checkpoints",
    help="See, check and keep checkpoints.",
    help_flags=["--help", "-h"],
    version_flags=[],
)
app.command(pruning.prune, name="prune")
app.command(exchange.export, name="export")
app.command(exchange.consolidate, name="consolidate")
app.command(exchange.import_, name="import")


@app.command(name="list")
def list_(
    store: StoreUrl = None, /, *, run: RunKey = None, credentials: Credentials = None, json: Json = False
) -> int:
    """List the runs of a store, or the checkpoints of one run."""
    opened = find_store(store, credentials)
    if run is not None:
        rows = list_rows(opened, find_run(opened, run))
        if json:
            print_json([row.as_dict() for row in rows])
        else:
            print_checkpoints(rows, title=f"Checkpoints of {run}")
        return 0
    runs = [describe_run(opened, folder) for folder in list_runs(opened)]
    if json:
        print_json([row.as_dict() for row in runs])
    else:
        print_runs(runs, title=f"Runs in {opened.url}")
    return FAILED if any(row.problem for row in runs) else 0


@app.command
def show(
    store: StoreUrl = None,
    /,
    *,
    run: RunKey = None,
    step: Step = None,
    credentials: Credentials = None,
    json: Json = False,
) -> int:
    """Show what one checkpoint holds."""
    from prefect_torch_elastic.checkpoint.verify import fetch_manifest

    opened, folder, commit = find_checkpoint(store, credentials, run, step)
    facts = describe_checkpoint(folder, commit, fetch_manifest(opened, folder, commit))
    if json:
        print_json(facts)
    else:
        print_checkpoint(facts)
    return 0


@app.command
def verify(
    store: StoreUrl = None,
    /,
    *,
    run: RunKey = None,
    step: Step = None,
    credentials: Credentials = None,
    json: Json = False,
) -> int:
    """Read checkpoints whole and compare them with what was committed; all of a run without `--step`."""
    opened = find_store(store, credentials)
    folder = find_run(opened, run)
    log = RunLog(opened, folder)
    state = log.refresh()
    commits = [commit for commit in state.commits if step in (None, commit.step)]
    known = [check for check in list_damaged(opened, folder, state) if step in (None, check.step)]
    if step is not None and not known:
        commits = [find_commit(opened, folder, step)]  # says which steps there are
    checks: list[CheckpointCheck] = []
    for commit in commits:
        if (check := _verify_one(opened, folder, log, commit)) is not None:
            checks.append(check)
            if not json:
                print_check(check)
    if json:
        print_json([check.as_dict() for check in [*checks, *known]])
    else:
        for check in known:
            print_check(check)
        print_lines([] if commits else [f"the run `{folder}` has no checkpoint to load."])
    return 0 if all(check.ok for check in [*checks, *known]) else FAILED


def _verify_one(store: Store, folder: str, log: RunLog, commit: Commit) -> CheckpointCheck | None:
    """Return what is wrong with a checkpoint; None if it was pruned in the meantime."""
    from prefect_torch_elastic.checkpoint.retention import pin
    from prefect_torch_elastic.checkpoint.verify import verify as verify_commit

    with pin(store, folder, commit.uuid), show_progress(f"step {commit.step}", commit.size_bytes) as done:
        if commit.uuid in log.refresh().pruned:
            return None
        findings = verify_commit(store, folder, commit, progress=done)
    return CheckpointCheck(
        step=commit.step, uuid=commit.uuid, damages=findings.damages, size_bytes=findings.size_bytes
    )
