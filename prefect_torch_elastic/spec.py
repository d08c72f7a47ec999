"""What the user asks for: one gang, its budgets, its machine, its storage; validated before anything starts.

Pure. `build_spec` is the one way from named values to a `Spec`; single values are checked in `spec_fields`,
values that contradict each other are found here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.ranks import ALLOW_SHARED_GPUS_VARIABLE
from prefect_torch_elastic.spec_checks import refusal
from prefect_torch_elastic.spec_fields import (
    FIELD_NAMES,
    CheckpointPolicy,
    SpecOptions,
    check_field,
    check_name,
)
from prefect_torch_elastic.spec_values import parse_gpu, parse_nnodes, parse_nproc_per_node, parse_topology

__all__ = [
    "CLUSTER_RDZV_TIMEOUT_SECONDS",
    "FIELD_NAMES",
    "CheckpointPolicy",
    "Spec",
    "SpecOptions",
    "build_spec",
    "check_field",
    "check_name",
    "fields_without_meaning_here",
    "merge_fields",
    "parse_gpu",
    "parse_nnodes",
    "parse_nproc_per_node",
    "parse_topology",
    "render_budgets",
    "render_worst_case_wait",
    "restore_spec",
    "worst_case_wait_seconds",
]

# Nodes of a cluster come up minutes apart: an image to pull, a machine that the autoscaler has to buy.
CLUSTER_RDZV_TIMEOUT_SECONDS = 900

# torch's own values, used where a field is not set.
# Source: ProcessGroupNCCL.hpp and ProcessGroupNCCL.cpp of torch 2.13
_NCCL_COLLECTIVE_TIMEOUT_SECONDS = 600
_NCCL_HEARTBEAT_TIMEOUT_SECONDS = 480
_NCCL_DUMP_SECONDS = 15

_FIELDS_OF_A_POOL = frozenset(
    {"inadmissible_grace_seconds", "active_deadline_seconds", "ttl_seconds_after_finished"}
    | {"resume_after_preemption"}
    | {"namespace", "queue", "queue_priority", "topology"}
    | {"image", "cpu", "memory", "gpu", "shm_size", "secret_env", "volumes", "node_selector", "tolerations"}
    | {"service_account", "labels", "annotations", "pod_template", "job_variables", "include_files"}
)


# Checked already, so that blocks can be saved with them; nothing reads them yet.
_FIELDS_TO_COME = frozenset({"rdzv_backend"})


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One gang as the user asked for it. Made by `build_spec`, which checks every value.

    The fields, their order and their defaults are those of the block `TorchElastic`, where each is described.
    """

    # gang
    nnodes: int | str = 1
    nproc_per_node: int | str = "auto"
    rdzv_backend: str | None = None
    rdzv_timeout_seconds: float = 600
    rdzv_configs: dict[str, str | int | float | bool] = field(
        default_factory=dict[str, "str | int | float | bool"]
    )
    monitor_interval_seconds: float = 0.1
    start_method: Literal["warm", "spawn"] = "warm"
    preload: list[str] = field(default_factory=list[str])
    # budgets
    max_restarts: int = 1
    max_attempts: int = 3
    resume_after_preemption: bool = True
    non_retryable: list[str] = field(default_factory=list[str])
    # time
    grace_seconds: float = 60
    run_timeout_seconds: float | None = None
    progress_timeout_seconds: float | None = None
    inadmissible_grace_seconds: float | None = None
    active_deadline_seconds: int | None = None
    ttl_seconds_after_finished: int | None = None
    # where
    work_pool: str | None = None
    namespace: str | None = None
    queue: str | None = None
    queue_priority: str | None = None
    topology: str | None = None
    # machine
    image: str | None = None
    cpu: str | None = None
    memory: str | None = None
    gpu: int | str | None = None
    shm_size: str | None = None
    env: dict[str, str] = field(default_factory=dict[str, str])
    secret_env: dict[str, str] = field(default_factory=dict[str, str])
    volumes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    node_selector: dict[str, str] = field(default_factory=dict[str, str])
    tolerations: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    service_account: str | None = None
    labels: dict[str, str] = field(default_factory=dict[str, str])
    annotations: dict[str, str] = field(default_factory=dict[str, str])
    pod_template: dict[str, Any] = field(default_factory=dict[str, Any])
    # NCCL
    nccl_collective_timeout_seconds: float | None = None
    nccl_heartbeat_timeout_seconds: float | None = None
    nccl_async_error_handling: bool | None = None
    nccl_enable_monitoring: bool | None = None
    # storage
    store: str | None = None
    store_credentials: str | None = None
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    # reporting
    log_level_all_ranks: str = "WARNING"
    log_level_leader: str = "INFO"
    price_per_node_hour: float | None = None
    # what a work pool gets besides
    job_variables: dict[str, Any] = field(default_factory=dict[str, Any])
    include_files: list[str] = field(default_factory=list[str])

    @property
    def min_nodes(self) -> int:
        """The number of nodes that the gang needs to start."""
        return parse_nnodes(self.nnodes)[0]

    @property
    def max_nodes(self) -> int:
        """The number of nodes that the gang can use."""
        return parse_nnodes(self.nnodes)[1]


def restore_spec(fields: Mapping[str, Any]) -> Spec:
    """Return the spec whose fields travelled as JSON; they were checked before."""
    values = {**fields, "checkpoint": CheckpointPolicy(**fields["checkpoint"])}
    return Spec(**cast("dict[str, Any]", values))


def merge_fields(*layers: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of all layers in one; a later layer wins, field by field and as a whole value.

    Pass them from the weakest to the strongest: pool, block, decorator, call. A layer holds what was set.
    """
    return {name: value for layer in layers for name, value in layer.items()}


def build_spec(fields: Mapping[str, object]) -> Spec:
    """Return the spec that the named values make; a field that is not named has its default.

    Raises:
        SpecError: If a name is unknown, a value is not accepted, or two values contradict each other.
    """
    checked = {name: check_field(name, value) for name, value in fields.items()}
    if checked.get("work_pool"):
        checked.setdefault("rdzv_timeout_seconds", CLUSTER_RDZV_TIMEOUT_SECONDS)
    spec = Spec(**cast("dict[str, Any]", checked))
    _check_together(spec)
    return spec


def _check_together(spec: Spec) -> None:
    """Raise a `SpecError` if values that are fine alone cannot be meant together."""
    if spec.rdzv_backend == "static" and spec.min_nodes < spec.max_nodes:
        why = (
            f"`nnodes={spec.nnodes!r}` is a range, and a static rendezvous needs to know the number of nodes"
        )
        cure = '`rdzv_backend="c10d"`, or one number for `nnodes`'
        raise refusal("rdzv_backend", spec.rdzv_backend, cure, why=why)
    if spec.work_pool and spec.store and "://" not in spec.store:
        why = f"the machines of `work_pool={spec.work_pool!r}` cannot see a directory of this one"
        cure = (
            "`s3://`, `gs://` or `az://`, or `file://` and the path where every machine mounts the same disk"
        )
        raise refusal("store", spec.store, cure, why=why)
    if twice := sorted(spec.env.keys() & spec.secret_env.keys()):
        raise SpecError(
            f"`{twice[0]}` is set in `env` and in `secret_env`. Remove it from one of them; "
            f"a secret belongs in `secret_env`."
        )
    _check_processes_fit(spec)


def _check_processes_fit(spec: Spec) -> None:
    """Say before the queue what the node would say after it."""
    if spec.gpu is None or ALLOW_SHARED_GPUS_VARIABLE in spec.env:
        return
    gpus = parse_gpu(spec.gpu)[1]
    if gpus == 0 and spec.nproc_per_node == "gpu":
        cure = '"cpu" or a number, or ask for GPUs with `gpu=8`'
        raise refusal("nproc_per_node", "gpu", cure, why="`gpu=0` asks for a node without GPUs")
    if gpus and isinstance(spec.nproc_per_node, int) and spec.nproc_per_node > gpus:
        why = f"`gpu={spec.gpu!r}` asks for {gpus} on each node"
        cure = f'{gpus} or "gpu", or set `{ALLOW_SHARED_GPUS_VARIABLE}` to `1` in `env` to share them'
        raise refusal("nproc_per_node", spec.nproc_per_node, cure, why=why)


def fields_without_meaning_here(
    set_fields: Mapping[str, object], *, work_pool: str | None
) -> tuple[str, ...]:
    """Return the fields that were set and mean nothing where the gang runs, in the order of the spec.

    Args:
        set_fields: Fields that somebody set; None is not set, and `gpu=0` means something everywhere.
        work_pool: The pool that the gang runs in; None is this machine, which has no queue and no pods.
    """
    if work_pool is not None:
        return ()
    named = {name for name, value in set_fields.items() if value is not None and (name, value) != ("gpu", 0)}
    names = named & (_FIELDS_OF_A_POOL | _FIELDS_TO_COME)
    return tuple(name for name in FIELD_NAMES if name in names)


def worst_case_wait_seconds(spec: Spec) -> float:
    """Return how long ranks can wait in NCCL for a peer that is gone, over all restarts of one attempt.

    One wait is the timeout of the collective, the dump of the flight recorder, and, while monitoring is on,
    the heartbeat for a watchdog that is stuck itself. Infinite if error handling is off: nothing ends it.
    """
    if spec.nccl_async_error_handling is False:
        total = float("inf")
    else:
        total = sum(seconds for _, seconds in _waits(spec)) * (spec.max_restarts + 1)
    return total if spec.run_timeout_seconds is None else min(total, spec.run_timeout_seconds)


def render_worst_case_wait(spec: Spec) -> str:
    """Return one sentence that says the worst wait and what it is made of."""
    total = worst_case_wait_seconds(spec)
    if total == float("inf"):
        return (
            "Ranks that wait in NCCL for a lost peer wait for ever: `nccl_async_error_handling` is off. "
            "Set `run_timeout_seconds`, or turn it on."
        )
    parts = " + ".join(f"{seconds:g} s {name}" for name, seconds in _waits(spec))
    starts = spec.max_restarts + 1
    limit = ", cut by `run_timeout_seconds`" if total == spec.run_timeout_seconds else ""
    return (
        f"Ranks that wait in NCCL for a lost peer wait at most {total:g} s: "
        f"({parts}) x {_count(starts, 'start')}{limit}."
    )


def _waits(spec: Spec) -> list[tuple[str, float]]:
    collective = spec.nccl_collective_timeout_seconds or _NCCL_COLLECTIVE_TIMEOUT_SECONDS
    heartbeat = spec.nccl_heartbeat_timeout_seconds or _NCCL_HEARTBEAT_TIMEOUT_SECONDS
    waits = [("collective timeout", collective), ("dump", _NCCL_DUMP_SECONDS)]
    return waits if spec.nccl_enable_monitoring is False else [*waits, ("heartbeat", heartbeat)]


def render_budgets(spec: Spec, *, retries: int) -> str:
    """Return one sentence that says how often the function may start, all budgets multiplied.

    Args:
        spec: The gang, with its restarts and attempts.
        retries: Retries of the Prefect task.
    """
    starts = (spec.max_restarts + 1) * spec.max_attempts * (retries + 1)
    return (
        f"The function starts at most {_count(starts, 'time')}: "
        f"(1 + {_count(spec.max_restarts, 'restart')}) x {_count(spec.max_attempts, 'attempt')} "
        f"x (1 + {_count(retries, 'retry')}); a preemption or a lost node spends none."
    )


def _count(number: int, noun: str) -> str:
    plural = noun.removesuffix("y") + "ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
