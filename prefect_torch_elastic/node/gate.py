"""Where nodes of other machines come in: the leader's door, and such a node as the gang's head sees it."""

from __future__ import annotations

import base64
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect_torch_elastic.channel import Channel, ChannelClosed, is_readable
from prefect_torch_elastic.node.handshake import HandshakeFailed, Visitor, admit, keep_alive
from prefect_torch_elastic.observations import EvidenceTaken, RankSnapshot
from prefect_torch_elastic.ranks import parse_endpoint
from prefect_torch_elastic.wire import Dismiss, Message, RankError, RanksFailed

_BACKLOG = 1024
_FAREWELL_SECONDS = 5.0
_MOST_GUESTS = 64  # who has not proved anything yet; the others wait in the backlog
_PAUSE_SECONDS = 0.1  # after an error that passes: no file descriptor left, a caller that hung up


class RemoteNode:
    """A node on another machine: its host passes on what its agent says, and what we say to it.

    Attributes:
        index: Its place in the gang.
        pod: Its name.
        is_gone: Whether the connection has ended.
    """

    def __init__(self, index: int, pod: str, connection: socket.socket) -> None:
        self.index, self.pod = index, pod
        self.channel = Channel(connection)
        self.is_gone = False

    @property
    def fds(self) -> list[int]:
        """What becomes readable when there are news."""
        return [] if self.is_gone else [self.channel.fileno()]

    def send(self, message: Message) -> None:
        try:
            self.channel.send(message)
        except ChannelClosed:
            self.is_gone = True

    def receive(self, folder: Path) -> Iterator[Message]:
        """Yield what its host has sent; files that it sends along are put into `folder`."""
        try:
            for message in self.channel.receive(0.0):
                match message:
                    case RankError():
                        self._keep_error(folder, message)
                    case RanksFailed():
                        yield replace(message, ranks=[self._localize(folder, rank) for rank in message.ranks])
                    case EvidenceTaken():
                        yield replace(message, ranks=[self._name_files(rank) for rank in message.ranks])
                    case _:
                        yield message
        except ChannelClosed:
            self.is_gone = True

    def stopped_seconds(self) -> float:
        """Unknown from here: its own machine's host looks after its agent."""
        return 0.0

    def interrupt(self) -> None:
        """Its host does that when a stop passes through its hands."""

    def kill(self) -> None:
        """End it: a host that loses its leader kills its agent."""
        self.is_gone = True
        self.channel.close()

    def see_off(self, deadline: float) -> None:
        """Read until it has left: closing a socket with unread words would take ours back."""
        if self.is_gone:
            return
        with suppress(OSError):
            self.channel.socket.shutdown(socket.SHUT_WR)
            while is_readable(self.channel, deadline - time.monotonic()) and self.channel.socket.recv(
                1 << 16
            ):
                pass

    def describe_end(self) -> str:
        return f"pod `{self.pod}` has closed its connection" if self.pod else "its connection has ended"

    def _keep_error(self, folder: Path, message: RankError) -> None:
        target = _error_path(folder, self.index, message.rank)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(base64.b64decode(message.data))

    def _name_files(self, rank: RankSnapshot) -> RankSnapshot:
        """Return the snapshot with files that say which pod they are on."""
        return replace(rank, files=[f"{self.pod}:{file}" if self.pod else file for file in rank.files])

    def _localize(self, folder: Path, rank: dict[str, Any]) -> dict[str, Any]:
        """Return the evidence with paths that mean something here."""
        path = _error_path(folder, self.index, int(rank["rank"]))
        where = f"{self.pod}:" if self.pod else ""
        return {
            **rank,
            "error": str(path) if rank.get("error") and path.exists() else "",
            "log": f"{where}{rank['log']}" if rank.get("log") else "",
            "stacks": f"{where}{rank['stacks']}" if rank.get("stacks") else "",
        }


class Gate:
    """Listens for the nodes of one incarnation of a gang; who cannot prove to be one is turned away.

    The proof does not tell an incarnation from the one before a preemption, whose name is the same. So a
    pod keeps its place while it is connected, and nobody comes in any more once the gang is decided.

    Args:
        endpoint: `address:port` to listen at.
        key: Of the call.
        gang: Name of the gang, with its attempt.
        nnodes: Of the gang, the leader's own included.

    Raises:
        OSError: If the address cannot be listened at.
    """

    def __init__(self, endpoint: str, *, key: bytes, gang: str, nnodes: int) -> None:
        self.gang = gang
        self.arrived: dict[int, RemoteNode] = {}
        self._key, self._nnodes = key, nnodes
        host, port = parse_endpoint(endpoint)
        self._listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind((host, port))
        self._listener.listen(_BACKLOG)
        self._visitors: queue.SimpleQueue[Visitor] = queue.SimpleQueue()
        self._guests = threading.BoundedSemaphore(_MOST_GUESTS)
        self._lock = threading.Lock()  # for all below
        self._places: dict[int, Visitor] = {}
        self._is_shut = self._is_closed = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._listen, name="gate", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Becomes readable when somebody has come in."""
        return self._bell

    def take_arrivals(self) -> list[RemoteNode]:
        """Return the nodes that have come in since the last call; a pod that comes again replaces itself."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        nodes: list[RemoteNode] = []
        while not self._visitors.empty():
            visitor = self._visitors.get()
            node = RemoteNode(visitor.node, visitor.pod, visitor.connection)
            if (before := self.arrived.get(node.index)) is not None:
                before.kill()
            self.arrived[node.index] = node
            nodes.append(node)
        return nodes

    def shut(self) -> None:
        """Let nobody in any more: how the gang ends is decided. Who is turned away may ask again."""
        with self._lock:
            self._is_shut = True

    def dismiss(self, exit_code: int) -> None:
        """Let all nodes leave with this code, and wait some seconds until they have."""
        self.shut()
        self.take_arrivals()  # one that came when all was over
        for node in self.arrived.values():
            node.send(Dismiss(exit_code=exit_code))
        deadline = time.monotonic() + _FAREWELL_SECONDS
        for node in self.arrived.values():
            node.see_off(deadline)

    def close(self) -> None:
        """Close the door and every connection; a node that was not dismissed takes its leader for lost."""
        with self._lock:  # guests that still talk find it closed, and ring no bell
            self._is_shut = self._is_closed = True
            os.close(self._bell)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in `accept`
        self._listener.close()
        self._thread.join(_FAREWELL_SECONDS)
        while not self._visitors.empty():  # nobody took them in
            self._visitors.get().connection.close()
        for node in self.arrived.values():
            node.kill()

    def _listen(self) -> None:
        while not self._is_closed:
            if not self._guests.acquire(timeout=_PAUSE_SECONDS):
                continue
            try:
                self._receive_guest()
            except (OSError, RuntimeError):  # of this caller, or no descriptor or thread is left just now
                self._guests.release()
                time.sleep(0.0 if self._is_closed else _PAUSE_SECONDS)

    def _receive_guest(self) -> None:
        connection, _ = self._listener.accept()
        try:
            threading.Thread(target=self._admit, args=[connection], name="gate-guest", daemon=True).start()
        except BaseException:
            connection.close()
            raise

    def _admit(self, connection: socket.socket) -> None:
        try:
            visitor = admit(
                connection, key=self._key, gang=self.gang, nnodes=self._nnodes, judge=self._give_place
            )
            keep_alive(connection)
            self._announce(visitor)
        except (HandshakeFailed, OSError):
            connection.close()  # it was told why, and tries again or says so itself
        finally:
            self._guests.release()

    def _give_place(self, visitor: Visitor) -> str:
        """Give a node its place in the gang, or say why not; two may ask at once."""
        with self._lock:
            if self._is_shut:
                return "how this gang ends is decided; another one may come"
            holder = self._places.get(visitor.node)
            if holder is not None and holder.pod != visitor.pod and _is_connected(holder.connection):
                return f"node {visitor.node} is there already: pod `{holder.pod}`"
            self._places[visitor.node] = visitor
            return ""

    def _announce(self, visitor: Visitor) -> None:
        with self._lock:
            if self._is_closed:
                raise HandshakeFailed("the door was closed meanwhile")
            self._visitors.put(visitor)
            os.eventfd_write(self._bell, 1)


def _is_connected(connection: socket.socket) -> bool:
    """Whether the other side has not hung up, nor the kernel given it up; unread words do not hide that."""
    poll = select.poll()
    try:
        poll.register(connection, select.POLLRDHUP)
    except ValueError:  # we have closed it
        return False
    return not poll.poll(0)


def _error_path(folder: Path, node: int, rank: int) -> Path:
    return folder / f"node-{node}" / f"rank-{rank}.error"
