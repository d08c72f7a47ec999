"""Why a flow run that goes on has to stop: what its state in the API says, or a signal."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from prefect.client.schemas.objects import State


class StopCause(StrEnum):
    """Who wants the run to stop."""

    CANCELLED = "cancelled"
    OVER = "over"  # somebody gave it a final state, or deleted it
    SIGNAL = "signal"


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A reason to stop.

    Attributes:
        cause: Who wants it.
        reason: Half a sentence for people.
    """

    cause: StopCause
    reason: str


DELETED = Stop(cause=StopCause.OVER, reason="the run was deleted")
SIGNALLED = Stop(
    cause=StopCause.SIGNAL,
    reason="its process was asked to end by a signal: its worker shuts down, or its machine goes away",
)


def decide_stop(state: State[Any], *, asked: str) -> Stop | None:
    """Return why a run has to stop, None if it goes on.

    Args:
        state: As the API has it.
        asked: What its driver says when it wants the run to stop, empty if it does not.
    """
    if state.is_cancelling() or state.is_cancelled():
        said = f" ({state.message})" if state.message else ""
        return Stop(cause=StopCause.CANCELLED, reason=f"the run was cancelled{said}")
    if state.is_final():
        said = f": {state.message}" if state.message else ""
        return Stop(cause=StopCause.OVER, reason=f"somebody else called the run `{state.name}`{said}")
    if asked:
        return Stop(cause=StopCause.CANCELLED, reason=f"its driver asked for it ({asked})")
    return None
