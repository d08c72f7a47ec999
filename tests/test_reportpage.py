"""The pages about a run: its report, its progress, its metrics."""

from __future__ import annotations

import re
from dataclasses import replace

from prefect_torch_elastic.artifacts.progresspage import render_metrics, render_progress
from prefect_torch_elastic.artifacts.reportpage import render_report
from prefect_torch_elastic.artifacts.tables import MAX_PAGE_BYTES, MAX_SMALL_PAGE_BYTES
from prefect_torch_elastic.incidents import IncidentKind
from prefect_torch_elastic.runfacts import Curve, GangFacts, IncidentFacts, RankFacts
from prefect_torch_elastic.wire import GangStatus, Progress, VerdictAction
from tests.run_stories import BEGIN, Story, tell_troubled_run

IMAGE = re.compile(r"\(data:image/svg\+xml;base64,[A-Za-z0-9+/=]+\)")


def find_section(page: str, title: str) -> str:
    """Return a section of a page, pictures without their data."""
    text = IMAGE.sub("(svg)", page).partition(f"## {title}\n\n")[2]
    return text.partition("\n\n## ")[0].strip()


def test_report_begins_with_goodput_and_what_went_on():
    page = render_report(tell_troubled_run().facts)

    assert page.markdown.startswith("# ✅ Run report: my run\n\n**Goodput 42.6%** · 100 of 100 steps · ")
    assert "3m50s in all · 2 restarts · 1 preemption · cost 3.80\n" in page.markdown


def test_report_has_a_card_of_short_lines():
    lines = render_report(tell_troubled_run().facts).description.split("\n\n")

    assert lines == [
        "**Goodput 42.6%** · 100 of 100 steps",
        "3m50s in all · 2 restarts",
        "1 preemption · cost 3.80",
    ]


def test_report_shows_parts_that_add_up_to_the_whole():
    assert find_section(render_report(tell_troubled_run().facts).markdown, "Where the time went") == (
        "![parts of the wall time](svg)\n\n"
        "| part | time | share |  |\n"
        "| --- | ---: | ---: | --- |\n"
        "| productive steps | 1m38s | 42.6% | ██████████ |\n"
        "| steps done twice | 28.5 s | 12.4% | ███ |\n"
        "| checkpoint stall | 2.00 s | 0.9% | ▏ |\n"
        "| hang until detected | 30.0 s | 13.0% | ███ |\n"
        "| start-up | 26.0 s | 11.3% | ███ |\n"
        "| teardown | 5.50 s | 2.4% | █ |\n"
        "| queue | 40.0 s | 17.4% | ████ |\n"
        "| **all** | **3m50s** | **100.0%** |  |\n\n"
        "Goodput is the share of productive steps: steps that no earlier try had done."
    )


def test_report_shows_attempts_and_restarts_with_their_causes():
    text = find_section(render_report(tell_troubled_run().facts).markdown, "Attempts and restarts")

    rows = [line.replace("\u00a0", " ") for line in text.splitlines() if line.startswith("| 1")]
    assert rows[0] == "| 1 | 2 | 2 | 11:07:05 | 36.0 s | 1 → 30 | 0 | ❌ failed: Killed |"
    assert rows[1].startswith("| 1, restart 1 | 2 | 2 |")
    assert rows[1].endswith("| 21 → 40 | 10 | ❌ failed: Hang |")
    assert rows[2].endswith("| ⚠️ preempted |")
    assert rows[3].startswith("| 1, again | 2 | 2 |")
    assert text.endswith("![attempts over time](svg)")


def test_report_links_incidents():
    story = tell_troubled_run()
    story.chronicle.note_link(1, "http://127.0.0.1:4200/v2/artifacts/artifact/1")

    text = find_section(render_report(story.facts).markdown, "What went wrong")
    assert text.splitlines()[0] == (
        "- 11:07:40 UTC · **[Killed](http://127.0.0.1:4200/v2/artifacts/artifact/1)** · "
        "rank 1 was killed by SIGKILL"
    )
    assert "UTC · **Hang** · rank 1 sleeps" in text


def test_report_says_what_rounds_failed_of_when_no_incident_did():
    story = Story().begin().start().train(1, 2).end_round(VerdictAction.FAIL, summary="rank 0 gave up")
    story.end_gang(GangStatus.FAILED, diagnosis={"category": "Killed", "summary": "rank 0 gave up"}).end()

    page = render_report(story.facts).markdown
    assert find_section(page, "What went wrong") == "- 11:06:42 UTC · rank 0 gave up"
    assert page.startswith("# ❌ Run report")


def test_report_drops_a_link_that_the_ui_would_not_open():
    facts = tell_troubled_run().facts
    odd = replace(facts.incidents[0], url="javascript:alert(1)")

    assert "javascript" not in render_report(replace(facts, incidents=(odd,))).markdown


def test_report_names_machines_and_cost():
    page = render_report(tell_troubled_run().facts).markdown

    assert "| **machines** | `host-a`, `host-c` |" in page
    assert "| **cost** | 3.80 (0.11 node hours at 36) |" in page


def test_report_shows_checkpoints_with_speed_and_stall():
    text = find_section(render_report(tell_troubled_run().facts).markdown, "Checkpoints")

    assert text.startswith("2 checkpoints, 1.9 GiB in all; training stood still for 4.00 s.")
    assert "| 20 | 11:07:30 | 953.7 MiB | 5.00 s | 200 | 2.00 s | `checkpoints/20` |" in text


def test_report_names_slow_ranks():
    ranks = [RankFacts(rank=k, node=k // 2, steps=90, step_seconds=0.5) for k in range(3)]
    slow = RankFacts(rank=3, node=1, steps=90, step_seconds=0.8, step_p95_seconds=1.25)
    facts = replace(tell_troubled_run().facts, ranks=(*ranks, slow))

    text = find_section(render_report(facts).markdown, "Ranks")
    expected = "🐢 **Slower than the others: rank 3 (node 1).** Of the slowest: its median step takes 0.8 s."
    assert text.startswith(expected)
    assert "| 3 | 1 | 90 | 800 ms | 1.25 s |" in text


def test_report_names_a_rank_that_the_others_wait_for():
    ranks = [RankFacts(rank=k, node=0, steps=90, step_seconds=0.5) for k in range(3)]
    slow = RankFacts(rank=3, node=1, steps=90, step_seconds=0.5, delay=0.34)
    facts = replace(tell_troubled_run().facts, ranks=(*ranks, slow))

    text = find_section(render_report(facts).markdown, "Ranks")
    assert "rank 3 (node 1).** Of the slowest: the others wait for it 34% of a step." in text
    assert "| 3 | 1 | 90 | 500 ms | 34% |" in text


def test_report_of_a_run_that_only_waits_is_a_page_too():
    page = render_report(Story().wait(5).facts)

    assert page.description == "5.00 s in all"
    assert "▶️ running" in page.markdown


def test_report_gives_no_goodput_when_no_step_was_reported():
    story = Story().begin().start().wait(60).end_round(VerdictAction.FINISH)

    assert "Goodput " not in render_report(story.end_gang(GangStatus.SUCCEEDED).end().facts).description


def test_report_escapes_what_users_and_ranks_wrote():
    story = Story(title="<img src=x> | *run*").begin().start().train(1, 2)
    story.end_round(VerdictAction.FAIL, summary="rank 0 failed: KeyError: '<lambda>|__init__'")

    page = render_report(story.facts).markdown
    assert "# ▶️ Run report: &lt;img src=x&gt; \\| \\*run\\*" in page
    assert "rank 0 failed: KeyError: '&lt;lambda&gt;\\|\\_\\_init\\_\\_'" in page


def test_report_stays_below_its_limit_however_large_the_run():
    story = tell_troubled_run()
    gang = story.facts.gangs[0]
    long = "x" * 400
    facts = replace(
        story.facts,
        gangs=(replace(gang, reason=long, places=tuple(f"host-{n}" for n in range(2000))),) * 200,
        ranks=tuple(RankFacts(rank=n, node=n, steps=90, step_seconds=1.0) for n in range(4096)),
        incidents=tuple(
            IncidentFacts(at=BEGIN, number=n, kind=IncidentKind.FAILURE, category="Killed", sentence=long)
            for n in range(50)
        ),
    )

    page = render_report(facts).markdown
    assert 20_000 < len(page.encode()) <= MAX_PAGE_BYTES
    assert "The 32 slowest of 4,096 ranks." in page


def test_progress_is_a_percentage_and_short_lines():
    story = Story().begin().start().train(1, 41)

    page = render_progress(story.facts)
    lines = IMAGE.sub("(svg)", page.description).split("\n\n")
    assert page.percent == 41.0
    assert lines == ["**41.0%** · step 41/100", "loss 0.2439 · 1 steps/s · ETA 59.0 s", "![loss](svg)"]
    assert all(len(line) <= 40 for line in lines)
    assert len(page.description) < 8000


def test_progress_turns_counts_of_a_step_into_rates():
    story = Story().begin().start().train(1, 10, seconds=0.5)
    metrics = {"loss": 1.0, "tokens": 4096, "samples_per_second": 310.4}
    story.chronicle.take(Progress(step=10, total_steps=100, metrics=metrics, phase="evaluate"), at=story.now)

    text = render_progress(story.facts).description
    assert "310 samples/s" in text
    assert "8,192 tokens/s" in text
    assert "in evaluate" in text


def test_progress_without_a_total_shows_the_step():
    story = Story().begin().start()
    story.chronicle.take(Progress(step=1200, total_steps=None, metrics={}, phase=""), at=story.now)

    page = render_progress(story.facts)
    assert (page.percent, page.description) == (0.0, "**step 1,200**")


def test_progress_before_the_first_step_says_so():
    assert render_progress(Story().facts).description == "no step yet"


def test_progress_shows_a_loss_that_is_not_a_number():
    story = Story().begin().start().train(1, 5)
    report = Progress(step=6, total_steps=100, metrics={"loss": float("nan")}, phase="")
    story.chronicle.take(report, at=story.now)

    assert "loss nan" in render_progress(story.facts).description


def test_progress_leaves_out_a_rate_that_is_beyond_numbers():
    story = Story().begin().start().train(1, 10, seconds=0.5)
    facts = replace(story.facts, metrics={"tokens": 1.7e308})

    assert "tokens/s" not in render_progress(facts).description


def test_metrics_page_has_a_chart_for_each_metric_within_its_limit():
    curves = tuple(
        Curve(name=f"metric-{n}", points=tuple((step, step * 0.1) for step in range(200))) for n in range(8)
    )
    facts = replace(tell_troubled_run().facts, curves=curves)

    page = render_metrics(facts).markdown
    assert len(IMAGE.findall(page)) == 8
    assert len(page.encode()) <= MAX_SMALL_PAGE_BYTES
    assert "| loss | 0.1 |" in page


def test_gang_without_ranks_has_a_row():
    facts = replace(Story().facts, gangs=(GangFacts(attempt=1, nodes=3, began_at=BEGIN),))

    text = find_section(render_report(facts).markdown, "Attempts and restarts")
    assert text.splitlines()[-1] == "| 1 | 3 | 11:06:40 | ▶️ running |"
