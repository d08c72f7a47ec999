"""The text file of an incident: all that is known, whole, for whoever has only the store."""

from __future__ import annotations

from prefect_torch_elastic.artifacts.evidencefile import render_evidence, render_evidence_key
from prefect_torch_elastic.incidents import Incident, IncidentKind, RankRow, StackGroup

AT = 1_796_057_716.0
INCIDENT = Incident(
    number=2,
    kind=IncidentKind.FAILURE,
    category="UserError",
    sentence="rank 1 failed at step 260: ValueError: label 1001 is not below 1000",
    cure="Fix what raised.",
    consequence="the gang ends: no restart is left.",
    rank=1,
    node_rank=0,
    traceback='  File "/home/me/train.py", line 84, in train\nValueError: label 1001',
    last_lines=["loss 0.4", "loss nan"],
    ranks=[
        RankRow(rank=0, node_rank=0, state="waits", step=260, collective="all_reduce #9 (waits)"),
        RankRow(rank=1, node_rank=0, state="failed", step=260, exit_code=1, files=["/runs/rank-1.log"]),
        RankRow(rank=2, node_rank=1, state="was ended", signal=9),
    ],
    stacks=[StackGroup(ranks=[0, 2], text="File train.py, line 80\n" * 1000)],
)


def test_file_says_all_that_the_page_says_and_whole_stacks():
    text = render_evidence(INCIDENT, title="train-1", at=AT)
    assert text.startswith(
        "Failure UserError in train-1, 2026-11-30 16:55:16 UTC\n\n"
        "Rank 1 failed at step 260: ValueError: label 1001 is not below 1000\n"
        "The gang ends: no restart is left.\n"
        "Fix what raised.\n\n"
        "== Ranks\n"
        "rank  node  state      step  exit code  signal   last collective\n"
        "0     0     waits      260   -          -        all_reduce #9 (waits)\n"
        "1     0     failed     260   1          -\n"
        "2     1     was ended  -     -          SIGKILL\n\n"
        "== Traceback of rank 1\n"
        '  File "/home/me/train.py", line 84, in train\n'
    )
    assert text.count("File train.py, line 80") == 1000
    assert "== Stacks of ranks 0, 2\n" in text
    assert text.endswith(
        "== The end of the log\nloss 0.4\nloss nan\n\n== Files on the machines\nrank 1: /runs/rank-1.log\n"
    )


def test_file_leaves_out_what_nobody_knows():
    text = render_evidence(
        Incident(number=1, kind=IncidentKind.NODE, sentence="node 1 is gone"), title="t", at=AT
    )
    assert text == "Node in t, 2026-11-30 16:55:16 UTC\n\nNode 1 is gone\n"


def test_file_can_be_written_whatever_a_rank_printed():
    lines = ["\ud800 half a character", "and a \0"]
    text = render_evidence(
        Incident(number=1, kind=IncidentKind.HANG, sentence="", last_lines=lines), title="t", at=AT
    )
    assert text.encode().decode().count("\ufffd") == 2


def test_key_is_in_the_run_folder_and_in_the_order_of_time():
    key = render_evidence_key(INCIDENT, folder="run", number=12, at=AT)
    assert key == "run/incidents/20261130T165516Z-12-failure.txt"
    assert key < render_evidence_key(INCIDENT, folder="run", number=13, at=AT + 1)
