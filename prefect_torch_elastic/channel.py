"""How messages cross a socket pair: whole, in order, and never at the price of waiting for the reader."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from prefect_torch_elastic.wire import Message, encode_message, parse_message

_LENGTH = struct.Struct("!I")
_MAX_FDS = 250  # SCM_MAX_FD of Linux is 253
_ROOM_BYTES = 256 << 10


class ChannelClosed(Exception):  # noqa: N818  (an end, not a mistake)
    """The other side is gone."""


class Channel:
    """One end of a socket pair that carries messages.

    Sending does not wait: what the socket does not take stays here and goes out with the next call of any
    kind. So a reader that sleeps (a flow's process under Ctrl-Z) cannot hold up a launcher or an agent.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()

    @property
    def events(self) -> int:
        """What to poll the channel for: news, and room while something has to go out."""
        return select.POLLIN | select.POLLOUT if self._outgoing else select.POLLIN

    def send(self, message: Message) -> None:
        """Send a message that must arrive.

        Raises:
            ChannelClosed: If the other side is gone.
        """
        body = encode_message(message)
        self._outgoing += _LENGTH.pack(len(body)) + body
        self.flush()

    def offer(self, message: Message) -> bool:
        """Send a message that may be lost, such as log lines; False if it was, because nobody reads.

        Raises:
            ChannelClosed: If the other side is gone.
        """
        self.flush()
        if len(self._outgoing) > _ROOM_BYTES:
            return False
        self.send(message)
        return True

    def flush(self) -> None:
        """Hand over as much as the socket takes now.

        Raises:
            ChannelClosed: If the other side is gone.
        """
        while self._outgoing:
            try:
                sent = self.socket.send(self._outgoing, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed from error
            del self._outgoing[:sent]

    def receive(self, timeout_seconds: float) -> Iterator[Message]:
        """Yield the messages that are there, after waiting at most `timeout_seconds` for the first one.

        Messages that a reader left, or that came together with one that is still being handled, come first.

        Raises:
            ChannelClosed: If the other side is gone and every message was yielded.
        """
        with suppress(ChannelClosed):  # told by the read, after the last words of the other side
            self.flush()
        message = self._take()
        if message is None and self._wait(timeout_seconds):
            self._read()
            message = self._take()
        while message is not None:
            yield message
            message = self._take()

    def _wait(self, timeout_seconds: float) -> bool:
        """Wait for something to read; the answer may depend on what has not gone out yet, so that goes on."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            poll = select.poll()
            poll.register(self.socket, self.events)
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready or ready[0][1] != select.POLLOUT:
                return bool(ready)
            self.flush()

    def _read(self) -> None:
        try:
            data = self.socket.recv(1 << 20)
        except OSError as error:
            raise ChannelClosed from error
        if not data:
            raise ChannelClosed
        self._incoming += data

    def _take(self) -> Message | None:
        """Return the next message that is here as a whole."""
        if len(self._incoming) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._incoming)
        if len(self._incoming) < _LENGTH.size + length:
            return None
        body = bytes(self._incoming[_LENGTH.size : _LENGTH.size + length])
        del self._incoming[: _LENGTH.size + length]
        return parse_message(body)


def is_readable(file: Any, timeout_seconds: float) -> bool:
    """Wait until `file` can be read, at most `timeout_seconds`; works with any number of open files."""
    poll = select.poll()  # `select` refuses file numbers above 1024, which a training process may well have
    poll.register(file, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_seconds) * 1000))


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
    if not is_readable(connection, deadline - time.monotonic()):
        raise TimeoutError


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ChannelClosed
        data += piece
    return data
