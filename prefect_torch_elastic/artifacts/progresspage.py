"""How far a run is: the text beside the progress artifact's donut, and the page of its metrics. Pure.

The card of an artifact clips lines at about 40 characters, so each line is short. Of the metrics of rank 0,
`samples_per_second` and `tokens_per_second` are rates; `samples` and `tokens` are counts of one step over the
whole gang, and become rates with the speed of the steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prefect_torch_elastic.artifacts.charts import render_curve, render_image, shorten
from prefect_torch_elastic.artifacts.tables import (
    MAX_SMALL_PAGE_BYTES,
    Page,
    escape_markdown,
    join_sections,
    render_count,
    render_duration,
    render_table,
    wrap_parts,
)
from prefect_torch_elastic.runfacts import Curve, RunFacts

_COUNTS = ("samples", "tokens")


@dataclass(frozen=True, kw_only=True)
class ProgressPage:
    """A progress artifact: per cent, and its description."""

    percent: float
    description: str


def render_progress(facts: RunFacts) -> ProgressPage:
    """Return the state of a run for its donut, with the chart of the loss."""
    percent = _percent(facts)
    lines = [_render_step(facts, percent), *wrap_parts(_list_numbers(facts))]
    if (curve := find_main_curve(facts)) is not None and len(curve.points) > 1:
        chart = render_curve(curve.name, curve.points, width=380, height=130, marks=facts.resumed_at_steps)
        lines.append(render_image(chart, alt=curve.name))
    return ProgressPage(percent=round(percent or 0.0, 1), description="\n\n".join(lines))


def render_metrics(facts: RunFacts) -> Page:
    """Return the page of a run's metrics: a chart each, and their newest values."""
    percent = _percent(facts)
    numbers = _list_numbers(facts)
    charts = [
        render_image(render_curve(c.name, c.points, marks=facts.resumed_at_steps), alt=c.name)
        for c in facts.curves
        if c.name not in _COUNTS
    ]
    rows = [(escape_markdown(name), _short(value)) for name, value in facts.metrics.items()]
    return Page(
        description=_render_step(facts, percent),
        markdown=join_sections(
            [
                f"# Metrics of {escape_markdown(facts.title)}",
                " · ".join([_render_step(facts, percent), *numbers]),
                *charts,
                render_marks_note(facts),
                render_table(("metric", "newest"), rows, right=(1,)) if rows else "No metrics were reported.",
            ],
            most=MAX_SMALL_PAGE_BYTES,
        ),
    )


def find_main_curve(facts: RunFacts) -> Curve | None:
    """Return the metric that people look at first: `loss`, else one with that in its name, else the first."""
    ordered = sorted(facts.curves, key=lambda curve: (curve.name != "loss", "loss" not in curve.name))
    return ordered[0] if ordered else None


def render_marks_note(facts: RunFacts) -> str:
    """Return what the marks in a chart mean; nothing if there are none."""
    return "Dashed lines: training went on there after a restart." if facts.resumed_at_steps else ""


def _percent(facts: RunFacts) -> float | None:
    if not facts.total_steps or facts.step is None:
        return None
    return min(100.0, max(0.0, 100 * facts.step / facts.total_steps))


def _render_step(facts: RunFacts, percent: float | None) -> str:
    if facts.step is None:
        return "no step yet"
    if percent is None:
        return f"**step {facts.step:,}**"
    return f"**{percent:.1f}%** · step {facts.step:,}/{facts.total_steps:,}"


def _list_numbers(facts: RunFacts) -> list[str]:
    """Return the numbers beside the step, each a few words."""
    parts: list[str] = []
    speed = facts.steps_per_second
    main = find_main_curve(facts)
    if main is not None and main.name in facts.metrics:
        parts.append(f"{escape_markdown(main.name[:20])} {_short(facts.metrics[main.name])}")
    if speed > 0:
        parts.append(f"{speed:.3g} steps/s" if speed >= 0.1 else f"{render_duration(1 / speed)} a step")
    parts += [
        f"{shorten(round(rate) if rate >= 100 else rate)} {name}/s" for name, rate in _list_rates(facts)
    ]
    if speed > 0 and facts.total_steps and facts.step is not None and facts.step < facts.total_steps:
        parts.append(f"ETA {render_duration((facts.total_steps - facts.step) / speed)}")
    if facts.phase:
        parts.append(f"in {escape_markdown(facts.phase[:24])}")
    parts += [render_count(facts.preemptions, "preemption"), render_count(facts.restarts, "restart")]
    return list(filter(None, parts))


def _list_rates(facts: RunFacts) -> list[tuple[str, float]]:
    rates: list[tuple[str, float]] = []
    for name in _COUNTS:
        given, count = facts.metrics.get(f"{name}_per_second"), facts.metrics.get(name)
        if isinstance(given, float):
            rates.append((name, given))
        elif isinstance(count, float) and facts.steps_per_second > 0:
            rates.append((name, count * facts.steps_per_second))
    return [(name, rate) for name, rate in rates if math.isfinite(rate)]


def _short(value: float | str) -> str:
    if isinstance(value, str):
        return escape_markdown(value[:40])
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.4g}"
