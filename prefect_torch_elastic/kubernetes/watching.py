"""How a watch is told: one JSON object a line on a connection that may break, stall or talk nonsense."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from prefect_torch_elastic.kubernetes.connection import Request

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

_TYPES = frozenset({"ADDED", "MODIFIED", "DELETED", "BOOKMARK"})


class Watch(Iterator[tuple[str, dict[str, Any]]]):
    """What happens to objects, from one connection.

    An iterator over pairs of `ADDED`, `MODIFIED`, `DELETED` or `BOOKMARK` and the object. It ends when the
    API ends it, and raises `ClusterError` on anything odd: list again then. `close` may be called from
    another thread, and ends the iteration at once.
    """

    def __init__(self, request: Request, response: BaseHTTPResponse) -> None:
        self._request, self._response = request, response
        self._lock = threading.Lock()
        self._is_open, self._is_closing = True, False
        self._events = self._read()

    def __next__(self) -> tuple[str, dict[str, Any]]:
        return next(self._events)

    def close(self) -> None:
        """End the iteration, from whatever thread."""
        with self._lock:
            self._is_closing = True
            # While the connection is open here its descriptor is ours: nobody else has got the number.
            if self._is_open:
                with suppress(OSError, ValueError), _share_socket(self._response.fileno()) as shared:
                    shared.shutdown(socket.SHUT_RDWR)

    def _read(self) -> Iterator[tuple[str, dict[str, Any]]]:
        import urllib3

        rest = b""
        try:
            for data in self._response.stream(65536):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield self._parse(line)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            if not self._is_closing:
                raise self._request.silence(error) from error
        finally:
            with self._lock:
                self._is_open = False
                self._response.close()
        if rest.strip() and not self._is_closing:
            raise self._request.silence(ValueError("the last line is cut short"))

    def _parse(self, line: bytes) -> tuple[str, dict[str, Any]]:
        try:
            event = json.loads(line)
            kind, thing = event["type"], event["object"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._request.silence(ValueError(f"no event: {line[:80]!r}")) from error
        if kind in _TYPES and isinstance(thing, dict):
            return kind, thing  # pyright: ignore[reportUnknownVariableType]
        status = thing.get("code") if kind == "ERROR" and isinstance(thing, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        if not isinstance(status, int):
            raise self._request.silence(ValueError(f"no event: {line[:80]!r}"))
        raise self._request.refusal(status, json.dumps(thing))


def _share_socket(descriptor: int) -> socket.socket:
    """Return another handle of an open connection: closing it leaves the connection as it is."""
    return socket.socket(fileno=os.dup(descriptor))
