"""Waiting for a child run: what is asked how often, what is said meanwhile, and what ends the wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun

from prefect_torch_elastic.cancelling import FlowCancelled
from prefect_torch_elastic.dispatch.mirror import StateMirror
from prefect_torch_elastic.dispatch.phases import Phase, decide_phase
from prefect_torch_elastic.dispatch.polling import Means, Poll, describe_outage
from prefect_torch_elastic.dispatch.pools import Pool
from prefect_torch_elastic.dispatch.sighting import ApiEyes, Sight, read_state
from prefect_torch_elastic.dispatch.verdicts import ChildVerdict, ChildWatch, Source, decide_patience
from prefect_torch_elastic.errors import StoreError
from prefect_torch_elastic.kubernetes.phases import GangPhase
from prefect_torch_elastic.local import GangCancelled

TICK_SECONDS = 0.2  # between two looks whether the task is asked to stop
STORE_SECONDS = 5.0
OVER_STORE_SECONDS = 1.0  # when Prefect calls the run over, its ending or its last sign of life is due
BACK_OFF_SECONDS = (2.0, 30.0)
SAY_AWAY_SECONDS = 5.0  # a server that restarts is away for some seconds
SAY_AGAIN_SECONDS = 300.0
MESSAGE_SECONDS = 60.0  # between two lines about one phase, such as places in a queue
LAST_LINES_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class ChildEnd:
    """How a child run ended.

    Attributes:
        verdict: What the end means.
        state_message: Why, in sentences, for the log and for an error.
        run: The run as last seen, None if it never was.
    """

    verdict: ChildVerdict
    state_message: str
    run: FlowRun | None


class Evidence(Protocol):
    """What the store has of a child run; asked in a thread. Both may take long, and raise `StoreError`."""

    def has_ending(self) -> bool: ...
    def pulse(self) -> str: ...


def wait_for_child(
    child_id: UUID,
    *,
    pool: Pool,
    parent_flow_run_ids: Sequence[UUID],
    evidence: Evidence,
    explain: Callable[[SyncPrefectClient], str],
    mirror: StateMirror,
    log: Any,
    cancelled: Callable[[], bool],
    start_within_seconds: float | None = None,
    means: Means = Means(),  # noqa: B008  (frozen)
) -> ChildEnd:
    """Wait until a child run is over, and return how it ended.

    API and store are asked in threads of their own, so an exception that is raised into this one (a timeout,
    Ctrl-C) and `cancelled` end the wait within tenths of a second, whoever is away. The child then still
    runs: the caller calls `stop_child`.

    Args:
        child_id: The child flow run.
        pool: Its work pool.
        parent_flow_run_ids: The flow run of the task, and those around it in this process; when one of them
            is cancelled, the wait ends.
        evidence: What the store has of the child.
        explain: Returns why no worker takes the child, empty when nothing is in the way. Called in a thread.
        mirror: Shows the phases.
        log: The task run's logger.
        cancelled: Whether the task was asked to stop.
        start_within_seconds: How long the child may wait before anything runs, None for ever. What a cluster
            queues may wait there for as long as its worker allows.
        means: Clock and callers.

    Raises:
        FlowCancelled: When a parent flow run is Cancelling or Cancelled.
        GangCancelled: After `cancelled()`.
    """
    api_caller, store_caller = means.make_api_caller(), means.make_store_caller()
    clock, sleep = means.clock, means.sleep
    parents = parent_flow_run_ids
    eyes = ApiEyes(child_id, parent_ids=parents, pool=pool.name, explain=explain, log=log, clock=clock)
    patience = decide_patience(
        start_within_seconds=start_within_seconds, starts_again=pool.starts_gangs_again
    )
    wait = _Wait(
        pool=pool.name,
        mirror=mirror,
        log=log,
        clock=clock,
        eyes=Poll(lambda: api_caller.ask(eyes.look)),
        touch=Poll(lambda: store_caller.ask(lambda _: _touch(evidence))),
        watch=ChildWatch(clock(), patience=patience),
    )
    try:
        while (end := wait.step()) is None:
            if stop := _asked_to_stop(cancelled, wait.sight):
                mirror.show(Phase.STOPPING, str(stop))
                raise stop
            sleep(TICK_SECONDS)
        if wait.watch.api.is_fresh(clock()):
            rest = api_caller.ask(eyes.read_rest)
            until = clock() + LAST_LINES_SECONDS
            while not rest.done() and clock() < until and not cancelled():
                sleep(TICK_SECONDS / 4)
        return end
    finally:
        api_caller.close()
        store_caller.close()


def _touch(evidence: Evidence) -> tuple[bool, str]:
    return (True, "") if evidence.has_ending() else (False, evidence.pulse())


def _asked_to_stop(cancelled: Callable[[], bool], sight: Sight | None) -> GangCancelled | None:
    """Return why the wait is given up, None if it is not."""
    if cancelled():
        return GangCancelled("The task was asked to stop while it waited for its child run.")
    if sight is not None and sight.cancelled_run is not None:
        reason = f"The flow run of this task is {sight.cancelled_state}."
        return FlowCancelled(reason, sight.cancelled_run)
    return None


@dataclass(kw_only=True)
class _Wait:
    """One wait: takes in what API and store say, shows it, and says what is in the way."""

    pool: str
    mirror: StateMirror
    log: Any
    clock: Callable[[], float]
    eyes: Poll[Sight]
    touch: Poll[tuple[bool, str]]
    watch: ChildWatch
    sight: Sight | None = None
    run: FlowRun | None = None
    _wait_reason: str = ""
    _phase: Phase | GangPhase | None = None
    _phase_text: str = ""
    _phase_said_at: float = 0.0
    _since: dict[str, float] = field(default_factory=dict[str, float])
    _said: dict[str, float] = field(default_factory=dict[str, float])

    def step(self) -> ChildEnd | None:
        """Look once, without waiting; return the end if there is one."""
        now = self.clock()
        if sight := self.eyes.look(now):
            self._take_sight(self.clock(), sight)
        if touched := self.touch.look(now):
            self._take_store(self.clock(), touched)
        now = self.clock()
        if verdict := self.watch.decide(now):
            return ChildEnd(verdict=verdict.kind, state_message=verdict.reason, run=self.run)
        self._tell_silence(now, "Prefect API", self.watch.api)
        self._tell_silence(now, "store", self.watch.store)
        self._say(now, "child run", self.watch.explain(now, wait_reason=self._wait_reason))
        return None

    def _take_sight(self, now: float, answer: Future[Sight]) -> None:
        watch = self.watch
        if error := answer.exception():
            if not (outage := describe_outage(error)):
                raise error
            watch.api.fail(now, outage)
            self.eyes.rest(now + _back_off(watch.api))
            return
        sight = answer.result()
        self.sight, self._wait_reason = sight, sight.wait_reason
        for trouble in sight.troubles:
            self.log.warning("%s", trouble)
        if sight.run is None:
            watch.see_no_run(now)
        else:
            self._take_run(now, sight.run)
        self.eyes.rest(now + _decide_interval(now - watch.state_since))
        if watch.is_over:
            self.touch.rest(now)

    def _take_run(self, now: float, run: FlowRun) -> None:
        self.run = run
        kind, name, message = read_state(run)
        has_run = run.run_count > 0  # a start time is set at the end too
        self.watch.see_run(now, state_type=kind, state_name=name, message=message, has_run=has_run)
        phase, text = decide_phase(kind, name, state_message=message, wait_reason=self._wait_reason)
        if phase is None:
            self._phase = None  # one that comes back is said again
            return
        self.mirror.show(phase, text)
        self._tell_phase(now, phase, text)

    def _tell_phase(self, now: float, phase: Phase | GangPhase, text: str) -> None:
        """Say a phase when it changes; when only its message does, once a minute."""
        if phase is self._phase:
            is_other_text = isinstance(phase, GangPhase) and text != self._phase_text
            if not is_other_text or now - self._phase_said_at < MESSAGE_SECONDS:
                return
        self._phase, self._phase_text, self._phase_said_at = phase, text, now
        if phase is Phase.WAITING and self._wait_reason:
            return  # a warning says it
        name = f"{phase}: " if isinstance(phase, GangPhase) and not text.startswith(phase) else ""
        self.log.info("Pool `%s`: %s%s", self.pool, name, text)

    def _take_store(self, now: float, answer: Future[tuple[bool, str]]) -> None:
        watch = self.watch
        if error := answer.exception():
            if not isinstance(error, StoreError):
                raise error
            watch.store.fail(now, str(error).splitlines()[0])
            self.touch.rest(now + _back_off(watch.store))
            return
        has_ending, pulse = answer.result()
        watch.see_store(now, asked_at=self.touch.asked_at, has_ending=has_ending, pulse=pulse)
        self.touch.rest(now + (OVER_STORE_SECONDS if watch.is_over else STORE_SECONDS))

    def _tell_silence(self, now: float, name: str, source: Source) -> None:
        """Say that somebody is away, and when the answers are back."""
        silent = source.silent_for(now)
        if silent is None and name in self._since:
            self.log.info("The %s answers again, after %.0f s.", name, now - self._since[name])
        text = ""
        if silent is not None and silent >= SAY_AWAY_SECONDS:
            text = f"The {name} does not answer ({source.error or 'nothing yet'}); the child run may go on."
        self._say(now, name, text)

    def _say(self, now: float, concern: str, text: str) -> None:
        """Say what is in the way once, and again every five minutes as long as it is."""
        if not text:
            self._since.pop(concern, None)
            return
        since = self._since.setdefault(concern, now)
        if now - self._said.get(text, -SAY_AGAIN_SECONDS) < SAY_AGAIN_SECONDS:
            return
        self._said[text] = now
        minutes = (now - since) / 60
        self.log.warning("%s%s", text, f" ({minutes:.0f} minutes so far)" if minutes >= 1 else "")


def _decide_interval(age: float) -> float:
    """Return how long to wait before the next look at a run whose state is this old: news come in bursts."""
    if age < 20.0:
        return 0.5
    return 2.0 if age < 300.0 else 5.0


def _back_off(source: Source) -> float:
    least, most = BACK_OFF_SECONDS
    return min(least * 2 ** min(source.failures - 1, 10), most)
