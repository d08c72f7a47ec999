"""The report of one incident as a page: its cause, the culprit apart from its victims, the evidence.

Pure. Stacks unfold, each group of equal ones is shown once, and the whole stays below what the UI can bear.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import assert_never

from prefect_torch_elastic.artifacts.tables import (
    Page,
    capitalise,
    cut_text,
    escape_markdown,
    join_sections,
    render_code,
    render_details,
    render_facts_table,
    render_prose,
    render_table,
    render_time,
)
from prefect_torch_elastic.explanations import signal_name
from prefect_torch_elastic.incidents import Incident, IncidentKind, RankRow

MAX_STACK_BYTES = 4096
MAX_TRACEBACK_BYTES = 16 * 1024
MAX_LOG_LINES = 200
MAX_LOG_BYTES = 48 * 1024
MAX_ROWS = 64
MAX_FILES = 64
MAX_OWN_FRAMES = 8
MAX_STACKS = 8
RANK_HEADERS = ("rank", "node", "state", "step", "exit code", "signal", "last collective")
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)$')
_FOREIGN = re.compile(r"/(site|dist)-packages/|/lib/python3|^<frozen |/prefect_torch_elastic/")


def render_incident(
    incident: Incident, *, title: str, at: float, evidence: str = "", folder: str = ""
) -> Page:
    """Return the page of an incident.

    Args:
        incident: What is known.
        title: Of the run.
        at: When it was seen, in unix seconds.
        evidence: Where its file in the run folder is, see `evidencefile`; empty if that is not known.
        folder: Where the files of ranks are on their machines; empty if that is not known.
    """
    head = f"{_mark(incident.kind)} {escape_markdown(_name(incident))}"
    return Page(
        description=_render_description(incident),
        markdown=join_sections(
            [
                f"# {head} in {escape_markdown(title)}",
                f"**{render_prose(capitalise(incident.sentence))}**",
                render_prose(incident.consequence),
                _render_facts(incident, at),
                f"## What to do\n\n{render_prose(incident.cure)}" if incident.cure else "",
                *_render_traceback(incident),
                *_render_ranks(incident),
                *_render_stacks(incident),
                *_render_log(incident),
                *_render_files(incident, evidence, folder),
            ]
        ),
    )


def _render_description(incident: Incident) -> str:
    head = " · ".join(filter(None, [f"**{escape_markdown(_name(incident))}**", _where(incident)]))
    return f"{head}\n\n{render_prose(capitalise(incident.sentence))}"


def _where(incident: Incident) -> str:
    step = [f"step {incident.step:,}"] if incident.step is not None else []
    return " · ".join([*_list_culprit(incident), *step])


def _list_culprit(incident: Incident) -> list[str]:
    rank = [f"rank {incident.rank}"] if incident.rank is not None else []
    return [*rank, *([f"node {incident.node_rank}"] if incident.node_rank is not None else [])]


def _render_facts(incident: Incident, at: float) -> str:
    culprit = next((row for row in incident.ranks if row.rank == incident.rank), None)
    rows = [
        ("kind", _explain_kind(incident)),
        ("culprit", " on ".join(_list_culprit(incident)) or "no single one"),
        ("it ended with", _render_exit(culprit) if culprit else ""),
        ("last step", f"{incident.step:,}" if incident.step is not None else "none was reported"),
        ("victims", _render_victims(incident.victims)),
        ("seen at", render_time(at, with_day=True)),
        ("restarts before", f"{incident.restarts}"),
        ("its log", render_code(incident.log) if incident.log else ""),
    ]
    return render_facts_table(rows)


def _explain_kind(incident: Incident) -> str:
    match incident.kind:
        case IncidentKind.SUSPICION:
            return "suspicion: the gang makes no steps, nothing was ended for it"
        case IncidentKind.HANG:
            return f"hang {render_code(incident.category)}: proven, its ranks were ended"
        case IncidentKind.FAILURE:
            return f"failure {render_code(incident.category)}"
        case IncidentKind.NODE:
            return "a node was lost"
        case IncidentKind.PREEMPTION:
            return "preemption: the gang has to leave its machines"
        case _:
            assert_never(incident.kind)


def _render_victims(ranks: Sequence[int]) -> str:
    """Return ranks as ranges: `0-2, 5`, with what they are."""
    if not ranks:
        return ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {render_ranges(ranks)} (they only suffered from it)"


def render_ranges(ranks: Sequence[int]) -> str:
    """Return numbers in order, neighbours as a range: `0-2, 5`."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def _render_traceback(incident: Incident) -> list[str]:
    """Return the user's own frames, the innermost first, and the whole traceback below."""
    if not incident.traceback:
        return []
    frames = find_own_frames(incident.traceback)
    rows = [(render_code(f"{file}:{line}"), render_code(name), code) for file, line, name, code in frames]
    own = render_table(("your code, innermost first", "in", ""), rows) if rows else ""
    last = next((line for line in reversed(incident.traceback.splitlines()) if line.strip()), "")
    return [
        f"## Traceback of rank {incident.rank}",
        render_code(last[:300]) if last else "",
        own,
        render_details("The whole traceback", incident.traceback, most=MAX_TRACEBACK_BYTES),
    ]


def find_own_frames(traceback: str) -> list[tuple[str, int, str, str]]:
    """Return file, line, function and source of the frames outside of libraries, the innermost first."""
    lines = traceback.splitlines()
    frames: list[tuple[str, int, str, str]] = []
    for place, line in enumerate(lines):
        match = _FRAME.match(line)
        if match is None or _FOREIGN.search(match["file"]):
            continue
        below = lines[place + 1].strip() if place + 1 < len(lines) else ""
        source = "" if _FRAME.match(lines[place + 1] if below else "") else render_code(below[:120])
        frames.append((match["file"], int(match["line"]), match["name"], source if below else ""))
    return frames[::-1][:MAX_OWN_FRAMES]


def _render_ranks(incident: Incident) -> list[str]:
    ranks = incident.ranks
    if not ranks:
        return []
    shown, note = ranks, ""
    if len(ranks) > MAX_ROWS:
        # the culprit and whoever does something else than most are worth a row
        states = Counter(row.state for row in ranks)
        rare = sorted(ranks, key=lambda row: (row.rank != incident.rank, states[row.state]))[:MAX_ROWS]
        shown = sorted(rare, key=lambda row: row.rank)
        note = f"{MAX_ROWS} of {len(ranks):,} ranks: those that do what few others do."
    rows = [
        (
            f"{row.rank}",
            f"{row.node_rank}",
            _render_state(row, is_culprit=row.rank == incident.rank),
            "" if row.step is None else f"{row.step:,}",
            "" if row.exit_code is None else f"{row.exit_code}",
            "" if row.signal is None else signal_name(row.signal),
            escape_markdown(row.collective),
        )
        for row in shown
    ]
    return ["## Ranks", note, render_table(RANK_HEADERS, rows, right=(0, 1, 3, 4))]


def _render_state(row: RankRow, *, is_culprit: bool) -> str:
    state = escape_markdown(row.state)
    return f"**{state}** 👈" if is_culprit else state


def _render_stacks(incident: Incident) -> list[str]:
    if not incident.stacks:
        return []
    groups: list[str] = []
    for group in incident.stacks[:MAX_STACKS]:
        who = "rank" if len(group.ranks) == 1 else f"{len(group.ranks)} ranks:"
        summary = f"{who} {render_ranges(group.ranks)}"
        groups.append(render_details(summary, group.text, most=MAX_STACK_BYTES))
    left_out = len(incident.stacks) - MAX_STACKS
    more = f"{left_out} more groups are in the file below." if left_out > 0 else ""
    return [
        "## Stacks",
        "Ranks with the same stacks stand together, the innermost frame first.",
        *groups,
        more,
    ]


def _render_log(incident: Incident) -> list[str]:
    if not incident.last_lines:
        return []
    lines = incident.last_lines[-MAX_LOG_LINES:]
    text = cut_text("\n".join(lines), MAX_LOG_BYTES)
    who = f"rank {incident.rank}" if incident.rank is not None else "the culprit"
    return [
        f"## Log of {who}",
        render_details(f"The last {len(lines)} lines", text, most=MAX_LOG_BYTES),
    ]


def _render_files(incident: Incident, evidence: str, folder: str) -> list[str]:
    rows = [(f"{row.rank}", link) for row in incident.ranks for link in map(_render_link, row.files)]
    if not (rows or evidence or folder):
        return []
    left_out = len(rows) - MAX_FILES
    return [
        "## Evidence",
        f"This page as text, with whole stacks, is kept in {_render_link(evidence)}." if evidence else "",
        f"Logs and files of the ranks are in {_render_link(folder)} on their machines." if folder else "",
        render_table(("rank", "file"), rows[:MAX_FILES], right=(0,)) if rows else "",
        f"{left_out} more files lie beside them." if left_out > 0 else "",
    ]


def _render_link(place: str) -> str:
    # other schemes lose their address in the UI
    if place.startswith(("http://", "https://")) and not re.search(r"[\s()<>|]", place):
        return f"[{escape_markdown(place)}]({place})"
    return render_code(place)


def _render_exit(row: RankRow) -> str:
    if row.signal is not None:
        return signal_name(row.signal)
    return "" if row.exit_code is None else f"exit code {row.exit_code}"


def _name(incident: Incident) -> str:
    return incident.category or incident.kind.capitalize()


def _mark(kind: IncidentKind) -> str:
    match kind:
        case IncidentKind.SUSPICION:
            return "🤔"
        case IncidentKind.HANG:
            return "⏳"
        case IncidentKind.FAILURE | IncidentKind.NODE:
            return "❌"
        case IncidentKind.PREEMPTION:
            return "⚠️"
        case _:
            assert_never(kind)
