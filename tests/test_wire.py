"""What crosses between the processes of a machine: each message arrives whole, or the end is told."""

from __future__ import annotations

import dataclasses
import os
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_elastic import wire
from prefect_torch_elastic.channel import Channel, ChannelClosed
from prefect_torch_elastic.wire import (
    GangEnded,
    LogLines,
    NodeDone,
    NodeRegroups,
    Notice,
    Progress,
    Quit,
    RankInfo,
    RanksFailed,
    RanksReturned,
    RanksStarted,
    RunGang,
    StopGang,
    Verdict,
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
    StopGang(reason="cancelled", grace_seconds=1.5),
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
    Verdict(round=1, action="restart", restart_count=1),
    NodeDone(node=1, problem="no space", killed=[3], warm=False),
    Notice(level=30, text="node 1 was lost"),
    GangEnded(status="failed", diagnosis={"category": "Killed"}, error="/x", restarts=1, killed=[0]),
]


@pytest.fixture
def channels():
    ends = [Channel(end) for end in socket.socketpair()]
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def sockets():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_arrives_equal(channels, message):
    here, there = channels
    here.send(message)
    assert list(there.receive(1.0)) == [message]


def test_every_message_of_the_union_is_tested_and_has_a_kind():
    kinds = set(wire.Message.__args__)
    assert {type(message) for message in MESSAGES} == kinds
    assert set(wire._KINDS.values()) == kinds


def test_messages_keep_their_order(channels):
    here, there = channels
    for message in MESSAGES:
        here.send(message)
    received: list[object] = []
    while len(received) < len(MESSAGES):
        received += there.receive(1.0)
    assert received == MESSAGES


def test_message_that_arrives_in_pieces_is_yielded_once_it_is_whole(sockets):
    raw, end = sockets
    channel = Channel(end)
    body = b'{"kind": "Notice", "level": 20, "text": "hello"}'
    data = wire._LENGTH.pack(len(body)) + body
    for byte in data[:-1]:
        raw.send(bytes([byte]))
        assert list(channel.receive(1.0)) == []
    raw.send(data[-1:])
    assert list(channel.receive(1.0)) == [Notice(level=20, text="hello")]


def test_message_that_came_with_one_that_is_still_handled_is_not_kept_back(channels):
    here, there = channels
    here.send(RUN_GANG)
    here.send(StopGang(reason="at once", grace_seconds=0.0))
    handled = []
    for message in there.receive(1.0):  # the agent reads its channel while it runs the gang
        handled.append(message)
        handled += there.receive(0.0)
    assert handled == [RUN_GANG, StopGang(reason="at once", grace_seconds=0.0)]


def test_message_that_a_reader_left_comes_with_the_next_look(channels):
    here, there = channels
    here.send(Quit())
    here.send(Notice(level=20, text="later"))
    assert next(there.receive(1.0)) == Quit()
    assert list(there.receive(0.0)) == [Notice(level=20, text="later")]


def test_receive_waits_no_longer_than_it_is_told(channels):
    started = time.monotonic()
    assert list(channels[0].receive(0.02)) == []
    assert 0.01 < time.monotonic() - started < 1.0


def test_receive_yields_the_last_words_before_the_end(channels):
    here, there = channels
    here.send(Quit())
    here.close()
    assert list(there.receive(1.0)) == [Quit()]
    with pytest.raises(ChannelClosed):
        list(there.receive(1.0))


def test_send_says_that_the_other_side_is_gone(channels):
    channels[1].close()
    with pytest.raises(ChannelClosed):
        channels[0].send(Quit())


def test_channel_works_above_1024_open_files(channels):
    here, there = channels
    fd = os.dup2(there.fileno(), 2000)
    high = Channel(socket.socket(fileno=fd))
    try:
        here.send(Quit())
        assert list(high.receive(1.0)) == [Quit()]
    finally:
        high.close()


@given(text=st.text(max_size=50), step=st.integers(0, 2**62))
def test_any_text_survives_the_way(text, step):
    message = Progress(step=step, total_steps=step, metrics={text: text}, phase=text)
    ends = [Channel(end) for end in socket.socketpair()]
    ends[0].send(message)
    assert list(ends[1].receive(1.0)) == [message]
    for end in ends:
        end.close()


def test_message_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Quit().kind = "StopGang"  # pyright: ignore[reportAttributeAccessIssue]


# ---------------------------------------------------------------- requests with open files


def test_request_brings_open_files_along(sockets):
    here, there = sockets
    reader, writer = os.pipe()
    wire.send_request(here, {"op": "fork", "children": [1, 2]}, [writer])
    os.close(writer)
    body, fds = wire.receive_request(there)
    assert body == {"op": "fork", "children": [1, 2]}
    os.write(fds[0], b"through")
    os.close(fds[0])
    assert os.read(reader, 20) == b"through"
    os.close(reader)


def test_large_request_without_files_arrives(sockets):
    here, there = sockets
    body = {"environment": {f"NAME_{index}": "x" * 100 for index in range(500)}}
    wire.send_request(here, body)
    assert wire.receive_request(there) == (body, [])


def test_request_of_a_side_that_is_gone_ends_the_channel(sockets):
    here, there = sockets
    here.close()
    with pytest.raises(ChannelClosed):
        wire.receive_request(there)


def test_request_that_was_cut_ends_the_channel(sockets):
    here, there = sockets
    here.sendall(wire._LENGTH.pack(100) + b'{"op"')
    here.close()
    with pytest.raises(ChannelClosed):
        wire.receive_request(there)


def test_wait_readable_raises_at_its_deadline(sockets):
    here, there = sockets
    with pytest.raises(TimeoutError):
        wire.wait_readable(there, time.monotonic() + 0.01)
    here.send(b"x")
    wire.wait_readable(there, time.monotonic() + 1.0)
