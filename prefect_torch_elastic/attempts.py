"""The budgets: what a gang does after a failure, from the verdict on it and on the one before.

Three budgets that never mix: restarts (ranks again, same nodes), attempts (a new gang), retries (Prefect).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from prefect_torch_elastic.diagnosis import INFRASTRUCTURE, MACHINES
from prefect_torch_elastic.evidence import Diagnosis


class Action(StrEnum):
    """What comes next."""

    RESTART = "restart"
    NEW_ATTEMPT = "new attempt"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """An action and its reason, as a clause for the log."""

    action: Action
    reason: str


def decide_restart(
    diagnosis: Diagnosis, previous: Diagnosis | None, *, restarts: int, max_restarts: int
) -> Decision:
    """Decide whether the ranks start again in the same gang.

    Args:
        diagnosis: Verdict on this failure.
        previous: Verdict on the failure before, None at the first one.
        restarts: Restarts that were spent already.
        max_restarts: The budget.
    """
    if diagnosis.non_retryable:
        return Decision(action=Action.FAIL, reason=f"running again cannot mend `{diagnosis.category}`")
    if previous is not None and _same_failure_again(diagnosis, previous):
        return Decision(
            action=Action.FAIL, reason=f"the same failure came back at the same step {diagnosis.step}"
        )
    if restarts >= max_restarts:
        return Decision(action=Action.FAIL, reason=f"{restarts} of {max_restarts} restarts are spent")
    return Decision(action=Action.RESTART, reason=f"restart {restarts + 1} of {max_restarts}")


def decide_attempt(
    diagnosis: Diagnosis, *, attempt: int, max_attempts: int, elsewhere: bool = False
) -> Decision:
    """Decide whether a gang that ended in failure is formed anew; only infrastructure failures earn that.

    Args:
        diagnosis: Verdict on the end of the gang.
        attempt: Gangs that this call has used up, from 1.
        max_attempts: The budget.
        elsewhere: Whether the next gang may get other machines.
    """
    if diagnosis.category not in (MACHINES if elsewhere else INFRASTRUCTURE) or diagnosis.non_retryable:
        return Decision(action=Action.FAIL, reason="the cause is not the infrastructure")
    if attempt >= max_attempts:
        return Decision(action=Action.FAIL, reason=f"{attempt} of {max_attempts} attempts are spent")
    return Decision(action=Action.NEW_ATTEMPT, reason=f"attempt {attempt + 1} of {max_attempts}")


def _same_failure_again(diagnosis: Diagnosis, previous: Diagnosis) -> bool:
    # Without a reported step nobody can tell "again" from "later on", so the budget alone decides.
    return diagnosis.step is not None and _fingerprint(diagnosis) == _fingerprint(previous)


def _fingerprint(diagnosis: Diagnosis) -> tuple[object, ...]:
    return (
        diagnosis.category,
        diagnosis.rank,
        diagnosis.exc_type,
        diagnosis.exc_message,
        diagnosis.signal,
        diagnosis.exit_code,
        diagnosis.step,
    )
