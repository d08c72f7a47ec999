"""The Prefect worker of type `torch-elastic`: each run of its pool is one JobSet, followed to its end."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from uuid import UUID

import anyio
import anyio.abc
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import InfrastructureNotAvailable, InfrastructureNotFound
from prefect.workers.base import BaseWorker, BaseWorkerResult

from prefect_torch_elastic.dispatch.pools import ELASTIC_TYPE
from prefect_torch_elastic.errors import ElasticError, MissingExtraError
from prefect_torch_elastic.hosting.asking import Outage
from prefect_torch_elastic.kubernetes.clusters import Clusters, ClusterView
from prefect_torch_elastic.kubernetes.conditions import text
from prefect_torch_elastic.kubernetes.creating import (
    GangPlace,
    ask,
    create_credentials,
    create_gang,
    is_leaving,
    parse_pid,
)
from prefect_torch_elastic.kubernetes.credentials import split_credentials
from prefect_torch_elastic.kubernetes.following import Following
from prefect_torch_elastic.kubernetes.judging import GangEnd, Outcome
from prefect_torch_elastic.kubernetes.reconciler import LOST_SECONDS, Reconciler, fetch_runs_alive
from prefect_torch_elastic.kubernetes.reporting import Reporter
from prefect_torch_elastic.kubernetes.request import GangRequest
from prefect_torch_elastic.kubernetes.resources import Kind
from prefect_torch_elastic.kubernetes.variables import (
    TorchElasticJobConfiguration,
    TorchElasticVariables,
    request_gang,
)


class TorchElasticWorkerResult(BaseWorkerResult):
    """What became of a run; its code is 0, because the run's state says it all."""


class TorchElasticWorker(
    BaseWorker[TorchElasticJobConfiguration, TorchElasticVariables, TorchElasticWorkerResult]
):
    """Runs gangs of TorchElastic ranks on Kubernetes, admitted by Kueue where there is one.

    A worker that is stopped leaves its gangs alone; the next one of the pool takes them over.
    """

    type = ELASTIC_TYPE
    job_configuration = TorchElasticJobConfiguration
    job_configuration_variables = TorchElasticVariables
    _display_name = "Torch Elastic"
    _description = (
        "Run gangs of TorchElastic ranks on Kubernetes: each run is one JobSet, queued and admitted by Kueue."
    )
    _documentation_url = "https://github.com/prefect-torch-elastic/prefect-torch-elastic"
    _logo_url = "https://avatars.githubusercontent.com/u/21003710"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.followings: dict[str, Following] = {}
        self.claimed: set[UUID] = set()
        self._clusters: Clusters | None = None
        self._usual: TorchElasticJobConfiguration | None = None  # what the pool's form says by itself
        self._unreachable: set[UUID] = set()  # runs whose cluster or namespace cannot be looked into
        self._reconciler: Reconciler | None = None
        self._outage = Outage(lambda sentence: self._logger.warning("%s", sentence))

    async def setup(self) -> None:
        """Prepare to run; where the client library of Kubernetes is missing, say so and leave."""
        try:
            await super().setup()
        except MissingExtraError as error:
            with suppress(BaseExceptionGroup):  # the task group wraps the error that it ends with
                await self.teardown(type(error), error, error.__traceback__)
            raise

    async def sync_with_backend(self) -> None:
        """Send a heartbeat, and begin the rounds once the work pool is known."""
        await super().sync_with_backend()
        if self._clusters is None and self._work_pool is not None:
            await self._begin()

    async def teardown(self, *exc_info: Any) -> None:
        """Stop following gangs, which go on; a worker that runs once follows them to their end before."""
        if self._reconciler:
            self._reconciler.close()
        try:
            await super().teardown(*exc_info)
        finally:
            if self._clusters:
                await self._clusters.close()
            self._clusters = self._reconciler = None

    async def run(
        self,
        flow_run: FlowRun,
        configuration: TorchElasticJobConfiguration,
        task_status: anyio.abc.TaskStatus[Any] | None = None,
    ) -> TorchElasticWorkerResult:
        """Create the gang of a run and follow it until the run has its final state."""
        self.claimed.add(flow_run.id)
        try:
            try:
                view, place = await self._create(flow_run, configuration)
            except ElasticError as error:
                if getattr(error, "may_pass", False):
                    raise  # Prefect calls the run crashed, and its driver may try again
                await self._refuse(flow_run, configuration, error)
                if task_status:
                    task_status.started(error)
                return TorchElasticWorkerResult(identifier="", status_code=0)
            if task_status:
                task_status.started(place.pid)
            await self._follow(view, place, flow_run, configuration)
            return TorchElasticWorkerResult(identifier=place.pid, status_code=0)
        finally:
            self.claimed.discard(flow_run.id)

    async def kill_infrastructure(
        self,
        infrastructure_pid: str,
        configuration: TorchElasticJobConfiguration,
        grace_seconds: int = 30,  # noqa: ARG002  (a gang has its own, in its manifest)
    ) -> None:
        """Delete the JobSet of a run.

        Raises:
            InfrastructureNotFound: If it is gone.
            InfrastructureNotAvailable: If the name is none of ours, or the cluster refuses.
        """
        if (where := parse_pid(infrastructure_pid)) is None:
            raise InfrastructureNotAvailable(
                f"`{infrastructure_pid}` is not `NAMESPACE:JOBSET`: another type of worker started this run."
            )
        try:
            view = await self._open().open(configuration.cluster_config, where[0])
            if not await ask(view.cluster.delete, Kind.JOBSET, *where):
                raise InfrastructureNotFound(f"There is no JobSet `{where[1]}` in namespace `{where[0]}`.")
        except ElasticError as error:
            raise InfrastructureNotAvailable(str(error)) from error

    def adopt(self, view: ClusterView, jobset: dict[str, Any], run: FlowRun) -> None:
        """Begin to follow a gang that another worker created."""
        assert self._runs_task_group, "the worker is set up"
        self.claimed.add(run.id)
        if self._limiter:
            with suppress(anyio.WouldBlock):  # it runs anyway; new runs wait until there is room
                self._limiter.acquire_on_behalf_of_nowait(run.id)
        self._runs_task_group.start_soon(self._adopt, view, jobset, run)

    async def _begin(self) -> None:
        """Look into the pool's own cluster: gangs of a worker that died may be there."""
        clusters = self._clusters = Clusters(pool_id=str(self.work_pool.id), warn=self._logger.warning)
        self._reconciler = Reconciler(
            self,
            client=self.client,
            pool_name=self._work_pool_name,
            clusters=clusters,
            log=self._logger,
            outage=self._outage,
        )
        try:
            usual = await self.job_configuration.from_template_and_values(
                self.work_pool.base_job_template, {}, client=self.client
            )
            await clusters.open(usual.cluster_config, usual.namespace)
            self._usual = usual
            await self.open_places_of(await fetch_runs_alive(self.client, self._work_pool_name))
        except MissingExtraError:
            raise
        except Exception as error:  # noqa: BLE001  (each run may name another cluster)
            self._logger.warning(
                "The cluster of work pool `%s` cannot be used: %s: %s. Runs that name no other one fail.",
                *(self._work_pool_name, type(error).__name__, error),
            )
        assert self._runs_task_group, "the worker is set up"
        self._runs_task_group.start_soon(self._reconciler.serve)

    async def open_places_of(self, runs: Iterable[FlowRun]) -> set[UUID]:
        """Look into every cluster and namespace that these runs name: their worker may have died.

        Returns:
            The runs where that is possible.
        """
        usual, clusters, opened = self._usual, self._open(), set[UUID]()
        if usual is None:  # the cluster of the pool cannot be used
            return opened
        for run in runs:
            variables = run.job_variables or {}
            try:
                if run.deployment_id or "cluster_config" in variables:
                    own = await self._resolve(run)
                    await clusters.open(own.cluster_config, own.namespace)
                else:
                    await clusters.open(usual.cluster_config, variables.get("namespace") or usual.namespace)
                opened.add(run.id)
            except Exception as error:  # noqa: BLE001  (those of the other runs are looked into)
                if run.id not in self._unreachable:
                    self._logger.warning("The gang of run `%s` is not looked for: %s", run.name, error)
                self._unreachable.add(run.id)
        return opened

    async def report_lost(self, run: FlowRun) -> None:
        """Give a run its end whose JobSet went away, or never came, while no worker was there to see it."""
        is_cancelled = run.state is not None and run.state.is_cancelling()
        message = (
            f"The gang is gone: the cluster has no JobSet of this run, and had none for {LOST_SECONDS:.0f} s."
            " Somebody deleted it, or its worker died before it was created."
        )
        outcome = Outcome.CANCELLED if is_cancelled else Outcome.CRASHED
        configuration = await self._resolve(run)
        reporter = self._make_reporter(run, configuration, place=None)
        await reporter.end(GangEnd(outcome=outcome, message=message))

    async def _resolve(self, run: FlowRun) -> TorchElasticJobConfiguration:
        return await self.job_configuration.resolve_for_flow_run(
            run,
            client=self.client,
            work_pool=copy.deepcopy(self.work_pool),
            worker_name=self.name,
            worker_id=self.backend_id,
        )

    def _open(self) -> Clusters:
        assert self._clusters, "the worker is set up, and its work pool known"
        return self._clusters

    async def _create(
        self, flow_run: FlowRun, configuration: TorchElasticJobConfiguration
    ) -> tuple[ClusterView, GangPlace]:
        request = self._request(flow_run, configuration)
        view = await self._open().open(configuration.cluster_config, request.namespace)
        credentials = split_credentials(configuration.env)[1]
        return view, await create_gang(view.cluster, request, credentials)

    def _request(self, run: FlowRun, configuration: TorchElasticJobConfiguration) -> GangRequest:
        return request_gang(
            configuration,
            flow_run_id=str(run.id),
            flow_run_name=run.name,
            pool_id=str(self.work_pool.id),
            worker_name=self.name,
        )

    async def _refuse(
        self, flow_run: FlowRun, configuration: TorchElasticJobConfiguration, error: ElasticError
    ) -> None:
        """Fail a run whose gang cannot be created: another try would meet the same."""
        ending = GangEnd(outcome=Outcome.FAILED, message=f"The gang cannot be created: {error}")
        await self._make_reporter(flow_run, configuration, place=None).end(ending)

    async def _follow(
        self,
        view: ClusterView,
        place: GangPlace,
        flow_run: FlowRun,
        configuration: TorchElasticJobConfiguration,
    ) -> None:
        following = Following(
            view=view,
            place=place,
            run=flow_run,
            reporter=self._make_reporter(flow_run, configuration, place=place),
            inadmissible_grace_seconds=configuration.inadmissible_grace_seconds,
            keeps_finished=configuration.ttl_seconds_after_finished is not None,
            resumes=configuration.resume_after_preemption,
        )
        self.followings[place.uid] = following
        try:
            await following.follow()
        finally:
            self.followings.pop(place.uid, None)

    async def _adopt(self, view: ClusterView, jobset: dict[str, Any], run: FlowRun) -> None:
        try:
            configuration = await self._resolve(run)
            if not is_leaving(jobset):
                await self._complete(view, jobset, run, configuration)
            place = GangPlace(
                namespace=text(jobset, "metadata", "namespace"),
                name=text(jobset, "metadata", "name"),
                uid=text(jobset, "metadata", "uid"),
                grace_seconds=configuration.grace_seconds,
            )
            await self._follow(view, place, run, configuration)
        except Exception:  # noqa: BLE001  (raised, it would end the worker; the next round finds the gang again)
            self.get_flow_run_logger(run).exception("The gang of this run cannot be followed.")
        finally:
            self.claimed.discard(run.id)
            self._release_limit_slot(run.id)

    async def _complete(
        self,
        view: ClusterView,
        jobset: dict[str, Any],
        run: FlowRun,
        configuration: TorchElasticJobConfiguration,
    ) -> None:
        """Create the Secret of a gang whose worker may have died before it did."""
        credentials = split_credentials(configuration.env)[1]
        try:
            request = self._request(run, configuration)
            await create_credentials(view.cluster, request, credentials, owner=jobset)
        except ElasticError as error:
            self.get_flow_run_logger(run).warning("The gang's Secret may be missing: %s", error)

    def _make_reporter(
        self, flow_run: FlowRun, configuration: TorchElasticJobConfiguration, *, place: GangPlace | None
    ) -> Reporter:
        resource = {
            "prefect.resource.id": f"prefect-torch-elastic.gang.{place.uid if place else flow_run.id}",
            "prefect.resource.name": place.pid if place else flow_run.name,
        }
        return Reporter(
            self.client,
            flow_run,
            log=self.get_flow_run_logger(flow_run),
            outage=self._outage,
            resource=resource,
            related=self._event_related_resources(configuration=configuration),
        )
