"""Commands that carry checkpoints out of a store and into one: `export`, `consolidate`, `import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import cyclopts

from prefect_torch_elastic.checkpoint.manifest import render_size
from prefect_torch_elastic.cli.parameters import Credentials, Json, NewRunKey, RunKey, Step, StoreUrl, To
from prefect_torch_elastic.cli.reading import find_checkpoint, find_store
from prefect_torch_elastic.cli.rendering import print_json, print_lines, show_progress
from prefect_torch_elastic.errors import MissingExtraError
from prefect_torch_elastic.runkey import name_folder
from prefect_torch_elastic.runlog import Commit


def export(
    store: StoreUrl = None,
    /,
    *,
    to: To,
    run: RunKey = None,
    step: Step = None,
    credentials: Credentials = None,
    json: Json = False,
) -> int:
    """Write a checkpoint as a directory of torch.distributed.checkpoint."""
    _demand_torch()
    from prefect_torch_elastic.checkpoint.export import export_dcp

    opened, folder, commit = find_checkpoint(store, credentials, run, step)
    with show_progress(f"step {commit.step}", commit.size_bytes) as done:
        left_out = export_dcp(opened, folder, commit, to, progress=done)
    _say_written(commit, to, left_out, json=json)
    return 0


def consolidate(
    store: StoreUrl = None,
    /,
    *,
    to: To,
    run: RunKey = None,
    step: Step = None,
    format: Literal["safetensors", "torch"] = "safetensors",
    optimizer: Annotated[bool, cyclopts.Parameter(negative="", help="With the optimizers' state.")] = False,
    key: Annotated[str | None, cyclopts.Parameter(help="Only this entry of the state.")] = None,
    credentials: Credentials = None,
    json: Json = False,
) -> int:
    """Write the model of a checkpoint to one file, for evaluation or serving."""
    _demand_torch()
    from prefect_torch_elastic.checkpoint.consolidate import consolidate as write_file

    opened, folder, commit = find_checkpoint(store, credentials, run, step)
    with show_progress(f"step {commit.step}", commit.size_bytes) as done:
        left_out = write_file(
            *(opened, folder, commit, to), format=format, optimizer=optimizer, key=key, progress=done
        )
    _say_written(commit, to, left_out, json=json)
    return 0


def import_(
    store: StoreUrl = None,
    /,
    *,
    source: Annotated[
        Path, cyclopts.Parameter("--from", help="A directory of torch.distributed.checkpoint.")
    ],
    run: NewRunKey,
    step: Annotated[int, cyclopts.Parameter(help="How many optimizer steps it has completed.")],
    key: Annotated[str, cyclopts.Parameter(help="Entry of the state for a bare model.")] = "model",
    credentials: Credentials = None,
    json: Json = False,
) -> int:
    """Make a directory of torch.distributed.checkpoint the first checkpoint of a run."""
    _demand_torch()
    from prefect_torch_elastic.checkpoint.dcp_import import import_dcp

    opened = find_store(store, credentials)
    commit, left_out = import_dcp(source, opened, name_folder(run), step=step, key=key)
    _say_written(commit, f"{opened.url}/{name_folder(run)}", left_out, json=json)
    return 0


def _say_written(commit: Commit, path: Path | str, left_out: list[str], *, json: bool) -> None:
    if json:
        print_json({"step": commit.step, "uuid": commit.uuid, "path": str(path), "left_out": left_out})
        return
    print_lines([f"step {commit.step}, {render_size(commit.size_bytes)}: {path}"])
    print_lines([f"left out: {sentence}" for sentence in left_out])


def _demand_torch() -> None:
    try:
        import torch  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ModuleNotFoundError as error:
        cure = "pip install 'prefect-torch-elastic[torch]'"
        raise MissingExtraError(f"this command needs `torch`. Run `{cure}`.") from error
