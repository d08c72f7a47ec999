"""The block `TorchElastic`: a gang as people save it, load it and edit it in Prefect's UI.

It knows what Prefect and its forms need. Each value is checked by `spec.check_field`, so a wrong one reads
here as it does under the decorator.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, cast

from prefect.blocks.core import Block
from pydantic import (
    ConfigDict,
    Field,
    HttpUrl,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from prefect_torch_elastic.spec import (
    FIELD_NAMES,
    CheckpointPolicy,
    Spec,
    build_spec,
    check_field,
    check_name,
)

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]

# A field of type `Block` cannot be registered with Prefect's API; the form shows a line of text instead.
_TEXT_IN_THE_FORM = WithJsonSchema({"type": "string"})

# What Prefect adds to the values of a block when it saves or sends one.
_FIELDS_OF_PREFECT = ("block_type_slug", "_block_document_id", "_block_document_name", "_is_anonymous")


class TorchElastic(Block):
    """How a gang of TorchElastic ranks runs: its size, budgets, machine, storage and reporting.

    Only fields that were set count: one that was not leaves the value of the work pool. Fields are only ever
    added at the end, because their order is part of the block's schema.

    Example:
        Load a saved gang and run a task with it:
        ```python
        from prefect_torch_elastic import TorchElastic, elastic_task

        @elastic_task(TorchElastic.load("BLOCK_NAME"))
        def train(steps: int) -> float: ...
        ```
    """

    # The message has the value already; pydantic would repeat all of `env`.
    model_config: ClassVar[ConfigDict] = ConfigDict(hide_input_in_errors=True)

    _block_type_name: ClassVar[str | None] = "Torch Elastic"
    _block_type_slug: ClassVar[str | None] = "torch-elastic"
    _description: ClassVar[str | None] = (
        "Run a task as a gang of TorchElastic ranks: on this machine, in a process pool, or on Kubernetes."
    )
    _documentation_url: ClassVar[HttpUrl | None] = HttpUrl(
        "https://github.com/prefect-torch-elastic/prefect-torch-elastic"
    )
    _logo_url: ClassVar[HttpUrl | None] = HttpUrl("https://avatars.githubusercontent.com/u/21003710")

    # gang
    nnodes: int | str = Field(
        default=1, title="Nodes", description="Nodes of the gang, or a range MIN:MAX to shrink and grow in."
    )
    nproc_per_node: int | Literal["auto", "gpu", "cpu"] = Field(
        default="auto",
        title="Processes per node",
        description="Ranks on each node. The node itself counts its GPUs, or its CPUs.",
    )
    rdzv_backend: Literal["static", "c10d"] | None = Field(
        default=None,
        title="Rendezvous backend",
        description="How nodes meet. Unset is static where that can work, else c10d.",
    )
    rdzv_timeout_seconds: float = Field(
        default=600,
        title="Rendezvous timeout (s)",
        description="Longest wait for other nodes. Unset is 900 in a work pool.",
    )
    rdzv_configs: dict[str, Any] = Field(
        default={},
        title="Rendezvous settings",
        description="More settings of torch's rendezvous, passed through.",
    )
    monitor_interval_seconds: float = Field(
        default=0.1,
        title="Monitor interval (s)",
        description="How often the agent looks at its ranks; a death it sees at once.",
    )
    start_method: Literal["warm", "spawn"] = Field(
        default="warm",
        title="Start method",
        description="Whether ranks start from a process that has imported torch, or anew.",
    )
    preload: list[str] = Field(
        default=[],
        title="Modules to preload",
        description="Modules to import once, besides those that the call itself names.",
    )
    # budgets
    max_restarts: int = Field(
        default=1, title="Restarts", description="How often ranks start again, in each attempt."
    )
    max_attempts: int = Field(
        default=3, title="Attempts", description="How many gangs may be created for one run of the task."
    )
    resume_after_preemption: bool = Field(
        default=True,
        title="Resume after preemption",
        description="Go on when the quota is back, which spends no budget. False ends the run.",
    )
    non_retryable: list[str] = Field(
        default=[],
        title="Errors that are final",
        description="Dotted names of exceptions that end all budgets at once.",
    )
    # time
    grace_seconds: float = Field(
        default=60, title="Grace (s)", description="Time between the request to stop and the kill."
    )
    run_timeout_seconds: float | None = Field(
        default=None,
        title="Run timeout (s)",
        description="Longest running time; waiting in a queue does not count.",
    )
    progress_timeout_seconds: float | None = Field(
        default=None,
        title="Progress timeout (s)",
        description="A gang without a step for so long is ended; unset: 10 minutes, or 5 x its longest gap.",
    )
    inadmissible_grace_seconds: float | None = Field(
        default=None, title="Inadmissible grace (s)", description="How long a gang that cannot fit waits."
    )
    active_deadline_seconds: int | None = Field(
        default=None, title="Active deadline (s)", description="Longest life of the pods, kept by Kubernetes."
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None, title="Keep finished (s)", description="How long Kubernetes keeps a finished gang."
    )
    # where
    work_pool: str | None = Field(
        default=None, title="Work pool", description="Where the gang runs. Unset is this machine."
    )
    namespace: str | None = Field(
        default=None, title="Namespace", description="Kubernetes namespace of the gang."
    )
    queue: str | None = Field(
        default=None, title="Queue", description="Kueue LocalQueue that admits the gang."
    )
    queue_priority: str | None = Field(
        default=None, title="Queue priority", description="Kueue WorkloadPriorityClass of the gang."
    )
    topology: str | None = Field(
        default=None,
        title="Topology",
        description="Node label of the domain to share; preferred:LABEL; or unconstrained.",
    )
    # machine
    image: str | None = Field(default=None, title="Image", description="Container image of the nodes.")
    cpu: str | None = Field(default=None, title="CPUs per node", description="Such as 4 or 500m.")
    memory: str | None = Field(
        default=None, title="Memory per node", description="With its unit, such as 64Gi."
    )
    gpu: int | str | None = Field(
        default=None, title="GPUs per node", description="A number, or NAME:NUMBER such as H200:8."
    )
    shm_size: str | None = Field(
        default=None,
        title="Shared memory per node",
        description="Size of /dev/shm, such as 16Gi; 0 leaves the container's own.",
    )
    env: dict[str, str] = Field(
        default={},
        title="Environment",
        description="Environment variables of the ranks. Secrets go into the next field.",
    )
    secret_env: dict[str, str] = Field(
        default={},
        title="Secret environment",
        description="From Kubernetes Secrets, as VARIABLE: secret-name/key.",
    )
    volumes: list[dict[str, Any]] = Field(
        default=[], title="Volumes", description="Kubernetes volumes, each with its mountPath."
    )
    node_selector: dict[str, str] = Field(
        default={}, title="Node selector", description="Labels that a Kubernetes node must have."
    )
    tolerations: list[dict[str, Any]] = Field(
        default=[], title="Tolerations", description="Kubernetes tolerations of the pods."
    )
    service_account: str | None = Field(
        default=None, title="Service account", description="Kubernetes service account of the pods."
    )
    labels: dict[str, str] = Field(default={}, title="Labels", description="Labels of the gang and its pods.")
    annotations: dict[str, str] = Field(
        default={}, title="Annotations", description="Annotations of the gang and its pods."
    )
    pod_template: dict[str, Any] = Field(
        default={},
        title="Pod template",
        description="Laid over our pod template; it cannot change what the gang depends on.",
    )
    # NCCL
    nccl_collective_timeout_seconds: float | None = Field(
        default=None,
        title="NCCL collective timeout (s)",
        description="How long a collective may take. Unset is torch's 600.",
    )
    nccl_heartbeat_timeout_seconds: float | None = Field(
        default=None,
        title="NCCL heartbeat timeout (s)",
        description="How long NCCL's watchdog may be stuck. Unset is torch's 480.",
    )
    nccl_async_error_handling: bool | None = Field(
        default=None,
        title="NCCL error handling",
        description="Whether a timeout ends the rank. Unset is torch's default, on.",
    )
    nccl_enable_monitoring: bool | None = Field(
        default=None,
        title="NCCL monitoring",
        description="Whether the watchdog is watched. Unset is torch's default, on.",
    )
    # storage
    store: str | None = Field(
        default=None,
        title="Store",
        description="Directory or URL (file, s3, gs, az) of the run folders. Unset is the machine's.",
    )
    store_credentials: Annotated[Any, _TEXT_IN_THE_FORM] = Field(
        default=None, title="Store credentials", description="A saved block: aws-credentials/training."
    )
    checkpoint: CheckpointPolicy = Field(
        default_factory=CheckpointPolicy,
        title="Checkpoints",
        description="When checkpoints are saved, and which ones stay.",
    )
    # reporting
    log_level_all_ranks: LogLevel = Field(
        default="WARNING", title="Log level of all ranks", description="Lowest level that Prefect shows."
    )
    log_level_leader: LogLevel = Field(
        default="INFO", title="Log level of rank 0", description="Lowest level that Prefect shows."
    )
    price_per_node_hour: float | None = Field(
        default=None, title="Price of a node hour", description="For cost reports, in any currency."
    )
    # what a work pool gets besides
    job_variables: dict[str, Any] = Field(
        default={},
        title="Job variables",
        description="Variables of the work pool's job template, such as a network or a cluster.",
    )
    include_files: list[str] = Field(
        default=[],
        title="Files to include",
        description="Files, folders or patterns beside the function's file that travel to the work pool.",
    )

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: object) -> object:
        """Refuse a misspelt field, which Prefect's blocks would take and ignore."""
        if isinstance(values, dict):
            for name in cast("dict[str, object]", values):
                if name not in _FIELDS_OF_PREFECT:
                    check_name(name)
        return cast("object", values)

    @field_validator("*", mode="before")
    @classmethod
    def _check_value(cls, value: object, info: ValidationInfo) -> object:
        assert info.field_name is not None
        return check_field(info.field_name, value)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        self.to_spec()
        return self

    def to_fields(self) -> dict[str, object]:
        """Return the fields that were set, as `spec.merge_fields` takes them.

        None counts as not set. In a saved block a default does too: Prefect stores every field, and its form
        sends the defaults of those that nobody touched.
        """
        fields = {name: getattr(self, name) for name in FIELD_NAMES if name in self.model_fields_set}
        if self._block_document_id is not None:
            defaults = type(self)()
            fields = {name: value for name, value in fields.items() if value != getattr(defaults, name)}
        return {name: value for name, value in fields.items() if value is not None}

    def to_spec(self) -> Spec:
        """Return the gang that this block alone describes.

        Raises:
            SpecError: If a value that was assigned after the block was made is not accepted.
        """
        return build_spec(self.to_fields())
