"""An incident as a text file in the run folder: with all that the gang's leader got to know of it. Pure.

Logs and stacks of ranks stay on their machines, and a pod's go with it; this file is beside the checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from prefect_torch_elastic.artifacts.incidentpage import RANK_HEADERS, render_ranges
from prefect_torch_elastic.artifacts.tables import capitalise, clean_text, render_time
from prefect_torch_elastic.explanations import signal_name
from prefect_torch_elastic.incidents import Incident, RankRow


def render_evidence_key(incident: Incident, *, folder: str, number: int, at: float) -> str:
    """Return the key of the file; keys of a run are in the order of time.

    Args:
        incident: It.
        folder: Name of the run folder.
        number: Of the incident in the run.
        at: When it was seen, in unix seconds.
    """
    moment = datetime.fromtimestamp(at, UTC)
    return f"{folder}/incidents/{moment:%Y%m%dT%H%M%SZ}-{number:02}-{incident.kind}.txt"


def render_evidence(incident: Incident, *, title: str, at: float) -> str:
    """Return the text of the file.

    Args:
        incident: What is known.
        title: Of the run.
        at: When it was seen, in unix seconds.
    """
    head = " ".join(filter(None, [incident.kind.capitalize(), incident.category]))
    said = (incident.sentence, incident.consequence, incident.cure)
    sections = [
        f"{head} in {title}, {render_time(at, with_day=True)}",
        "\n".join(capitalise(text) for text in said if text),
        _render_ranks(incident.ranks),
        _render_section(f"Traceback of rank {incident.rank}", incident.traceback),
        *(_render_section(f"Stacks of {_name_ranks(one.ranks)}", one.text) for one in incident.stacks),
        _render_section("The end of the log", "\n".join(incident.last_lines)),
        _render_section("Files on the machines", "\n".join(_list_files(incident.ranks))),
    ]
    return clean_text("\n\n".join(filter(None, sections))) + "\n"


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {render_ranges(ranks)}"


def _render_ranks(ranks: Sequence[RankRow]) -> str:
    rows = [RANK_HEADERS, *map(_render_row, ranks)] if ranks else []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return _render_section("Ranks", "\n".join(lines))


def _render_row(row: RankRow) -> tuple[str, ...]:
    numbers = (row.rank, row.node_rank, row.step, row.exit_code)
    rank, node, step, exit_code = ("-" if number is None else f"{number}" for number in numbers)
    signal = "-" if row.signal is None else signal_name(row.signal)
    return rank, node, row.state, step, exit_code, signal, row.collective


def _list_files(ranks: Sequence[RankRow]) -> list[str]:
    return [f"rank {row.rank}: {path}" for row in ranks for path in row.files]


def _render_section(title: str, text: str) -> str:
    return f"== {title}\n{text.strip(chr(10))}" if text.strip() else ""
