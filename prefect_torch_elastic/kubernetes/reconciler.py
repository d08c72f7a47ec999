"""The rounds of a worker: what the API says of its runs, and what became of JobSets that nobody follows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, Protocol, assert_never
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType, WorkerStatus
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound

from prefect_torch_elastic.hosting.asking import Outage
from prefect_torch_elastic.hosting.watching import heartbeat_seconds, send_heartbeat
from prefect_torch_elastic.kubernetes.answers import ClusterError
from prefect_torch_elastic.kubernetes.clusters import Clusters, ClusterView
from prefect_torch_elastic.kubernetes.conditions import text
from prefect_torch_elastic.kubernetes.creating import ask, is_leaving, is_over
from prefect_torch_elastic.kubernetes.following import Following
from prefect_torch_elastic.kubernetes.naming import FLOW_RUN_LABEL, KEPT_ANNOTATION, WORKER_ANNOTATION
from prefect_torch_elastic.kubernetes.resources import Kind

LOOK_SECONDS = 2.0  # until a cancelled run is noticed; one request for all runs
TIDY_SECONDS = 15.0
SURVEY_SECONDS = 60.0
LOST_SECONDS = 900.0  # without a JobSet; a worker may wait for a webhook to create it
_BATCH = 200  # the API answers no more runs at once

JobSet = dict[str, Any]


class Fate(StrEnum):
    """What becomes of a JobSet that this worker does not follow."""

    LEAVE = "leave"  # another worker follows it, or Kubernetes deletes it in its own time
    ADOPT = "adopt"
    DELETE = "delete"  # nobody waits for it any more


def decide_fate(jobset: JobSet, run: FlowRun | None, *, worker_name: str, online: Iterable[str]) -> Fate:
    """Return what becomes of a JobSet of our work pool that this worker does not follow.

    Args:
        jobset: As the cluster has it.
        run: Its flow run, None if the API has none.
        worker_name: Of this worker; one of the same name that died may have created it.
        online: Names of the workers of the pool that live.
    """
    owner = owner_of(jobset)
    if owner != worker_name and owner in set(online):
        return Fate.LEAVE
    if run is None:
        return Fate.DELETE
    if run.state and run.state.is_final():
        is_kept = bool(text(jobset, "metadata", "annotations", KEPT_ANNOTATION))
        return Fate.LEAVE if is_kept and is_over(jobset) else Fate.DELETE
    if is_over(jobset) and not is_leaving(jobset) and run.state and run.state.is_scheduled():
        return Fate.LEAVE  # the run is to start again: whoever takes it replaces its former JobSet
    return Fate.ADOPT  # one on its way out too: its run has to be told


def owner_of(jobset: JobSet) -> str:
    """Return the name of the worker that follows a JobSet, empty if it does not say."""
    return text(jobset, "metadata", "annotations", WORKER_ANNOTATION)


def flow_run_of(jobset: JobSet) -> UUID | None:
    """Return the flow run that a JobSet was created for, None if it does not say."""
    try:
        return UUID(text(jobset, "metadata", "labels", FLOW_RUN_LABEL))
    except ValueError:
        return None


async def fetch_runs_alive(client: PrefectClient, pool_name: str) -> list[FlowRun]:
    """Return the runs of a work pool that a worker has taken and that have not ended."""
    pool = WorkPoolFilter(name=WorkPoolFilterName(any_=[pool_name]))
    alive = FlowRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING, StateType.CANCELLING])
    only = FlowRunFilter(state=FlowRunFilterState(type=alive))
    runs: list[FlowRun] = []
    while part := await client.read_flow_runs(
        work_pool_filter=pool,
        flow_run_filter=only,
        sort=FlowRunSort.ID_DESC,
        limit=_BATCH,
        offset=len(runs),
    ):
        runs += part
    return runs


class Host(Protocol):
    """The worker, as its rounds see it."""

    @property
    def name(self) -> str: ...

    @property
    def followings(self) -> Mapping[str, Following]:
        """The gangs that it follows, by uid."""
        ...

    @property
    def claimed(self) -> set[UUID]:
        """The runs that it is about to create, or follows."""
        ...

    def adopt(self, view: ClusterView, jobset: JobSet, run: FlowRun) -> None:
        """Begin to follow a gang."""
        ...

    async def open_places_of(self, runs: Iterable[FlowRun]) -> set[UUID]:
        """Look into every cluster and namespace that these runs name; return those where that is possible."""
        ...

    async def report_lost(self, run: FlowRun) -> None:
        """Give a run its end that has no JobSet."""
        ...


class Reconciler:
    """Makes the rounds.

    Args:
        host: The worker.
        client: Of the Prefect API.
        pool_name: Of the work pool.
        clusters: Where its gangs are.
        log: The worker's logger.
        outage: Tells when the API goes away and when it is back.
    """

    def __init__(
        self,
        host: Host,
        *,
        client: PrefectClient,
        pool_name: str,
        clusters: Clusters,
        log: Any,
        outage: Outage,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._client, self._pool_name = host, client, pool_name
        self._clusters, self._log, self._outage, self._clock = clusters, log, outage, clock
        self._tidy_at = self._heartbeat_at = self._survey_at = clock()
        self._missing: dict[UUID, float] = {}  # runs without a JobSet, and since when
        self._closing = asyncio.Event()
        self._said: set[str] = set()

    def close(self) -> None:
        """Adopt nothing more, and end with the last gang that is followed."""
        self._closing.set()

    async def serve(self) -> None:
        """Make rounds until the worker closes; what fails is tried again in the next."""
        while self._host.claimed or not self._closing.is_set():
            await self._try(self.look_at_runs)
            self._send_heartbeats()
            if self._clock() >= self._tidy_at and not self._closing.is_set():
                self._tidy_at = self._clock() + TIDY_SECONDS
                await self._try(self.tidy)
            try:
                await asyncio.wait_for(self._closing.wait(), LOOK_SECONDS)
                await asyncio.sleep(LOOK_SECONDS if self._host.claimed else 0)
            except TimeoutError:
                continue

    async def look_at_runs(self) -> None:
        """Tell each gang that is followed what the API says of its run."""
        followings = list(self._host.followings.values())
        runs = await self._fetch_runs({following.run.id for following in followings})
        for following in followings:
            following.see_run(runs[following.run.id])

    async def tidy(self) -> None:
        """Look for JobSets that nobody follows: adopt them, or delete those that nobody waits for.

        Now and then also for runs that have none.
        """
        now, alive, places = self._clock(), list[FlowRun](), set[UUID]()
        if is_survey := now >= self._survey_at:
            self._survey_at = now + SURVEY_SECONDS
            alive = await fetch_runs_alive(self._client, self._pool_name)
            places = await self._host.open_places_of(alive)
        found: set[UUID] = set()
        for view in self._clusters.views:
            for namespace in sorted(view.namespaces):
                try:
                    listing = await ask(
                        view.cluster.list, Kind.JOBSET, namespace, labels=self._clusters.labels
                    )
                except ClusterError as error:
                    self._warn_once(f"JobSets that nobody follows are not looked for: {error}")
                    is_survey = False  # its runs may have theirs there
                    continue
                found |= {run_id for one in listing.items if (run_id := flow_run_of(one))}
                await self._tidy_namespace(view, listing.items)
        if is_survey:
            await self._look_for_lost([run for run in alive if run.id in places - found], now)

    async def _look_for_lost(self, runs: list[FlowRun], now: float) -> None:
        """Give an end to runs whose JobSet went away, or never came, while no worker was there to see it."""
        missing = [run for run in runs if run.id not in self._host.claimed]
        self._missing = {run.id: self._missing.get(run.id, now) for run in missing}
        for run in missing:
            if now - self._missing[run.id] >= LOST_SECONDS:
                await self._host.report_lost(run)

    async def _tidy_namespace(self, view: ClusterView, jobsets: Iterable[JobSet]) -> None:
        strays: list[tuple[JobSet, UUID]] = []
        for jobset in jobsets:
            run_id = flow_run_of(jobset)
            if following := self._host.followings.get(text(jobset, "metadata", "uid")):
                if owner_of(jobset) != self._host.name:
                    following.leave()  # two workers may have thought that a third one is gone
            elif run_id is not None and run_id not in self._host.claimed:
                strays.append((jobset, run_id))
        if not strays:
            return
        runs = await self._fetch_runs({run_id for _, run_id in strays})
        workers = await self._client.read_workers_for_work_pool(self._pool_name)
        online = {worker.name for worker in workers if worker.status is WorkerStatus.ONLINE}
        for jobset, run_id in strays:
            run = runs[run_id]
            fate = decide_fate(jobset, run, worker_name=self._host.name, online=online)
            await self._carry_out(fate, view, jobset, run)

    async def _carry_out(self, fate: Fate, view: ClusterView, jobset: JobSet, run: FlowRun | None) -> None:
        namespace, name, uid = (text(jobset, "metadata", part) for part in ("namespace", "name", "uid"))
        try:
            match fate:
                case Fate.LEAVE:
                    return
                case Fate.DELETE:
                    if not is_leaving(jobset):
                        why = "is over" if run else "was deleted"
                        self._log.info("JobSet `%s/%s` is deleted: its flow run %s.", namespace, name, why)
                        await ask(view.cluster.delete, Kind.JOBSET, namespace, name, uid=uid)
                case Fate.ADOPT:
                    assert run is not None
                    mine = {"metadata": {"annotations": {WORKER_ANNOTATION: self._host.name}}}
                    await ask(view.cluster.patch, Kind.JOBSET, namespace, name, mine)
                    self._log.info(
                        "JobSet `%s/%s` is taken over from worker `%s`.", namespace, name, owner_of(jobset)
                    )
                    self._host.adopt(view, jobset, run)
                case _:
                    assert_never(fate)
        except ClusterError as error:
            self._warn_once(f"JobSet `{namespace}/{name}`, which nobody follows, stays as it is: {error}")

    async def _fetch_runs(self, ids: set[UUID]) -> dict[UUID, FlowRun | None]:
        """Return runs as the API has them; one that a list lacks counts as deleted only if a look says so."""
        found: dict[UUID, FlowRun | None] = {}
        for part in _parts(sorted(ids)):
            only = FlowRunFilter(id=FlowRunFilterId(any_=part))
            for run in await self._client.read_flow_runs(flow_run_filter=only, limit=len(part)):
                found[run.id] = run
        for run_id in ids - found.keys():
            try:
                found[run_id] = await self._client.read_flow_run(run_id)
            except ObjectNotFound:
                found[run_id] = None
        return found

    def _send_heartbeats(self) -> None:
        """Say that runs without pods are alive: an automation that misses a heartbeat calls a run crashed."""
        every = heartbeat_seconds()
        if every is None or self._clock() < self._heartbeat_at:
            return
        self._heartbeat_at = self._clock() + every
        for following in self._host.followings.values():
            if following.waits:
                send_heartbeat(following.run)

    async def _try(self, do: Callable[[], Awaitable[None]]) -> None:
        try:
            await do()
        except Exception as error:  # noqa: BLE001  (the next round tries again; the worker must not die of it)
            if not self._outage.begins(error):
                self._warn_once(f"A round failed and is tried again: {type(error).__name__}: {error}")
        else:
            self._outage.ends()

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._log.warning("%s", sentence)


def _parts(ids: list[UUID]) -> list[list[UUID]]:
    return [ids[start : start + _BATCH] for start in range(0, len(ids), _BATCH)]
