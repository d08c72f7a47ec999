"""An S3 server on loopback that keeps everything in memory, and fails when it is told to.

In the test's own process, with a handle on everything:

    with S3Server() as s3:
        store = open_store(s3.url("runs"), s3.credentials)
        s3.set_faults(fail_share=0.1)           # every tenth request gets a 503; `Faults` lists the others
        s3.start_outage(seconds=2.0)
        assert s3.open_uploads() == 0
        puts = [call for call in s3.calls() if call.method == "PUT"]
        s3.buckets.write("bucket", "runs/log/000000000001.json", b"damaged")

As a process of its own, for benchmarks, with the same methods except `buckets` and `before`:

    with S3Process() as s3: ...                 # or: python -m tests.simulators.s3 --port 9000

Faults travel to that process as `PUT /_control` with a JSON object; `GET /_control` returns what happened.
Requests are checked for who signs them (`faults.expired_keys`), not for their signature.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tests.simulators.s3_buckets import Buckets, fail
from tests.simulators.s3_faults import Call, Faults
from tests.simulators.s3_wire import Buffers, Connection, Request, Response

BUCKET = "bucket"
_CONTROL = "/_control"
_ROOT = Path(__file__).resolve().parents[2]
_SIGNER = re.compile(r"Credential=([^/]+)/")


class _Handle:
    """What a test needs to use either kind of server."""

    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def credentials(self) -> dict[str, Any]:
        """What `open_store` takes."""
        return {
            "kind": "aws",
            "access_key_id": "AKIAEXAMPLE",
            "secret_access_key": "not-for-the-eyes-of-others",
            "region": "us-east-1",
            "endpoint_url": self.endpoint,
        }

    def url(self, prefix: str = "") -> str:
        return f"s3://{BUCKET}/{prefix}".rstrip("/")

    def set_faults(self, **faults: Any) -> None:
        raise NotImplementedError

    def start_outage(self, *, seconds: float) -> None:
        """Close every connection without an answer for a while."""
        self.set_faults(outage_until=time.monotonic() + seconds)  # the clock is the machine's


class S3Server(_Handle):
    """The server, in threads of this process.

    Args:
        port: 0 takes a free one.
        buckets: Names of buckets that exist at the start; others get 404 NoSuchBucket.
        seed: Of the share of failed requests.

    Attributes:
        faults: What goes wrong; fields may be set directly.
        buckets: The objects: `read`, `write`, `keys`.
        before: Called with each Request before it is carried out: raise ConnectionError to close its
            connection, block to hold it, kill a client.
    """

    def __init__(self, *, port: int = 0, buckets: Sequence[str] = (BUCKET,), seed: int = 0) -> None:
        self.faults = Faults()
        self.before: Callable[[Request], None] | None = None
        self._buffers = Buffers()
        self.buckets = Buckets(buckets, self._buffers)
        self._calls: list[Call] = []
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._connections: set[Connection] = set()
        self._listener = socket.create_server(("127.0.0.1", port), backlog=512)
        self.port = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve, name="s3", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set_faults(self, **faults: Any) -> None:
        self.faults = dataclasses.replace(self.faults, **faults)
        self.buckets.ignore_conditions = self.faults.ignore_conditions

    def calls(self) -> list[Call]:
        """Return the requests so far, in the order of their answers."""
        with self._lock:
            return list(self._calls)

    def forget_calls(self) -> None:
        with self._lock:
            self._calls.clear()

    def open_uploads(self) -> int:
        """Return the number of multipart uploads that were neither completed nor aborted."""
        return len(self.buckets.uploads)

    def clear(self) -> None:
        """Remove all objects; their memory serves the next ones of the same size."""
        self.buckets.clear()

    def serve(self) -> None:
        """Answer requests until `close`."""
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve_connection, args=(sock,), daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()

    def _serve_connection(self, sock: socket.socket) -> None:
        connection = Connection(sock, self._buffers)
        with self._lock:
            self._connections.add(connection)
        try:
            while True:
                request = connection.receive()
                response, finish = self._answer(request)
                try:
                    if response.drop:
                        return
                    connection.send(request.method, response)
                finally:
                    finish()
        except (EOFError, OSError):
            pass  # the client has left, or is made to
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, request: Request) -> tuple[Response, Callable[[], None]]:
        if request.path == _CONTROL:
            return self._control(request), _nothing
        if self.before is not None:
            self.before(request)
        faults = self.faults
        time.sleep(faults.latency_seconds) if faults.latency_seconds else None
        early = self._refuse(request, faults)
        if early is not None:
            return self._note(request, early), _nothing
        response, finish = self.buckets.answer(request)
        if faults.bytes_per_second:
            time.sleep((len(request.body) + len(response.body)) / faults.bytes_per_second)
        if self._hits("lose", request):
            finish()
            response = Response(drop=True) if faults.lose_as == "drop" else fail(500, "InternalError", "lost")
            finish = _nothing
        return self._note(request, response), finish

    def _refuse(self, request: Request, faults: Faults) -> Response | None:
        if time.monotonic() < faults.outage_until or self._hits("drop", request):
            return Response(drop=True)
        signer = match[1] if (match := _SIGNER.search(request.headers.get("authorization", ""))) else ""
        if signer in faults.expired_keys:
            return fail(400, "ExpiredToken", "The provided token has expired.")
        if signer in faults.unknown_keys:
            return fail(403, "InvalidAccessKeyId", "The access key does not exist in our records.")
        if faults.fail_share:
            with self._lock:
                unlucky = self._random.random() < faults.fail_share
            if unlucky:
                return fail(faults.fail_status, "SlowDown", "Please reduce your request rate.")
        return None

    def _hits(self, fault: str, request: Request) -> bool:
        faults = self.faults
        if request.method not in faults.only_methods or faults.only_keys not in request.path:
            return False
        with self._lock:
            left = getattr(faults, fault)
            setattr(faults, fault, max(0, left - 1))
        return left > 0

    def _note(self, request: Request, response: Response) -> Response:
        key = request.path.lstrip("/").partition("/")[2]
        size = len(response.body) if request.method == "GET" else len(request.body)
        with self._lock:
            self._calls.append(Call(request.method, key, size, 0 if response.drop else response.status))
        return response

    def _control(self, request: Request) -> Response:
        if request.method == "PUT":
            self.set_faults(**json.loads(bytes(request.body)))
        elif request.method == "DELETE":
            self.clear()
            self.forget_calls()
        state = {"calls": self.calls(), "open_uploads": self.open_uploads()}
        return Response(200, json.dumps(state).encode(), {"Content-Type": "application/json"})


class S3Process(_Handle):
    """The server in a process of its own, which ends with this one."""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.simulators.s3", "--until-stdin-closes"]
        self._process = subprocess.Popen(
            command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def set_faults(self, **faults: Any) -> None:
        self._control("PUT", json.dumps(faults))

    def calls(self) -> list[Call]:
        return [Call(*call) for call in self._control("GET")["calls"]]

    def open_uploads(self) -> int:
        return self._control("GET")["open_uploads"]

    def clear(self) -> None:
        """Remove all objects and forget the calls."""
        self._control("DELETE")

    def _control(self, method: str, body: str | None = None) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, _CONTROL, body)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()


def _nothing() -> None:
    """Is called where no buffer was lent."""


def _main() -> None:
    parser = argparse.ArgumentParser(description="An S3 server in memory, on loopback.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--until-stdin-closes", action="store_true")
    options = parser.parse_args()
    server = S3Server(port=options.port)
    print(server.port, flush=True)
    if options.until_stdin_closes:
        threading.Thread(target=server.serve, daemon=True).start()
        sys.stdin.read()
    else:
        server.serve()


if __name__ == "__main__":
    _main()
