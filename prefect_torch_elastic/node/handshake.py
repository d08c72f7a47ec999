"""How a node on another machine and its leader make sure of each other before anything else is said.

Both know the key of the call; neither sends it. Each proves it by an HMAC over what the other has made up,
over the gang and the node: a recorded proof is worth nothing, and a pod of another attempt finds no way in.
Before and after a preemption a gang has the same name: there the leader's own judgement keeps them apart.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SECONDS = 10.0  # for all of it, so that nobody keeps us busy by a letter now and then
_MOST_BYTES = 1024


class HandshakeFailed(Exception):  # noqa: N818  (an answer, not a mistake of ours)
    """The other side is not who it should be, or went away; `final` says that asking again cannot help."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


@dataclass(frozen=True, kw_only=True)
class Visitor:
    """A node that has proved who it is."""

    node: int
    pod: str
    connection: socket.socket


def introduce(connection: socket.socket, *, key: bytes, gang: str, node: int, pod: str) -> None:
    """Prove to the leader who we are, and make sure that it is the leader.

    Raises:
        HandshakeFailed: If it turns us away, proves nothing, or hangs up.
    """
    until = time.monotonic() + SECONDS
    challenge = str(_receive(connection, until).get("challenge", ""))
    ours = secrets.token_hex(16)
    about = [challenge, ours, gang, str(node)]
    proof = _prove(key, "node", about)
    _send(connection, until, {"gang": gang, "node": node, "pod": pod, "challenge": ours, "proof": proof})
    answer = _receive(connection, until)
    if refusal := answer.get("refused"):
        raise HandshakeFailed(f"the leader turned this node away: {refusal}", final=bool(answer.get("final")))
    if not hmac.compare_digest(str(answer.get("proof", "")), _prove(key, "leader", about)):
        raise HandshakeFailed(
            "whoever answers at the leader's address does not know this call's key", final=True
        )
    connection.settimeout(None)


def admit(
    connection: socket.socket,
    *,
    key: bytes,
    gang: str,
    nnodes: int,
    judge: Callable[[Visitor], str] = lambda _: "",
) -> Visitor:
    """Make sure who calls, and prove that we are the leader.

    Args:
        connection: To whoever calls.
        key: Of the call.
        gang: Its name.
        nnodes: Of the gang, the leader's own included.
        judge: Says why a node that has proved itself is not let in now, or nothing; it may ask again.

    Raises:
        HandshakeFailed: If it is none of this gang's nodes; it was told.
    """
    until = time.monotonic() + SECONDS
    ours = secrets.token_hex(16)
    _send(connection, until, {"challenge": ours})
    said = _receive(connection, until)
    node, theirs = said.get("node"), str(said.get("challenge", ""))
    about = [ours, theirs, gang, str(node)]
    refusal, final = "", True
    if said.get("gang") != gang:  # a straggler of an attempt that is over, or we are the straggler
        refusal, final = f"this is gang {gang}, not {said.get('gang')}", False
    elif not hmac.compare_digest(str(said.get("proof", "")), _prove(key, "node", about)):
        refusal = "its proof does not fit this call's key"
    elif not (isinstance(node, int) and 0 < node < nnodes):
        refusal = f"node {node} is none of the {nnodes - 1} that are awaited"
    else:
        visitor = Visitor(node=node, pod=str(said.get("pod", "")), connection=connection)
        refusal, final = judge(visitor), False
        if not refusal:
            _send(connection, until, {"proof": _prove(key, "leader", about)})
            connection.settimeout(None)
            return visitor
    _send(connection, until, {"refused": refusal, "final": final})
    raise HandshakeFailed(refusal, final=final)


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel notice within seconds that the other machine is gone, though it never said so."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)  # milliseconds


def _prove(key: bytes, who: str, about: list[str]) -> str:
    return hmac.new(
        key, json.dumps(["prefect-torch-elastic", who, *about]).encode(), hashlib.sha256
    ).hexdigest()


def _send(connection: socket.socket, until: float, body: dict[str, Any]) -> None:
    try:
        _limit(connection, until)
        connection.sendall(json.dumps(body).encode() + b"\n")
    except OSError as error:
        raise HandshakeFailed(f"the connection was lost: {error}") from error


def _limit(connection: socket.socket, until: float) -> None:
    """Let the next step take no longer than until then."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"it took longer than {SECONDS:g} s")
    connection.settimeout(left)


def _receive(connection: socket.socket, until: float) -> dict[str, Any]:
    """Return one line of JSON; what comes after the line stays in the socket, for the channel."""
    line = bytearray()
    try:
        while not line.endswith(b"\n"):
            _limit(connection, until)
            piece = connection.recv(1)
            if not piece:
                raise HandshakeFailed("the other side hung up")
            line += piece
            if len(line) > _MOST_BYTES:
                raise HandshakeFailed("the other side speaks another language")
        body = json.loads(line)
    except (OSError, ValueError) as error:
        raise HandshakeFailed(f"the other side said nothing that can be read: {error}") from error
    if not isinstance(body, dict):
        raise HandshakeFailed("the other side speaks another language")
    return body  # pyright: ignore[reportUnknownVariableType]  (each field is looked at by the caller)
