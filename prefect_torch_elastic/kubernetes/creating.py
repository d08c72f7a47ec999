"""Creating a gang and ending it: JobSet and Secret, once for a run, and until no pod is left."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import anyio
from anyio import to_thread

from prefect_torch_elastic.errors import ElasticError
from prefect_torch_elastic.kubernetes.answers import ClusterError
from prefect_torch_elastic.kubernetes.client import Listing
from prefect_torch_elastic.kubernetes.conditions import objects, read_condition, text
from prefect_torch_elastic.kubernetes.manifest import render_credentials_secret, render_jobset
from prefect_torch_elastic.kubernetes.naming import FLOW_RUN_LABEL, name_secret, select_pods
from prefect_torch_elastic.kubernetes.podspec import MARGIN_SECONDS
from prefect_torch_elastic.kubernetes.request import GangRequest
from prefect_torch_elastic.kubernetes.resources import Kind

CREATE_SECONDS = 60.0  # a webhook of Kueue or JobSet that starts is there within
GONE_MARGIN_SECONDS = 60.0  # for the controllers, besides
_NONCE_BYTES = 3
_LOOK_SECONDS = 1.0
_PAUSE_SECONDS = 3.0
_LONGEST_PAUSE_SECONDS = 15.0

T = TypeVar("T")


class Objects(Protocol):
    """What is asked of a cluster to create and delete gangs; `client.Cluster` does it."""

    def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]: ...

    def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None: ...

    def list(self, kind: Kind, namespace: str) -> Listing: ...

    def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None = None) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Means:
    """The clock that waits go by; tests bring their own."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep


@dataclass(frozen=True, kw_only=True)
class GangPlace:
    """Where a gang is, and for how long its pods may take to end.

    Attributes:
        namespace, name, uid: Of the JobSet.
        grace_seconds: What a node has between the request to stop and its end.
    """

    namespace: str
    name: str
    uid: str
    grace_seconds: float

    @property
    def pid(self) -> str:
        """Name of the gang in Prefect, see `parse_pid`."""
        return f"{self.namespace}:{self.name}"


def parse_pid(pid: str) -> tuple[str, str] | None:
    """Return namespace and name of a gang by its name in Prefect, None if it is no such name."""
    namespace, _, name = pid.partition(":")
    return (namespace, name) if namespace and name and ":" not in name else None


async def ask(work: Callable[..., T], *args: Any, **options: Any) -> T:
    """Return what a call to a cluster returns, made in a thread: the worker's loop never waits for one."""
    return await to_thread.run_sync(partial(work, *args, **options), abandon_on_cancel=True)


async def create_gang(
    cluster: Objects,
    request: GangRequest,
    credentials: Mapping[str, str],
    *,
    means: Means = Means(),
) -> GangPlace:
    """Create a gang, or find the one that was created for the same run before.

    The Secret comes second and belongs to the JobSet, so none can be left behind. A pod that is quicker waits
    for it. Its name is new for each JobSet: that of a former one of this run is still there for a while after
    it, and would be collected under the new pods.

    Raises:
        ClusterError: If the cluster refuses; nothing is left then.
        ElasticError: If another's object has the name, or there is no such queue.
    """
    if request.queue:
        await _check_queue(cluster, request.namespace, request.queue)
    if request.credentials_secret:
        own_secret = f"{request.credentials_secret}-{secrets.token_hex(_NONCE_BYTES)}"
        request = replace(request, credentials_secret=own_secret)
    manifest = render_jobset(request)
    jobset = await _create_jobset(cluster, request, manifest, means=means)
    place = GangPlace(
        namespace=request.namespace,
        name=request.name,
        uid=text(jobset, "metadata", "uid"),
        grace_seconds=request.grace_seconds,
    )
    try:
        await create_credentials(cluster, request, credentials, owner=jobset)
    except ClusterError:
        await ask(cluster.delete, Kind.JOBSET, place.namespace, place.name, uid=place.uid)
        raise
    return place


async def _check_queue(cluster: Objects, namespace: str, queue: str) -> None:
    """Refuse a queue that does not exist: Kueue would take the gang and wait for the queue, without a limit.

    Without the right to look for it the gang is created all the same, and Kueue says what it thinks of it.
    """
    try:
        if await ask(cluster.get, Kind.LOCAL_QUEUE, namespace, queue) is not None:
            return
    except ClusterError as error:
        if error.not_installed:
            raise
        return
    try:
        others = (await ask(cluster.list, Kind.LOCAL_QUEUE, namespace)).items
    except ClusterError:  # who may get one may not be allowed to list them
        others = ()
    names = ", ".join(sorted(f"`{text(other, 'metadata', 'name')}`" for other in others))
    cure = f"Name one of {names}." if names else f"`kubectl get localqueues -n {namespace}` says which exist."
    raise ElasticError(f"There is no LocalQueue `{queue}` in namespace `{namespace}`. {cure}")


async def create_credentials(
    cluster: Objects, request: GangRequest, values: Mapping[str, str], *, owner: Mapping[str, Any]
) -> None:
    """Create the Secret that the pods of a JobSet name, unless it is there or not needed.

    Raises:
        ClusterError: If the cluster refuses.
    """
    if not values:
        return
    request = replace(request, credentials_secret=_find_secret(request, owner))
    try:
        secret = render_credentials_secret(request, values, owner=owner)
        await ask(cluster.create, Kind.SECRET, request.namespace, secret)
    except ClusterError as error:
        if not error.exists:
            raise


def _find_secret(request: GangRequest, jobset: Mapping[str, Any]) -> str | None:
    """Return the name of the Secret that the pods of a JobSet take their credentials from."""
    for role in objects(jobset, "spec", "replicatedJobs"):
        for container in objects(role, "template", "spec", "template", "spec", "containers"):
            for variable in objects(container, "env"):
                name = text(variable, "valueFrom", "secretKeyRef", "name")
                if name.startswith(name_secret(request.name)):
                    return name
    return request.credentials_secret


async def _create_jobset(
    cluster: Objects, request: GangRequest, manifest: dict[str, Any], *, means: Means
) -> dict[str, Any]:
    began = means.clock()
    until = began + request.grace_seconds + MARGIN_SECONDS + GONE_MARGIN_SECONDS
    while True:
        try:
            return await ask(cluster.create, Kind.JOBSET, request.namespace, manifest)
        except ClusterError as error:
            if error.may_pass and means.clock() - began < CREATE_SECONDS:
                await means.sleep(error.retry_after or _PAUSE_SECONDS)
                continue
            if not error.exists:
                raise
        there = await ask(cluster.get, Kind.JOBSET, request.namespace, request.name)
        if there is None:
            continue
        owner = text(there, "metadata", "labels", FLOW_RUN_LABEL)
        if owner != request.flow_run_id:
            raise ElasticError(
                f"JobSet `{request.name}` exists in namespace `{request.namespace}`, and not for this run "
                f"(label `{FLOW_RUN_LABEL}` is `{owner}`). Give the run another name, or delete it: "
                f"`kubectl delete jobset -n {request.namespace} {request.name}`."
            )
        if not is_over(there):
            return there  # created before its answer got lost, or by a worker that died
        # The run was started again; its pods must be gone first, the new ones would have the same names.
        await ask(
            cluster.delete, Kind.JOBSET, request.namespace, request.name, uid=text(there, "metadata", "uid")
        )
        if means.clock() >= until:
            raise ElasticError(
                f"The former JobSet `{request.name}` of this run is still being deleted in namespace "
                f"`{request.namespace}`. Look for pods that cannot end: "
                f"`kubectl get pods -n {request.namespace} -l {select_pods(request.name)}`."
            )
        await means.sleep(_LOOK_SECONDS)


def is_over(jobset: dict[str, Any]) -> bool:
    """Return whether a JobSet has ended, or is on its way out."""
    ends = [read_condition(jobset, type) for type in ("Completed", "Failed")]
    return any(end.is_true for end in ends) or is_leaving(jobset)


def is_leaving(jobset: dict[str, Any]) -> bool:
    """Return whether a JobSet is being deleted."""
    return bool(text(jobset, "metadata", "deletionTimestamp"))


async def delete_gang(cluster: Objects, place: GangPlace, *, log: Any, means: Means = Means()) -> bool:
    """Delete a gang and return once all of its pods are gone; False if they are not after their grace.

    A cluster that is away is asked again until then.
    """
    until = means.clock() + place.grace_seconds + MARGIN_SECONDS + GONE_MARGIN_SECONDS
    asked, pause, problem = False, _LOOK_SECONDS, "its pods have not ended"
    while True:
        try:
            if not asked:
                await ask(cluster.delete, Kind.JOBSET, place.namespace, place.name, uid=place.uid)
                asked = True
            there = await ask(cluster.get, Kind.JOBSET, place.namespace, place.name)
            if there is None or text(there, "metadata", "uid") != place.uid:
                return True
            pause = _LOOK_SECONDS
        except ClusterError as error:
            problem, pause = str(error), min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if not error.may_pass:
                break
        if means.clock() >= until:
            break
        await means.sleep(pause)
    log.warning(
        "JobSet `%s` in namespace `%s` is not gone: %s. It is deleted again later; see "
        "`kubectl get pods -n %s -l %s`.",
        *(place.name, place.namespace, problem, place.namespace, select_pods(place.name)),
    )
    return False
