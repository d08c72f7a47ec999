"""The report of a run as a page: what ran where, what its time went into, and what went wrong. Pure."""

from __future__ import annotations

from typing import assert_never

from prefect_torch_elastic.artifacts.charts import (
    Segment,
    render_bar,
    render_curve,
    render_image,
    render_timeline,
)
from prefect_torch_elastic.artifacts.progresspage import find_main_curve, render_marks_note
from prefect_torch_elastic.artifacts.reporttables import render_checkpoints, render_incidents, render_ranks
from prefect_torch_elastic.artifacts.tables import (
    Page,
    escape_markdown,
    join_sections,
    render_bytes,
    render_code,
    render_count,
    render_duration,
    render_facts_table,
    render_prose,
    render_share,
    render_table,
    render_time,
    wrap_parts,
)
from prefect_torch_elastic.goodput import Goodput, Part, count_goodput
from prefect_torch_elastic.runfacts import (
    GangEnd,
    GangFacts,
    RoundFacts,
    RunFacts,
)

MAX_ROUND_ROWS = 60
MAX_LANES = 20

_LABELS = {
    Part.PRODUCTIVE: ("productive steps", "#16a34a"),
    Part.REPEATED: ("steps done twice", "#f59e0b"),
    Part.CHECKPOINT: ("checkpoint stall", "#3b82f6"),
    Part.HANG: ("hang until detected", "#dc2626"),
    Part.STARTUP: ("start-up", "#8b5cf6"),
    Part.TEARDOWN: ("teardown", "#0891b2"),
    Part.QUEUE: ("queue", "#94a3b8"),
    Part.OTHER: ("phases and other", "#db2777"),
}


def render_report(facts: RunFacts) -> Page:
    """Return the report of a run as it is now; `facts.ended_at` says whether it is the last one."""
    goodput = count_goodput(facts)
    headline = _list_headline(facts, goodput)
    return Page(
        description="\n\n".join(wrap_parts(headline)),
        markdown=join_sections(
            [
                f"# {_mark(facts.end)} Run report: {escape_markdown(facts.title)}",
                " · ".join(headline),
                _render_now(facts),
                *_render_goodput(goodput),
                *_render_gangs(facts),
                *_render_timeline(facts, goodput),
                *render_incidents(facts),
                *_render_curve(facts),
                *render_ranks(facts),
                *render_checkpoints(facts),
            ]
        ),
    )


def _list_headline(facts: RunFacts, goodput: Goodput) -> list[str]:
    parts = [f"**Goodput {100 * goodput.share(Part.PRODUCTIVE):.1f}%**" if facts.has_steps else ""]
    if facts.step is not None:
        total = f" of {facts.total_steps:,}" if facts.total_steps else ""
        parts.append(f"{facts.step:,}{total} steps")
    parts.append(f"{render_duration(goodput.wall_ms / 1000)} in all")
    parts.append(render_count(facts.restarts, "restart"))
    parts.append(render_count(facts.preemptions, "preemption"))
    parts.append("" if facts.cost is None else f"cost {facts.cost:,.2f}")
    return list(filter(None, parts))


def _render_now(facts: RunFacts) -> str:
    """Return what ran where, and how it ended."""
    gang = facts.gangs[-1] if facts.gangs else None
    world = max((r.world_size for g in facts.gangs for r in g.rounds), default=0)
    state = f"{_mark(facts.end)} {facts.end or 'running'}"
    cause = f": {render_prose(gang.reason)}" if facts.end and gang and gang.reason else ""
    machines = ", ".join(render_code(place) for place in gang.places[:16]) if gang else ""
    if gang and len(gang.places) > 16:
        machines += f" and {len(gang.places) - 16} more"
    until = facts.seen_at if facts.ended_at is None else facts.ended_at
    peak = max((rank.memory_bytes for rank in facts.ranks), default=0)
    gpu_peak = max((rank.gpu_memory_bytes for rank in facts.ranks), default=0)
    ran = [
        render_count(gang.nodes, "node") if gang else "",
        render_count(world, "rank"),
        escape_markdown(facts.place),
    ]
    rows = [
        ("state", state + cause),
        ("ran on", " · ".join(filter(None, ran))),
        ("machines", machines),
        ("from", render_time(facts.began_at, with_day=True)),
        ("until" if facts.ended_at is not None else "as of", render_time(until, with_day=True)),
        ("peak memory of a rank", render_bytes(peak)),
        ("peak GPU memory of a rank", render_bytes(gpu_peak)),
        ("cost", _explain_cost(facts)),
        ("run key", render_code(facts.run_key)),
    ]
    return render_facts_table(rows)


def _render_goodput(goodput: Goodput) -> list[str]:
    segments = [
        Segment(label=label, value=goodput.parts_ms[part], colour=colour)
        for part, (label, colour) in _LABELS.items()
    ]
    rows = [
        (
            label,
            render_duration(goodput.seconds(part)),
            f"{100 * goodput.share(part):.1f}%",
            render_share(goodput.share(part)),
        )
        for part, (label, _) in _LABELS.items()
        if goodput.parts_ms[part]
    ]
    if not rows:
        return []
    total = ("**all**", f"**{render_duration(goodput.wall_ms / 1000)}**", "**100.0%**", "")
    return [
        "## Where the time went",
        render_image(render_bar(segments), alt="parts of the wall time"),
        render_table(("part", "time", "share", ""), [*rows, total], right=(1, 2)),
        "Goodput is the share of productive steps: steps that no earlier try had done.",
    ]


def _render_gangs(facts: RunFacts) -> list[str]:
    names = _name_gangs(facts)
    rows = [row for gang, name in zip(facts.gangs, names, strict=True) for row in _list_gang_rows(gang, name)]
    if not rows:
        return []
    headers = ("attempt", "nodes", "ranks", "began", "lasted", "steps", "again", "end")
    left_out = len(rows) - MAX_ROUND_ROWS
    return [
        "## Attempts and restarts",
        f"The first {left_out} are not shown." if left_out > 0 else "",
        render_table(headers, rows[-MAX_ROUND_ROWS:], right=(1, 2, 4, 5, 6)),
    ]


def _name_gangs(facts: RunFacts) -> list[str]:
    """Return the numbers of their attempts; a gang whose machines were taken away comes back with its own."""
    before = [0, *(gang.attempt for gang in facts.gangs)]
    return [
        f"{gang.attempt},\u00a0again" if gang.attempt == earlier else f"{gang.attempt}"
        for gang, earlier in zip(facts.gangs, before, strict=False)
    ]


def _list_gang_rows(gang: GangFacts, title: str) -> list[tuple[str, ...]]:
    """Return a row for each round; how the gang ended stands in the last one."""
    rows: list[tuple[str, ...]] = []
    for place, current in enumerate(gang.rounds):
        name = title if place == 0 else f"{gang.attempt},\u00a0restart\u00a0{place}"
        ended = current.ended_at
        rows.append(
            (
                name,
                f"{current.nodes}",
                f"{current.world_size}",
                render_time(current.started_at),
                "" if ended is None else render_duration(max(0.0, ended - current.started_at)),
                _render_steps(current),
                f"{current.repeated_steps:,}",
                _render_end(gang, current),
            )
        )
    if not rows:
        lasted = "" if gang.ended_at is None else render_duration(max(0.0, gang.ended_at - gang.began_at))
        end = _render_end(gang, None)
        rows.append((title, f"{gang.nodes}", "", render_time(gang.began_at), lasted, "", "", end))
    return rows


def _render_steps(current: RoundFacts) -> str:
    if current.first_step is None or current.last_step is None:
        return "none"
    return f"{current.first_step:,}\u00a0→\u00a0{current.last_step:,}"


def _render_end(gang: GangFacts, current: RoundFacts | None) -> str:
    """Return how a round, or with the last one its gang, ended, in a word or two."""
    why = f": {escape_markdown(current.category)}" if current is not None and current.category else ""
    is_over = current is None or current is gang.rounds[-1]
    if is_over and (gang.end is not None or current is None or current.end is None):
        return f"{_mark(gang.end)} {gang.end or 'running'}{why}"
    return f"{'❌' if why else '🔁'} {current.end if current else ''}{why}"


def _render_timeline(facts: RunFacts, goodput: Goodput) -> list[str]:
    """Return a picture of the gangs over time; one gang alone is told by the bar already."""
    if len(facts.gangs) + facts.restarts < 2 or not goodput.wall_ms:
        return []
    begin = facts.began_at * 1000
    shown, names = facts.gangs[-MAX_LANES:], _name_gangs(facts)[-MAX_LANES:]
    lanes: list[tuple[str, list[tuple[float, float, str]]]] = []
    for place, gang in enumerate(shown):
        lane_begin = gang.began_at * 1000
        lane_end = shown[place + 1].began_at * 1000 if place + 1 < len(shown) else begin + goodput.wall_ms
        if place == 0:
            lane_begin = begin if len(shown) == len(facts.gangs) else lane_begin
        pieces = [
            (max(span.begin_ms, lane_begin), min(span.end_ms, lane_end), _LABELS[span.part][1])
            for span in goodput.spans
            if span.end_ms > lane_begin and span.begin_ms < lane_end
        ]
        lanes.append((f"attempt {names[place]}", pieces))
    used = {span.part for span in goodput.spans}
    picture = render_timeline(
        lanes,
        begin=begin,
        end=begin + goodput.wall_ms,
        end_label=render_duration(goodput.wall_ms / 1000),
        legend=[(colour, label) for part, (label, colour) in _LABELS.items() if part in used],
    )
    return [render_image(picture, alt="attempts over time")]


def _render_curve(facts: RunFacts) -> list[str]:
    curve = find_main_curve(facts)
    if curve is None or len(curve.points) < 2:
        return []
    chart = render_image(render_curve(curve.name, curve.points, marks=facts.resumed_at_steps), alt=curve.name)
    return [f"## {escape_markdown(curve.name.capitalize())}", chart, render_marks_note(facts)]


def _explain_cost(facts: RunFacts) -> str:
    if facts.cost is None:
        return ""
    return f"{facts.cost:,.2f} ({facts.node_hours:,.2f} node hours at {facts.price_per_node_hour:,g})"


def _mark(end: GangEnd | None) -> str:
    match end:
        case None:
            return "▶️"
        case GangEnd.SUCCEEDED:
            return "✅"
        case GangEnd.FAILED:
            return "❌"
        case GangEnd.PREEMPTED:
            return "⚠️"
        case GangEnd.CANCELLED:
            return "⏹️"
        case GangEnd.TIMED_OUT:
            return "⏱️"
        case GangEnd.LOST:
            return "❓"
        case _:
            assert_never(end)
