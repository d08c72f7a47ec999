"""Text as the UI's markdown shows it: numbers for people, tables, words of others without effect. Pure.

Neither UI formats numbers, both strip styles, and a blank line ends a block of HTML: what others wrote is
escaped, and preformatted text has no blank line in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

from prefect_torch_elastic.checkpoint.manifest import render_size

MAX_PAGE_BYTES = 256 * 1024  # the lists of the UI fetch all pages whole, again and again
MAX_SMALL_PAGE_BYTES = 64 * 1024
LINE_CHARACTERS = 38  # the card of an artifact clips lines at about 40
_MARKUP = re.compile(r"([\\`*_{}\[\]#|~$])")
_UNSENDABLE = re.compile("[\0\ud800-\udfff]")  # a database or UTF-8 does not take them
_SPACES = re.compile(r"[ \t\r\n]+")  # not those that keep words together
_BARE_PIPE = re.compile(r"(?<!\\)\|")
_BAR = 24


@dataclass(frozen=True, kw_only=True)
class Page:
    """A markdown artifact: the line on its card, and its text."""

    description: str
    markdown: str


def render_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Return a table; columns in which nothing stands are left out.

    Args:
        headers: Of the columns, plain words.
        rows: Cells, markdown of one line.
        right: Indices of columns with numbers, which are aligned at the right.
    """
    columns = [column for column in range(len(headers)) if any(row[column] for row in rows)]
    marks = ["---:" if column in right else "---" for column in range(len(headers))]
    lines = [[_render_cell(line[column]) for column in columns] for line in (headers, marks, *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _render_cell(text: str) -> str:
    return _BARE_PIPE.sub(r"\\|", _SPACES.sub(" ", text))


def render_facts_table(rows: Sequence[tuple[str, str]]) -> str:
    """Return names and values in two columns, the first as the head; rows without a value are left out."""
    (name, value), *rest = [(name, value) for name, value in rows if value]
    return render_table((name, value), [(f"**{name}**", value) for name, value in rest])


def render_details(summary: str, text: str, *, most: int) -> str:
    """Return preformatted text that unfolds, as one block of HTML: a blank line would end it.

    Args:
        summary: One line, plain text.
        text: Plain text.
        most: Bytes of it that are kept, see `cut_text`.
    """
    lines = escape(cut_text(text.strip("\n"), most), quote=False).splitlines()
    body = "\n".join(line if line.strip() else "&nbsp;" for line in lines)
    return (
        f"<details><summary><b>{escape(' '.join(summary.split()))}</b></summary><pre>{body}</pre></details>"
    )


def escape_markdown(text: str) -> str:
    """Return plain text as one line of markdown that shows it as it is."""
    return _escape_keeping_ends(text).strip()


def render_code(text: str) -> str:
    """Return a path or a name in letters of equal width."""
    line = " ".join(text.split()).replace("`", "'")
    return f"`{line}`"


def render_prose(text: str) -> str:
    """Return a sentence of ours, in which words between backticks are code, as one line of markdown."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # somebody else's backtick is among them
        return escape_markdown(text)
    return "".join(
        render_code(piece) if place % 2 and piece.strip() else _escape_keeping_ends(piece)
        for place, piece in enumerate(pieces)
    ).strip()


def _escape_keeping_ends(text: str) -> str:
    return _MARKUP.sub(r"\\\1", escape(_SPACES.sub(" ", text), quote=False))


def clean_text(text: str) -> str:
    """Return a text that can be sent: what neither UTF-8 nor a database can hold is replaced."""
    return _UNSENDABLE.sub("\ufffd", text)


def capitalise(text: str) -> str:
    """Return a sentence with a capital at its begin; the rest stays."""
    return text[:1].upper() + text[1:]


def wrap_parts(parts: Sequence[str]) -> list[str]:
    """Return the parts of a card on as few short lines as they fit on."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 3 + len(part) <= LINE_CHARACTERS:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return lines


def cut_text(text: str, most: int) -> str:
    """Return at most so many bytes of a text, its begin and its end, and between them how much is missing."""
    text = clean_text(text)
    size = len(text.encode())
    if size <= most:
        return text
    lines = text.splitlines()
    head: list[str] = []
    tail: list[str] = []
    room, front, back = most - 60, 0, len(lines)
    while front < back:
        place = front if len(head) <= len(tail) else back - 1
        cost = len(lines[place].encode()) + 1
        if cost > room:
            break
        room -= cost
        if place == front:
            head.append(lines[place])
            front += 1
        else:
            tail.insert(0, lines[place])
            back -= 1
    if not head and not tail:  # one long line
        return text.encode()[: max(0, most - 60)].decode(errors="ignore") + f" … {size:,} bytes in all"
    return "\n".join([*head, f"… {back - front:,} lines are left out here …", *tail])


def join_sections(sections: Sequence[str], *, most: int = MAX_PAGE_BYTES) -> str:
    """Return the sections of a page; those that do not fit are left out, and it is said how many."""
    kept: list[str] = []
    room = most - 200
    left_out = 0
    for section in map(clean_text, filter(None, sections)):
        if (cost := len(section.encode()) + 2) > room:
            left_out += 1
            continue
        room -= cost
        kept.append(section)
    if left_out:
        verb = "section does" if left_out == 1 else "sections do"
        kept.append(f"*{left_out} {verb} not fit on a page of {most // 1024} KB.*")
    return "\n\n".join(kept) + "\n"


def render_share(share: float) -> str:
    """Return a bar for 0 to 1."""
    return "█" * round(share * _BAR) if share * _BAR >= 0.5 else "▏" if share > 0 else ""


def render_duration(seconds: float) -> str:
    """Return `0.42 s`, `12.3 s`, `4m05s`, `3h04m` or `2d03h`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def render_step_time(seconds: float) -> str:
    """Return `412 ms` or `1.23 s`; nothing for an unknown one."""
    if seconds <= 0:
        return ""
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def render_bytes(count: float) -> str:
    """Return `1.2 GiB`; nothing for an unknown size."""
    return render_size(count) if count > 0 else ""


def render_time(at: float, *, with_day: bool = False) -> str:
    """Return the time of day in UTC."""
    moment = datetime.fromtimestamp(at, UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC" if with_day else f"{moment:%H:%M:%S}"


def render_count(number: int, word: str) -> str:
    """Return `1 node` or `2 nodes`; nothing for none."""
    return f"{number:,} {word}{'' if number == 1 else 's'}" if number else ""
