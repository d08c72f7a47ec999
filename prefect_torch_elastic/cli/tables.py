"""The tables of runs, checkpoints and entries, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefect_torch_elastic.checkpoint.manifest import render_size
from prefect_torch_elastic.cli.rendering import print_lines, print_table, render_metrics, render_time
from prefect_torch_elastic.cli.summary import CheckpointCheck, CheckpointRow, RunRow


def print_runs(rows: Sequence[RunRow], *, title: str) -> None:
    """Print the runs of a store, and below them what is wrong with a log."""
    columns = ("Run", "Checkpoints", "Newest step", "Size", "Ranks", "Epoch", "Damaged", "Last change")
    cells = [
        (
            row.run,
            "" if row.problem else str(row.checkpoints),
            "" if row.newest_step is None else str(row.newest_step),
            "" if row.problem else render_size(row.size_bytes),
            str(row.world_size or ""),
            "" if row.problem else str(row.epoch),
            "log damaged" if row.problem else str(row.damaged or ""),
            render_time(row.changed),
        )
        for row in rows
    ]
    print_table(columns, cells, title=title)
    print_lines([f"{row.run}: {row.problem}" for row in rows if row.problem])


def print_checkpoints(rows: Sequence[CheckpointRow], *, title: str) -> None:
    """Print the checkpoints of a run."""
    columns = ("Step", "Saved", "Size", "Ranks", "Epoch", "Metrics", "State")
    cells = [
        (
            str(row.commit.step),
            render_time(row.saved),
            render_size(row.commit.size_bytes),
            str(row.commit.world_size),
            str(row.commit.epoch),
            render_metrics(row.commit.metrics),
            row.state,
        )
        for row in rows
    ]
    print_table(columns, cells, title=title)


def print_checkpoint(facts: Mapping[str, Any]) -> None:
    """Print what `describe_checkpoint` says of one checkpoint."""
    columns = ("Entry", "Kind", "Tensors", "Elements", "Dtypes")
    cells = [
        (
            group["entry"],
            group["kind"],
            str(group["tensors"]),
            f"{group['elements']:,}",
            ", ".join(group["dtypes"]),
        )
        for group in facts["entries"]
    ]
    print_table(columns, cells, title=f"Step {facts['step']} of {facts['run']}")
    print_lines(
        [
            f"{render_size(facts['size_bytes'])}, world size {facts['world_size']}, saved in "
            f"{facts['seconds']:.2f} s by epoch {facts['epoch']} as {facts['uuid']}",
            *([f"metrics: {render_metrics(facts['metrics'])}"] if facts["metrics"] else []),
            "with " + ", ".join(f"{name} {number}" for name, number in facts["versions"].items()),
        ]
    )


def print_check(check: CheckpointCheck) -> None:
    """Print what reading one checkpoint has found, or what a load had found before."""
    if check.reason:
        print_lines([f"step {check.step}: damaged, as a load found: {check.reason}"])
        return
    word = "whole" if check.ok else "damaged"
    print_lines([f"step {check.step}: {word}, {render_size(check.size_bytes)} read"])
    print_lines([f"  {damage}" for damage in check.damages])
