"""How messages cross a socket pair: whole, in order, or the end is told; nobody waits for a reader."""

from __future__ import annotations

import os
import select
import socket
import threading
import time

import pytest

from prefect_torch_elastic import channel
from prefect_torch_elastic.channel import Channel, ChannelClosed
from prefect_torch_elastic.rankstate import StopReason
from prefect_torch_elastic.wire import LogLines, Notice, Progress, Quit, RanksReturned, StopGang

MESSAGES = [
    StopGang(reason=StopReason.CANCELLED, grace_seconds=1.5),
    Quit(),
    LogLines(rank=3, lines=[(20, "epoch 1"), (40, "")]),
    Progress(step=7, total_steps=None, metrics={"loss": 2.5}, phase="evaluate"),
]
LONG = Notice(level=20, text="x" * 500_000)  # more than a socket takes at once


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
    there = Channel(end)
    body = b'{"kind": "Notice", "level": 20, "text": "hello"}'
    data = channel._LENGTH.pack(len(body)) + body
    for byte in data[:-1]:
        raw.send(bytes([byte]))
        assert list(there.receive(1.0)) == []
    raw.send(data[-1:])
    assert list(there.receive(1.0)) == [Notice(level=20, text="hello")]


def test_message_that_came_with_one_that_is_still_handled_is_not_kept_back(channels):
    here, there = channels
    here.send(MESSAGES[0])
    here.send(StopGang(reason=StopReason.CANCELLED, grace_seconds=0.0))
    handled = []
    for message in there.receive(1.0):  # the agent reads its channel while it runs the gang
        handled.append(message)
        handled += there.receive(0.0)
    assert handled == [MESSAGES[0], StopGang(reason=StopReason.CANCELLED, grace_seconds=0.0)]


def test_message_that_a_reader_left_comes_with_the_next_look(channels):
    here, there = channels
    here.send(Quit())
    here.send(Notice(level=20, text="later"))
    assert next(there.receive(1.0)) == Quit()
    assert list(there.receive(0.0)) == [Notice(level=20, text="later")]


def test_receive_waits_no_longer_than_it_is_told(channels):
    started = time.monotonic()
    assert list(channels[0].receive(0.02)) == []
    assert 0.01 < time.monotonic() - started < 10.0  # it waits, and not for ever


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


# ---------------------------------------------------------------- a reader that does not read


def read_until(reader: Channel, last: object, *, seconds: float = 10.0) -> list[object]:
    """Return the messages up to `last`, or fail."""
    received: list[object] = []
    deadline = time.monotonic() + seconds
    while last not in received:
        assert time.monotonic() < deadline, f"{len(received)} messages came, and not the last"
        received += reader.receive(0.1)
    return received


def test_reader_that_does_not_read_blocks_no_sender(channels):
    here, _ = channels
    started = time.monotonic()
    for _ in range(20):
        here.send(LONG)
        here.offer(LONG)
        list(here.receive(0.0))
    assert time.monotonic() - started < 5


def test_offer_is_refused_beyond_the_room_and_accepted_after_the_reader_has_read(channels):
    here, there = channels
    assert here.offer(LONG)  # what does not fit into the socket waits here
    here.send(LONG)
    assert not here.offer(Notice(level=20, text="lost"))
    thread = threading.Thread(target=lambda: list(here.receive(5.0)))
    thread.start()
    received = read_until(there, LONG) + read_until(there, LONG)
    there.send(Quit())
    thread.join(10)
    assert received == [LONG, LONG]
    assert here.offer(MESSAGES[1])
    assert list(there.receive(1.0)) == [MESSAGES[1]]


def test_messages_for_a_slow_reader_come_later_whole_and_in_order(channels):
    here, there = channels
    sent = [LONG, *MESSAGES, LONG, RanksReturned(node=0, round=1)]
    for message in sent:
        here.send(message)
    received: list[object] = []
    while sent[-1] not in received:
        here.flush()
        received += there.receive(0.1)
    assert received == sent


def test_sender_that_waits_for_an_answer_hands_over_what_the_socket_did_not_take(channels):
    """Ranks that print much and return: the launcher must hear of both before it can answer."""
    agent, launcher = channels
    agent.send(LONG)
    agent.send(RanksReturned(node=0, round=1))

    def answer() -> None:
        read_until(launcher, RanksReturned(node=0, round=1))
        launcher.send(Quit())

    thread = threading.Thread(target=answer)
    thread.start()
    assert list(agent.receive(5.0)) == [Quit()]
    thread.join(10)


def test_channel_asks_for_room_only_while_something_has_to_go_out(channels):
    here, there = channels
    assert here.events == select.POLLIN
    here.send(LONG)
    assert here.events == select.POLLIN | select.POLLOUT
    while here.events != select.POLLIN:
        list(there.receive(0.0))
        here.flush()


def test_last_words_are_read_before_a_failed_send_ends_the_channel(channels):
    here, there = channels
    here.send(LONG)  # a part of it waits
    there.send(Quit())
    there.close()
    assert list(here.receive(1.0)) == [Quit()]
    with pytest.raises(ChannelClosed):
        list(here.receive(1.0))


# ---------------------------------------------------------------- requests with open files


def test_request_brings_open_files_along(sockets):
    here, there = sockets
    reader, writer = os.pipe()
    channel.send_request(here, {"op": "fork", "children": [1, 2]}, [writer])
    os.close(writer)
    body, fds = channel.receive_request(there)
    assert body == {"op": "fork", "children": [1, 2]}
    os.write(fds[0], b"through")
    os.close(fds[0])
    assert os.read(reader, 20) == b"through"
    os.close(reader)


def test_large_request_without_files_arrives(sockets):
    here, there = sockets
    body = {"environment": {f"NAME_{index}": "x" * 100 for index in range(500)}}
    channel.send_request(here, body)
    assert channel.receive_request(there) == (body, [])


def test_request_of_a_side_that_is_gone_ends_the_channel(sockets):
    here, there = sockets
    here.close()
    with pytest.raises(ChannelClosed):
        channel.receive_request(there)


def test_request_that_was_cut_ends_the_channel(sockets):
    here, there = sockets
    here.sendall(channel._LENGTH.pack(100) + b'{"op"')
    here.close()
    with pytest.raises(ChannelClosed):
        channel.receive_request(there)


def test_wait_readable_raises_at_its_deadline(sockets):
    here, there = sockets
    with pytest.raises(TimeoutError):
        channel.wait_readable(there, time.monotonic() + 0.01)
    here.send(b"x")
    channel.wait_readable(there, time.monotonic() + 1.0)
