"""The pages keep their word: their Python runs, their `make` targets exist, their links lead somewhere.

Each page's Python blocks run in one namespace and one fresh interpreter, at the line numbers of the page, so
that a traceback points into the page. An HTML comment on the line before a block changes that, with a reason:
`<!-- skip: needs a cluster -->` leaves it alone, `<!-- no-run: needs 8 GPUs -->` compiles it only.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import assert_never

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if path.is_file()]
LINKED = sorted({*PAGES, *ROOT.glob("*.md"), *(ROOT / "flows").rglob("*.md")})
PAGE_SECONDS = 240.0

FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w-]*)")
ORDER = re.compile(r"^\s*<!--\s*(?P<verb>skip|no-run)\b:?\s*(?P<reason>.*?)\s*-->\s*$")
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)(?:\s+\"[^\"]*\")?\)")
SHELLS = {"bash", "sh", "shell", "console"}


class Order(StrEnum):
    """What to do with a block."""

    RUN = "run"
    COMPILE = "no-run"
    LEAVE = "skip"


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block of a page; `line` is that of its first line of text, from 1."""

    language: str
    text: str
    line: int
    order: Order


def parse_blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page, top to bottom."""
    lines = page.splitlines()
    number = 0
    while number < len(lines):
        fence = FENCE.match(lines[number])
        number += 1
        if not fence:
            continue
        first = number
        while number < len(lines) and lines[number].strip() != fence["ticks"]:
            number += 1
        text = textwrap.dedent("\n".join(lines[first:number])) + "\n"
        order = parse_order(lines[first - 2] if first >= 2 else "", line=first - 1)
        yield Block(language=fence["language"], text=text, line=first + 1, order=order)
        number += 1


def parse_order(comment: str, *, line: int) -> Order:
    """Return what the line before a block asks for."""
    match = ORDER.match(comment)
    if not match:
        return Order.RUN
    if not match["reason"]:
        raise ValueError(f"Line {line}: `{comment.strip()}` has no reason. Write `<!-- skip: why -->`.")
    return Order(match["verb"])


def render_script(blocks: list[Block]) -> str:
    """Return one script of all blocks to run, each at its line of the page."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    return "\n".join(lines) + "\n"


def blocks_of(page: Path, *languages: str) -> list[Block]:
    return [block for block in parse_blocks(page.read_text()) if block.language in languages]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def make_targets(shell: str) -> Iterator[str]:
    """Yield what a shell text asks `make` for."""
    for line in shell.splitlines():
        words = iter(shlex.split(line.removeprefix("$ "), comments=True))
        for word in words:
            if word != "make":
                continue
            for argument in words:
                if argument in {"&&", ";", "|", "||"}:
                    break
                if not argument.startswith("-") and "=" not in argument:
                    yield argument


def anchors_of(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub spells them."""
    prose = without_blocks(page)
    headings = re.findall(r"^#{1,6}\s+(.*?)\s*#*$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_blocks(page: str) -> str:
    return re.sub(r"^ *(`{3,}).*?^ *\1 *$", "", page, flags=re.MULTILINE | re.DOTALL)


def broken_links(page: Path) -> Iterator[str]:
    prose = re.sub(r"`[^`\n]*`", "", without_blocks(page.read_text()))
    for match in LINK.finditer(prose):
        target, _, anchor = match["target"].partition("#")
        if re.match(r"[a-z][a-z0-9+.-]*:", target):  # another site
            continue
        linked = page.parent / target if target else page
        exists = linked.exists()
        if exists and anchor and linked.suffix == ".md":
            exists = anchor in anchors_of(linked.read_text())
        if not exists:
            yield match["target"]


@pytest.mark.timeout(PAGE_SECONDS + 60)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page, "python")], ids=page_id)
def test_page_runs_its_python_blocks(page, run_script, request):
    to_run: list[Block] = []
    for block in blocks_of(page, "python"):
        match block.order:
            case Order.RUN:
                to_run.append(block)
            case Order.COMPILE:
                compile("\n" * (block.line - 1) + block.text, page_id(page), "exec")
            case Order.LEAVE:
                continue
            case _:
                assert_never(block.order)
    if not to_run:
        return
    request.getfixturevalue("prefect_server")  # started only for a page that runs something
    result = run_script(render_script(to_run), timeout_seconds=PAGE_SECONDS)
    assert result.rc == 0, f"{page_id(page)} failed; line numbers are the page's:\n{result.stderr[-6000:]}"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page, *SHELLS)], ids=page_id)
def test_page_names_make_targets_that_exist(page):
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    asked = {target for block in blocks_of(page, *SHELLS) for target in make_targets(block.text)}
    assert asked <= targets


@pytest.mark.parametrize("page", LINKED, ids=page_id)
def test_page_links_resolve(page):
    assert list(broken_links(page)) == []


def test_blocks_keep_the_line_numbers_of_the_page():
    page = "# Title\n\n```python\na = 1\n```\n\n1. item\n\n   ```python\n   print(a)\n   ```\n"
    script = render_script(list(parse_blocks(page)))
    assert script.splitlines() == ["", "", "", "a = 1", "", "", "", "", "", "print(a)"]


def test_block_order_is_read_from_the_comment_before_it():
    page = "<!-- skip: needs a cluster -->\n```python\n1/0\n```\n<!-- no-run: 8 GPUs -->\n```python\nb\n```\n"
    assert [block.order for block in parse_blocks(page)] == [Order.LEAVE, Order.COMPILE]


def test_block_order_is_refused_when_it_has_no_reason():
    with pytest.raises(ValueError, match="has no reason"):
        list(parse_blocks("<!-- skip -->\n```python\n1/0\n```\n"))


def test_page_without_blocks_has_nothing_to_run():
    assert render_script(list(parse_blocks("# Title\n\nText.\n"))) == "\n"


def test_make_targets_are_told_from_options_and_other_words():
    shell = "git clone x && cd x  # make nothing\nPYTHON=p make -s demo TORCH_INDEX=u test && echo make\n"
    assert list(make_targets(shell)) == ["demo", "test"]


def test_anchors_are_spelled_as_on_github():
    assert anchors_of("## What happens when… a rank dies?\n```bash\n# no heading\n```\n") == {
        "what-happens-when-a-rank-dies"
    }


def test_broken_links_name_the_target(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Top\n[a](#top) [b](page.md#top) [c](gone.md) [d](#gone) [e](https://x.y) `[f](g)`\n")
    assert list(broken_links(page)) == ["gone.md", "#gone"]
