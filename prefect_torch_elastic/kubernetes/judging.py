"""When a gang is over and what becomes of its run: what was seen of both, by the clock (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from prefect_torch_elastic.kubernetes.phases import GangPhase
from prefect_torch_elastic.kubernetes.podfailures import DISRUPTED, PodFailure
from prefect_torch_elastic.kubernetes.status import GangReading

REPORT_SECONDS = 30.0  # between the end of the last pod and the leader's final state in the API
UNMANAGED_SECONDS = 30.0  # besides those until the phase is called so
MARGIN_SECONDS = 60.0  # besides the grace, for a leader that ends its gang itself
BLOCKED_SECONDS = 300.0  # for whoever pushes the image, or creates the Secret, a little late
_DELETED = "The flow run was deleted, and its gang with it. Run the flow again if that was a mistake."
_GONE = (
    "Somebody deleted the JobSet of this run, and its pods with it. Find out who (`kubectl delete`, a script "
    "that cleans up, the end of the namespace) and run it again: it goes on from its last checkpoint."
)
_FORMING = (GangPhase.STARTING, GangPhase.RESTARTING)


class Outcome(StrEnum):
    """What becomes of the run."""

    LEFT = "left"  # it has its final state, or it was deleted
    FAILED = "failed"
    CRASHED = "crashed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, kw_only=True)
class GangEnd:
    """How a gang ends.

    Attributes:
        outcome: What becomes of its run.
        message: Why, in sentences, for the run's state.
        has_pods: Whether pods may still run: they are ended before the run gets its state.
        may_stay: Whether the JobSet has ended by itself, so that Kubernetes can delete it in its own time.
        failure: What went wrong with a pod in the last attempt, None if nothing is known of it.
        attempt: The number of that attempt, from 1.
    """

    outcome: Outcome
    message: str
    has_pods: bool = False
    may_stay: bool = False
    failure: PodFailure | None = None
    attempt: int = 1


@dataclass(frozen=True, kw_only=True)
class RunSight:
    """A flow run as the API has it.

    Attributes:
        type: Of its state, such as `RUNNING`; empty when the run was deleted.
        name: Of its state.
        message: Of its state.
        stop: What its driver says when it wants the run to stop, empty if it does not.
    """

    type: str
    name: str = ""
    message: str = ""
    stop: str = ""

    @property
    def is_over(self) -> bool:
        """Whether it has a final state, or is no more."""
        return self.type in ("", "COMPLETED", "FAILED", "CRASHED", "CANCELLED")

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody cancelled it, also when it has not ended yet."""
        return self.type in ("CANCELLING", "CANCELLED")


class GangJudge:
    """Takes in what is seen of a gang and of its run, and decides when that is the end.

    Args:
        now: The time, on the clock of all other calls.
        grace_seconds: What a node has between the request to stop and its end.
        inadmissible_grace_seconds: How long a gang may wait that cannot be admitted; None is for ever.
        resumes: Whether a gang that was preempted goes on when it has its quota again.
    """

    def __init__(
        self,
        now: float,
        *,
        grace_seconds: float,
        inadmissible_grace_seconds: float | None,
        resumes: bool = True,
    ) -> None:
        self._grace, self._patience = grace_seconds + MARGIN_SECONDS, inadmissible_grace_seconds
        self._resumes = resumes
        self._status: GangReading | None = None
        self._failure: PodFailure | None = None
        self._failed_attempt = 0
        self._run = RunSight(type="PENDING")
        self._phase_since = now
        self._blocked_since: float | None = None
        self._told_at: float | None = None

    @property
    def status(self) -> GangReading | None:
        """The gang as last seen, None before that."""
        return self._status

    @property
    def is_silent(self) -> bool:
        """Whether only the leader's last report is missing."""
        return self._phase is GangPhase.SUCCEEDED and not self._run.is_over

    def see_gang(self, now: float, status: GangReading, failure: PodFailure | None) -> None:
        """Take in the gang."""
        if self._status is None or self._status.phase is not status.phase:
            self._phase_since = now
        self._status = status
        if status.phase is GangPhase.RUNNING:
            self._failure = None  # whatever ended an earlier attempt, or kept a pod from starting
        if failure is not None and failure != self._failure:
            self._failure, self._failed_attempt = failure, status.restarts + 1
        # One that runs, or waits for its quota, has no pod that cannot start, whatever was said before.
        if not (failure and failure.blocks_start and status.phase in _FORMING):
            self._blocked_since = None
        elif self._blocked_since is None:
            self._blocked_since = now

    def see_run(self, now: float, run: RunSight) -> None:
        """Take in the run."""
        self._run = run
        told = run.is_over or run.is_cancelled or bool(run.stop)
        self._told_at = (now if self._told_at is None else self._told_at) if told else None

    def decide(self, now: float) -> GangEnd | None:
        """Return how the gang ends, None as long as it goes on."""
        run, phase = self._run, self._phase
        ended = phase in (GangPhase.SUCCEEDED, GangPhase.FAILED)
        if not run.type:
            return GangEnd(outcome=Outcome.LEFT, message=_DELETED, has_pods=not ended)
        if run.is_cancelled:
            return self._cancel(run.message or "The run was cancelled.", has_pods=not ended, may_stay=ended)
        if self._status is not None and (ending := self._decide_by_phase(now, self._status)):
            return ending
        if self._told_at is None:
            return None
        # A leader that runs hears of it too; it ends its gang in order and says how that went.
        if not (phase is None or phase.waits) and now - self._told_at < self._grace:
            return None
        if run.is_over:
            return GangEnd(outcome=Outcome.LEFT, message=f"The run is `{run.name}` already.", has_pods=True)
        return self._cancel(run.stop, has_pods=True)

    @property
    def _phase(self) -> GangPhase | None:
        return self._status.phase if self._status else None

    def _decide_by_phase(self, now: float, status: GangReading) -> GangEnd | None:
        since = now - self._phase_since
        if status.preemptions and not self._resumes and not status.phase.is_final:
            return self._end_preempted(status)
        match status.phase:
            case GangPhase.SUCCEEDED:
                return self._decide_succeeded(since)
            case GangPhase.FAILED:
                return self._end(Outcome.FAILED, self._explain(status), may_stay=True)
            case GangPhase.DEACTIVATED:
                return self._end(Outcome.FAILED, self._explain(status), has_pods=True)
            case GangPhase.GONE:
                return self._end(Outcome.CRASHED, _GONE)
            case GangPhase.INADMISSIBLE if self._patience is not None and since >= self._patience:
                waited = f"It was waited for {since:.0f} s (`inadmissible_grace_seconds`)."
                return self._end(Outcome.FAILED, f"{self._explain(status)} {waited}")
            case GangPhase.UNMANAGED if since >= UNMANAGED_SECONDS:
                return self._end(Outcome.FAILED, self._explain(status))
            case GangPhase.STARTING | GangPhase.RESTARTING if (blocked := self._blocked_for(now)) is not None:
                return self._end(Outcome.FAILED, self._explain_blocked(blocked), has_pods=True)
            case (
                GangPhase.CREATED
                | GangPhase.UNMANAGED
                | GangPhase.QUEUED
                | GangPhase.INADMISSIBLE
                | GangPhase.PROVISIONING
                | GangPhase.ADMITTED
                | GangPhase.STARTING
                | GangPhase.RUNNING
                | GangPhase.RESTARTING
                | GangPhase.STOPPING
                | GangPhase.PREEMPTED
                | GangPhase.REQUEUED
            ):
                return None
            case _:
                assert_never(status.phase)

    def _blocked_for(self, now: float) -> float | None:
        """Return for how long a pod could not start, None while that may still change."""
        if self._blocked_since is None or now - self._blocked_since < BLOCKED_SECONDS:
            return None
        return now - self._blocked_since

    def _explain_blocked(self, seconds: float) -> str:
        assert self._failure, "a pod is known that cannot start"
        why = f"{self._failure.message} {self._failure.cure}".strip()
        return f"The gang cannot start: {why} It was waited for {seconds:.0f} s."

    def _end_preempted(self, status: GangReading) -> GangEnd:
        """End a gang that does not go on, before Kueue admits it again; its pods keep their grace."""
        # It may have its quota again already; then only the count is left.
        cause = status.preemption or f"Preempted (preemption {status.preemptions})"
        message = (
            f"{cause}. `resume_after_preemption` is off, so it does not wait for its quota. What it saved is "
            "in the store: a retry of the task (`retries`) or of its flow run goes on from the last "
            "checkpoint. With `resume_after_preemption=True` the gang does that by itself."
        )
        failure = PodFailure(category=DISRUPTED, pod="", node=None, node_name="", message=message)
        return self._end(Outcome.FAILED, message, has_pods=True, failure=failure)

    def _decide_succeeded(self, since: float) -> GangEnd | None:
        if not self._run.is_over and since < REPORT_SECONDS:
            return None
        missing = (
            f"All pods ended with exit code 0, but none has reported how the run ended within "
            f"{REPORT_SECONDS:.0f} s. Look whether the pods can reach `PREFECT_API_URL`, and whether the "
            "command of the gang is that of this package."
        )
        return self._end(Outcome.CRASHED, missing, may_stay=True)

    def _end(
        self,
        outcome: Outcome,
        message: str,
        *,
        has_pods: bool = False,
        may_stay: bool = False,
        failure: PodFailure | None = None,
    ) -> GangEnd:
        """Return the end of a gang; a final state that the run has already is left alone."""
        if self._run.is_over:
            left = f"The run is `{self._run.name}`."
            return GangEnd(outcome=Outcome.LEFT, message=left, has_pods=has_pods, may_stay=may_stay)
        if self._run.stop:
            return self._cancel(self._run.stop, has_pods=has_pods, may_stay=may_stay)
        return GangEnd(
            outcome=outcome,
            message=message,
            has_pods=has_pods,
            may_stay=may_stay,
            failure=failure or self._last_failure,
            attempt=self._attempt,
        )

    @property
    def _attempt(self) -> int:
        return self._status.restarts + 1 if self._status else 1

    @property
    def _last_failure(self) -> PodFailure | None:
        """What went wrong in this attempt; what ended an earlier one explains nothing any more."""
        return self._failure if self._failed_attempt == self._attempt else None

    def _cancel(self, message: str, *, has_pods: bool, may_stay: bool = False) -> GangEnd:
        return GangEnd(outcome=Outcome.CANCELLED, message=message, has_pods=has_pods, may_stay=may_stay)

    def _explain(self, status: GangReading) -> str:
        parts = [status.message]
        if (failure := self._last_failure) and failure.message not in status.message:
            parts.append(f"{failure.message} {failure.cure}".strip())
        if status.detail and status.detail not in status.message:
            parts.append(f"The cluster says: {status.detail}")
        return " ".join(parts)
