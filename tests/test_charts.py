"""The SVGs of the pages, and the text around them: what a picture says, and that nothing breaks out of it."""

from __future__ import annotations

import base64
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_elastic.artifacts.charts import (
    MAX_POINTS,
    Segment,
    find_ticks,
    render_bar,
    render_curve,
    render_image,
    render_timeline,
    shorten,
    thin_out,
)
from prefect_torch_elastic.artifacts.tables import (
    cut_text,
    escape_markdown,
    join_sections,
    render_bytes,
    render_code,
    render_details,
    render_duration,
    render_prose,
    render_table,
)

LOSS = [(float(step), 10.0 / step) for step in range(1, 2000)]


def read_texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_curve_shows_name_newest_value_and_first_and_last_step():
    texts = read_texts(render_curve("loss", [(1.0, 9.5), (400.0, 1.82)]))

    assert {"loss", "1.82 at step 400", "1", "400", "0", "10"} <= set(texts)


def test_curve_stays_small_however_long_the_run():
    svg = render_curve("loss", LOSS, width=380, height=130)

    points = re.search(r'points="([^"]*)"', svg)
    assert points is not None
    assert len(points[1].split()) == MAX_POINTS
    assert len(svg) < 5000


def test_curve_follows_the_theme_and_has_no_ground_of_its_own():
    svg = render_curve("loss", LOSS)

    assert "prefers-color-scheme:dark" in svg
    assert "background" not in svg


def test_curve_leaves_out_values_that_are_not_finite():
    svg = render_curve("loss", [(1.0, 2.0), (2.0, math.nan), (3.0, math.inf), (4.0, 1.0)])

    assert "nan" not in svg
    assert "inf" not in svg


def test_curve_says_so_when_there_is_nothing_to_show():
    assert read_texts(render_curve("loss", [(1.0, math.nan)])) == ["no values of loss yet"]


def test_curve_marks_restarts_that_are_on_it():
    svg = render_curve("loss", LOSS, marks=[700.0, 5000.0])

    assert svg.count('class="m"') == 1


def test_curve_escapes_the_name_of_a_metric():
    name = '<script>"&'

    assert name in read_texts(render_curve(name, LOSS))


@given(
    st.floats(-1e9, 1e9, allow_nan=False, allow_subnormal=False),
    st.floats(0, 1e9, allow_nan=False, allow_subnormal=False),
)
def test_ticks_enclose_all_values_and_are_few(low: float, span: float):
    ticks = find_ticks(low, low + span, 5)

    slack = 1e-6 * (abs(low) + span + 1)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + span - slack
    assert 2 <= len(ticks) <= 8


@pytest.mark.parametrize(
    ("low", "high"),
    [
        pytest.param(-1e308, 1e308, id="the whole is infinite"),
        pytest.param(900719925.8203125, 900719925.8203126, id="neighbours"),
        pytest.param(1.79e308, 1.79e308, id="largest"),
        pytest.param(-1.79e308, -1.79e308, id="lowest"),
        pytest.param(0.0, 5e-324, id="smallest"),
        pytest.param(1e-320, 2e-320, id="small"),
    ],
)
def test_curve_is_drawn_where_numbers_end(low: float, high: float):
    svg = render_curve("loss", [(1.0, low), (2.0, high)])

    assert "polyline" in svg
    assert "nan" not in svg
    assert "inf" not in svg


def test_bar_gives_each_part_its_share_and_leaves_out_empty_ones():
    parts = [("a", 3.0, "#111111"), ("b", 1.0, "#222222"), ("c", 0.0, "#333333")]
    svg = render_bar(
        [Segment(label=name, value=value, colour=colour) for name, value, colour in parts], width=400
    )

    assert read_texts(svg) == ["a 75.0%", "b 25.0%"]
    assert re.findall(r'height="24" fill="(#\d+)"', svg) == ["#111111", "#222222"]
    assert 'width="300.0" height="24"' in svg


def test_timeline_has_a_lane_each_and_its_end():
    svg = render_timeline(
        [("attempt 1", [(0, 10, "#111111")]), ("attempt 2", [(10, 20, "#222222")])],
        begin=0,
        end=20,
        end_label="20.0 s",
        legend=[("#111111", "queue")],
    )

    assert read_texts(svg) == ["attempt 1", "attempt 2", "0", "20.0 s", "queue"]


def test_image_is_markdown_with_data_in_it():
    image = render_image("<svg/>", alt="a]b(c\n")

    match = re.fullmatch(r"!\[a b c \]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", image)
    assert match is not None
    assert base64.b64decode(match[1]) == b"<svg/>"


def test_thinning_keeps_the_first_and_the_last_point():
    kept = thin_out(LOSS, 50)

    assert (len(kept), kept[0], kept[-1]) == (50, LOSS[0], LOSS[-1])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param(1234.0, "1,234", id="whole"),
        pytest.param(0.012345, "0.0123", id="small"),
        pytest.param(1.2e-5, "1.2e-05", id="tiny"),
        pytest.param(3e9, "3e+09", id="huge"),
    ],
)
def test_numbers_on_charts_are_short(value: float, text: str):
    assert shorten(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        pytest.param(0.423, "0.42 s", id="short"),
        pytest.param(59.94, "59.9 s", id="seconds"),
        pytest.param(245.0, "4m05s", id="minutes"),
        pytest.param(11040.0, "3h04m", id="hours"),
        pytest.param(183600.0, "2d03h", id="days"),
    ],
)
def test_durations_are_for_people(seconds: float, text: str):
    assert render_duration(seconds) == text


def test_bytes_are_for_people():
    assert [render_bytes(n) for n in (0, 12, 1536, 3 * 2**30)] == ["", "12 B", "1.5 KiB", "3.0 GiB"]


def test_table_leaves_out_empty_columns_and_escapes_bars():
    table = render_table(("a", "b", "c"), [("1", "", "x|y"), ("2", "", "`p|q`")], right=(0,))

    assert table == "| a | c |\n| ---: | --- |\n| 1 | x\\|y |\n| 2 | `p\\|q` |"


def test_words_of_others_have_no_effect():
    shown = escape_markdown("<b>*x*</b> [a](b) `c` | ~~d~~\n\n# e")

    assert shown == "&lt;b&gt;\\*x\\*&lt;/b&gt; \\[a\\](b) \\`c\\` \\| \\~\\~d\\~\\~ \\# e"


def test_prose_keeps_code_between_backticks():
    assert render_prose("Raise `shm_size`, or use <fewer> workers.") == (
        "Raise `shm_size`, or use &lt;fewer&gt; workers."
    )


def test_prose_escapes_a_backtick_that_has_no_partner():
    assert render_prose("it said ` here") == "it said \\` here"


def test_code_cannot_end_early():
    assert render_code("a`b\nc") == "`a'b c`"


def test_details_are_one_block_without_blank_lines():
    block = render_details("rank 3 <b>", "one\n\n  \n<two> & three\n", most=4096)

    assert block == (
        "<details><summary><b>rank 3 &lt;b&gt;</b></summary>"
        "<pre>one\n&nbsp;\n&nbsp;\n&lt;two&gt; &amp; three</pre></details>"
    )


def test_text_that_cannot_be_sent_is_replaced():
    damaged = "a\0b\ud83d"

    assert cut_text(damaged, 100) == join_sections([damaged]).strip() == "a\ufffdb\ufffd"
    assert read_texts(render_curve(damaged, LOSS))[0] == "a\ufffdb\ufffd"


def test_long_text_keeps_its_begin_and_its_end():
    text = "\n".join(f"line {number}" for number in range(1000))
    cut = cut_text(text, 500)

    assert len(cut.encode()) <= 500
    assert cut.startswith("line 0\n")
    assert cut.endswith("line 999")
    assert re.search(r"… \d+ lines are left out here …", cut)


@given(st.text("aé\n ", max_size=300), st.integers(80, 200))
def test_cut_text_never_exceeds_its_limit(text: str, most: int):
    assert len(cut_text(text, most).encode()) <= most


def test_sections_that_do_not_fit_are_counted():
    page = join_sections(["# a", "x" * 5000, "b", ""], most=1024)

    assert page == "# a\n\nb\n\n*1 section does not fit on a page of 1 KB.*\n"
