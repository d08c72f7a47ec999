"""One gang from its JobSet to its end: what the cluster and the API say of it, and what the worker does."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from prefect.client.schemas.objects import FlowRun

from prefect_torch_elastic.kubernetes.creating import GangPlace, Means, Objects, delete_gang
from prefect_torch_elastic.kubernetes.gangtimes import GangTimes
from prefect_torch_elastic.kubernetes.judging import GangEnd, GangJudge
from prefect_torch_elastic.kubernetes.observer import Sighting
from prefect_torch_elastic.kubernetes.phases import GangPhase
from prefect_torch_elastic.kubernetes.reporting import Reporter
from prefect_torch_elastic.kubernetes.runstates import sight_run

TICK_SECONDS = 5.0  # clocks run out between two sightings
END_AGAIN_SECONDS = 60.0  # until a final state that the API refuses is reported again
LAST_TICK_SECONDS = 1.0  # the leader's last report comes within a second or two


class View(Protocol):
    """What a gang is followed in; `clusters.ClusterView` is one."""

    @property
    def cluster(self) -> Objects: ...

    def follow(self, uid: str, hear: Any) -> None: ...

    def unfollow(self, uid: str) -> None: ...


class Following:
    """Follows one gang.

    Args:
        view: The cluster that it is in.
        place: Where it is.
        run: Its flow run.
        reporter: Shows what it does.
        inadmissible_grace_seconds: How long it may wait when it cannot be admitted.
        resumes: Whether it goes on after a preemption.
        keeps_finished: Whether Kubernetes deletes a JobSet that has ended, some time later.
        means: The clock.
    """

    def __init__(
        self,
        *,
        view: View,
        place: GangPlace,
        run: FlowRun,
        reporter: Reporter,
        inadmissible_grace_seconds: float | None,
        keeps_finished: bool,
        resumes: bool = True,
        means: Means = Means(),  # noqa: B008  (frozen)
    ) -> None:
        self.place, self.run = place, run
        self._view, self._reporter, self._means = view, reporter, means
        self._keeps_finished = keeps_finished
        now = means.clock()
        self._times = GangTimes(now)
        self._judge = GangJudge(
            now,
            grace_seconds=place.grace_seconds,
            inadmissible_grace_seconds=inadmissible_grace_seconds,
            resumes=resumes,
        )
        self._judge.see_run(now, sight_run(run))
        self._sighting: Sighting | None = None
        self._wake = asyncio.Event()
        self._has_left = False

    @property
    def waits(self) -> bool:
        """Whether the gang has no quota now, so that nobody in it can say that the run is alive."""
        status = self._judge.status
        return bool(status and status.phase.waits)

    def hear(self, sighting: Sighting) -> None:
        """Take in what the gang does; only for the loop that follows it."""
        self._sighting = sighting
        self._wake.set()

    def see_run(self, run: FlowRun | None) -> None:
        """Take in the run as the API has it, None if it was deleted."""
        self.run = run or self.run
        self._judge.see_run(self._means.clock(), sight_run(run))
        self._wake.set()

    def leave(self) -> None:
        """Follow it no more: another worker does."""
        self._has_left = True
        self._wake.set()

    async def follow(self) -> None:
        """Return when the run has its final state and the JobSet is gone, or left to its time to live.

        A cancellation leaves everything as it is: the gang goes on, and another worker takes it over.
        """
        self._view.follow(self.place.uid, self.hear)
        try:
            while not self._has_left:
                if ending := await self._step():
                    await self._end(ending)
                    return
                await self._rest()
        finally:
            self._view.unfollow(self.place.uid)

    async def _rest(self) -> None:
        seconds = LAST_TICK_SECONDS if self._judge.is_silent else TICK_SECONDS
        try:
            await asyncio.wait_for(self._wake.wait(), seconds)
        except TimeoutError:
            return

    async def _step(self) -> GangEnd | None:
        self._wake.clear()
        now = self._means.clock()
        if sighting := self._sighting:
            status = sighting.status
            self._judge.see_gang(now, status, sighting.failure)
            self._times.see(now, status.phase)
            await self._reporter.show(now, status)
            if sighting.failure and status.phase is GangPhase.RESTARTING:
                self._reporter.warn(sighting.failure)
        if self._judge.is_silent:
            await self._look_at_run()
        return self._judge.decide(self._means.clock())

    async def _look_at_run(self) -> None:
        """Look for the leader's report; the rounds of all runs come less often."""
        try:
            self._judge.see_run(self._means.clock(), sight_run(await self._reporter.fetch()))
        except Exception as error:  # noqa: BLE001  (the next look may succeed)
            self._reporter.log.debug("The run cannot be read: %s", error)

    async def _end(self, ending: GangEnd) -> None:
        """Give the run its state and delete the JobSet: pods that may still write to the store go first.

        The JobSet of a run without its state stays, so that the next round finds both again.
        """
        self._times.see(self._means.clock(), None)
        keeps = ending.may_stay and self._keeps_finished
        status = self._judge.status
        is_first = not (ending.has_pods or (status and status.phase is GangPhase.GONE))
        if is_first and not await self._reporter.end(ending):
            return
        if not keeps:
            await delete_gang(self._view.cluster, self.place, log=self._reporter.log, means=self._means)
        if not is_first:
            await self._end_without_jobset(ending)
        self._reporter.log.info("%s", self._times.render(status))

    async def _end_without_jobset(self, ending: GangEnd) -> None:
        """Give the run its state, without giving up: no round finds a run whose JobSet is gone."""
        while not (self._has_left or await self._reporter.end(ending)):
            await self._means.sleep(END_AGAIN_SECONDS)
