"""What a gang means for the state of its run: while it goes on, and when it ends (pure)."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Cancelled, Crashed, Failed, Pending

from prefect_torch_elastic.dispatch.stopping import STOP_LABEL
from prefect_torch_elastic.kubernetes.judging import GangEnd, Outcome, RunSight
from prefect_torch_elastic.kubernetes.phases import GangPhase


class Change(StrEnum):
    """What a phase means for the state of the run."""

    NONE = "none"
    PROPOSE = "propose"
    FORCE = "force"  # Prefect's rules refuse it: they know of no run that waits again after it ran


def decide_change(phase: GangPhase, held: RunSight) -> Change:
    """Return whether the run takes the name of a phase.

    Running and all final states are the leader's to report. It does so at any moment once pods may run, so
    nothing is forced over its word then.

    Args:
        phase: Of the gang.
        held: The run as the API has it.
    """
    if phase.is_final or phase is GangPhase.CREATED:
        return Change.NONE
    if held.is_over or held.is_cancelled or held.type == "PAUSED":
        return Change.NONE
    if held.type == "RUNNING" or (held.type == "PENDING" and held.name == name_state(phase)):
        return Change.FORCE if phase.waits else Change.NONE
    return Change.PROPOSE


def name_state(phase: GangPhase) -> str:
    """Return the name of the state that shows a phase; that pods run is not the leader's word yet."""
    return str(GangPhase.STARTING if phase is GangPhase.RUNNING else phase)


def is_ours(held: RunSight) -> bool:
    """Return whether the run has a state that shows a phase."""
    return held.type == "PENDING" and held.name in {name_state(phase) for phase in GangPhase}


def sight_run(run: FlowRun | None) -> RunSight:
    """Return what matters of a run; None is one that was deleted."""
    if run is None:
        return RunSight(type="")
    stop = str((run.labels or {}).get(STOP_LABEL, ""))
    state = run.state or Pending()
    return RunSight(type=state.type.value, name=state.name or "", message=state.message or "", stop=stop)


def render_state(ending: GangEnd) -> State[Any] | None:
    """Return the state that an ending means, None if the run keeps its own."""
    match ending.outcome:
        case Outcome.LEFT:
            return None
        case Outcome.FAILED:
            return Failed(message=ending.message)
        case Outcome.CRASHED:
            return Crashed(message=ending.message)
        case Outcome.CANCELLED:
            return Cancelled(message=ending.message)
