"""What a watch says: the changes under its selectors in order, bookmarks between them, and its end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.simulators.kubernetes.faults import Break, Faults
from tests.simulators.kubernetes.history import Change, Subscription
from tests.simulators.kubernetes.objects import Obj
from tests.simulators.kubernetes.refusals import ApiError, BadRequestError, GoneError
from tests.simulators.kubernetes.routes import Route
from tests.simulators.kubernetes.selectors import Matcher, make_matcher
from tests.simulators.kubernetes.storage import Storage
from tests.simulators.kubernetes.verbs import select

_BATCH = 500


class ConnectionBroken(Exception):  # noqa: N818
    """The watch is to end as a broken connection, not as an answer."""


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """How watches behave: pauses between bookmarks, and whether the server is still there."""

    bookmark_seconds: float
    is_open: Callable[[], bool]


def open_watch(storage: Storage, route: Route) -> tuple[Subscription, list[bytes]]:
    """Return the changes from the version that a watch names, and what it says before any of them.

    Without a version (or with 0) the objects of now come first, as if they were new.

    Raises:
        GoneError: If the version is too old: a watch says so in an event, not with its status.
    """
    asked = route.query.get("resourceVersion", "")
    if asked in ("", "0"):
        subscription = storage.subscribe(route.resource.plural)
        found, version = select(storage, route)
        subscription.skip_to = version
        return subscription, [_say(b"ADDED", storage.encode(obj)) for obj in found]
    if not asked.isdecimal():
        raise BadRequestError(f'resourceVersion: Invalid value: "{asked}": strconv.ParseUint: invalid syntax')
    return storage.subscribe(route.resource.plural, since=int(asked)), []


def follow(
    storage: Storage, route: Route, subscription: Subscription, *, faults: Faults, settings: WatchSettings
) -> Iterator[bytes]:
    """Yield lines until the watch's time is over.

    Raises:
        ConnectionBroken: If it is to break (`Break.DROP`).
    """
    query = route.query
    matches = make_matcher(
        query.get("labelSelector", ""), query.get("fieldSelector", ""), is_custom=route.resource.is_custom
    )
    now = time.monotonic()
    ends = now + float(query.get("timeoutSeconds") or 3600)
    wants_bookmarks = query.get("allowWatchBookmarks") in ("true", "1", "True")
    next_bookmark = now + settings.bookmark_seconds if wants_bookmarks else float("inf")
    stalls = False
    while settings.is_open() and (now := time.monotonic()) < ends:
        if not stalls and (how := faults.take_break(route.resource.plural)) is not None:
            match how:
                case Break.DROP:
                    raise ConnectionBroken
                case Break.GONE:
                    yield say_error(GoneError("too old resource version: 1 (2)"))
                    return
                case Break.GARBAGE:
                    yield b"<html>502 Bad Gateway</html>\n"
                case Break.STALL:
                    stalls = True
        if stalls:
            subscription.take(max(0.0, ends - now))
            continue
        if now >= next_bookmark:
            next_bookmark = now + settings.bookmark_seconds
            yield _say_bookmark(route, storage, subscription)
        change = subscription.take(max(0.0, min(ends, next_bookmark) - now))
        if change is not None:
            lines = _translate_all(storage, route, matches, subscription, change)
            if lines:
                yield lines


def _translate_all(
    storage: Storage, route: Route, matches: Matcher | None, subscription: Subscription, change: Change | None
) -> bytes:
    """Return the lines of all changes that wait, so that a burst is one write on the socket."""
    lines: list[bytes] = []
    while change is not None and len(lines) < _BATCH:
        if change.version > subscription.skip_to and (line := _translate(storage, route, matches, change)):
            lines.append(line)
        change = subscription.take(0)
    if change is not None and change.version > subscription.skip_to:
        lines.append(_translate(storage, route, matches, change) or b"")
    return b"".join(lines)


def _translate(storage: Storage, route: Route, matches: Matcher | None, change: Change) -> bytes | None:
    """Return the line of a change; who enters or leaves the selection is ADDED or DELETED."""
    if route.namespace and change.object["metadata"].get("namespace") != route.namespace:
        return None
    is_in = matches is None or matches(change.object)
    was_in = change.previous is not None and (matches is None or matches(change.previous))
    match change.type, was_in, is_in:
        case "DELETED", True, _:
            said = b"DELETED"
        case "ADDED" | "MODIFIED", False, True:
            said = b"ADDED"
        case "MODIFIED", True, True:
            said = b"MODIFIED"
        case "MODIFIED", True, False:
            said = b"DELETED"
        case _:
            return None
    return _say(said, storage.encode(change.object))


def _say(kind: bytes, encoded: bytes) -> bytes:
    return b'{"type":"' + kind + b'","object":' + encoded + b"}\n"


def _say_bookmark(route: Route, storage: Storage, subscription: Subscription) -> bytes:
    # Only what has been read is behind us: changes that wait in the subscription are not.
    version = subscription.read_version(storage.version)
    obj: Obj = {
        "kind": route.resource.kind,
        "apiVersion": route.resource.api_version,
        "metadata": {"resourceVersion": str(version), "creationTimestamp": None},
    }
    return _say(b"BOOKMARK", json.dumps(obj).encode())


def say_error(error: ApiError) -> bytes:
    """Return the line of an ERROR event."""
    return _say(b"ERROR", json.dumps(error.as_status()).encode())
