"""HTTP on a socket, for the S3 server: requests in, responses out, large bodies in warm buffers.

A body is received into a buffer that an earlier object of the same size has left behind: the first touch of
fresh memory costs more than the loopback transfer, and a benchmark would measure the kernel's page faults.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qsl, unquote, urlsplit

POOLED_BYTES = 1 << 20
_RECEIVE_BYTES = 1 << 16


@dataclass
class Request:
    """One request, its body decoded."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytearray


@dataclass
class Response:
    """One response; `drop` closes the connection instead of sending it."""

    status: int = 200
    body: bytes | memoryview = b""
    headers: dict[str, str] = field(default_factory=dict)
    drop: bool = False


class Buffers:
    """Buffers of objects that are gone, by size."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[bytearray]] = {}

    def take(self, size: int) -> bytearray:
        if size >= POOLED_BYTES:
            with self._lock:
                if free := self._free.get(size):
                    return free.pop()
        return bytearray(size)

    def give_back(self, buffer: bytearray) -> None:
        if len(buffer) >= POOLED_BYTES:
            with self._lock:
                self._free.setdefault(len(buffer), []).append(buffer)


class Connection:
    """A client's connection."""

    def __init__(self, sock: socket.socket, buffers: Buffers) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._buffers = buffers
        self._ahead = b""

    def receive(self) -> Request:
        """Wait for the next request.

        Raises:
            EOFError: When the client has closed the connection.
        """
        lines = self._read_until(b"\r\n\r\n").decode("latin1").split("\r\n")
        method, target, _ = lines[0].split(" ", 2)
        pairs = (line.split(":", 1) for line in lines[1:])
        headers = {name.strip().lower(): value.strip() for name, value in pairs}
        if headers.get("expect", "").lower() == "100-continue":
            self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        parts = urlsplit(target)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        return Request(method, unquote(parts.path), query, headers, self._read_body(headers))

    def send(self, method: str, response: Response) -> None:
        """Send a response; a HEAD request gets its head only."""
        reason = HTTPStatus(response.status).phrase
        length = response.headers.pop("Content-Length", str(len(response.body)))
        head = [f"HTTP/1.1 {response.status} {reason}", "x-amz-request-id: 1", f"Content-Length: {length}"]
        head += [f"{name}: {value}" for name, value in response.headers.items()]
        self._socket.sendall("\r\n".join([*head, "", ""]).encode())
        if method != "HEAD" and len(response.body):
            self._socket.sendall(response.body)

    def close(self) -> None:
        with suppress(OSError):  # the client was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read_body(self, headers: dict[str, str]) -> bytearray:
        encoded = "aws-chunked" in headers.get("content-encoding", "") or headers.get(
            "x-amz-content-sha256", ""
        ).startswith("STREAMING-")
        chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        if encoded and not chunked:
            return self._read_chunks(int(headers["x-amz-decoded-content-length"]))
        if chunked:
            outer = self._read_chunks(None)
            if not encoded:
                return outer
            inner = Connection.__new__(Connection)
            inner._buffers, inner._ahead = self._buffers, bytes(outer)
            return inner._read_chunks(None)
        body = self._buffers.take(int(headers.get("content-length", 0)))
        self._read_into(memoryview(body))
        return body

    def _read_chunks(self, size: int | None) -> bytearray:
        body = bytearray() if size is None else self._buffers.take(size)
        at = 0
        while length := int(self._read_until(b"\r\n").split(b";")[0], 16):
            if size is None:
                body += bytes(length)
            with memoryview(body) as view:
                self._read_into(view[at : at + length])
            at += length
            self._read_until(b"\r\n")
        while self._read_until(b"\r\n"):
            pass  # trailing checksums
        return body

    def _read_until(self, end: bytes) -> bytes:
        while end not in self._ahead:
            data = self._socket.recv(_RECEIVE_BYTES)
            if not data:
                raise EOFError
            self._ahead += data
        found, _, self._ahead = self._ahead.partition(end)
        return found

    def _read_into(self, view: memoryview) -> None:
        known = min(len(view), len(self._ahead))
        view[:known] = self._ahead[:known]
        self._ahead = self._ahead[known:]
        while known < len(view):
            received = self._socket.recv_into(view[known:])
            if not received:
                raise EOFError
            known += received
