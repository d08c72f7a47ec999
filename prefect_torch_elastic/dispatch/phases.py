"""Which phase of its child run a task shows, and what it says about it (pure)."""

from __future__ import annotations

from enum import StrEnum

from prefect_torch_elastic.kubernetes.phases import GangPhase


class Phase(StrEnum):
    """Where a step in a work pool stands; the values are the names of states on its task run."""

    WAITING = "WaitingForWorker"
    STARTING = "Starting"
    RUNNING = "Running"
    SUSPECTED = "Suspected"  # the gang makes no steps; it may go on, or be ended for it
    STOPPING = "Stopping"


PLAIN_PENDING = ("Pending", "Submitting")
_GANG_PHASES = {str(phase): phase for phase in GangPhase}


def find_gang_phase(state_type: str, state_name: str) -> GangPhase | None:
    """Return the phase of a gang in a cluster that its worker named a state after, None for other states."""
    return _GANG_PHASES.get(state_name) if state_type == "PENDING" else None


def decide_phase(
    state_type: str, state_name: str, *, state_message: str = "", wait_reason: str
) -> tuple[Phase | GangPhase | None, str]:
    """Return the phase that a state of the child run means, and the message to show with it.

    What a worker says of its gang is shown in its own words.

    Args:
        state_type: Type of the child run's state, such as `RUNNING`.
        state_name: Its name, such as `Late` or `Submitting`.
        state_message: Its message.
        wait_reason: Why no worker takes the run, empty when nothing is known to be in the way.

    Returns:
        No phase (what was shown stays) for states that are final: the end of the task run speaks for itself,
        and a run that is called Crashed may still live.
    """
    if phase := find_gang_phase(state_type, state_name):
        return phase, state_message or f"The gang is {phase}."
    match state_type:
        case "SCHEDULED":
            return Phase.WAITING, wait_reason or "Waiting for a worker that takes the child run."
        case "PAUSED":
            return Phase.WAITING, f"The child run is {state_name}. Resume it in the UI, or cancel it."
        case "PENDING":
            note = "" if state_name in PLAIN_PENDING else f" (its state is `{state_name}`)"
            return Phase.STARTING, f"A worker has taken the child run and starts it{note}."
        case "RUNNING" if state_name == Phase.SUSPECTED:
            return Phase.SUSPECTED, state_message or "The gang makes no steps."
        case "RUNNING":
            note = "" if state_name == "Running" else f" (its state is `{state_name}`)"
            return Phase.RUNNING, f"The child run is running{note}."
        case "CANCELLING":
            return Phase.STOPPING, "The child run is being cancelled."
        case _:
            return None, ""
