"""A gang seen by its head: agents are played by the test, so rounds, deaths and verdicts come as it says."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict
from typing import Any

import pytest

from prefect_torch_elastic.channel import Channel
from prefect_torch_elastic.evidence import Category, RankEvidence, parse_diagnosis
from prefect_torch_elastic.node.gang import Gang
from prefect_torch_elastic.spec import build_spec
from prefect_torch_elastic.wire import (
    GangStatus,
    Message,
    NodeDone,
    NodeRegroups,
    Notice,
    RankInfo,
    RanksFailed,
    RanksReturned,
    RanksStarted,
    RunGang,
    StopGang,
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
        self.signals: list[int] = []
        self.heard: list[Message] = []

    def send(self, message: Message) -> None:
        self.channel.send(message)

    def signal(self, number: int) -> None:
        self.signals.append(number)

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
        gang.gang.stop(StopGang(reason="asked", grace_seconds=grace))
    graces = [message.grace_seconds for message in gang.node(0).listen() if isinstance(message, StopGang)]
    assert graces == [30.0, 0.0]
    gang.say(0, NodeDone(node=0, killed=[1, 0]))
    assert (gang.ended.status, gang.ended.killed) == (GangStatus.STOPPED, [0, 1])
