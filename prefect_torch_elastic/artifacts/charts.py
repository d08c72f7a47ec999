"""Small SVGs as `data:` images in markdown: both UIs of Prefect show them, and they follow the page's theme.

Pure. Inline `<svg>` would be stripped and an image artifact prints its URL below itself, so a chart is an
image of markdown. An SVG there sees nothing of the page but its colour scheme; its ground stays transparent.
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from prefect_torch_elastic.artifacts.tables import clean_text

MAX_POINTS = 200

# Colours that stand on white and on dark slate; text and lines change with the theme.
_STYLE = (
    "<style>text{font:11px system-ui,sans-serif;fill:#475569}.g{stroke:#cbd5e1;stroke-width:1}"
    ".m{stroke:#b45309;stroke-width:1;stroke-dasharray:3 3}.c{fill:none;stroke:#2563eb;stroke-width:1.6;"
    "stroke-linejoin:round}.d{fill:#2563eb}.t{font-weight:600;fill:#1e293b}"
    "@media(prefers-color-scheme:dark){text{fill:#a8b3c4}.g{stroke:#334155}.m{stroke:#fbbf24}.c{stroke:#60a5fa}"
    ".d{fill:#60a5fa}.t{fill:#e2e8f0}}</style>"
)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A piece of a bar: `value` in any unit, `colour` as in CSS."""

    label: str
    value: float
    colour: str


def render_image(svg: str, *, alt: str) -> str:
    """Return an SVG as an image of markdown."""
    alt = "".join(" " if c in "[]()\\\n\r!`" else c for c in alt)
    return f"![{alt}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"


def render_curve(
    name: str,
    points: Sequence[tuple[float, float]],
    *,
    width: int = 640,
    height: int = 220,
    marks: Sequence[float] = (),
) -> str:
    """Return a line chart of a metric over steps.

    Args:
        name: Of the metric.
        points: In the order of the steps; those without a finite value are left out.
        width: Of the picture.
        height: Of the picture.
        marks: Steps at which training went on after a restart: dashed lines.
    """
    kept = thin_out([(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)], MAX_POINTS)
    if not kept:
        return _frame(
            width, height, _text(width / 2, height / 2, f"no values of {name} yet", anchor="middle")
        )
    ticks = find_ticks(min(y for _, y in kept), max(y for _, y in kept), 3 if height < 160 else 5)
    (first, _), (last, newest) = kept[0], kept[-1]
    left = 10 + 6.2 * max(len(shorten(tick)) for tick in ticks)
    edges = {"left": left, "right": width - 12, "top": 26, "bottom": height - 20}
    plane = _Plane(**edges, x=(first, last), y=(ticks[0], ticks[-1]))
    parts = [
        _text(left, 14, name, kind="t"),
        _text(plane.right, 14, f"{shorten(newest)} at step {last:,.0f}", anchor="end"),
        *_render_ticks(plane, ticks),
        *(_render_mark(plane, mark) for mark in marks if first <= mark <= last),
        _text(left, height - 5, f"{first:,.0f}"),
    ]
    if last > first:
        path = " ".join(f"{plane.at_x(x):.1f},{plane.at_y(y):.1f}" for x, y in kept)
        parts.append(_text(plane.right, height - 5, f"{last:,.0f}", anchor="end"))
        parts.append(f'<polyline class="c" points="{path}"/>')
    parts.append(f'<circle cx="{plane.at_x(last):.1f}" cy="{plane.at_y(newest):.1f}" r="3" class="d"/>')
    return _frame(width, height, *parts)


@dataclass(frozen=True, kw_only=True)
class _Plane:
    """Where values lie on the picture: `x` and `y` are the values at its edges."""

    left: float
    right: float
    top: float
    bottom: float
    x: tuple[float, float]
    y: tuple[float, float]

    def at_x(self, x: float) -> float:
        return self.left + (self.right - self.left) * _find_share(x, *self.x)

    def at_y(self, y: float) -> float:
        return self.bottom - (self.bottom - self.top) * _find_share(y, *self.y)


def _find_share(value: float, low: float, high: float) -> float:
    """Return where a value lies between two others, 0 to 1; in halves, as the whole may be infinite."""
    span = high / 2 - low / 2
    return (value / 2 - low / 2) / span if span > 0 else 0.5


def _render_mark(plane: _Plane, x: float) -> str:
    return _line(plane.at_x(x), plane.top, plane.at_x(x), plane.bottom, "m")


def _render_ticks(plane: _Plane, ticks: Sequence[float]) -> list[str]:
    parts: list[str] = []
    for tick in ticks:
        y = plane.at_y(tick)
        parts.append(_line(plane.left, y, plane.right, y, "g"))
        parts.append(_text(plane.left - 5, y + 4, shorten(tick), anchor="end"))
    return parts


def render_bar(segments: Sequence[Segment], *, width: int = 640) -> str:
    """Return one bar of segments by their values, with a legend of those that are not empty."""
    kept = [segment for segment in segments if segment.value > 0]
    total = sum(segment.value for segment in kept)
    parts: list[str] = []
    x = 0.0
    for segment in kept:
        wide = width * segment.value / total
        parts.append(f'<rect x="{x:.1f}" y="0" width="{wide:.1f}" height="24" fill="{segment.colour}"/>')
        x += wide
    labels = [f"{segment.label} {100 * segment.value / total:.1f}%" for segment in kept]
    legend, height = _legend([(s.colour, label) for s, label in zip(kept, labels, strict=True)], 34, width)
    return _frame(width, height, *parts, *legend)


def render_timeline(
    lanes: Sequence[tuple[str, Sequence[tuple[float, float, str]]]],
    *,
    begin: float,
    end: float,
    end_label: str,
    legend: Sequence[tuple[str, str]] = (),
    width: int = 640,
) -> str:
    """Return lanes of coloured pieces over the same time.

    Args:
        lanes: Name, and pieces `(begin, end, colour)` of each.
        begin: Where the picture begins, in the unit of the pieces.
        end: Where it ends.
        end_label: What is written there; `0` stands at its begin.
        legend: Colours and what they mean.
        width: Of the picture.
    """
    left = 14 + 6.4 * max((len(name) for name, _ in lanes), default=0)
    scale = (width - left) / max(end - begin, 1e-9)
    parts: list[str] = []
    for place, (name, pieces) in enumerate(lanes):
        y = 4 + 24 * place
        parts.append(_text(0, y + 13, name))
        parts.append(_line(left, y + 18.5, width, y + 18.5, "g"))
        for piece_begin, piece_end, colour in pieces:
            x, wide = left + (piece_begin - begin) * scale, max(0.8, (piece_end - piece_begin) * scale)
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="18" fill="{colour}"/>')
    below = 4 + 24 * len(lanes)
    parts += [_text(left, below + 12, "0"), _text(width, below + 12, end_label, anchor="end")]
    entries, height = _legend(legend, below + 24, width)
    return _frame(width, height, *parts, *entries)


def _legend(entries: Sequence[tuple[str, str]], y: float, width: int) -> tuple[list[str], int]:
    """Return the legend's elements and the height of the picture below it."""
    parts: list[str] = []
    x = 0.0
    for colour, label in entries:
        wide = 30 + 5.9 * len(label)
        if x and x + wide > width:
            x, y = 0.0, y + 19
        parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="11" height="11" rx="2" fill="{colour}"/>')
        parts.append(_text(x + 16, y + 10, label))
        x += wide
    return parts, int(y + 18) if entries else int(y)


def thin_out(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return at most so many of the points, evenly chosen, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(place * (len(points) - 1) / (most - 1))] for place in range(most)]


def find_ticks(low: float, high: float, most: int) -> list[float]:
    """Return round values, at least two, that enclose all from `low` to `high`, about `most` of them."""
    if high - low <= 1e-9 * abs(low):  # no two floats between them, or nearly so: a line
        pad = abs(low) * 0.1 or 1.0
        low, high = max(low - pad, -sys.float_info.max), min(high + pad, sys.float_info.max)
    rough = (high - low) / max(1, most - 1)
    if not 1e-300 < rough < 1e300:  # floats end here, and training has ended before
        return [low, high]
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * place, 12) if abs(step) > 1e-9 else step * place for place in range(first, last + 1)]


def shorten(value: float) -> str:
    """Return a number in few characters: `1,234`, `0.0123`, `1.2e-05`."""
    if value == int(value) and abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _frame(width: int, height: int, *parts: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    return f'{head} viewBox="0 0 {width} {height}">{_STYLE}{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> str:
    kind = f' class="{kind}"' if kind else ""
    anchor = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{anchor}{kind}>{escape(clean_text(text))}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
