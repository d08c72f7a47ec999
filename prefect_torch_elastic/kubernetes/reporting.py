"""What a run in Prefect shows of its gang: states, lines in its log, and events."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol
from uuid import UUID

import anyio
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas import OrchestrationResult
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import SetStateStatus
from prefect.events.schemas.events import RelatedResource
from prefect.events.utilities import emit_event
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Pending, Running

from prefect_torch_elastic.dispatch.failurelabel import name_failure, render_failure_label
from prefect_torch_elastic.hosting.asking import Outage
from prefect_torch_elastic.kubernetes.judging import GangEnd, Outcome, RunSight
from prefect_torch_elastic.kubernetes.phases import GangPhase
from prefect_torch_elastic.kubernetes.podfailures import PodFailure
from prefect_torch_elastic.kubernetes.runstates import (
    Change,
    decide_change,
    is_ours,
    name_state,
    render_state,
    sight_run,
)
from prefect_torch_elastic.kubernetes.status import GangReading

MESSAGE_SECONDS = 60.0  # between two states, or lines, that differ in their message only
END_TRIES = 6  # of an API that is there; one that is away is waited for
_FIRST_PAUSE_SECONDS = 1.0  # between two of them, then twice as long
_EVENT_PREFIX = "prefect-torch-elastic.gang."


class Runs(Protocol):
    """What is asked of the Prefect API about runs; its client does it."""

    async def read_flow_run(self, flow_run_id: UUID) -> FlowRun: ...

    async def read_flow_run_states(self, flow_run_id: UUID) -> list[State[Any]]: ...

    async def set_flow_run_state(
        self, flow_run_id: UUID, state: State[Any], force: bool = False
    ) -> OrchestrationResult[Any]: ...

    async def update_flow_run_labels(self, flow_run_id: UUID, labels: dict[str, Any]) -> None: ...


class Reporter:
    """Keeps the state, the log and the events of one run in step with its gang.

    An API that is away is no error here: what it did not hear is said again with the next `show`.

    Args:
        client: Of the Prefect API.
        run: The flow run.
        log: The run's logger.
        outage: Tells when the API goes away and when it is back.
        resource: Of events: the gang.
        related: To events: the run, its flow and tags, the work pool.
    """

    def __init__(
        self,
        client: Runs | PrefectClient,
        run: FlowRun,
        *,
        log: Any,
        outage: Outage,
        resource: dict[str, str],
        related: Sequence[RelatedResource] = (),
        emit: Callable[..., Any] = emit_event,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self._client, self._run, self._log, self._outage = client, run, log, outage
        self._resource, self._related, self._emit, self._sleep = resource, list(related), emit, sleep
        self._phase: GangPhase | None = None  # of the last line and event
        self._preemptions: int | None = None  # as counted when that was said
        self._said, self._said_at = "", float("-inf")
        self._told: tuple[str, str] | None = None  # the pod and what it suffered, of the last warning
        self._shown: tuple[GangPhase, str] | None = None  # of the last state
        self._shown_at = float("-inf")
        self._overruled_at: int | None = None  # evictions when we spoke after a leader, see `_was_overruled`

    @property
    def log(self) -> Any:
        """The run's logger."""
        return self._log

    async def fetch(self) -> FlowRun | None:
        """Return the run as the API has it, None if it was deleted."""
        try:
            return await self._client.read_flow_run(self._run.id)
        except ObjectNotFound:
            return None

    async def show(self, now: float, status: GangReading) -> None:
        """Show a status: a line and an event for each phase, an event for each preemption, and the state."""
        self._say(now, status)
        shown = (status.phase, status.message)
        if shown == self._shown:
            return
        if self._shown and self._shown[0] is status.phase and now - self._shown_at < MESSAGE_SECONDS:
            return
        try:
            await self._change(status)
        except ObjectNotFound:
            pass  # deleted: whoever looks at the run says so
        except Exception as error:  # noqa: BLE001  (the next call tries again)
            if not self._outage.begins(error):
                self._log.warning(
                    "The state `%s` is not shown: %s: %s", status.phase, type(error).__name__, error
                )
            return
        self._outage.ends()
        self._shown, self._shown_at = shown, now

    def warn(self, failure: PodFailure) -> None:
        """Say once why the gang starts again; if it does not, its last state says it."""
        if failure.ends_attempt and self._told != (failure.pod, failure.category):
            self._told = (failure.pod, failure.category)
            self._log.warning("%s", f"{failure.message} {failure.cure}".strip())

    async def end(self, ending: GangEnd) -> bool:
        """Give the run its final state, however long the API is away; one that it has already stays.

        Returns:
            Whether the run needs no other state; False when the API refuses ours.
        """
        if (state := render_state(ending)) is None:
            return True
        tries, problem = 0, ""
        while tries < END_TRIES:
            try:
                held = await self._end(state, ending)
            except Exception as error:  # noqa: BLE001  (nobody else would give the run its end)
                if self._outage.begins(error):
                    await self._sleep(self._outage.next_pause())
                    continue
                problem = f"{type(error).__name__}: {error}"
            else:
                self._outage.ends()
                if held.is_over:
                    self._say_end(held, state, ending)
                    return True
                problem = f"{held.message}, and it is `{held.name}`"
            tries += 1
            if tries < END_TRIES:
                await self._sleep(_FIRST_PAUSE_SECONDS * 2 ** (tries - 1))
        self._log.error(
            "This run is over and stays without its final state `%s` (%s): the API did not take it in %d "
            "tries, last for %s. See the log of the Prefect server; the state can be set by hand.",
            *(state.name, ending.message, tries, problem),
        )
        return False

    def _say_end(self, held: RunSight, state: State[Any], ending: GangEnd) -> None:
        if held.type == state.type.value:
            level = logging.INFO if ending.outcome is Outcome.CANCELLED else logging.ERROR
            self._log.log(level, "%s", ending.message)

    def _say(self, now: float, status: GangReading) -> None:
        is_new = status.phase is not self._phase
        # Phases are what is seen when somebody looks; a preemption that is over by then is only counted.
        if self._preemptions is not None and status.preemptions > self._preemptions:
            self._send(GangPhase.PREEMPTED, status)
        elif is_new and (status.phase is not GangPhase.PREEMPTED or self._preemptions is None):
            self._send(status.phase, status)
        self._preemptions = status.preemptions
        if not is_new and (status.message == self._said or now - self._said_at < MESSAGE_SECONDS):
            return
        self._phase, self._said, self._said_at = status.phase, status.message, now
        prefix = "" if status.message.startswith(str(status.phase)) else f"{status.phase}: "
        self._log.info("%s%s", prefix, status.message)

    def _send(self, phase: GangPhase, status: GangReading) -> None:
        counts = ("preemptions", "evictions", "restarts", "counted_restarts", "nodes_ready", "nnodes")
        payload = {name: getattr(status, name) for name in ("message", "detail", *counts)}
        try:
            self._emit(
                event=f"{_EVENT_PREFIX}{phase.lower()}",
                resource=self._resource,
                related=self._related,
                payload=payload,
            )
        except Exception as error:  # noqa: BLE001  (the run goes on without events)
            self._log.debug("The event of phase `%s` was not sent: %s", phase, error)

    async def _change(self, status: GangReading) -> None:
        run = await self.fetch()
        held = sight_run(run)
        change = decide_change(status.phase, held)
        state = Pending(name=name_state(status.phase), message=status.message)
        if self._was_overruled(status, held):
            change, state = Change.FORCE, Running()
        if change is Change.NONE:
            return
        answer = await self._client.set_flow_run_state(self._run.id, state, force=change is Change.FORCE)
        if change is Change.FORCE and run and run.state and answer.state:
            await self._put_back_what_was_lost(status, after=run.state, ours=answer.state)

    async def _put_back_what_was_lost(
        self, status: GangReading, *, after: State[Any], ours: State[Any]
    ) -> None:
        """Set again what somebody said between our look and our word: Prefect cannot compare and set.

        That may be that the run is cancelled, or how it ended. That it runs is only noted: what we said may
        be true still.
        """
        lost: State[Any] | None = None
        for state in await self._client.read_flow_run_states(self._run.id):
            if not after.timestamp < state.timestamp <= ours.timestamp or state.id == ours.id:
                continue
            if state.is_cancelling() or state.is_final():
                lost = state
            elif state.is_running():
                self._overruled_at = status.evictions
        if lost is not None:
            again = State(type=lost.type, name=lost.name, message=lost.message)
            await self._client.set_flow_run_state(self._run.id, again, force=True)

    def _was_overruled(self, status: GangReading, held: RunSight) -> bool:
        """Return whether the run waits only because our word came later than the leader's.

        When we looked, the gang had no pods; then a leader said that it runs, then we said that it waits. If
        all pods run and the gang has lost no quota since, that leader is theirs, and says it only once.
        """
        is_same_start = self._overruled_at == status.evictions
        return is_same_start and status.phase is GangPhase.RUNNING and is_ours(held)

    async def _label(self, ending: GangEnd) -> None:
        """Leave for the driver what failed; without that it knows the state's message only."""
        seen = name_failure(ending.failure, attempt=ending.attempt) if ending.failure else None
        if seen is None or ending.outcome is not Outcome.FAILED:
            return
        try:
            await self._client.update_flow_run_labels(self._run.id, render_failure_label(seen))
        except Exception as error:
            if self._outage.begins(error):
                raise
            self._log.debug("The run gets no label of its failure: %s", error)

    async def _end(self, wanted: State[Any], ending: GangEnd) -> RunSight:
        """Bring the run to its final state, and return the run as it is then, or why it is not so."""
        held = RunSight(type="")
        for force in (False, True):  # somebody may be quicker than we are, or a rule may refuse
            held = sight_run(await self.fetch())
            if held.is_over:
                break
            if not force:
                await self._label(ending)
            state = wanted
            if held.is_cancelled and not wanted.is_cancelled():
                state = Cancelled(message=held.message)
            answer = await self._client.set_flow_run_state(self._run.id, state, force=force)
            if answer.status is SetStateStatus.ACCEPT:
                return RunSight(type=state.type.value)
            held = replace(held, message=f"{answer.status.value} ({getattr(answer.details, 'reason', None)})")
        return held
