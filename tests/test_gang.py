"""A gang seen by its head: agents are played by the test, so rounds, deaths and verdicts come as it says."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_elastic import hangwatch, stalls
from prefect_torch_elastic.channel import Channel, ChannelClosed, is_readable
from prefect_torch_elastic.evidence import Category, RankEvidence, parse_diagnosis
from prefect_torch_elastic.incidents import Incident, IncidentKind, parse_incident
from prefect_torch_elastic.node.gang import Gang
from prefect_torch_elastic.observations import (
    CheckpointSaved,
    EvidenceTaken,
    LastCollective,
    NodeSample,
    RankSample,
    RankSnapshot,
)
from prefect_torch_elastic.rankstate import StopReason
from prefect_torch_elastic.spec import build_spec
from prefect_torch_elastic.wire import (
    GangStatus,
    IncidentSeen,
    Message,
    NodeDone,
    NodeRegroups,
    Notice,
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
)

PEER_LOST = ("RuntimeError", "gloo/transport/tcp/pair.cc:547 Connection closed by peer [127.0.0.1]:3")
NON_RETRYABLE = ("NonRetryable", "bad data")
USER_ERROR = ("ValueError", "lr must be > 0")


class PlayedNode:
    """A node whose agent is the test; `heard` is what the head told it."""

    def __init__(self, index: int) -> None:
        ours, theirs = socket.socketpair()
        self.index, self.channel, self.agent = index, Channel(ours), Channel(theirs)
        self.pidfd, self._life = os.pipe()  # at its end when the last writer is gone, like a dead process's
        self.code: int | None = None
        self.is_gone = False
        self.signals: list[int] = []
        self.heard: list[Message] = []

    @property
    def fds(self) -> list[int]:
        return [self.channel.fileno(), self.pidfd]

    def receive(self, folder: Path) -> Iterator[Message]:
        gone = is_readable(self.pidfd, 0.0)
        with suppress(ChannelClosed):
            yield from self.channel.receive(0.0)
        self.is_gone = gone

    def send(self, message: Message) -> None:
        self.channel.send(message)

    def kill(self) -> None:
        self.signals.append(signal.SIGKILL)

    def interrupt(self) -> None:
        pass

    def stopped_seconds(self) -> float:
        return 0.0

    def listen(self) -> list[Message]:
        self.heard += self.agent.receive(0.0)
        return self.heard

    def die(self) -> None:
        """End the agent; its channel ends with it."""
        self.agent.close()
        os.close(self._life)
        self._life = -1

    def close(self) -> None:
        for end in (self.channel, self.agent):
            end.close()
        for fd in (self.pidfd, self._life):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self._life = -1


class PlayedNodes:
    """Provides played nodes; `made` has all of them, also those that were replaced."""

    def __init__(self) -> None:
        self.made: list[PlayedNode] = []

    def provide(self, index: int) -> PlayedNode:
        self.made.append(PlayedNode(index))
        return self.made[-1]

    def bury(self, node: PlayedNode) -> int:
        node.code = -9
        node.close()
        return -9

    def retire(self, *nodes: PlayedNode) -> None:
        for node in nodes:
            self.bury(node)


class PlayedGang:
    """A gang of two ranks per node, and the nodes that the test plays."""

    def __init__(self, folder: str, fields: dict[str, object], environment: dict[str, str]) -> None:
        order = RunGang(
            run_key="run",
            attempt=1,
            folder=folder,
            call=f"{folder}/call",
            secret="00",
            fields=asdict(build_spec({"nproc_per_node": 2, **fields})),
            environment={"CUDA_VISIBLE_DEVICES": "", **environment},
            directory="/",
            search_path=[],
            modules=[],
        )
        self.nodes, self.told = PlayedNodes(), list[Message]()
        self.gang = Gang(order, self.nodes, self.told.append)  # pyright: ignore[reportArgumentType]

    @property
    def ended(self) -> Any:
        return self.gang.ended

    @property
    def goes_on(self) -> bool:
        return self.gang.ended is None

    @property
    def warnings(self) -> str:
        return "\n".join(message.text for message in self.told if isinstance(message, Notice))

    @property
    def incidents(self) -> list[Incident]:
        return [parse_incident(one.incident) for one in self.told if isinstance(one, IncidentSeen)]

    @property
    def rounds_ended(self) -> list[tuple[int, VerdictAction]]:
        return [(one.round, one.action) for one in self.told if isinstance(one, RoundEnded)]

    def requests(self, number: int) -> list[TakeEvidence]:
        """Return what evidence a node was asked for."""
        return [message for message in self.node(number).listen() if isinstance(message, TakeEvidence)]

    def answer(self, number: int, *snapshots: RankSnapshot) -> None:
        """Let a node answer the newest request that it has got."""
        newest = self.requests(number)[-1].number
        node = self.node(number).index
        self.say(number, EvidenceTaken(node=node, number=newest, ranks=list(snapshots)))

    def node(self, number: int) -> PlayedNode:
        return self.nodes.made[number]

    def say(self, number: int, *messages: Message) -> None:
        """Let the agent of a node speak, and the head hear it."""
        for message in messages:
            self.node(number).agent.send(message)
        self.gang.step(None, 0.0)

    def start(self, number: int, *, round: int = 1, nodes: int = 2, restart_count: int = 0) -> None:
        """Let the ranks of a node start."""
        node = self.node(number).index
        ranks = [
            RankInfo(
                rank=2 * node + local, local_rank=local, node_rank=node, pid=1, log=f"/r/rank-{local}.log"
            )
            for local in range(2)
        ]
        self.say(
            number,
            RanksStarted(
                node=node,
                round=round,
                world_size=2 * nodes,
                restart_count=restart_count,
                warm=True,
                ranks=ranks,
            ),
        )

    def fail(self, number: int, error: tuple[str, str], *, round: int = 1, **fields) -> None:
        """Let the first rank of a node raise."""
        node = self.node(number).index
        evidence = RankEvidence(
            rank=2 * node,
            local_rank=0,
            node_rank=node,
            failed_at=1.0,
            exit_code=1,
            stage="run",
            exc_type=error[0],
            exc_message=error[1],
            **fields,
        )
        self.say(number, RanksFailed(node=node, round=round, ranks=[asdict(evidence)]))

    def lose(self, number: int) -> None:
        """Let the agent of a node die."""
        self.node(number).die()
        self.gang.step(None, 0.0)

    def verdicts(self, number: int) -> list[tuple[int, VerdictAction, int]]:
        """Return the verdicts that a node has heard."""
        return [
            (message.round, message.action, message.restart_count)
            for message in self.node(number).listen()
            if isinstance(message, Verdict)
        ]

    def order(self, number: int) -> RunGang:
        """Return the order that a node has got."""
        return next(message for message in self.node(number).listen() if isinstance(message, RunGang))


@pytest.fixture
def play(tmp_path):
    """`play(**fields)` forms a gang with these fields of the spec."""
    made: list[PlayedGang] = []

    def form(*, environment: dict[str, str] | None = None, **fields: object) -> PlayedGang:
        made.append(PlayedGang(str(tmp_path), fields, environment or {}))
        return made[-1]

    yield form
    for played in made:
        played.gang.close()
        for node in played.nodes.made:
            node.close()


# ---------------------------------------------------------------- the usual course


def test_gang_succeeds_when_all_ranks_of_the_round_have_returned(play):
    gang = play(nnodes=2)
    gang.start(0)
    gang.start(1)
    gang.say(0, RanksReturned(node=0, round=1))
    assert gang.verdicts(0) == []
    gang.say(1, RanksReturned(node=1, round=1))
    assert gang.verdicts(0) == gang.verdicts(1) == [(1, VerdictAction.FINISH, 0)]
    gang.say(0, NodeDone(node=0))
    assert gang.goes_on
    gang.say(1, NodeDone(node=1))
    assert (gang.ended.status, gang.ended.result) == (GangStatus.SUCCEEDED, "/r/rank-0.result")


def test_failure_spends_a_restart_and_the_same_failure_again_ends_the_gang(play):
    gang = play(max_restarts=1)
    gang.start(0, nodes=1)
    gang.fail(0, USER_ERROR)
    assert gang.verdicts(0) == [(1, VerdictAction.RESTART, 1)]
    gang.start(0, round=2, nodes=1, restart_count=1)
    gang.fail(0, USER_ERROR, round=2)
    assert gang.verdicts(0)[1:] == [(2, VerdictAction.FAIL, 1)]
    gang.say(0, NodeDone(node=0))
    assert (gang.ended.status, gang.ended.restarts) == (GangStatus.FAILED, 1)
    assert [incident.restarts for incident in gang.incidents] == [0, 1]
    assert parse_diagnosis(gang.ended.diagnosis).category is Category.USER_ERROR


def test_order_that_the_socket_does_not_take_at_once_arrives(play):
    gang = play(environment={"LARGE": "x" * 1_000_000})
    heard = gang.node(0).heard
    for _ in range(1000):
        gang.node(0).listen()
        gang.gang.step(None, 0.01)
        if heard:
            break
    assert len(gang.order(0).environment["LARGE"]) == 1_000_000


# ---------------------------------------------------------------- lost nodes


def test_victims_of_a_lost_node_start_again_for_free(play):
    gang = play(nnodes=2)
    gang.start(0)
    gang.start(1)
    gang.lose(1)
    gang.fail(0, PEER_LOST)
    assert gang.verdicts(0) == [(1, VerdictAction.RESTART, 0)]
    assert "nodes came or went, which spends nothing" in gang.warnings


def test_victims_of_a_node_that_left_the_round_start_again_for_free(play):
    gang = play(nnodes="1:2")
    gang.start(0)
    gang.start(1)
    gang.say(1, NodeRegroups(node=1, round=1))
    gang.fail(0, PEER_LOST)
    gang.gang.step(None, 1.0)  # node 1 may have evidence too: it gets a moment
    assert gang.verdicts(0) == [(1, VerdictAction.RESTART, 0)]


@pytest.mark.parametrize(
    ("error", "non_retryable", "verdict"),
    [
        pytest.param(NON_RETRYABLE, True, (1, VerdictAction.FAIL, 0), id="non-retryable"),
        pytest.param(USER_ERROR, False, (1, VerdictAction.RESTART, 1), id="users-error"),
    ],
)
def test_error_of_the_user_is_not_free_because_a_node_was_lost(play, error, non_retryable, verdict):
    gang = play(nnodes=2)
    gang.start(0)
    gang.start(1)
    gang.lose(1)
    gang.fail(0, error, non_retryable=non_retryable)
    assert gang.verdicts(0) == [verdict]


def test_peer_lost_in_a_round_that_lost_no_node_spends_a_restart(play):
    gang = play(nnodes=1)
    gang.start(0, nodes=1)
    gang.fail(0, PEER_LOST)
    assert gang.verdicts(0) == [(1, VerdictAction.RESTART, 1)]


def test_replacement_is_told_the_restarts_and_the_round_of_its_gang(play):
    gang = play(nnodes=2, max_restarts=3)
    assert (gang.order(0).restart_count, gang.order(0).after_round) == (0, 0)
    gang.start(0)
    gang.start(1)
    gang.fail(0, USER_ERROR)
    gang.fail(1, PEER_LOST)
    for number in (0, 1):
        gang.start(number, round=2, restart_count=1)
    gang.lose(1)
    assert gang.node(2).index == 1
    assert (gang.order(2).restart_count, gang.order(2).after_round) == (1, 2)


def test_replacement_of_a_lone_node_counts_its_rounds_on(play):
    gang = play(nnodes=1)
    gang.start(0, nodes=1)
    gang.lose(0)
    assert gang.order(1).after_round == 1
    gang.start(1, round=2, nodes=1)
    gang.fail(1, USER_ERROR, round=2)
    assert gang.verdicts(1) == [(2, VerdictAction.RESTART, 1)]


def test_range_goes_on_with_its_minimum_when_no_more_replacements_are_allowed(play):
    gang = play(nnodes="1:2", max_attempts=1)
    gang.start(0)
    gang.start(1)
    gang.lose(1)
    assert len(gang.nodes.made) == 2
    assert "is not replaced any more; the gang goes on with 1 of 2" in gang.warnings
    assert gang.goes_on
    gang.start(0, round=2, nodes=1)
    gang.say(0, RanksReturned(node=0, round=2))
    gang.say(0, NodeDone(node=0))
    assert gang.ended.status is GangStatus.SUCCEEDED


def test_fixed_gang_fails_when_no_more_replacements_are_allowed(play):
    gang = play(nnodes=2, max_attempts=2)
    gang.start(0)
    gang.start(1)
    gang.lose(1)
    gang.lose(2)
    assert any(isinstance(message, StopGang) for message in gang.node(0).listen())
    gang.say(0, NodeDone(node=0))
    diagnosis = parse_diagnosis(gang.ended.diagnosis)
    assert (gang.ended.status, diagnosis.category) == (GangStatus.FAILED, Category.NODE_LOST)
    assert "as many as `max_attempts` allows" in diagnosis.summary


# ---------------------------------------------------------------- stops


def test_second_stop_can_only_shorten_the_grace(play):
    gang = play(nnodes=1)
    gang.start(0, nodes=1)
    for grace in (30.0, 60.0, 0.0):
        gang.gang.stop(StopGang(reason=StopReason.CANCELLED, grace_seconds=grace))
    graces = [message.grace_seconds for message in gang.node(0).listen() if isinstance(message, StopGang)]
    assert graces == [30.0, 0.0]
    gang.say(0, NodeDone(node=0, killed=[1, 0]))
    assert (gang.ended.status, gang.ended.killed) == (GangStatus.STOPPED, [0, 1])


def test_stop_is_said_once_with_its_reason_and_grace(play):
    gang = play(nnodes=1)
    gang.start(0, nodes=1)
    for grace in (30.0, 0.0):
        gang.gang.stop(StopGang(reason=StopReason.PREEMPTED, grace_seconds=grace))
    assert gang.warnings == "The gang is asked to stop (preempted); its ranks have 30 s."


def test_ranks_that_return_after_a_stop_are_no_success(play):
    gang = play(nnodes=1)
    gang.start(0, nodes=1)
    gang.gang.stop(StopGang(reason=StopReason.CANCELLED, grace_seconds=30.0))
    gang.say(0, RanksReturned(node=0, round=1))
    assert gang.verdicts(0) == []
    gang.say(0, NodeDone(node=0))
    assert (gang.ended.status, gang.ended.result) == (GangStatus.STOPPED, "")


def test_ranks_that_return_after_the_run_timeout_are_no_success(play):
    gang = play(nnodes=1, run_timeout_seconds=0.01)
    gang.start(0, nodes=1)
    gang.gang.step(None, 1.0)
    (order,) = [message for message in gang.node(0).listen() if isinstance(message, StopGang)]
    assert (order.reason, order.grace_seconds) == (StopReason.TIMED_OUT, 60.0)
    gang.say(0, RanksReturned(node=0, round=1))
    gang.say(0, NodeDone(node=0))
    assert gang.ended.status is GangStatus.TIMED_OUT


def test_nodes_of_a_failed_gang_are_told_that_they_have_lost_a_peer(play):
    gang = play(nnodes=2, max_restarts=0)
    gang.start(0)
    gang.start(1)
    gang.fail(0, USER_ERROR)
    gang.gang.step(None, 1.0)
    reasons = [message.reason for message in gang.node(1).listen() if isinstance(message, StopGang)]
    assert reasons == [StopReason.FAILED]


# ---------------------------------------------------------------- samples, evidence, hangs


def stand(rank: int, sequence: int, operation: str = "all_reduce", **facts) -> RankSnapshot:
    """A rank that waits in a collective."""
    newest = LastCollective(group="0", sequence=sequence, operation=f"gloo:{operation}", is_done=False)
    return RankSnapshot(rank=rank, **{"is_alive": True, "collectives": [newest], **facts})


@pytest.fixture
def impatient(monkeypatch):
    """Looks follow each other at once, and two of them are proof."""
    for name in ("PAUSE_SECONDS", "AGAIN_SECONDS", "LEFT_SECONDS", "LEAST_SECONDS"):
        monkeypatch.setattr(stalls, name, 0.0)
    monkeypatch.setattr(hangwatch, "SAME_SECONDS", 0.0)


def test_samples_and_checkpoints_are_passed_on(play):
    gang = play(nnodes=1)
    gang.start(0, nodes=1)
    sample = NodeSample(node=0, round=1, ranks=[RankSample(rank=0, step=3)])
    saved = CheckpointSaved(step=3, uuid="u", key="k", size_bytes=1, seconds=1.0, stall_seconds=0.1)
    gang.say(0, sample, saved)
    assert gang.told[-2:] == [sample, saved]


def test_other_nodes_give_their_stacks_before_a_failure_is_judged(play):
    gang = play(nnodes=2, max_restarts=0)
    gang.start(0)
    gang.start(1)
    gang.fail(0, USER_ERROR)
    assert gang.requests(0) == []
    assert gang.verdicts(1) == []
    gang.answer(1, stand(2, 5, stacks="Thread 1\n  a"), stand(3, 5, stacks="Thread 2\n  a"))
    gang.gang.step(None, 1.0)
    assert gang.verdicts(1) == [(1, VerdictAction.FAIL, 0)]
    (incident,) = gang.incidents
    assert (incident.kind, incident.category, incident.rank) == (IncidentKind.FAILURE, "UserError", 0)
    assert [(row.rank, row.state) for row in incident.ranks] == [
        (0, "failed"),
        (1, "not known"),
        (2, "waits"),
        (3, "waits"),
    ]
    assert incident.ranks[2].collective == "all_reduce #5 (waits)"
    assert [group.ranks for group in incident.stacks] == [[2], [3]]


@pytest.mark.parametrize(
    ("restarts", "verdict"),
    [
        pytest.param(1, (1, VerdictAction.RESTART, 1), id="restart"),
        pytest.param(0, (1, VerdictAction.FAIL, 0), id="fail"),
    ],
)
def test_proven_hang_ends_the_round_by_the_budget(play, impatient, restarts, verdict):
    gang = play(nnodes=1, max_restarts=restarts)
    gang.start(0, nodes=1)
    for _ in range(2):
        gang.gang.step(None, 0.0)
        gang.answer(0, stand(0, 7), stand(1, 7, "broadcast"))
        gang.gang.step(None, 0.0)
    assert gang.verdicts(0) == [verdict]
    assert gang.rounds_ended == [verdict[:2]]
    (incident,) = gang.incidents
    assert (incident.kind, incident.category) == (IncidentKind.HANG, "CollectivesApart")
    assert (incident.rank, incident.victims) == (1, [0])
    stops = [message.reason for message in gang.node(0).listen() if isinstance(message, StopGang)]
    assert stops == ([] if restarts else [StopReason.FAILED])


def test_failed_gang_that_hung_has_the_cause_as_its_diagnosis(play, impatient):
    gang = play(nnodes=1, max_restarts=0)
    gang.start(0, nodes=1)
    for _ in range(2):
        gang.gang.step(None, 0.0)
        gang.answer(0, stand(0, 7), stand(1, 7, "broadcast"))
        gang.gang.step(None, 0.0)
    gang.say(0, NodeDone(node=0))
    diagnosis = parse_diagnosis(gang.ended.diagnosis)
    assert (diagnosis.category, diagnosis.rank) == (Category.COLLECTIVES_APART, 1)
    assert diagnosis.log == "/r/rank-1.log"


def test_suspected_gang_is_told_once_and_when_it_goes_on(play, monkeypatch):
    monkeypatch.setattr(stalls, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(stalls, "AGAIN_SECONDS", 0.0)
    gang = play(nnodes=1)
    gang.start(0, nodes=1)
    facts = {"steps": 5, "step_seconds": 0.1, "idle_seconds": 30.0}
    ranks = [RankSample(rank=rank, step=5, **facts) for rank in (0, 1)]
    gang.say(0, NodeSample(node=0, round=1, ranks=ranks))
    for _ in range(3):
        gang.gang.step(None, 0.0)
        gang.answer(0, *(RankSnapshot(rank=rank, is_alive=True, idle_seconds=30.0) for rank in (0, 1)))
    (incident,) = gang.incidents
    assert (incident.kind, incident.rank) == (IncidentKind.SUSPICION, None)
    assert incident.sentence == "no step for 30 s, where a step takes 0.1 s."
    assert gang.warnings.count("The gang seems to hang") == 1
    ranks = [RankSample(rank=rank, step=6, steps=6, step_seconds=0.1) for rank in (0, 1)]
    gang.say(0, NodeSample(node=0, round=1, ranks=ranks))
    assert "The gang makes steps again after 30 s." in gang.warnings
    assert gang.verdicts(0) == []


def test_preemption_is_told_with_what_the_ranks_do_now_and_not_with_an_older_look(play, monkeypatch):
    monkeypatch.setattr(stalls, "LEAST_SECONDS", 0.0)
    gang = play(nnodes=1)
    gang.start(0, nodes=1)
    ranks = [RankSample(rank=rank, step=5, steps=5, step_seconds=0.1, idle_seconds=30.0) for rank in (0, 1)]
    gang.say(0, NodeSample(node=0, round=1, ranks=ranks))
    gang.gang.step(None, 0.0)
    gang.answer(0, stand(0, 7, step=5), stand(1, 7, step=5))
    gang.gang.step(None, 0.0)
    ranks = [RankSample(rank=rank, step=900, steps=900, step_seconds=0.1) for rank in (0, 1)]
    gang.say(0, NodeSample(node=0, round=1, ranks=ranks))
    gang.gang.stop(StopGang(reason=StopReason.PREEMPTED, grace_seconds=30.0))
    incident = gang.incidents[-1]
    assert (incident.kind, incident.step, incident.stacks) == (IncidentKind.PREEMPTION, 900, [])
    assert [row.step for row in incident.ranks] == [900, 900]
    assert all(not row.collective for row in incident.ranks)


def test_answer_to_an_older_request_is_not_mixed_in(play, impatient):
    gang = play(nnodes=1)
    gang.start(0, nodes=1)
    gang.gang.step(None, 0.0)
    gang.say(0, EvidenceTaken(node=0, number=99, ranks=[stand(0, 7), stand(1, 7, "broadcast")]))
    gang.gang.step(None, 0.0)
    assert gang.incidents == []


def test_lost_node_and_preemption_are_incidents(play):
    gang = play(nnodes=2)
    gang.start(0)
    gang.start(1)
    gang.lose(1)
    gang.gang.stop(StopGang(reason=StopReason.PREEMPTED, grace_seconds=30.0))
    lost, preempted = gang.incidents
    assert (lost.kind, lost.category, lost.node_rank) == (IncidentKind.NODE, "NodeLost", 1)
    assert (preempted.kind, preempted.consequence) == (
        IncidentKind.PREEMPTION,
        "Its ranks have 30 s to save.",
    )


def test_ranks_that_return_end_their_round(play):
    gang = play(nnodes=1)
    gang.start(0, nodes=1)
    gang.say(0, RanksReturned(node=0, round=1))
    assert gang.rounds_ended == [(1, VerdictAction.FINISH)]
    assert gang.incidents == []
