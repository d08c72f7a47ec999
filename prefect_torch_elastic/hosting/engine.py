"""Prefect's flow engine around a body, without its word about states: those are ours.

The engine gives the body its context: subtasks, subflows, loggers, artifacts, printed lines. What it says
about the run would be lost when the API is away, and would overwrite a cancellation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect.client.schemas.objects import FlowRun, State
from prefect.flow_engine import AsyncFlowRunEngine, FlowRunEngine
from prefect.flows import Flow

ShowState = Callable[[State[Any]], State[Any]]


def run_in_engine(flow: Flow[Any, Any], flow_run: FlowRun, show_state: ShowState) -> None:
    """Call a flow's function, which takes nothing and is not async, in its run's context.

    Args:
        flow: Its function hands its result out by itself.
        flow_run: The run, which is Running.
        show_state: Called with what the engine would report; returns what the run's log shows as its end.
    """
    engine: Any = _SyncEngine(flow=flow, parameters={}, flow_run=flow_run)
    engine.show_state = show_state
    with engine.start():
        while engine.is_running():
            with engine.run_context():
                engine.call_flow_fn()


async def run_in_async_engine(flow: Flow[Any, Any], flow_run: FlowRun, show_state: ShowState) -> None:
    """Do as `run_in_engine` does, for an async function."""
    engine: Any = _AsyncEngine(flow=flow, parameters={}, flow_run=flow_run)
    engine.show_state = show_state
    async with engine.start():
        while engine.is_running():
            async with engine.run_context():
                await engine.call_flow_fn()


# Overridden methods keep the parameters of Prefect's.
class _SyncEngine(FlowRunEngine[Any, Any]):
    show_state: ShowState

    @property
    def heartbeat_seconds(self) -> None:  # the watcher of the run sends them
        return None

    def begin_run(self) -> State[Any]:
        return self.state

    def set_state(self, state: State[Any], force: bool = False) -> State[Any]:  # noqa: ARG002
        return _keep(self.flow_run, self.show_state(state))


class _AsyncEngine(AsyncFlowRunEngine[Any, Any]):
    show_state: ShowState

    @property
    def heartbeat_seconds(self) -> None:
        return None

    async def begin_run(self) -> State[Any]:
        return self.state

    async def set_state(self, state: State[Any], force: bool = False) -> State[Any]:  # noqa: ARG002
        return _keep(self.flow_run, self.show_state(state))


def _keep(flow_run: FlowRun | None, state: State[Any]) -> State[Any]:
    assert flow_run
    flow_run.state, flow_run.state_name, flow_run.state_type = state, state.name, state.type
    return state
