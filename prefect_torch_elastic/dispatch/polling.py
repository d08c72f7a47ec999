"""Asking again and again, in a thread: whoever waits for answers looks for them, and hangs on none."""

from __future__ import annotations

import contextvars
import json
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

REQUEST_SECONDS = 20.0  # a server that is there answers within; Prefect's own limit is 60 s
REPEAT_SECONDS = 0.3  # between two tries of something that may take a few
QUICK_SECONDS = 0.1  # most answers come within, and whoever waits looks for others after its next sleep only
AWAY_CODES = (401, 403, 408, 425, 429)  # a key that is being replaced, a proxy that is busy

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")


class Caller(Protocol[T_co]):
    """Asks one party with a tool of its own, such as a client."""

    def ask(self, work: Callable[[T_co], R]) -> Future[R]:
        """Begin to ask and return at once; errors come with the answer."""
        ...

    def close(self) -> None:
        """Ask no more; does not wait for the answer that is due."""
        ...


class ThreadCaller(Generic[T]):
    """A caller with a thread of its own, in which it opens its tool and closes it again.

    The thread is a daemon: a store or an API that never answers does not keep the process from ending.
    """

    def __init__(self, open_tool: Callable[[], AbstractContextManager[T]], *, name: str) -> None:
        self._open_tool = open_tool
        self._orders: SimpleQueue[tuple[Callable[[T], Any], Future[Any]] | None] = SimpleQueue()
        context = contextvars.copy_context()  # Prefect's settings are in there
        threading.Thread(target=context.run, args=[self._serve], name=name, daemon=True).start()

    def ask(self, work: Callable[[T], R]) -> Future[R]:
        answer: Future[R] = Future()
        self._orders.put((work, answer))
        return answer

    def close(self) -> None:
        self._orders.put(None)

    def _serve(self) -> None:
        with ExitStack() as stack:
            tools: list[T] = []
            while order := self._orders.get():
                work, answer = order
                try:
                    if not tools:
                        tools.append(stack.enter_context(self._open_tool()))
                    answer.set_result(work(tools[0]))
                except BaseException as error:  # noqa: BLE001  (whatever it is, it belongs to who asks)
                    answer.set_exception(error)


class Poll(Generic[R]):
    """One question that is asked again and again, never twice at the same time.

    Attributes:
        asked_at: When it was asked last.
    """

    def __init__(self, ask: Callable[[], Future[R]]) -> None:
        self._ask = ask
        self._answer: Future[R] | None = None
        self._due: float | None = None
        self.asked_at = 0.0

    def look(self, now: float) -> Future[R] | None:
        """Ask if it is time to, and return the answer once if there is one."""
        if self._answer is None and (self._due is None or now >= self._due):
            self._answer, self.asked_at = self._ask(), now
            wait([self._answer], QUICK_SECONDS)
        if self._answer is None or not self._answer.done():
            return None
        answer, self._answer = self._answer, None
        return answer

    def rest(self, until: float) -> None:
        """Ask not before this time; may be called again to ask earlier."""
        self._due = until


def make_api_caller() -> Caller[SyncPrefectClient]:
    """Return a caller of the Prefect API."""
    return ThreadCaller(open_client, name="prefect-torch-elastic api")


def make_store_caller() -> Caller[None]:
    """Return a caller of a store, which needs no tool."""
    return ThreadCaller(nullcontext, name="prefect-torch-elastic store")


@contextmanager
def open_client(*, timeout_seconds: float = REQUEST_SECONDS) -> Generator[SyncPrefectClient]:
    """Open a client of one thread that gives up at once; whoever asks again says meanwhile what is wrong.

    Prefect's own client repeats a request for more than a minute before it raises.
    """
    # With settings of its own it is not the client of Prefect's engine, which is not made for two threads.
    settings = {"timeout": httpx.Timeout(timeout_seconds)}
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        get_client(httpx_settings=settings, sync_client=True) as client,
    ):
        yield client


@dataclass(frozen=True, kw_only=True)
class Means:
    """The clock and the callers that a wait works with; tests bring their own."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    make_api_caller: Callable[[], Caller[SyncPrefectClient]] = make_api_caller
    make_store_caller: Callable[[], Caller[None]] = make_store_caller


def describe_outage(error: BaseException) -> str:
    """Return what a request met if the API was away, empty if the error means something else."""
    match error:
        case httpx.RequestError():
            return f"{type(error).__name__}: {error}".rstrip(": ")
        case httpx.HTTPStatusError() if _is_outage(error.response.status_code):
            return f"HTTP {error.response.status_code} {error.response.reason_phrase}".strip()
        case json.JSONDecodeError():  # a page of a proxy
            return "an answer that is no JSON"
        case _:
            return ""


def _is_outage(code: int) -> bool:
    return code >= 500 or code in AWAY_CODES


def insist(
    ask: Callable[[], T],
    *,
    seconds: float,
    pause_seconds: float = REPEAT_SECONDS,
    say: Callable[[str], object] = lambda _: None,
) -> T:
    """Return what `ask` returns, which is called again while the API is away.

    A server with SQLite also refuses a write when another one came in between, as those of the child do.

    Args:
        ask: Asks the API; it may be called after it has succeeded, when the answer got lost.
        seconds: How long.
        pause_seconds: Between two calls.
        say: Called with the outage after each failure.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            return ask()
        except Exception as error:
            if not (outage := describe_outage(error)) or time.monotonic() >= until:
                raise
            say(outage)
        time.sleep(pause_seconds)
