"""How nodes of other machines come in: who is let in, what passes the gate, and how a gang's head sees it."""

from __future__ import annotations

import base64
import errno
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from prefect_torch_elastic.channel import Channel
from prefect_torch_elastic.node import gate as gate_room
from prefect_torch_elastic.node import handshake
from prefect_torch_elastic.node.awaited import Awaited
from prefect_torch_elastic.node.gate import Gate, RemoteNode
from prefect_torch_elastic.node.handshake import HandshakeFailed, Visitor, admit, introduce
from prefect_torch_elastic.node.interfaces import find_interface
from prefect_torch_elastic.spec import build_spec
from prefect_torch_elastic.wire import Dismiss, NodeDone, RankError, RanksFailed

KEY, GANG = b"k" * 32, "gang-0"
WAIT_SECONDS = 10.0


@pytest.fixture
def gate() -> Iterator[Gate]:
    with socket.socket() as probe:  # a port that is free now
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    opened = Gate(f"127.0.0.1:{port}", key=KEY, gang=GANG, nnodes=3)
    yield opened
    opened.close()


def call(gate: Gate) -> socket.socket:
    return socket.create_connection(gate._listener.getsockname(), WAIT_SECONDS)


def join(gate: Gate, node: int = 1, *, pod: str = "gang-node-0-1-abcde") -> tuple[Channel, RemoteNode]:
    """Come in as a node, and return both sides."""
    connection = call(gate)
    introduce(connection, key=KEY, gang=GANG, node=node, pod=pod)
    assert select.select([gate], [], [], WAIT_SECONDS)[0], "nobody was announced"
    (arrived,) = gate.take_arrivals()
    return Channel(connection), arrived


def test_node_that_proves_itself_is_announced_with_its_name(gate: Gate):
    channel, node = join(gate, 2, pod="gang-node-0-2-fghij")
    assert (node.index, node.pod) == (2, "gang-node-0-2-fghij")
    channel.close()


@pytest.mark.parametrize(
    ("key", "gang", "node", "final"),
    [
        pytest.param(b"x" * 32, GANG, 1, True, id="another-key"),
        pytest.param(KEY, "gang-1", 1, False, id="another-incarnation"),
        pytest.param(KEY, GANG, 0, True, id="the-leader-itself"),
        pytest.param(KEY, GANG, 3, True, id="more-than-there-are"),
    ],
)
def test_gate_turns_strangers_away(gate: Gate, key: bytes, gang: str, node: int, final: bool):
    with call(gate) as connection, pytest.raises(HandshakeFailed) as turned_away:
        introduce(connection, key=key, gang=gang, node=node, pod="")
    assert turned_away.value.final is final
    assert gate.take_arrivals() == []


def test_node_does_not_trust_a_leader_without_the_key():
    ours, theirs = socket.socketpair()

    def pretend() -> None:
        with suppress(HandshakeFailed):
            admit(theirs, key=KEY, gang=GANG, nnodes=2)

    impostor = threading.Thread(target=pretend)
    impostor.start()
    try:  # the impostor knows another key, so that it turns us away: that is no proof either
        with pytest.raises(HandshakeFailed):
            introduce(ours, key=b"other" * 6, gang=GANG, node=1, pod="")
    finally:
        impostor.join()
        ours.close()
        theirs.close()


def test_proof_of_a_leader_that_echoes_ours_is_not_accepted():
    ours, theirs = socket.socketpair()
    theirs.settimeout(WAIT_SECONDS)

    def echo() -> None:
        theirs.sendall(b'{"challenge": "a"}\n')
        line = theirs.recv(4096)
        theirs.sendall(line)  # it has a `proof`, and it is the node's own

    impostor = threading.Thread(target=echo)
    impostor.start()
    with pytest.raises(HandshakeFailed, match="does not know this call's key"):
        introduce(ours, key=KEY, gang=GANG, node=1, pod="")
    impostor.join()
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\n\r\n", b"x" * 5000, b"[1]\n", b""],
    ids=["http", "long", "a-list", "nothing"],
)
def test_gate_survives_noise(gate: Gate, noise: bytes):
    with call(gate) as connection:
        connection.sendall(noise)
    channel, node = join(gate)
    assert node.index == 1
    channel.close()


def test_messages_pass_and_a_node_that_hangs_up_is_gone(gate: Gate, tmp_path: Path):
    channel, node = join(gate)
    channel.send(NodeDone(node=1))
    assert select.select(node.fds, [], [], WAIT_SECONDS)[0]
    assert list(node.receive(tmp_path)) == [NodeDone(node=1)]
    assert not node.is_gone
    channel.close()
    assert select.select(node.fds, [], [], WAIT_SECONDS)[0]
    assert list(node.receive(tmp_path)) == []
    assert node.is_gone
    assert node.pod in node.describe_end()


def test_exception_of_a_far_rank_lands_in_the_leaders_folder(gate: Gate, tmp_path: Path):
    channel, node = join(gate)
    channel.send(RankError(rank=3, data=base64.b64encode(b"parcel").decode()))
    evidence = {"rank": 3, "error": "/far/rank-3.error", "log": "/far/rank-3.log", "stacks": ""}
    channel.send(RanksFailed(node=1, round=1, ranks=[evidence]))
    messages: list[object] = []
    while not messages:
        assert select.select(node.fds, [], [], WAIT_SECONDS)[0]
        messages += node.receive(tmp_path)
    (failed,) = messages
    assert isinstance(failed, RanksFailed)
    (rank,) = failed.ranks
    assert Path(rank["error"]).read_bytes() == b"parcel"
    assert Path(rank["error"]).is_relative_to(tmp_path)
    assert rank["log"] == "gang-node-0-1-abcde:/far/rank-3.log"
    channel.close()


def test_error_file_that_did_not_come_is_not_named(gate: Gate, tmp_path: Path):
    channel, node = join(gate)
    channel.send(RanksFailed(node=1, round=1, ranks=[{"rank": 3, "error": "/far/rank-3.error"}]))
    assert select.select(node.fds, [], [], WAIT_SECONDS)[0]
    (failed,) = node.receive(tmp_path)
    assert isinstance(failed, RanksFailed)
    assert failed.ranks[0]["error"] == ""
    channel.close()


def test_dismissal_arrives_though_the_node_was_talking(gate: Gate):
    channel, _ = join(gate)
    channel.send(NodeDone(node=1))  # nobody reads it: closing over it would take the goodbye back
    heard: list[object] = []

    def leave() -> None:
        heard.extend(channel.receive(WAIT_SECONDS))
        channel.close()

    node = threading.Thread(target=leave)
    node.start()
    gate.dismiss(65)
    node.join()
    assert heard == [Dismiss(exit_code=65)]


def test_node_that_comes_again_replaces_itself(gate: Gate):
    first, before = join(gate)
    second, _ = join(gate)
    assert before.is_gone
    first.close()
    second.close()


def test_pod_with_another_name_does_not_take_the_place_of_one_that_is_connected(gate: Gate):
    first, before = join(gate)
    with call(gate) as connection, pytest.raises(HandshakeFailed, match="`gang-node-0-1-abcde`") as refused:
        introduce(connection, key=KEY, gang=GANG, node=1, pod="gang-node-0-1-fghij")
    assert not refused.value.final
    assert not before.is_gone
    assert gate.take_arrivals() == []
    first.close()


def test_pod_takes_the_place_of_one_that_hung_up_though_its_words_are_unread(gate: Gate):
    first, _ = join(gate)
    first.send(NodeDone(node=1))
    first.close()
    second, node = join(gate, pod="gang-node-0-1-fghij")
    assert node.pod == "gang-node-0-1-fghij"
    second.close()


def test_gate_that_is_shut_asks_newcomers_to_come_again(gate: Gate):
    member, node = join(gate)
    gate.shut()
    with call(gate) as connection, pytest.raises(HandshakeFailed, match="is decided") as refused:
        introduce(connection, key=KEY, gang=GANG, node=2, pod="")
    assert not refused.value.final
    assert not node.is_gone
    member.close()


class Door:
    """A listening socket that fails so often before anybody comes in."""

    def __init__(self, listener: socket.socket, *errors: OSError) -> None:
        self._listener, self._errors = listener, list(errors)

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = self._listener.accept()
        if self._errors:
            connection.close()
            raise self._errors.pop()
        return connection, address

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


def test_gate_stays_open_after_errors_that_pass(gate: Gate):
    errors = [OSError(errno.EMFILE, "too many"), ConnectionAbortedError(errno.ECONNABORTED, "gone")]
    gate._listener = cast("Any", Door(gate._listener, *errors))
    for _ in range(3):  # the first one came in by the socket itself
        call(gate).close()
    channel, node = join(gate)
    assert node.index == 1
    channel.close()


def test_silent_guests_are_bounded_and_others_come_in_after_them(gate: Gate):
    calls = [call(gate) for _ in range(gate_room._MOST_GUESTS + 8)]
    for connection in calls[: gate_room._MOST_GUESTS]:
        assert select.select([connection], [], [], WAIT_SECONDS)[0], "it was not asked who it is"
    guests = [thread for thread in threading.enumerate() if thread.name == "gate-guest"]
    assert len(guests) <= gate_room._MOST_GUESTS
    for connection in calls:
        connection.close()
    channel, _ = join(gate)
    channel.close()


def test_guest_that_proves_itself_while_the_gate_closes_rings_no_bell():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    gate = Gate(f"127.0.0.1:{port}", key=KEY, gang=GANG, nnodes=3)
    ours, theirs = socket.socketpair()
    gate.close()
    with ours, theirs, pytest.raises(HandshakeFailed, match="closed"):
        gate._announce(Visitor(node=1, pod="", connection=theirs))


def test_handshake_has_one_deadline_however_slowly_somebody_talks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(handshake, "SECONDS", 0.3)
    ours, theirs = socket.socketpair()
    over = threading.Event()

    def trickle() -> None:
        while not over.wait(0.02):
            with suppress(OSError):
                theirs.send(b" ")

    talker = threading.Thread(target=trickle)
    talker.start()
    began = time.monotonic()
    try:
        with pytest.raises(HandshakeFailed):
            admit(ours, key=KEY, gang=GANG, nnodes=2)
    finally:
        over.set()
        talker.join()
        ours.close()
        theirs.close()
    assert time.monotonic() - began < 2.0


# ---------------------------------------------------------------- who is missing


def test_missing_nodes_are_named_once_a_minute_and_at_the_end():
    awaited = Awaited(build_spec({"nnodes": 4, "rdzv_timeout_seconds": 90}))
    now = time.monotonic()
    awaited.arrive(2)
    assert (awaited.news(now), awaited.overdue(now)) == ("", "")
    assert awaited.news(now + 61) == "2 of 4 nodes have joined; missing: node 1, node 3."
    assert awaited.news(now + 62) == ""
    assert awaited.overdue(now + 91) == "only 2 of 4 nodes have joined in 90 s; missing: node 1, node 3."


def test_nothing_is_said_when_all_have_come():
    awaited = Awaited(build_spec({"nnodes": 2, "rdzv_timeout_seconds": 1}))
    awaited.arrive(1)
    late = time.monotonic() + 100
    assert (awaited.next_news, awaited.news(late), awaited.overdue(late)) == (None, "", "")


# ---------------------------------------------------------------- where ranks listen


@pytest.mark.parametrize(
    ("address", "name"),
    [("127.0.0.1", "lo"), ("127.20.3.7", "lo"), ("192.0.2.1", ""), ("", ""), ("fd00::7", "")],
    ids=["loopback", "of-loopback", "nobodys", "none", "ipv6"],
)
def test_interface_is_found_by_its_address(address: str, name: str):
    assert find_interface(address) == name
