"""The tables of a run's report: what went wrong, its ranks, its checkpoints. Pure."""

from __future__ import annotations

import re

from prefect_torch_elastic.artifacts.tables import (
    escape_markdown,
    render_bytes,
    render_code,
    render_count,
    render_duration,
    render_prose,
    render_step_time,
    render_table,
    render_time,
)
from prefect_torch_elastic.runfacts import (
    IncidentFacts,
    RankFacts,
    RunFacts,
    describe_slowness,
    find_slow_ranks,
)

MAX_RANK_ROWS = 32
MAX_CHECKPOINT_ROWS = 20


def render_incidents(facts: RunFacts) -> list[str]:
    """Return the incidents, each with a link to its own page; without any, what the rounds failed of.

    A list, because V1 of the UI does not wrap the lines of a table.
    """
    lines = [_render_incident(incident) for incident in facts.incidents] or _list_causes(facts)
    return ["## What went wrong", "\n".join(lines)] if lines else []


def _render_incident(incident: IncidentFacts) -> str:
    name = escape_markdown(incident.category or incident.kind)
    is_link = re.fullmatch(r"https?://[^\s()<>]+", incident.url)
    parts = [
        f"{render_time(incident.at)} UTC",
        f"**[{name}]({incident.url})**" if is_link else f"**{name}**",
        f"step {incident.step:,}" if incident.step is not None else "",
        render_prose(incident.sentence),
    ]
    return f"- {' · '.join(filter(None, parts))}"


def _list_causes(facts: RunFacts) -> list[str]:
    causes: dict[str, float] = {}
    for gang in facts.gangs:
        for ended in gang.rounds:
            causes.setdefault(ended.cause, ended.ended_at or ended.started_at)
        causes.setdefault(gang.reason, gang.ended_at or gang.began_at)
    return [f"- {render_time(at)} UTC · {render_prose(cause)}" for cause, at in causes.items() if cause]


def render_ranks(facts: RunFacts) -> list[str]:
    """Return the ranks with their step times and memory, the slow ones named."""
    ranks = [rank for rank in facts.ranks if rank.step_seconds > 0 or rank.memory_bytes > 0]
    if not ranks:
        return []
    shown, note = ranks, ""
    if len(ranks) > MAX_RANK_ROWS:
        shown = sorted(ranks, key=lambda rank: (-rank.delay, -rank.step_seconds))[:MAX_RANK_ROWS]
        note = f"The {MAX_RANK_ROWS} slowest of {len(ranks):,} ranks."
    has_gpu = any(rank.gpu_memory_bytes for rank in ranks)
    headers = ["rank", "node", "steps", "step p50", "step p95", "longest", "waited for", "memory"]
    headers += ["GPU memory"] if has_gpu else []
    rows = [_render_rank(rank)[: len(headers)] for rank in shown]
    table = render_table(headers, rows, right=range(len(headers)))
    return ["## Ranks", _render_slowest(ranks), note, table]


def _render_rank(rank: RankFacts) -> list[str]:
    return [
        f"{rank.rank}",
        f"{rank.node}",
        f"{rank.steps:,}",
        render_step_time(rank.step_seconds),
        render_step_time(rank.step_p95_seconds),
        render_step_time(rank.longest_seconds),
        f"{rank.delay:.0%}" if rank.delay >= 0.005 else "",
        render_bytes(rank.memory_bytes),
        render_bytes(rank.gpu_memory_bytes),
    ]


def _render_slowest(ranks: list[RankFacts]) -> str:
    timed = [rank for rank in ranks if rank.step_seconds > 0]
    if len(timed) < 2:
        return ""
    slowest = max(timed, key=lambda rank: rank.step_seconds)
    if slow := find_slow_ranks(ranks):
        names = ", ".join(f"rank {rank.rank} (node {rank.node})" for rank in slow[:8])
        return f"🐢 **Slower than the others: {names}.** Of the slowest: {describe_slowness(slow[0])}."
    return f"No rank stands out; the slowest is rank {slowest.rank} with {_step(slowest)} a step."


def _step(rank: RankFacts) -> str:
    return render_step_time(rank.step_seconds)


def render_checkpoints(facts: RunFacts) -> list[str]:
    """Return the newest checkpoints, and what all of them cost."""
    if not facts.checkpoint_count:
        return []
    rows = [
        (
            f"{saved.step:,}",
            render_time(saved.at),
            render_bytes(saved.size_bytes),
            render_duration(saved.seconds),
            f"{saved.size_bytes / saved.seconds / 1e6:,.0f}" if saved.seconds > 0 else "",
            render_duration(saved.stall_seconds),
            render_code(saved.key),
        )
        for saved in facts.checkpoints[-MAX_CHECKPOINT_ROWS:]
    ]
    written = render_count(facts.checkpoint_count, "checkpoint")
    totals = (
        f"{written}, {render_bytes(facts.checkpoint_bytes) or '0 B'} in all; "
        f"training stood still for {render_duration(facts.checkpoint_stall_seconds)}."
    )
    if facts.checkpoint_count > len(rows):
        totals += f" The newest {len(rows)}:"
    headers = ("step", "at (UTC)", "size", "written in", "MB/s", "stall", "folder")
    return ["## Checkpoints", totals, render_table(headers, rows, right=(0, 2, 3, 4, 5))]
