"""What a gang is created from: everything that its manifest says, as plain checked values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prefect_torch_elastic.kubernetes.accelerators import Accelerator


@dataclass(frozen=True, kw_only=True)
class GangRequest:
    """One gang to create, in the words of `Spec`.

    Attributes:
        name: Of the JobSet, see `naming.name_jobset`.
        namespace: Where it is created.
        nnodes: How many pods it has.
        command: What each pod runs, word by word; no shell stands between it and signals.
        image: Of the container.
        pool_id, flow_run_id, flow_run_name, worker_name: For whom it is created.
        env: Environment variables, none of them secret.
        credentials_secret: The Secret that holds `credential_names`, one key for each variable.
        secret_env: Variables from Secrets of the user, as `SECRET/KEY`.
        gpu: A number, or `NAME:NUMBER` with a name in `accelerators`.
        shm_size: Of `/dev/shm`; "0" leaves the container its own 64 MB. None is half of `memory`, at most
            64Gi, and 8Gi when no memory is asked for.
        topology: `required:LABEL`, `preferred:LABEL` or `unconstrained`, see `spec_values.parse_topology`.
        volumes: See `spec_values.parse_volume`.
        pod_template: What is laid over the pod template.
        max_attempts: How many gangs the JobSet may start, disruptions and preemptions not counted.
        grace_seconds: What the program in the pod has between SIGTERM and its own end.
    """

    name: str
    namespace: str
    nnodes: int
    command: tuple[str, ...]
    image: str
    pool_id: str
    flow_run_id: str
    flow_run_name: str
    worker_name: str
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    credentials_secret: str | None = None
    credential_names: tuple[str, ...] = ()
    secret_env: Mapping[str, str] = field(default_factory=dict[str, str])
    cpu: str | None = None
    memory: str | None = None
    gpu: int | str | None = None
    ephemeral_storage: str | None = None
    shm_size: str | None = None
    queue: str | None = None
    queue_priority: str | None = None
    topology: str | None = None
    service_account: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    annotations: Mapping[str, str] = field(default_factory=dict[str, str])
    node_selector: Mapping[str, str] = field(default_factory=dict[str, str])
    tolerations: tuple[Mapping[str, Any], ...] = ()
    volumes: tuple[Mapping[str, Any], ...] = ()
    pod_template: Mapping[str, Any] = field(default_factory=dict[str, Any])
    accelerators: Mapping[str, Accelerator] = field(default_factory=dict[str, Accelerator])
    max_attempts: int = 3
    grace_seconds: float = 60
    active_deadline_seconds: int | None = None
    ttl_seconds_after_finished: int | None = None
