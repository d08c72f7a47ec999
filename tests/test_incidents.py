"""An incident as data: rows, states in words, stacks in groups, and the way as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from prefect_torch_elastic.evidence import Category, Diagnosis, RankEvidence
from prefect_torch_elastic.incidents import (
    Incident,
    IncidentKind,
    RankRow,
    StackGroup,
    Witness,
    blame,
    describe_ranks,
    group_by_stack,
    parse_incident,
)
from prefect_torch_elastic.observations import LastCollective, RankSample, RankSnapshot
from prefect_torch_elastic.wire import RankInfo

PEER_LOST: dict[str, Any] = {
    "exc_type": "RuntimeError",
    "exc_message": "gloo/transport/tcp/pair.cc:547 Connection closed by peer",
}
STACK = 'Current thread 0x1 (most recent call first):\n  File "/me/train.py", line 4 in load\n'


def witness(rank: int, **facts) -> Witness:
    info = RankInfo(rank=rank, local_rank=rank, node_rank=0, pid=70 + rank, log=f"/r/rank-{rank}.log")
    return Witness(info=info, **facts)


def snapshot(rank: int = 0, **facts) -> RankSnapshot:
    return RankSnapshot(rank=rank, **{"is_alive": True, **facts})


def evidence(rank: int = 0, **facts) -> RankEvidence:
    return RankEvidence(rank=rank, local_rank=rank, node_rank=0, **facts)


WAITING = LastCollective(group="0", sequence=12, operation="gloo:all_reduce", is_done=False)
DONE = LastCollective(group="2", sequence=40, operation="gloo:broadcast", is_done=True)


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        pytest.param({}, "not known", id="nothing"),
        pytest.param({"snapshot": snapshot()}, "runs", id="runs"),
        pytest.param({"snapshot": snapshot(collectives=[DONE, WAITING])}, "waits", id="waits"),
        pytest.param({"snapshot": snapshot(is_alive=False)}, "returned", id="gone-without-failure"),
        pytest.param({"snapshot": snapshot(is_stopped=True)}, "stopped", id="stopped"),
        pytest.param({"snapshot": snapshot(busy="save")}, "saves", id="saves"),
        pytest.param({"snapshot": snapshot(busy="load")}, "loads", id="loads"),
        pytest.param({"snapshot": snapshot(phase="evaluate")}, "in phase evaluate", id="phase"),
        pytest.param({"evidence": evidence(failed_at=1.0, exc_type="ValueError")}, "failed", id="failed"),
        pytest.param({"evidence": evidence(failed_at=1.0, **PEER_LOST)}, "lost its peer", id="victim"),
        pytest.param({"evidence": evidence(failed_at=1.0, told_to_stop=True)}, "was ended", id="told"),
        pytest.param({"evidence": evidence(returned_at=1.0, exit_code=0)}, "returned", id="returned"),
    ],
)
def test_state_is_said_in_words(facts, state):
    (row,) = describe_ranks([witness(0, **facts)])
    assert row.state == state


def test_culprit_that_runs_stands_still():
    rows = describe_ranks([witness(1, snapshot=snapshot(1)), witness(0, snapshot=snapshot())], culprits=[1])
    assert [(row.rank, row.state) for row in rows] == [(0, "runs"), (1, "stands still")]


def test_row_has_step_exit_collective_and_files():
    one = witness(
        0,
        sample=RankSample(rank=0, step=6),
        snapshot=snapshot(step=7, collectives=[DONE, WAITING], files=["/r/rank-0.stacks"]),
        evidence=evidence(failed_at=1.0, signal=9, stacks="/r/rank-0.stacks"),
    )
    assert describe_ranks([one], culprits=[0]) == [
        RankRow(
            rank=0,
            node_rank=0,
            state="failed",
            step=7,
            signal=9,
            collective="all_reduce #12 (waits)",
            files=["/r/rank-0.stacks", "/r/rank-0.log"],
        )
    ]


def test_step_comes_from_the_sample_when_nothing_else_has_one():
    (row,) = describe_ranks([witness(0, sample=RankSample(rank=0, step=6), snapshot=snapshot())])
    assert row.step == 6


def test_stacks_of_the_culprit_come_first():
    groups = group_by_stack({0: STACK, 1: STACK.replace("load", "wait"), 2: STACK}, culprits=[1])
    assert [group.ranks for group in groups] == [[1], [0, 2]]


def test_incident_has_the_words_of_the_verdict():
    verdict = Diagnosis(
        category=Category.HANG,
        summary="rank 1 hangs.",
        cure="Look.",
        rank=1,
        node_rank=0,
        step=4,
        victims=[0],
    )
    incident = blame(Incident(number=1, kind=IncidentKind.HANG, sentence=""), verdict)
    assert (incident.category, incident.sentence, incident.cure) == ("Hang", "rank 1 hangs.", "Look.")
    assert (incident.rank, incident.step, incident.victims) == (1, 4, [0])


def test_incident_survives_the_way_as_json():
    incident = Incident(
        number=2,
        kind=IncidentKind.FAILURE,
        sentence="rank 0 failed.",
        ranks=[RankRow(rank=0, node_rank=0, state="failed", exit_code=1)],
        stacks=[StackGroup(ranks=[1], text=STACK)],
    )
    assert parse_incident(json.loads(json.dumps(asdict(incident)))) == incident
