"""All that crosses between driver, launcher, agents and ranks of a machine: JSON messages on a socket pair.

Each message is one dataclass below with its name in `kind`; a reader gets the dataclass back. Objects of user
code never travel here: they are files (`parcel`), and messages carry their paths.
"""

from __future__ import annotations

import dataclasses
import json
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_LENGTH = struct.Struct("!I")
_MAX_FDS = 250  # SCM_MAX_FD of Linux is 253


@dataclass(frozen=True, kw_only=True)
class RunGang:
    """Driver to launcher, launcher to agent: form a gang and run this call in it.

    Attributes:
        run_key: Stable name of the run over restarts, attempts and retries.
        attempt: This gang's number in the run, from 1.
        folder: Folder of the attempt; logs, results and evidence of all nodes are written there.
        call: Path of the parcel with function and arguments.
        secret: HMAC key of the parcels, as hex.
        fields: The fields of the `Spec`.
        environment: Environment of the ranks, without what the agent adds.
        directory: Working directory of the ranks.
        search_path: `sys.path` of the flow, so that ranks import what the flow imports.
        modules: Modules that the call names, imported once per node instead of once per rank.
        flow_run_id: For `get_context()` and for logs; empty without a flow.
        task_run_id: The same for the task.
        node: Agent only: index of the simulated node.
        nproc: Agent only: processes on this node.
        devices: Agent only: GPU ids for `CUDA_VISIBLE_DEVICES`; None leaves the variable as it is.
        endpoint: Agent only: `host:port` of the store that the nodes meet at; empty for one node.
    """

    run_key: str
    attempt: int
    folder: str
    call: str
    secret: str
    fields: dict[str, Any]
    environment: dict[str, str]
    directory: str
    search_path: list[str]
    modules: list[str]
    flow_run_id: str = ""
    task_run_id: str = ""
    node: int = 0
    nproc: int = 1
    devices: list[str] | None = None
    endpoint: str = ""


@dataclass(frozen=True, kw_only=True)
class StopGang:
    """Downwards: end the gang; SIGTERM, `grace_seconds`, SIGKILL."""

    reason: str
    grace_seconds: float


@dataclass(frozen=True, kw_only=True)
class Quit:
    """Downwards: no more gangs will come; leave."""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Where one rank lives."""

    rank: int
    local_rank: int
    node_rank: int
    pid: int
    log: str


@dataclass(frozen=True, kw_only=True)
class RanksStarted:
    """Upwards: the ranks of a node run (again)."""

    node: int
    round: int
    world_size: int
    restart_count: int
    warm: bool
    ranks: list[RankInfo]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class LogLines:
    """Upwards: lines of one rank that belong into the task run's log: `(level, text)`."""

    rank: int
    lines: list[tuple[int, str]]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Upwards: what rank 0 reported last."""

    step: int
    total_steps: int | None
    metrics: dict[str, Any]
    phase: str


@dataclass(frozen=True, kw_only=True)
class RanksFailed:
    """Agent to launcher: ranks of this node failed and all are down; `ranks` are fields of `RankEvidence`."""

    node: int
    round: int
    ranks: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RanksReturned:
    """Agent to launcher: every rank of this node returned."""

    node: int
    round: int


@dataclass(frozen=True, kw_only=True)
class NodeRegroups:
    """Agent to launcher: this node ends its ranks and leaves the round, because other nodes came or went."""

    node: int
    round: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Launcher to agent: what the gang does next: `restart`, `finish` or `fail`."""

    round: int
    action: str
    restart_count: int


@dataclass(frozen=True, kw_only=True)
class NodeDone:
    """Agent to launcher: this node's part in the gang is over, no rank of it is left.

    `warm`: the agent can fork the next gang's ranks; `killed`: ranks that outstayed their grace.
    """

    node: int
    problem: str = ""
    killed: list[int] = field(default_factory=list[int])
    warm: bool = True


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Upwards: one state change in words, with a logging level."""

    level: int
    text: str


@dataclass(frozen=True, kw_only=True)
class GangEnded:
    """Launcher to driver: the gang is over and nothing of it is left.

    Attributes:
        status: `succeeded`, `failed`, `stopped` (as ordered) or `timed out`.
        result: Path of rank 0's parcel, when it succeeded.
        diagnosis: Fields of the `Diagnosis`, when it failed.
        error: Path of the parcel with the culprit's exception, empty when it could not travel.
        restarts: Restarts that were spent.
        killed: Ranks that did not leave within their grace and were killed.
    """

    status: str
    result: str = ""
    diagnosis: dict[str, Any] = field(default_factory=dict[str, Any])
    error: str = ""
    restarts: int = 0
    killed: list[int] = field(default_factory=list[int])


Message = (
    RunGang
    | StopGang
    | Quit
    | RanksStarted
    | LogLines
    | Progress
    | RanksFailed
    | RanksReturned
    | NodeRegroups
    | Verdict
    | NodeDone
    | Notice
    | GangEnded
)
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        RunGang,
        StopGang,
        Quit,
        RanksStarted,
        LogLines,
        Progress,
        RanksFailed,
        RanksReturned,
        NodeRegroups,
        Verdict,
        NodeDone,
        Notice,
        GangEnded,
    )
}


class ChannelClosed(Exception):  # noqa: N818  (an end, not a mistake)
    """The other side is gone."""


class Channel:
    """One end of a socket pair that carries messages; reading never blocks longer than it is told to."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._pending = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            ChannelClosed: If the other side is gone.
        """
        body = json.dumps({"kind": type(message).__name__, **dataclasses.asdict(message)}).encode()
        try:
            self.socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise ChannelClosed from error

    def receive(self, timeout_seconds: float) -> Iterator[Message]:
        """Yield the messages that are there, after waiting at most `timeout_seconds` for the first one.

        Messages that a reader left, or that came together with one that is still being handled, come first.

        Raises:
            ChannelClosed: If the other side is gone and every message was yielded.
        """
        message = self._take()
        if message is None and self._wait(timeout_seconds):
            self._read()
            message = self._take()
        while message is not None:
            yield message
            message = self._take()

    def _read(self) -> None:
        try:
            data = self.socket.recv(1 << 20)
        except OSError as error:
            raise ChannelClosed from error
        if not data:
            raise ChannelClosed
        self._pending += data

    def _take(self) -> Message | None:
        """Return the next message that is here as a whole."""
        if len(self._pending) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._pending)
        if len(self._pending) < _LENGTH.size + length:
            return None
        body = bytes(self._pending[_LENGTH.size : _LENGTH.size + length])
        del self._pending[: _LENGTH.size + length]
        return parse_message(body)

    def _wait(self, timeout_seconds: float) -> bool:
        # poll, not select: a training process may well have more than 1024 open files
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_seconds) * 1000))


def parse_message(body: bytes) -> Message:
    """Return the dataclass of one JSON body."""
    fields = json.loads(body)
    kind = _KINDS[fields.pop("kind")]
    if kind is RanksStarted:
        fields["ranks"] = [RankInfo(**rank) for rank in fields["ranks"]]
    if kind is LogLines:
        fields["lines"] = [(level, text) for level, text in fields["lines"]]
    return kind(**fields)


def send_request(connection: socket.socket, body: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send JSON with open files (`SCM_RIGHTS` on the length), as the fork server's protocol needs it."""
    data = json.dumps(body).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(data))], list(fds))
    connection.sendall(data)


def receive_request(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive what `send_request` sent.

    Raises:
        ChannelClosed: If the other side is gone.
    """
    try:
        head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, _MAX_FDS)
        if not head:
            raise ChannelClosed
        head += _read(connection, _LENGTH.size - len(head))
        return json.loads(_read(connection, _LENGTH.unpack(head)[0])), list(fds)
    except OSError as error:
        raise ChannelClosed from error


def wait_readable(connection: socket.socket, deadline: float) -> None:
    """Wait until `connection` can be read.

    Raises:
        TimeoutError: If `time.monotonic()` passes `deadline` first.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ChannelClosed
        data += piece
    return data
