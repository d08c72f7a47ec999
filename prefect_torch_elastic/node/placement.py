"""How a gang fits onto this machine: ranks per node, nodes, and the GPUs that each of them gets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from prefect_torch_elastic.errors import ElasticError, SpecError
from prefect_torch_elastic.node.devices import GpuLease, list_visible_gpus
from prefect_torch_elastic.node.environment import with_thread_limit
from prefect_torch_elastic.ranks import ALLOW_SHARED_GPUS_VARIABLE, decide_processes
from prefect_torch_elastic.spec import Spec, parse_gpu


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What was decided for one gang.

    Attributes:
        nproc: Ranks on each node.
        environment: Environment of the ranks, with torchrun's thread limit.
        devices: For each node, its GPUs for `CUDA_VISIBLE_DEVICES`; None leaves the variable as it is.
    """

    nproc: int
    environment: dict[str, str]
    devices: list[list[str] | None]

    @property
    def nnodes(self) -> int:
        """Nodes that are started: as many as have devices, at most the gang's maximum."""
        return len(self.devices)


def place_gang(spec: Spec, environment: Mapping[str, str], lease: GpuLease) -> Placement:
    """Decide how many ranks a node gets and hold the GPUs of all nodes.

    Raises:
        SpecError: If the machine can never run it: more ranks than GPUs.
        ElasticError: If other gangs hold the devices now.
    """
    without_gpus = spec.gpu is not None and parse_gpu(spec.gpu)[1] == 0
    visible = [] if without_gpus else list_visible_gpus(environment)
    shared = environment.get(ALLOW_SHARED_GPUS_VARIABLE) == "1"
    nproc = decide_processes(
        spec.nproc_per_node,
        gpu_count=len(visible),
        cpu_count=len(os.sched_getaffinity(0)),
        visible_devices=environment.get("CUDA_VISIBLE_DEVICES"),
        allow_shared_gpus=shared,
    )
    limited = with_thread_limit(environment, nproc=nproc)
    if without_gpus:
        devices: list[list[str] | None] = [[] for _ in range(spec.max_nodes)]
    elif not visible or shared:
        devices = [visible or None for _ in range(spec.max_nodes)]
    else:
        held = _hold_gpus(spec, visible, nproc, lease)
        devices = [held[start : start + nproc] for start in range(0, len(held), nproc)]
    return Placement(nproc=nproc, environment=limited, devices=devices)


def _hold_gpus(spec: Spec, visible: list[str], nproc: int, lease: GpuLease) -> list[str]:
    """Hold GPUs for as many nodes as there can be, at least the minimum."""
    for nnodes in range(spec.max_nodes, spec.min_nodes, -1):
        try:
            return lease.acquire(visible, nproc * nnodes)
        except SpecError:
            continue  # a smaller gang may fit
    try:
        return lease.acquire(visible, nproc * spec.min_nodes)
    except SpecError as error:
        raise ElasticError(str(error)) from error  # no mistake of the spec: others hold the devices now
