"""When a child run is over: what was seen of it, and what that means by the clock (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from prefect_torch_elastic.dispatch.phases import find_gang_phase

# The host writes its sign of life every 10 s; two in a row may be missed by a busy store.
STILL_SECONDS = 30.0  # Prefect calls the run over, and the sign of life stands still: no ending will come
NEVER_ALIVE_SECONDS = 3.0  # the same for one that failed or was cancelled and never gave a sign of life
GONE = "gone"  # the last sign of life of a host that was killed; its companion writes it
GONE_SETTLE_SECONDS = 3.0  # after that: a worker that still lives says why
LOST_SECONDS = 120.0  # Prefect calls it alive
NO_SIGN_SECONDS = 60.0  # the same, to say so
LINGER_SECONDS = 5.0  # for the final state, and the log lines before it, once the ending is there
GONE_SECONDS = 10.0  # a proxy in front of the API may say 404 once
AWAY_SECONDS = 1800.0
STALE_SECONDS = 15.0  # an answer that is older says nothing about now
SLOW_START_SECONDS = 60.0
# A cluster that takes a gang's machines away gives it others: no sign of life comes meanwhile, and the worker
# that would say so may be down.
AGAIN_LOST_SECONDS = 1800.0
AGAIN_NO_SIGN_SECONDS = 300.0
LEAST_TAKE_SECONDS = 60.0  # its worker asks for runs every 15 s, however short a grace the gang itself has
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


class ChildVerdict(StrEnum):
    """How the wait for a child run ended."""

    ENDED = "ended"  # its ending is in the store; or Prefect calls it over and there is none: an error
    CRASHED = "crashed"  # it died, and its sign of life with it
    LOST = "lost"  # Prefect calls it alive, and there is no sign of life
    CANCELLED = "cancelled"  # somebody cancelled it, not this task
    NOT_STARTED = "not_started"  # nothing has run within the time it had to start


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on a child run, and why, in sentences."""

    kind: ChildVerdict
    reason: str


@dataclass(frozen=True, kw_only=True)
class ChildPatience:
    """How long a child run is waited for, by what is seen of it.

    Attributes:
        take_seconds: Until a worker takes it, None for ever.
        start_seconds: Until something runs once it is taken, None for ever.
        no_sign_seconds: It should run and gives no sign of life: until that is said.
        lost_seconds: The same: until it counts as lost.
        gone_seconds: Its host is known to be gone: until it counts as lost.
        over_seconds: Prefect calls it over, and its sign of life stands still: until no ending is expected.
    """

    take_seconds: float | None
    start_seconds: float | None
    no_sign_seconds: float
    lost_seconds: float
    gone_seconds: float
    over_seconds: float


def decide_patience(*, start_within_seconds: float | None, starts_again: bool) -> ChildPatience:
    """Return how long a child run is waited for.

    Args:
        start_within_seconds: How long it may wait before anything runs, None for ever.
        starts_again: Whether a cluster queues it and starts its machines again. Then its worker judges how
            long it may wait there, and only the wait for a worker is judged here.
    """
    if not starts_again:
        return ChildPatience(
            take_seconds=start_within_seconds,
            start_seconds=start_within_seconds,
            no_sign_seconds=NO_SIGN_SECONDS,
            lost_seconds=LOST_SECONDS,
            gone_seconds=GONE_SETTLE_SECONDS,
            over_seconds=STILL_SECONDS,
        )
    return ChildPatience(
        take_seconds=None if start_within_seconds is None else max(start_within_seconds, LEAST_TAKE_SECONDS),
        start_seconds=None,
        no_sign_seconds=AGAIN_NO_SIGN_SECONDS,
        lost_seconds=AGAIN_LOST_SECONDS,
        gone_seconds=AGAIN_LOST_SECONDS,
        over_seconds=NEVER_ALIVE_SECONDS,  # its worker says so when no pod is left
    )


class Source:
    """Whether one party answers: the API, or the store.

    Attributes:
        answered_at: When it answered last.
        failures: How often it failed in a row.
        error: What the last of these was, empty after an answer.
    """

    def __init__(self, now: float) -> None:
        self.answered_at = now
        self.failures = 0
        self.error = ""
        self._failed_at = now

    def answer(self, now: float) -> None:
        """Note an answer."""
        self.answered_at, self.failures, self.error = now, 0, ""

    def fail(self, now: float, error: str) -> None:
        """Note that there was an error instead of an answer."""
        if not self.failures:
            self._failed_at = now
        self.failures, self.error = self.failures + 1, error

    def is_fresh(self, now: float) -> bool:
        """Whether what it said last is true of now."""
        return self.silent_for(now) is None

    def silent_for(self, now: float) -> float | None:
        """For how many seconds it has failed, or not answered at all; None if it answers."""
        if self.failures:
            return now - self._failed_at
        silent = now - self.answered_at
        return silent if silent > STALE_SECONDS else None

    def is_away(self, now: float) -> bool:
        """Whether it has been away for so long that nobody waits for it any more."""
        return (self.silent_for(now) or 0.0) >= AWAY_SECONDS


class ChildWatch:
    """Takes in what is seen of a child run, and decides what it means.

    Args:
        now: The time, on the clock of all other calls.
        patience: How long it is waited for.

    Attributes:
        api, store: Whether these answer.
        state_type, state_name, state_message: The run's state as last seen; the type is empty before that.
        state_since: When that type was seen first.
    """

    def __init__(self, now: float, *, patience: ChildPatience) -> None:
        self.api, self.store = Source(now), Source(now)
        self.state_type = self.state_name = self.state_message = ""
        self.state_since = now
        self._began, self._patience = now, patience
        self._was_taken = self._has_run = False
        self._pulse = ""
        self._is_gone = False
        self._still = 0.0
        self._looked_at = now
        self._ending_at: float | None = None
        self._gone_at: float | None = None

    def see_run(self, now: float, *, state_type: str, state_name: str, message: str, has_run: bool) -> None:
        """Take in the run as the API has it."""
        self.api.answer(now)
        self._gone_at = None
        if state_type != self.state_type:
            self.state_since, self._still = now, 0.0
        self.state_type, self.state_name, self.state_message = state_type, state_name, message
        self._was_taken = self._was_taken or state_type == "PENDING"
        self._has_run = self._has_run or has_run or state_type == "RUNNING"

    def see_no_run(self, now: float) -> None:
        """Take in that the API has no such run."""
        self.api.answer(now)
        self._gone_at = now if self._gone_at is None else self._gone_at

    def see_store(self, now: float, *, asked_at: float, has_ending: bool, pulse: str) -> None:
        """Take in what the store has of the run; it may have been asked long before it answered."""
        # While the store was silent the host could not write either: that time counts little.
        self._still += min(now - max(self.store.answered_at, self.state_since), STALE_SECONDS)
        self.store.answer(now)
        self._looked_at = asked_at
        if has_ending and self._ending_at is None:
            self._ending_at = now
        if pulse != self._pulse:
            self._pulse = pulse
            self._is_gone = pulse == GONE
            self._still = 0.0
            self._has_run = True

    @property
    def is_over(self) -> bool:
        """Whether Prefect calls the run over; one that it calls Crashed may still live."""
        return self.state_type in _OVER

    def decide(self, now: float) -> Verdict | None:
        """Return the verdict, None as long as there is none."""
        if self._ending_at is not None:
            return self._decide_ended(now)
        if self.is_over and self.state_type != "CRASHED":
            return self._decide_over(now)
        if self.api.is_away(now):
            return self._decide_unreachable(now)
        if not self.api.is_fresh(now):
            return None
        if self._gone_at is not None:
            over = now - self._gone_at >= GONE_SECONDS
            return Verdict(kind=ChildVerdict.CRASHED, reason="The child run was deleted.") if over else None
        if self.state_type == "CRASHED":
            return self._decide_over(now)
        return self._decide_alive(now)

    def _decide_ended(self, now: float) -> Verdict | None:
        assert self._ending_at is not None
        if self.is_over or not self.api.is_fresh(now) or now - self._ending_at >= LINGER_SECONDS:
            return Verdict(kind=ChildVerdict.ENDED, reason="The child run wrote its ending to the store.")
        return None

    def _decide_over(self, now: float) -> Verdict | None:
        dead_early = not self._pulse and self.state_type in ("FAILED", "CANCELLED")
        quiet = NEVER_ALIVE_SECONDS if dead_early else 0.0 if self._is_gone else self._patience.over_seconds
        kind = {"CANCELLED": ChildVerdict.CANCELLED, "CRASHED": ChildVerdict.CRASHED}.get(
            self.state_type, ChildVerdict.ENDED
        )
        said = f": {self.state_message}" if self.state_message else "."
        reason = f"The child run is {self.state_name}{said}"
        looked = self.store.is_fresh(now) and self._looked_at >= self.state_since
        if looked and self._still >= quiet:
            return Verdict(kind=kind, reason=reason)
        if self.store.is_away(now):
            return Verdict(kind=kind, reason=f"{reason} Its store does not answer ({self.store.error}).")
        return None

    def _decide_unreachable(self, now: float) -> Verdict | None:
        """The API has been away for long: as long as the sign of life changes, the run is waited for."""
        if self.store.is_fresh(now):
            if self._still < self._patience.lost_seconds:
                return None
            rest = "and the run gives no sign of life in the store."
        elif self.store.is_away(now):
            rest = f"and neither does the store ({self.store.error or 'no answer'})."
        else:
            return None
        minutes = AWAY_SECONDS / 60
        api = f"The Prefect API has not answered for {minutes:.0f} minutes ({self.api.error or 'no answer'})"
        return Verdict(kind=ChildVerdict.LOST, reason=f"{api}, {rest}")

    def _decide_alive(self, now: float) -> Verdict | None:
        if self.state_type not in ("RUNNING", "CANCELLING"):
            return self._decide_waiting(now)
        if not self.store.is_fresh(now):
            return None
        patience = self._patience
        if self._still >= patience.lost_seconds:
            why = (
                f"and has given no sign of life for {patience.lost_seconds:.0f} s: "
                "its process or its machine is gone."
            )
        elif self._is_gone and self._still >= patience.gone_seconds:
            why = "but its process was killed; a worker that is stopped does that to its jobs."
        else:
            return None
        kind = ChildVerdict.LOST if self.state_type == "RUNNING" else ChildVerdict.CANCELLED
        return Verdict(kind=kind, reason=f"The child run is {self.state_name}, {why}")

    def _decide_waiting(self, now: float) -> Verdict | None:
        limit = self._patience.start_seconds if self._was_taken else self._patience.take_seconds
        if not self.state_type or limit is None or self._has_run or now - self._began < limit:
            return None
        reason = f"The child run has not started within {limit:g} s: it is {self.state_name}."
        return Verdict(kind=ChildVerdict.NOT_STARTED, reason=reason)

    def explain(self, now: float, *, wait_reason: str) -> str:
        """Return what the wait is for, if that is not simply the run's work; it is said, and said again."""
        if self._gone_at is not None:
            return "The API does not know the child run any more."
        since = now - self.state_since
        match self.state_type:
            case "SCHEDULED" if not wait_reason and since >= SLOW_START_SECONDS:
                return (
                    "Nothing is known to be in the way, but no worker has taken the child run: "
                    "see whether those of the pool are busy, or read their logs."
                )
            case "SCHEDULED":
                return wait_reason
            case "PAUSED":
                return f"The child run is {self.state_name}: it goes on when somebody resumes it in the UI."
            case "PENDING" if find_gang_phase("PENDING", self.state_name):
                return ""  # its worker says what it waits for
            case "PENDING" if since >= SLOW_START_SECONDS:
                return (
                    f"A worker has taken the child run, but it does not start (`{self.state_name}`): "
                    "read the log of that worker, and of the machine that it asked for."
                )
            case "RUNNING" | "CANCELLING" if (
                self.store.is_fresh(now) and self._still > self._patience.no_sign_seconds
            ):
                return (
                    f"The child run is {self.state_name}, but gives no sign of life. "
                    f"After {self._patience.lost_seconds:.0f} s it counts as lost."
                )
            case "CRASHED" if since >= NEVER_ALIVE_SECONDS:
                said = f" ({self.state_message})" if self.state_message else ""
                return (
                    f"The child run is called Crashed{said}. It is waited for until it has given "
                    f"no sign of life for {self._patience.over_seconds:.0f} s."
                )
            case "COMPLETED" | "FAILED" | "CANCELLED" if since >= NEVER_ALIVE_SECONDS:
                said = f" ({self.state_message})" if self.state_message else ""
                return f"The child run is {self.state_name}{said}, but its ending is not in the store."
            case _:
                return ""
