"""The simulated API as a server: its life, its faults, and the log of its requests."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.simulators.kubernetes import discovery, verbs
from tests.simulators.kubernetes.connections import Handler, HttpServer
from tests.simulators.kubernetes.faults import Faults
from tests.simulators.kubernetes.history import Subscription
from tests.simulators.kubernetes.refusals import ForbiddenError
from tests.simulators.kubernetes.routes import Route, find_route, split_target
from tests.simulators.kubernetes.storage import Storage
from tests.simulators.kubernetes.verbs import Answer, Body
from tests.simulators.kubernetes.watching import ConnectionBroken, WatchSettings

_TOKEN = "simulated-token"


@dataclass(frozen=True, kw_only=True)
class LoggedRequest:
    """One request as it came: `what` is the plural with the subresource, or the path if it means no kind."""

    verb: str
    what: str
    namespace: str
    name: str
    status: int


class ApiServer:
    """A server on a free port of the loopback: `start`, then `close`.

    `absent_groups` are API groups that are not installed; it may be changed while the server runs.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        faults: Faults | None = None,
        absent_groups: set[str] | None = None,
        bookmark_seconds: float = 5.0,
    ) -> None:
        self.storage = storage
        self.faults = faults or Faults()
        self.absent_groups = absent_groups if absent_groups is not None else set()
        self.requests: list[LoggedRequest] = []
        self.settings = WatchSettings(bookmark_seconds=bookmark_seconds, is_open=lambda: self._is_open)
        self._is_open = False
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._watches: set[Subscription] = set()
        self._http: HttpServer | None = None
        self._thread: threading.Thread | None = None
        self.faults.wake_watches = self._wake_watches

    def __enter__(self) -> ApiServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where it listens."""
        assert self._http is not None, "the server is not started"
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """How many requests came, by verb and plural with subresource."""
        return Counter((request.verb, request.what) for request in list(self.requests))

    @property
    def open_watches(self) -> int:
        """How many watches are open now."""
        return len(self._watches)

    def start(self) -> ApiServer:
        """Listen."""
        self._http = HttpServer(("127.0.0.1", 0), Handler)
        self._http.api = self
        self._is_open = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), name="simulated-api")
        self._thread.start()
        return self

    def close(self) -> None:
        """End every connection and thread."""
        if self._http is None or self._thread is None or not self._is_open:
            return
        self._is_open = False
        self._http.shutdown()
        self._thread.join()
        self._wake_watches()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._http.server_close()  # waits for the threads of the connections

    def drop_connections(self) -> None:
        """Reset every open connection, as a load balancer that restarts does."""
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def write_kubeconfig(self, path: Path | str, *, namespace: str = "default") -> Path:
        """Write a kubeconfig with one context, `simulated`, and return its path."""
        named = "simulated"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": named, "cluster": {"server": self.url}}],
            "users": [{"name": named, "user": {"token": _TOKEN}}],
            "contexts": [
                {"name": named, "context": {"cluster": named, "user": named, "namespace": namespace}}
            ],
            "current-context": named,
        }
        Path(path).write_text(yaml.safe_dump(content))
        return Path(path)

    def handle(self, method: str, target: str, body: Body) -> Answer | Route:
        """Return the answer of a request; a watch is returned as its route.

        Raises:
            ApiError: If it is refused.
            ConnectionBroken: If the answer gets lost.
        """
        parts, query = split_target(target)
        route = find_route(method, parts, query)
        if route is None or route.resource.group in self.absent_groups:
            return self._answer_other(parts, query, body)
        error, loses_answer = self.faults.take(route.verb, route.what)
        if error is not None:
            raise error
        if self.faults.is_denied(route.verb, route.what):
            raise _forbid(route)
        if route.verb == "watch":
            return route
        done = verbs.answer(self.storage, route, body)
        if loses_answer:
            raise ConnectionBroken
        return done

    def log(self, method: str, target: str, status: int) -> None:
        """Count a request."""
        parts, query = split_target(target)
        route = find_route(method, parts, query)
        if route is None:
            logged = LoggedRequest(
                verb=method, what="/" + "/".join(parts), namespace="", name="", status=status
            )
        else:
            logged = LoggedRequest(
                verb=route.verb,
                what=route.what,
                namespace=route.namespace,
                name=route.name,
                status=status,
            )
        self.requests.append(logged)

    def _answer_other(self, parts: list[str], query: dict[str, str], body: Body) -> Answer:
        if parts in (["healthz"], ["readyz"], ["livez"]):
            return Answer(body=b"ok", media_type="text/plain")
        said = discovery.describe(parts, absent_groups=self.absent_groups)
        status = 200
        if said is None and body.content:
            said, status = discovery.review(parts, body.read(), faults=self.faults), 201
        if said is None and "visibility.kueue.x-k8s.io" not in self.absent_groups:
            said, status = discovery.list_pending(self.storage, parts, query), 200
        if said is None:
            return Answer(body=b"404 page not found\n", status=404, media_type="text/plain")
        return Answer(body=json.dumps(said).encode(), status=status)

    def add_connection(self, connection: socket.socket) -> None:
        """Remember a connection, so that `close` can end it."""
        with self._lock:
            self._connections.add(connection)

    def remove_connection(self, connection: socket.socket) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            self._connections.discard(connection)

    def add_watch(self, subscription: Subscription) -> None:
        """Count an open watch."""
        with self._lock:
            self._watches.add(subscription)

    def remove_watch(self, subscription: Subscription) -> None:
        """Count a watch that has ended."""
        with self._lock:
            self._watches.discard(subscription)
        subscription.close()

    def _wake_watches(self) -> None:
        with self._lock:
            for subscription in self._watches:
                subscription.wake()


def _forbid(route: Route) -> ForbiddenError:
    resource = route.resource
    name = f' "{route.name}"' if route.name else ""
    where = f' in the namespace "{route.namespace}"' if route.namespace else " at the cluster scope"
    return ForbiddenError(
        f'{resource.full_name}{name} is forbidden: User "{discovery.USER}" cannot {route.verb} resource '
        f'"{route.what}" in API group "{resource.group}"{where}',
        details={"name": route.name, "group": resource.group, "kind": resource.plural},
    )
