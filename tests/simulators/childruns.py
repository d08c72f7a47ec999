"""A child run in virtual time: what API and store have of it at each moment, and when they are away."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
from prefect.client.schemas.objects import FlowRun, Log, State, StateType
from prefect.exceptions import ObjectNotFound

from prefect_torch_elastic.dispatch.polling import Means
from prefect_torch_elastic.dispatch.verdicts import GONE
from prefect_torch_elastic.errors import StoreError

NAMES = {"SCHEDULED": "Scheduled", "PENDING": "Pending", "RUNNING": "Running", "PAUSED": "Paused"}
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")
HAS_RUN = ("RUNNING", "COMPLETED")
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class VirtualTime:
    """A clock that moves when somebody sleeps: by `stride` at least, so that hours pass in few steps."""

    now: float = 0.0
    stride: float = 0.0
    limit: float = float("inf")
    at: dict[float, Callable[[], None]] = field(default_factory=dict)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, self.stride)
        assert self.now < self.limit, f"still waiting after {self.now:.0f} s"
        for moment in [moment for moment in self.at if moment <= self.now]:
            self.at.pop(moment)()

    def means(self, api: FakeApi) -> Means:
        return Means(
            clock=self.clock,
            sleep=self.sleep,
            make_api_caller=lambda: DirectCaller(api),
            make_store_caller=lambda: DirectCaller(None),
        )


@dataclass
class DirectCaller:
    """Asks at once, in the same thread."""

    tool: Any
    closed: bool = False

    def ask(self, work: Callable[[Any], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        try:
            answer.set_result(work(self.tool))
        except Exception as error:  # noqa: BLE001
            answer.set_exception(error)
        return answer

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True)
class Away:
    """From when to when somebody does not answer, and what a request meets instead."""

    begin: float
    end: float = float("inf")
    how: str | int = "refused"

    def holds(self, now: float) -> bool:
        return self.begin <= now < self.end


@dataclass
class FakeApi:
    """The part of Prefect's client that a wait uses, for one child run.

    Args:
        time: The clock.
        states: Moments and types, `(0, "SCHEDULED"), (5, "RUNNING:Late")`; a name may follow the type.
        away: When it fails.
        deleted_at: When the child run is deleted.
        parent: The same as `states`, for the parent flow run.
        lines: Moments when log lines arrive, and their text.
        messages: Whether final states have one.
        host_stops_after: How long after the host was asked it makes Cancelled of it; None if there is none.
    """

    time: VirtualTime
    states: Sequence[tuple[float, str]]
    away: Sequence[Away] = ()
    deleted_at: float = float("inf")
    parent: Sequence[tuple[float, str]] = ((0.0, "RUNNING"),)
    lines: Sequence[tuple[float, str]] = ()
    host_stops_after: float | None = None
    messages: bool = True
    child_id: UUID = field(default_factory=uuid4)
    parent_id: UUID = field(default_factory=uuid4)
    proposed: list[str] = field(default_factory=list)
    labels: dict[str, Any] = field(default_factory=dict)
    _runs: dict[tuple[str, bool], FlowRun] = field(default_factory=dict)
    _logs: list[Log] = field(default_factory=list)

    def read_flow_run(self, flow_run_id: UUID) -> FlowRun:
        self._check_away()
        if flow_run_id == self.parent_id:
            return self._run(state_at(self.parent, self.time.now), has_run=True)
        self._check_deleted()
        seen = [kind.partition(":")[0] for at, kind in self.states if at <= self.time.now]
        return self._run(state_at(self.states, self.time.now), has_run=any(kind in HAS_RUN for kind in seen))

    def read_logs(self, log_filter: Any, limit: int, offset: int, sort: Any) -> list[Log]:
        self._check_away()
        for at, text in self.lines[len(self._logs) :]:
            self._logs.append(
                Log(name="x", level=20, message=text, timestamp=EPOCH + timedelta(seconds=at), id=uuid4())  # pyright: ignore[reportArgumentType]
            )
        now = EPOCH + timedelta(seconds=self.time.now)
        after = log_filter.timestamp.after_ if log_filter.timestamp else EPOCH
        return [log for log in self._logs if after <= log.timestamp <= now][offset : offset + limit]

    def set_flow_run_state(self, flow_run_id: UUID, state: State[Any], force: bool = False) -> None:
        """Orchestrate as a server does, as far as a stop needs it."""
        self._check_away()
        self._check_deleted()
        assert flow_run_id == self.child_id
        self.proposed.append(state.type.value + (" forced" if force else ""))
        now = self.time.now
        before = state_at(self.states, now).partition(":")[0]
        if before in FINAL and not force:
            return
        after = state.type.value
        if after == "CANCELLING" and before == "SCHEDULED":
            after = "CANCELLED"
        states = [*((at, kind) for at, kind in self.states if at <= now), (now, after)]
        if after == "CANCELLING" and self.host_stops_after is not None:
            states.append((now + self.host_stops_after, "CANCELLED"))
        self.states = states

    def update_flow_run_labels(self, flow_run_id: UUID, labels: dict[str, Any]) -> None:
        self._check_away()
        self._check_deleted()
        assert flow_run_id == self.child_id
        self.labels |= labels
        now = self.time.now
        if self.host_stops_after is not None and state_at(self.states, now).startswith("RUNNING"):
            self.states = [*self.states, (now + self.host_stops_after, "CANCELLED")]

    def _run(self, kind: str, *, has_run: bool) -> FlowRun:
        if (kind, has_run) not in self._runs:
            kind_only, _, name = kind.partition(":")
            state = State(
                type=StateType(kind_only),
                name=name or NAMES.get(kind_only, kind_only.capitalize()),
                message=f"message of {kind_only}" if kind_only in FINAL and self.messages else None,
            )
            self._runs[kind, has_run] = FlowRun.model_validate(
                {"flow_id": uuid4(), "state": state, "run_count": int(has_run)}
            )
        return self._runs[kind, has_run]

    def _check_away(self) -> None:
        for away in self.away:
            if away.holds(self.time.now):
                raise make_outage(away.how)

    def _check_deleted(self) -> None:
        if self.time.now >= self.deleted_at:
            raise ObjectNotFound(http_exc=Exception("404"))


@dataclass
class FakeStore:
    """What the store has of a child run.

    Args:
        time: The clock.
        ending_at: When the ending is written.
        alive: When the host lives: it changes its sign of life every 10 s.
        away: When the store fails.
        gone_at: When the host is killed and its companion says so.
    """

    time: VirtualTime
    ending_at: float = float("inf")
    alive: Sequence[tuple[float, float]] = ()
    away: Sequence[Away] = ()
    gone_at: float = float("inf")

    def has_ending(self) -> bool:
        self._check_away()
        return self.time.now >= self.ending_at

    def pulse(self) -> str:
        self._check_away()
        if self.time.now >= self.gone_at:
            return GONE
        beats = [
            f"{begin}:{int((min(self.time.now, end) - begin) // 10)}"
            for begin, end in self.alive
            if begin <= self.time.now
        ]
        return beats[-1] if beats else ""

    def _check_away(self) -> None:
        for away in self.away:
            if away.holds(self.time.now):
                raise StoreError("`s3://bucket` cannot be read: connection refused")


@dataclass
class SeenMirror:
    """Collects the phases that are shown."""

    shown: list[tuple[str, str]] = field(default_factory=list)

    def show(self, phase: Any, message: str) -> None:
        if (phase, message) not in self.shown[-1:]:
            self.shown.append((phase, message))

    @property
    def phases(self) -> list[str]:
        return [str(phase) for phase, _ in self.shown]


@dataclass
class SeenLog:
    """Collects log lines, with the moment of each."""

    time: VirtualTime
    lines: list[tuple[float, str, str]] = field(default_factory=list)

    def info(self, text: str, *args: Any) -> None:
        self.lines.append((self.time.now, "info", text % args))

    def warning(self, text: str, *args: Any) -> None:
        self.lines.append((self.time.now, "warning", text % args))

    def log(self, level: int, text: str, *args: Any, extra: Any = None) -> None:
        self.lines.append((self.time.now, "child", text % args))

    def texts(self, kind: str) -> list[str]:
        return [text for _, which, text in self.lines if which == kind]


def state_at(states: Sequence[tuple[float, str]], now: float) -> str:
    """Return the state that holds at a moment."""
    return states[max(bisect_right([at for at, _ in states], now) - 1, 0)][1]


def make_outage(how: str | int) -> Exception:
    request = httpx.Request("GET", "http://api")
    if isinstance(how, int):
        return httpx.HTTPStatusError("error", request=request, response=httpx.Response(how, request=request))
    return httpx.ConnectError("[Errno 111] Connection refused", request=request)
