"""What a work pool is able to do, and how the order for one of its workers is written down."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import WorkerStatus, WorkPool, WorkQueueStatus
from prefect.exceptions import ObjectNotFound

from prefect_torch_elastic.dispatch.gangsizes import SIZES, check_fixed_size, size_gang
from prefect_torch_elastic.dispatch.order import CallKind
from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.spec import FIELD_NAMES, Spec

COMMAND_VARIABLE = "command"
PROCESS_TYPE = "process"
ELASTIC_TYPE = "torch-elastic"  # of our own worker, which makes a JobSet of each run
TYPES_WITH_SEVERAL_NODES = (PROCESS_TYPE, ELASTIC_TYPE)

# The worker's own interpreter, as in Prefect's default command: `python` is another one, or none, when the
# worker was started from an environment that is not activated (`/opt/venv/bin/prefect worker start`, as
# systemd does). The worker is the parent of the shell, and `exec` keeps the process that it watches.
_WORKERS_PYTHON = (
    "p=$(tr '\\0' '\\n' </proc/$PPID/cmdline 2>/dev/null | head -n 1); "
    "case ${p##*/} in python*) ;; *) p=python ;; esac; "
    "case $p in /*) ;; */*) p=$(readlink /proc/$PPID/cwd)/$p ;; esac; "
    'exec "$p" "$@"'
)

_PLACEHOLDER = re.compile(r"\{\{\s*([\w.-]+)\s*\}\}", re.ASCII)

# Job variables by field, the first that the pool has. The fields without one are the business of a cluster.
_VARIABLES_OF_FIELD: Mapping[str, tuple[str, ...]] = {
    "env": ("env",),
    "labels": ("labels",),
    "image": ("image",),
    "namespace": ("namespace",),
    "service_account": ("service_account", "service_account_name"),
    "ttl_seconds_after_finished": ("finished_job_ttl",),
    **dict.fromkeys(("cpu", "memory", "gpu", "shm_size", "secret_env", "volumes", "node_selector"), ()),
    **dict.fromkeys(
        ("tolerations", "annotations", "pod_template", "queue", "queue_priority", "topology"), ()
    ),
    **dict.fromkeys(("inadmissible_grace_seconds", "active_deadline_seconds", "resume_after_preemption"), ()),
}
# The same names mean other units in other types of pools, so these are for this type only.
_KUBERNETES_VARIABLES_OF_FIELD: Mapping[str, tuple[str, ...]] = {
    "cpu": ("cpu_request", "cpu_limit"),
    "memory": ("memory_request", "memory_limit"),
}


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A work pool as the API knows it now.

    Attributes:
        name: Its name.
        type: The type of its workers, such as `process` or `kubernetes`.
        is_paused: Whether its workers get no runs.
        workers: Workers that the API has ever heard of.
        workers_online: Those that were heard of lately.
        has_command: Whether a job variable can say what a worker starts.
        variables: Names of the job variables that its template knows.
        limit: How many runs it starts at once; None is no limit.
        active: How many of them are taken, None without a limit.
        queue: Its default queue, which child runs wait in.
        queue_is_paused: Whether nothing leaves that queue.
        queue_is_polled: Whether a worker asked that queue lately. One started for another queue never does.
    """

    name: str
    type: str
    is_paused: bool = False
    workers: int = 0
    workers_online: int = 0
    has_command: bool = True
    variables: frozenset[str] = frozenset()
    limit: int | None = None
    active: int | None = None
    queue: str = "default"
    queue_is_paused: bool = False
    queue_is_polled: bool = True

    @property
    def has_workers(self) -> bool:
        """Whether runs are taken by workers that somebody starts; Prefect itself serves the other types."""
        return not self.type.endswith((":push", ":managed"))

    @property
    def starts_gangs_again(self) -> bool:
        """Whether a run whose machines are gone may go on by itself: the cluster starts others for it."""
        return self.type == ELASTIC_TYPE


@dataclass(frozen=True, kw_only=True)
class JobVariables:
    """What a child run tells the worker.

    Attributes:
        values: The job variables.
        ignored: What was set and means nothing to the pool, as the user wrote it; for one warning.
    """

    values: dict[str, Any]
    ignored: tuple[str, ...]


def fetch_pool(client: SyncPrefectClient, name: str, *, spec: Spec | None = None) -> Pool:
    """Return the pool of that name.

    Args:
        client: Of the Prefect API.
        name: Of the pool.
        spec: What is to run in it, which decides the type of a pool that is missing.

    Raises:
        SpecError: If there is none; it names those that exist and the command that makes one.
    """
    try:
        pool = client.read_work_pool(name)
        queue = client.read_work_queue(pool.default_queue_id)
        workers = client.read_workers_for_work_pool(name)
    except ObjectNotFound as error:
        raise _missing_pool(client, name, spec or Spec()) from error
    variables = frozenset(_list_variables(pool))
    return Pool(
        name=pool.name,
        type=pool.type,
        is_paused=pool.is_paused,
        workers=len(workers),
        workers_online=sum(worker.status is WorkerStatus.ONLINE for worker in workers),
        has_command=COMMAND_VARIABLE in _list_placeholders(pool),
        variables=variables,
        limit=pool.concurrency_limit,
        active=pool.active_slots,
        queue=queue.name,
        queue_is_paused=queue.is_paused,
        queue_is_polled=queue.status is not WorkQueueStatus.NOT_READY,
    )


def _missing_pool(client: SyncPrefectClient, name: str, spec: Spec) -> SpecError:
    pools = sorted(client.read_work_pools(), key=lambda pool: pool.name)
    known = ", ".join(f"`{pool.name}` ({pool.type})" for pool in pools)
    there_is = f"There are {known}." if pools else "There is none at all."
    type = ELASTIC_TYPE if spec.max_nodes > 1 or spec.queue or spec.image else PROCESS_TYPE
    return SpecError(
        f"`work_pool={name!r}`: there is no such work pool. {there_is} "
        f"Correct the name, or make the pool: `prefect work-pool create {shlex.quote(name)} --type {type}`."
    )


def _list_placeholders(pool: WorkPool) -> set[str]:
    return set(_PLACEHOLDER.findall(json.dumps(pool.base_job_template.get("job_configuration", {}))))


def _list_variables(pool: WorkPool) -> Iterator[str]:
    yield from pool.base_job_template.get("variables", {}).get("properties", {})
    yield from _list_placeholders(pool)


def check_pool(pool: Pool, *, kind: CallKind, nnodes: int | str, max_nodes: int) -> None:
    """Refuse what the pool cannot run, before anything is stored or queued.

    Raises:
        SpecError: If its jobs have no command of their own, or a gang of several nodes is asked of a pool
            that starts one machine for each run, or a range of nodes of one whose gangs have a fixed size.
    """
    if not pool.has_command:
        raise SpecError(
            f"`work_pool={pool.name!r}`: a run cannot say what this pool of type `{pool.type}` starts, "
            f"because its job template has no `{{{{ {COMMAND_VARIABLE} }}}}`. Add it, as in the answer of "
            f"`prefect work-pool get-default-base-job-template --type {PROCESS_TYPE}`, or use another pool."
        )
    if kind is CallKind.GANG and max_nodes > 1 and pool.type not in TYPES_WITH_SEVERAL_NODES:
        able = " or ".join(f"`{name}`" for name in TYPES_WITH_SEVERAL_NODES)
        raise SpecError(
            f"`nnodes={nnodes!r}`: work pool `{pool.name}` of type `{pool.type}` starts one machine for each "
            f"run. Use a pool of type {able}, or `nnodes=1`."
        )
    if kind is CallKind.GANG and pool.type == ELASTIC_TYPE:
        check_fixed_size(nnodes, pool=pool.name)


def build_job_variables(pool: Pool, *, command: Sequence[str], spec: Spec, kind: CallKind) -> JobVariables:
    """Return the job variables of a child run: the command, what the spec says, `job_variables` on top.

    `env` and `labels` of both are joined; a worker joins the result with those of the pool and its own.

    Raises:
        SpecError: If `job_variables` has what is ours, such as a `command`.
    """
    own = spec.job_variables
    check_own_variables(own, type=pool.type)
    values: dict[str, Any] = {COMMAND_VARIABLE: shlex.join(_localize(pool, command))}
    if pool.type == ELASTIC_TYPE:
        values |= size_gang(spec, kind)
    ignored = [name for name in _list_set_fields(spec) if not _add_field(values, pool, name, spec)]
    if spec.gpu == 0:  # it means something everywhere
        ignored = [name for name in ignored if name != "gpu"]
    ignored += [f'job_variables["{name}"]' for name in own if name.partition(".")[0] not in pool.variables]
    for name, value in own.items():
        values[name] = _join(values.get(name), value)
    return JobVariables(values=values, ignored=tuple(ignored))


def check_own_variables(own: Mapping[str, Any], *, type: str) -> None:
    """Refuse a user's job variables that are ours.

    Args:
        own: `job_variables` of the task.
        type: Of the work pool.

    Raises:
        SpecError: If one is a `command`, or what the order of a gang says too.
    """
    names = {name.partition(".")[0] for name in own}
    if COMMAND_VARIABLE in names:
        raise SpecError(
            f"`job_variables` has a `{COMMAND_VARIABLE}`, and what a worker starts for this task is decided "
            "here. Take it out; what has to run before belongs into the image or the worker's environment."
        )
    if type == ELASTIC_TYPE and (twice := [name for name in SIZES if name in names]):
        raise SpecError(
            f"`job_variables` has `{twice[0]}`, which the program in the pods has to know too. Take it out, "
            f"and set the field of the task: `{twice[0]}={own.get(twice[0])!r}`."
        )


def _localize(pool: Pool, command: Sequence[str]) -> list[str]:
    if pool.type == PROCESS_TYPE and command[0] == "python":
        return ["sh", "-c", _WORKERS_PYTHON, "sh", *command[1:]]
    return list(command)  # an image has one Python, and may have no shell


def _list_set_fields(spec: Spec) -> list[str]:
    """Return the fields about machines that somebody set."""
    unset = Spec()
    return [
        name
        for name in FIELD_NAMES
        if name in _VARIABLES_OF_FIELD and getattr(spec, name) != getattr(unset, name)
    ]


def _add_field(values: dict[str, Any], pool: Pool, field: str, spec: Spec) -> bool:
    """Set the job variables that a field means in this pool; False if there is none."""
    names: Sequence[str]
    if pool.type == ELASTIC_TYPE:  # its form has our own names
        names = [field]
    elif pool.type == "kubernetes" and field in _KUBERNETES_VARIABLES_OF_FIELD:
        names = [name for name in _KUBERNETES_VARIABLES_OF_FIELD[field] if name in pool.variables]
    else:
        names = [name for name in _VARIABLES_OF_FIELD[field] if name in pool.variables][:1]
    for name in names:
        values[name] = getattr(spec, field)
    return bool(names)


def _join(ours: object, own: object) -> object:
    if isinstance(ours, dict) and isinstance(own, dict):
        return {**cast("dict[str, Any]", ours), **cast("dict[str, Any]", own)}
    return own


def explain_wait(pool: Pool) -> str:
    """Return why no worker will take a run of this pool now, and the cure; empty if one should."""
    name, quoted = pool.name, shlex.quote(pool.name)
    if pool.is_paused:
        return f"Work pool `{name}` is paused. Resume it: `prefect work-pool resume {quoted}`."
    if pool.has_workers and not pool.workers_online:
        known = f"None of the {pool.workers} known workers" if pool.workers else "No worker"
        start = f"prefect worker start --pool {quoted}"
        return f"{known} of work pool `{name}` is online. Start one: `{start}`."
    if pool.queue_is_paused:
        resume = f"prefect work-queue resume {shlex.quote(pool.queue)} --pool {quoted}"
        return f"Queue `{pool.queue}` of work pool `{name}` is paused. Resume it: `{resume}`."
    if pool.limit is not None and (pool.active or 0) >= pool.limit:
        return (
            f"Work pool `{name}` runs {pool.active or 0} of at most {pool.limit} at once. Wait for one to "
            f"end, or allow more: `prefect work-pool set-concurrency-limit {quoted} {pool.limit + 1}`."
        )
    if pool.has_workers and not pool.queue_is_polled:
        return (
            f"Work pool `{name}` has a worker online, but none has asked its queue `{pool.queue}` yet. One "
            f"that was started with `--work-queue` for another queue never does; start one without."
        )
    return ""
