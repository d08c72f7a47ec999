"""How long a child run waited for its quota and how long it ran, by the history of its states (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from prefect.client.schemas.objects import State, StateType

from prefect_torch_elastic.dispatch.phases import find_gang_phase
from prefect_torch_elastic.kubernetes.gangtimes import render_seconds


def render_times(states: Sequence[State[Any]], *, until: datetime) -> str:
    """Return one sentence with both times; empty for a run that never waited in a queue of its cluster.

    Args:
        states: Of the run, in any order.
        until: What a state that is not final has lasted to.
    """
    history = sorted(states, key=lambda state: state.timestamp)
    spans = [(state, later.timestamp) for state, later in pairwise(history)]
    if history and not history[-1].is_final():
        spans.append((history[-1], until))
    queued = [span for span in spans if _waits(span[0])]
    if not queued:
        return ""
    ran = [span for span in spans if span[0].type is StateType.RUNNING]
    return f"The child run waited {_render(queued)} in its queue and ran {_render(ran)}."


def _waits(state: State[Any]) -> bool:
    phase = find_gang_phase(state.type.value, state.name or "")
    return phase is not None and phase.waits


def _render(spans: Sequence[tuple[State[Any], datetime]]) -> str:
    return render_seconds(sum(max((end - state.timestamp).total_seconds(), 0.0) for state, end in spans))
