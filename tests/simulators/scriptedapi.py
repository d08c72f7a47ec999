"""An HTTP server that answers as it is told: refusals, lost answers, watches that break or stall."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

NOT_FOUND = b"404 page not found\n"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer: a body at once, or chunks; `then` says how the connection goes on."""

    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict[str, str])
    chunks: Sequence[bytes] | None = None
    then: str = "end"  # "drop": closed in the middle; "stall": open, and nothing more comes


LOST = Answer(then="drop")  # the request arrives, its answer does not


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


def ok(value: Any, status: int = 200) -> Answer:
    return Answer(status=status, body=json.dumps(value).encode())


def status(code: int, reason: str, message: str, **details: Any) -> Answer:
    """Return a refusal as the API writes it."""
    value = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "details": details,
        "code": code,
    }
    return ok(value, code)


def events(*pairs: tuple[str, Any], then: str = "end") -> Answer:
    """Return a watch that tells these events."""
    lines = [json.dumps({"type": kind, "object": thing}).encode() + b"\n" for kind, thing in pairs]
    return Answer(chunks=lines, then=then)


class ScriptedApi:
    """Answers each request with the next answer for its method and path; the last one is given again."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self._answers: dict[tuple[str, str], list[Answer]] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None: ...

            def handle_any(self) -> None:
                with contextlib.suppress(OSError):
                    api._handle(self)

            do_GET = do_POST = do_PATCH = do_DELETE = handle_any  # noqa: N815  (as the standard library asks)

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None: ...  # a client that left

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def on(self, route: str, *answers: Answer) -> None:
        """Script a route such as `GET /api/v1/namespaces/ml/pods`."""
        method, _, path = route.partition(" ")
        with self._lock:
            self._answers[method, path] = list(answers)

    def asked(self, method: str) -> list[Seen]:
        """Return the requests of one method."""
        return [seen for seen in self.seen if seen.method == method]

    def close(self) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        data = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        with self._lock:
            self.seen.append(
                Seen(
                    method=handler.command,
                    path=parts.path,
                    query=dict(parse_qsl(parts.query)),
                    headers={name.title(): value for name, value in handler.headers.items()},
                    body=json.loads(data) if data else None,
                )
            )
            answers = self._answers.get((handler.command, parts.path)) or [Answer(status=404, body=NOT_FOUND)]
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
        self._write(handler, answer)

    def _write(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        if answer is LOST:
            handler.close_connection = True
            return
        handler.send_response(answer.status)
        for name, value in answer.headers.items():
            handler.send_header(name, value)
        if answer.chunks is None:
            handler.send_header("Content-Length", str(len(answer.body)))
            handler.end_headers()
            handler.wfile.write(answer.body)
            return
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for chunk in answer.chunks:
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            handler.wfile.flush()
        if answer.then == "end":
            handler.wfile.write(b"0\r\n\r\n")
        else:
            handler.close_connection = True
            if answer.then == "stall":
                self._ended.wait(30.0)


def write_kubeconfig(folder: Path, url: str, *, token: str = "") -> Path:
    """Write a kubeconfig with one context, `test`."""
    path = folder / "kubeconfig"
    path.write_text(json.dumps(make_kubeconfig(url, token=token)))
    return path


def make_kubeconfig(url: str, *, token: str = "") -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": token} if token else {}}],
        "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u"}}],
    }
