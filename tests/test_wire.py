"""What crosses between the processes of a machine: every message comes back as what it was."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_elastic import wire
from prefect_torch_elastic.arrivals import Arrivals
from prefect_torch_elastic.observations import (
    CheckpointSaved,
    EvidenceTaken,
    LastCollective,
    NodeSample,
    RankSample,
    RankSnapshot,
)
from prefect_torch_elastic.rankstate import StopReason
from prefect_torch_elastic.wire import (
    Dismiss,
    GangEnded,
    GangStatus,
    IncidentSeen,
    JoinGang,
    LogLines,
    NodeDone,
    NodeLeaves,
    NodeRegroups,
    Notice,
    Progress,
    Quit,
    RankError,
    RankInfo,
    RanksFailed,
    RanksReturned,
    RanksStarted,
    RoundEnded,
    RunGang,
    StopGang,
    TakeEvidence,
    Verdict,
    VerdictAction,
    encode_message,
    parse_message,
)

RUN_GANG = RunGang(
    run_key="pretrain-7b",
    attempt=2,
    folder="/runs/a",
    call="/runs/a/call",
    secret="00ff",
    fields={"nnodes": "1:2", "checkpoint": {"keep_last": 3}},
    environment={"LANG": "C", "ÄÖ": "ü"},
    directory="/home",
    search_path=["/home", ""],
    modules=["transformers"],
    node=1,
    devices=["0", "1"],
    endpoint="127.0.0.1:29400",
)
MESSAGES = [
    RUN_GANG,
    StopGang(reason=StopReason.PREEMPTED, grace_seconds=1.5),
    Quit(),
    RanksStarted(
        node=1,
        round=3,
        world_size=4,
        restart_count=1,
        warm=True,
        ranks=[RankInfo(rank=2, local_rank=0, node_rank=1, pid=17, log="/runs/a/rank-2.log")],
        note="cold",
    ),
    LogLines(rank=3, lines=[(20, "epoch 1"), (40, "")]),
    Progress(step=7, total_steps=None, metrics={"loss": 2.5}, phase="evaluate"),
    RanksFailed(node=0, round=1, ranks=[{"rank": 0, "signal": 9}]),
    RanksReturned(node=0, round=1),
    NodeRegroups(node=1, round=2),
    Verdict(round=1, action=VerdictAction.RESTART, restart_count=1),
    NodeDone(node=1, problem="no space", killed=[3], warm=False),
    JoinGang(
        node=1, attempt=2, folder="0003", nproc=4, endpoint="10.0.0.7:4001", restart_count=1, preemptions=3
    ),
    Dismiss(exit_code=65),
    NodeLeaves(node=1),
    NodeSample(node=0, round=2, ranks=[RankSample(rank=1, step=7, step_seconds=0.2, busy="save")]),
    NodeSample(
        node=0, round=2, ranks=[RankSample(rank=1, arrivals=Arrivals(look=3, first=5, offsets_us=[-2, 1]))]
    ),
    TakeEvidence(number=3, reason="no step for 20 s"),
    EvidenceTaken(
        node=1,
        number=3,
        ranks=[
            RankSnapshot(
                rank=4,
                is_alive=True,
                stacks="Thread 1",
                collectives=[
                    LastCollective(group="0", sequence=9, operation="gloo:all_reduce", is_done=False)
                ],
            )
        ],
    ),
    CheckpointSaved(step=9, uuid="u", key="checkpoints/9", size_bytes=7, seconds=0.5, stall_seconds=0.1),
    RoundEnded(round=1, action=VerdictAction.RESTART, restarts=1, diagnosis={"category": "Killed"}),
    IncidentSeen(incident={"kind": "hang"}),
    RankError(rank=5, data="cGFyY2Vs"),
    Notice(level=30, text="node 1 was lost"),
    GangEnded(status=GangStatus.FAILED, diagnosis={"category": "Killed"}, error="/x", restarts=1, killed=[0]),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_comes_back_equal(message):
    assert parse_message(encode_message(message)) == message


def test_every_message_of_the_union_is_tested_and_has_a_kind():
    kinds = set(wire.Message.__args__)
    assert {type(message) for message in MESSAGES} == kinds
    assert set(wire._KINDS.values()) == kinds


@pytest.mark.parametrize("action", VerdictAction)
def test_verdict_has_a_member_of_its_enum_that_match_can_compare(action):
    back = parse_message(encode_message(Verdict(round=1, action=action, restart_count=0)))
    assert isinstance(back, Verdict)
    assert back.action is action


@pytest.mark.parametrize("reason", list(StopReason), ids=lambda reason: reason.name)
def test_stop_has_a_member_of_its_enum(reason):
    back = parse_message(encode_message(StopGang(reason=reason, grace_seconds=1.0)))
    assert isinstance(back, StopGang)
    assert back.reason is reason


@pytest.mark.parametrize("status", GangStatus)
def test_end_of_a_gang_has_a_member_of_its_enum_that_match_can_compare(status):
    back = parse_message(encode_message(GangEnded(status=status)))
    assert isinstance(back, GangEnded)
    assert back.status is status


@pytest.mark.parametrize(
    "body",
    [
        b'{"kind": "Verdict", "round": 1, "action": "again", "restart_count": 0}',
        b'{"kind": "GangEnded", "status": "done"}',
        b'{"kind": "StopGang", "reason": 99, "grace_seconds": 1.0}',
    ],
    ids=["action", "status", "reason"],
)
def test_word_that_is_not_in_its_enum_is_refused(body):
    with pytest.raises(ValueError, match="is not a valid"):
        parse_message(body)


@given(text=st.text(max_size=50), step=st.integers(0, 2**62))
def test_any_text_survives_the_way(text, step):
    message = Progress(step=step, total_steps=step, metrics={text: text}, phase=text)
    assert parse_message(encode_message(message)) == message


def test_message_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Quit().kind = "StopGang"  # pyright: ignore[reportAttributeAccessIssue]
