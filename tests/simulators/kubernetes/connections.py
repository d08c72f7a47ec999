"""HTTP on one connection: answers in one write, watches in chunks."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, cast

from tests.simulators.kubernetes.refusals import ApiError, GoneError
from tests.simulators.kubernetes.routes import Route
from tests.simulators.kubernetes.verbs import Answer, Body
from tests.simulators.kubernetes.watching import ConnectionBroken, follow, open_watch, say_error

if TYPE_CHECKING:
    from tests.simulators.kubernetes.server import ApiServer


class HttpServer(ThreadingHTTPServer):
    """The listening socket; `api` is set before it serves."""

    daemon_threads = False
    block_on_close = True
    request_queue_size = 256
    api: ApiServer


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self._api = cast(HttpServer, self.server).api
        self._api.add_connection(self.connection)

    def finish(self) -> None:
        self._api.remove_connection(self.connection)
        with suppress(OSError):
            super().finish()

    def handle(self) -> None:
        with suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the requests are in `ApiServer.requests`."""

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = Body(
            content=self.rfile.read(length) if length else b"",
            media_type=self.headers.get("Content-Type", ""),
        )
        try:
            found = self._api.handle(self.command, self.path, body)
            if isinstance(found, Route):
                self._watch(found)
                return
        except ConnectionBroken:
            self._break_off()
            return
        except ApiError as error:
            found = Answer(body=json.dumps(error.as_status()).encode(), status=error.status)
            if error.retry_after_seconds is not None:
                self._send(found, f"Retry-After: {error.retry_after_seconds}\r\n")
                return
        self._send(found)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815

    def _send(self, answer: Answer, more: str = "") -> None:
        # Before the answer: whoever has it finds the request in the log.
        self._api.log(self.command, self.path, answer.status)
        head = (
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\n"
            f"Content-Type: {answer.media_type}\r\nContent-Length: {len(answer.body)}\r\n{more}\r\n"
        )
        self.wfile.write(head.encode() + answer.body)

    def _watch(self, route: Route) -> None:
        api = self._api
        try:
            subscription, first = open_watch(api.storage, route)
        except GoneError as error:
            self._send_head()
            self.wfile.write(_chunk(say_error(error)) + b"0\r\n\r\n")
            return
        api.add_watch(subscription)
        try:
            self._send_head()
            if first:
                self.wfile.write(_chunk(b"".join(first)))
            for lines in follow(api.storage, route, subscription, faults=api.faults, settings=api.settings):
                self.wfile.write(_chunk(lines))
            self.wfile.write(b"0\r\n\r\n")
        finally:
            api.remove_watch(subscription)

    def _send_head(self) -> None:
        self._api.log(self.command, self.path, 200)
        self.wfile.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )

    def _break_off(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def _chunk(content: bytes) -> bytes:
    return f"{len(content):x}\r\n".encode() + content + b"\r\n"
