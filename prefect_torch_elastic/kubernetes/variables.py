"""The form of a work pool of type `torch-elastic`, and how what it says becomes the request for a gang."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from prefect.workers.base import BaseJobConfiguration, BaseVariables
from pydantic import Field, WithJsonSchema

from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.kubernetes.accelerators import parse_accelerators
from prefect_torch_elastic.kubernetes.credentials import split_credentials
from prefect_torch_elastic.kubernetes.naming import (
    check_label_value,
    check_variables,
    name_jobset,
    name_secret,
)
from prefect_torch_elastic.kubernetes.request import GangRequest
from prefect_torch_elastic.spec import check_field, parse_nnodes
from prefect_torch_elastic.spec_values import parse_memory

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.client.schemas.objects import Flow, FlowRun, WorkPool
    from prefect.client.schemas.responses import DeploymentResponse

INADMISSIBLE_GRACE_SECONDS = 600.0  # quota may be raised, a queue may be created

# Settings that are about the worker's own machine, or that only a server needs (its database's password).
_PREFIXES_OF_OTHERS = ("PREFECT_SERVER_", "PREFECT_WORKER_", "PREFECT_RUNNER_")
_PATHS_OF_THE_WORKER = frozenset(
    {"PREFECT_HOME", "PREFECT_PROFILES_PATH", "PREFECT_LOCAL_STORAGE_PATH", "PREFECT_MEMO_STORE_PATH"}
    | {"PREFECT_RESULTS_LOCAL_STORAGE_PATH", "PREFECT_LOGGING_CONFIG_PATH"}
    | {"PREFECT_LOGGING_SETTINGS_PATH", "PREFECT_API_SSL_CERT_FILE"}
)

# The form shows a line of text; a reference to a block in it arrives here as the block's fields.
_TEXT_IN_THE_FORM = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]})

# Fields of the form that are fields of `Spec` too, and are checked as those are.
_FIELDS = (
    *("nnodes", "image", "cpu", "memory", "gpu", "shm_size", "namespace", "queue", "queue_priority"),
    *("topology", "service_account", "secret_env", "volumes", "node_selector", "tolerations", "labels"),
    *("annotations", "pod_template", "max_attempts", "grace_seconds", "active_deadline_seconds"),
    *("ttl_seconds_after_finished", "inadmissible_grace_seconds", "resume_after_preemption"),
)


class TorchElasticVariables(BaseVariables):
    """What a work pool sets for all its gangs, and what each of them may set otherwise."""

    nnodes: int = Field(default=1, ge=1, title="Nodes", description="Pods of the gang.")
    image: str | None = Field(
        default=None,
        title="Image",
        description="Container image of the nodes, with Python, torch and `prefect-torch-elastic[torch]`.",
    )
    cpu: str | None = Field(default=None, title="CPUs per node", description="Such as 4 or 500m.")
    memory: str | None = Field(
        default=None, title="Memory per node", description="With its unit, such as 64Gi."
    )
    gpu: int | str | None = Field(
        default=None,
        title="GPUs per node",
        description="A number, or NAME:NUMBER such as H200:8 with a name from the accelerators below.",
    )
    shm_size: str | None = Field(
        default=None,
        title="Shared memory per node",
        description="Size of /dev/shm, such as 16Gi; 0 leaves the container's own. It counts as memory.",
    )
    ephemeral_storage: str | None = Field(
        default=None, title="Local disk per node", description="With its unit, such as 100Gi."
    )
    namespace: str = Field(
        default="default", title="Namespace", description="Kubernetes namespace of the gangs."
    )
    queue: str | None = Field(
        default=None,
        title="Queue",
        description="Kueue LocalQueue that admits the gangs. Without one they start at once.",
    )
    queue_priority: str | None = Field(
        default=None, title="Queue priority", description="Kueue WorkloadPriorityClass of the gangs."
    )
    topology: str | None = Field(
        default=None,
        title="Topology",
        description="Node label of the domain to share; preferred:LABEL; or unconstrained.",
    )
    service_account: str | None = Field(
        default=None,
        title="Service account",
        description="Kubernetes service account of the pods. They get no token of it.",
    )
    secret_env: dict[str, str] = Field(
        default_factory=dict,
        title="Secret environment",
        description="From Kubernetes Secrets, as VARIABLE: secret-name/key.",
    )
    volumes: list[dict[str, Any]] = Field(
        default_factory=list[dict[str, Any]],
        title="Volumes",
        description="Kubernetes volumes, each with its mountPath.",
    )
    node_selector: dict[str, str] = Field(
        default_factory=dict, title="Node selector", description="Labels that a Kubernetes node must have."
    )
    tolerations: list[dict[str, Any]] = Field(
        default_factory=list[dict[str, Any]],
        title="Tolerations",
        description="Kubernetes tolerations of the pods.",
    )
    annotations: dict[str, str] = Field(
        default_factory=dict, title="Annotations", description="Annotations of the gang and its pods."
    )
    pod_template: dict[str, Any] = Field(
        default_factory=dict,
        title="Pod template",
        description="Laid over our pod template; it cannot change what the gang depends on.",
    )
    max_attempts: int = Field(
        default=3,
        ge=1,
        title="Attempts",
        description="How often the pods of a gang are started. Preemptions and drains do not count.",
    )
    resume_after_preemption: bool = Field(
        default=True,
        title="Resume after preemption",
        description="Whether a preempted gang goes on when it has its quota again; else its run fails.",
    )
    grace_seconds: float = Field(
        default=60,
        ge=0,
        title="Grace (s)",
        description="Time that a node has to save and to end after it was told to stop.",
    )
    active_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        title="Active deadline (s)",
        description="Longest life of the pods, kept by Kubernetes.",
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None,
        ge=0,
        title="Keep finished (s)",
        description="How long Kubernetes keeps a finished gang. Unset deletes it at once.",
    )
    inadmissible_grace_seconds: float | None = Field(
        default=INADMISSIBLE_GRACE_SECONDS,
        ge=0,
        title="Inadmissible grace (s)",
        description="How long a gang waits that its queue can never admit, before its run fails.",
    )
    accelerators: dict[str, Any] = Field(
        default_factory=dict,
        title="Accelerators",
        description="What a name in `gpu` means: its resource, node_selector and tolerations.",
    )
    cluster_config: Annotated[Any, _TEXT_IN_THE_FORM] = Field(
        default=None,
        title="Cluster",
        description=(
            "A kubeconfig's path on the worker's machine, or a block of prefect-kubernetes as "
            "`{{ prefect.blocks.kubernetes-cluster-config.NAME }}`. Unset is the cluster that the worker "
            "runs in, or its default kubeconfig."
        ),
    )


class TorchElasticJobConfiguration(BaseJobConfiguration):
    """What one run gets: the pool's form with the run's own values in it.

    Values are checked by `request_gang`, whose errors are the same sentences that the decorator would raise.
    """

    nnodes: int | str = 1
    image: str | None = None
    cpu: str | None = None
    memory: str | None = None
    gpu: int | str | None = None
    shm_size: str | None = None
    ephemeral_storage: str | None = None
    namespace: str = "default"
    queue: str | None = None
    queue_priority: str | None = None
    topology: str | None = None
    service_account: str | None = None
    secret_env: dict[str, str] = Field(default_factory=dict)
    volumes: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    annotations: dict[str, str] = Field(default_factory=dict)
    pod_template: dict[str, Any] = Field(default_factory=dict)
    max_attempts: int = 3
    resume_after_preemption: bool = True
    grace_seconds: float = 60
    active_deadline_seconds: int | None = None
    ttl_seconds_after_finished: int | None = None
    inadmissible_grace_seconds: float | None = INADMISSIBLE_GRACE_SECONDS
    accelerators: dict[str, Any] = Field(default_factory=dict)
    cluster_config: Any = None

    def prepare_for_flow_run(
        self,
        flow_run: FlowRun,
        deployment: DeploymentResponse | None = None,
        flow: Flow | None = None,
        work_pool: WorkPool | None = None,
        worker_name: str | None = None,
        worker_id: UUID | None = None,
    ) -> None:
        """Fill in what Prefect gives each run; its labels stay out, most of them are none in Kubernetes."""
        labels = self.labels
        super().prepare_for_flow_run(flow_run, deployment, flow, work_pool, worker_name, worker_id)
        self.labels = labels

    @classmethod
    def _base_environment(cls) -> dict[str, str]:
        """Return the worker's settings that mean something in a pod."""
        return {
            name: value
            for name, value in super()._base_environment().items()
            if name not in _PATHS_OF_THE_WORKER and not name.startswith(_PREFIXES_OF_OTHERS)
        }


def fill_form(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> TorchElasticJobConfiguration:
    """Return what a run gets in a pool with these defaults, as Prefect would fill it in, without asking it.

    Args:
        defaults: Of the pool's form. A run's value replaces them; `env` is joined.
        values: Job variables of the run; `env.NAME` is one of `env`. What is not in the form has no effect.
    """
    given: dict[str, Any] = {}
    for name in sorted(values, key=lambda name: "." not in name):  # a whole `env` wins over its parts
        field, _, rest = name.partition(".")
        value = {rest: values[name]} if rest else values[name]
        given[field] = {**given.get(field, {}), **value} if isinstance(value, dict) else value
    env = {**defaults.get("env", {}), **given.get("env", {})}
    return TorchElasticJobConfiguration.model_validate({**defaults, **given, "env": env})


def request_gang(
    configuration: TorchElasticJobConfiguration,
    *,
    flow_run_id: str,
    flow_run_name: str,
    pool_id: str,
    worker_name: str,
) -> GangRequest:
    """Return the gang that a run asks for, without the values of its credentials.

    Raises:
        SpecError: If a value is not accepted, or if image or command are missing.
    """
    values = _check_fields(configuration)
    name = name_jobset(configuration.name or flow_run_name, flow_run_id=flow_run_id, nnodes=values["nnodes"])
    plain, credentials = split_credentials(configuration.env)
    check_variables("env", [*plain, *credentials])
    return GangRequest(
        **values,
        name=name,
        command=tuple(shlex.split(configuration.command or "")),
        env=plain,
        credentials_secret=name_secret(name) if credentials else None,
        credential_names=tuple(sorted(credentials)),
        accelerators=parse_accelerators(configuration.accelerators),
        pool_id=pool_id,
        flow_run_id=flow_run_id,
        flow_run_name=flow_run_name,
        worker_name=worker_name,
    )


def _check_fields(configuration: TorchElasticJobConfiguration) -> dict[str, Any]:
    """Return the fields of the request that are fields of the configuration too, each checked."""
    values: dict[str, Any] = {name: check_field(name, getattr(configuration, name)) for name in _FIELDS}
    for name in ("inadmissible_grace_seconds", "resume_after_preemption"):  # the worker's business
        del values[name]
    smallest, largest = parse_nnodes(values["nnodes"])
    if smallest != largest:
        raise SpecError(
            f"`nnodes='{smallest}:{largest}'`: gangs that shrink and grow on Kubernetes are to come; they "
            f"run on one machine and in process pools. Pass `nnodes={largest}`, or `nnodes={smallest}`."
        )
    if not values["image"]:
        raise SpecError(
            '`image` is not set, and pods need one. Set it in the task (`image="registry/train:1"`) or in '
            "the form of the work pool."
        )
    if not configuration.command:
        raise SpecError("`command` is empty: a gang has nothing to run. Set it in the job variables.")
    if configuration.ephemeral_storage is not None:
        values["ephemeral_storage"] = parse_memory("ephemeral_storage", configuration.ephemeral_storage)
    check_variables("secret_env", values["secret_env"])
    for field in ("labels", "node_selector"):
        for key, value in values[field].items():
            check_label_value(f"{field}[{key!r}]", value)
    return values | {"nnodes": largest} | {one: tuple(values[one]) for one in ("volumes", "tolerations")}
