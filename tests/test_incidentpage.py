"""The page of an incident: who did it, who suffered, where in the user's code, and what to do."""

from __future__ import annotations

import re
import signal
from typing import Any

from prefect_torch_elastic.artifacts.incidentpage import (
    find_own_frames,
    render_incident,
    render_ranges,
)
from prefect_torch_elastic.artifacts.tables import MAX_PAGE_BYTES
from prefect_torch_elastic.incidents import Incident, IncidentKind, RankRow, StackGroup
from tests.run_stories import BEGIN

TRACEBACK = """\
Traceback (most recent call last):
  File "/venv/lib/python3.12/site-packages/prefect_torch_elastic/node/rank.py", line 101, in run_call
    value = call.fn(*call.args)
  File "/home/me/train.py", line 84, in train
    loss = step(model, batch)
           ^^^^^^^^^^^^^^^^^^
  File "/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1501, in _call_impl
    return forward_call(*args)
  File "/home/me/model.py", line 12, in forward
    raise ValueError("label 1001 is not below 1000")
ValueError: label 1001 is not below 1000
"""


def make_incident(**fields: Any) -> Incident:
    values: dict[str, Any] = {
        "number": 1,
        "kind": IncidentKind.FAILURE,
        "category": "UserError",
        "sentence": "rank 1 failed at step 260: ValueError: label 1001 is not below 1000",
        "cure": "Mend the function where the traceback points; `max_restarts` cannot.",
        "consequence": "Its ranks start again: restart 1 of 3.",
        "rank": 1,
        "node_rank": 0,
        "step": 260,
        "victims": [0, 2, 3],
        "traceback": TRACEBACK,
        "ranks": [
            RankRow(rank=0, node_rank=0, state="waits", step=260, collective="all_reduce #9 (waits)"),
            RankRow(rank=1, node_rank=0, state="failed", step=260, exit_code=1, files=["node-0/rank-1.log"]),
            RankRow(rank=2, node_rank=1, state="lost its peer", step=260, signal=signal.SIGTERM),
        ],
        "stacks": [StackGroup(ranks=[0, 2, 3], text="File a.py, line 1\n\nFile <b>.py, line 2")],
        "last_lines": ["one", "", "two"],
    }
    return Incident(**{**values, **fields})


def render(**fields: Any) -> str:
    places = {"evidence": "s3://b/run/incidents/1.txt", "folder": "/runs/attempts/0001"}
    return render_incident(make_incident(**fields), title="my run", at=BEGIN, **places).markdown


def test_incident_begins_with_its_cause_and_what_happens_now():
    assert render().startswith(
        "# ❌ UserError in my run\n\n"
        "**Rank 1 failed at step 260: ValueError: label 1001 is not below 1000**\n\n"
        "Its ranks start again: restart 1 of 3.\n\n"
    )


def test_incident_keeps_the_culprit_apart_from_its_victims():
    page = render()

    assert "| **culprit** | rank 1 on node 0 |" in page
    assert "| **victims** | ranks 0, 2-3 (they only suffered from it) |" in page
    assert "| **it ended with** | exit code 1 |" in page


def test_incident_says_what_to_do():
    assert (
        "## What to do\n\nMend the function where the traceback points; `max_restarts` cannot.\n" in render()
    )


def test_incident_has_a_row_for_each_rank():
    table = render().partition("## Ranks\n\n")[2].partition("\n\n")[0]

    assert table.splitlines() == [
        "| rank | node | state | step | exit code | signal | last collective |",
        "| ---: | ---: | --- | ---: | ---: | --- | --- |",
        "| 0 | 0 | waits | 260 |  |  | all\\_reduce \\#9 (waits) |",
        "| 1 | 0 | **failed** 👈 | 260 | 1 |  |  |",
        "| 2 | 1 | lost its peer | 260 |  | SIGTERM |  |",
    ]


def test_incident_shows_the_users_frames_first_the_innermost_above():
    page = render()

    frames = find_own_frames(TRACEBACK)
    assert [(file, line, name) for file, line, name, _ in frames] == [
        ("/home/me/model.py", 12, "forward"),
        ("/home/me/train.py", 84, "train"),
    ]
    assert page.index("/home/me/model.py:12") < page.index("/home/me/train.py:84") < page.index("_call_impl")


def test_frames_without_source_have_none():
    text = '  File "/a.py", line 1, in f\n  File "/b.py", line 2, in g\n    x = 1\nKeyError: 3'

    assert find_own_frames(text) == [("/b.py", 2, "g", "`x = 1`"), ("/a.py", 1, "f", "")]


def test_incident_has_no_blank_line_inside_a_block_of_html():
    blocks = [text for text in render().split("\n\n") if "<details>" in text or "</details>" in text]

    assert len(blocks) == 3  # traceback, stacks, log
    assert all(text.startswith("<details>") and text.rstrip().endswith("</details>") for text in blocks)
    assert all(line.strip() for text in blocks for line in text.rstrip().splitlines())


def test_incident_escapes_stacks():
    assert "File &lt;b&gt;.py, line 2" in render()


def test_incident_says_which_ranks_share_their_stacks():
    assert "<summary><b>3 ranks: 0, 2-3</b></summary>" in render()


def test_incident_names_the_files_of_the_evidence():
    page = render()

    assert "with whole stacks, is kept in `s3://b/run/incidents/1.txt`." in page
    assert "files of the ranks are in `/runs/attempts/0001` on their machines." in page
    assert "| 1 | `node-0/rank-1.log` |" in page


def test_incident_links_files_that_a_browser_opens():
    row = RankRow(rank=0, node_rank=0, state="waits", files=["https://x/y_z.log", "http://x/a b)"])

    page = render(ranks=[row])
    assert "[https://x/y\\_z.log](https://x/y_z.log)" in page
    assert "`http://x/a b)`" in page


def test_incident_without_a_culprit_blames_nobody():
    page = render(
        kind=IncidentKind.SUSPICION, category="", rank=None, node_rank=None, victims=[], traceback=""
    )

    assert page.startswith("# 🤔 Suspicion in my run")
    assert "| **culprit** | no single one |" in page
    assert "victims" not in page


def test_incident_of_large_gangs_stays_below_its_limit():
    ranks = [RankRow(rank=n, node_rank=n, state="waits", files=["f" * 100] * 3) for n in range(4096)]
    ranks[2000] = RankRow(rank=2000, node_rank=2000, state="stopped")
    stacks = [StackGroup(ranks=[n], text="<&>\n" * 9000) for n in range(64)]
    page = render(
        rank=3000, ranks=ranks, stacks=stacks, last_lines=["y" * 900] * 200, traceback="<z>\n" * 90_000
    )

    assert len(page.encode()) <= MAX_PAGE_BYTES
    assert "| 2000 | 2000 | stopped |" in page
    assert "| 3000 | 3000 | **waits** 👈 |" in page
    assert "64 of 4,096 ranks" in page
    assert re.search(r"… [\d,]+ lines are left out here …", page)


def test_incident_shows_a_few_of_many_stacks_and_says_where_the_others_are():
    stacks = [StackGroup(ranks=[n], text=f"File rank{n}.py") for n in range(11)]
    page = render(stacks=stacks)
    assert "File rank7.py" in page
    assert "File rank8.py" not in page
    assert "3 more groups are in the file below." in page


def test_incident_card_is_the_cause_in_a_sentence():
    page = render_incident(make_incident(), title="my run", at=BEGIN)

    assert page.description == (
        "**UserError** · rank 1 · node 0 · step 260\n\n"
        "Rank 1 failed at step 260: ValueError: label 1001 is not below 1000"
    )


def test_ranges_join_neighbours():
    assert render_ranges([5, 0, 1, 2, 9, 8]) == "0-2, 5, 8-9"
