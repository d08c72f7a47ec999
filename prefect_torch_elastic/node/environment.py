"""The environment of a rank: what torchrun sets, what trackers look for, and nothing stale.

Frameworks (Lightning, Accelerate, HF Trainer, DeepSpeed) find out from it that they are in a gang already.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from prefect_torch_elastic import context
from prefect_torch_elastic.node import processes
from prefect_torch_elastic.node.rank import RankOrder
from prefect_torch_elastic.spec import Spec
from prefect_torch_elastic.wire import RunGang

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup

# What another launch (an image, a notebook, an earlier gang) may have left; PET_* are torchrun's flags.
_STALE = re.compile(
    r"^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_(RANK|WORLD_SIZE)"
    r"|ROLE_(RANK|NAME|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|TORCH_ELASTIC_.*|PET_.*|PTE_.*)$"
)


def without_stale_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what places a process in some other gang."""
    return {name: value for name, value in environment.items() if not _STALE.match(name)}


def with_thread_limit(environment: Mapping[str, str], *, nproc: int) -> dict[str, str]:
    """Return the environment with one OpenMP thread per rank, as torchrun does, unless it says otherwise."""
    if nproc <= 1 or "OMP_NUM_THREADS" in environment:
        return dict(environment)
    return {**environment, "OMP_NUM_THREADS": "1"}


def build_rank_environment(
    order: RunGang, spec: Spec, group: WorkerGroup, worker: Worker, *, restart_count: int
) -> dict[str, str]:
    """Return the whole environment of one rank."""
    handler = group.spec.rdzv_handler
    environment = {
        **order.environment,
        "RANK": worker.global_rank,
        "LOCAL_RANK": worker.local_rank,
        "WORLD_SIZE": worker.world_size,
        "LOCAL_WORLD_SIZE": order.nproc,
        "GROUP_RANK": group.group_rank,
        "GROUP_WORLD_SIZE": group.group_world_size,
        "NODE_RANK": group.group_rank,
        "ROLE_RANK": worker.role_rank,
        "ROLE_NAME": group.spec.role,
        "ROLE_WORLD_SIZE": worker.role_world_size,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "TORCHELASTIC_RESTART_COUNT": restart_count,
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        "TORCHELASTIC_RUN_ID": handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": handler.use_agent_store,
        "PYTHONUNBUFFERED": "1",
        context.RUN_KEY: order.run_key,
        context.ATTEMPT: order.attempt,
        context.RESTART_COUNT: restart_count,
        context.PREEMPTION_COUNT: order.preemptions,
        context.FLOW_RUN_ID: order.flow_run_id,
        context.TASK_RUN_ID: order.task_run_id,
        processes.MARK: os.environ.get(processes.MARK, ""),  # for what the rank starts
    }
    environment = _tracker_variables(order, worker.global_rank) | environment | _nccl_variables(spec)
    if order.devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(order.devices)
    return {name: str(value) for name, value in environment.items()}


def build_rank_order(order: RunGang, spec: Spec, prefix: Path, environment: Mapping[str, str]) -> RankOrder:
    """Return what the rank itself is told."""
    threads = environment.get("OMP_NUM_THREADS", "")
    return RankOrder(
        call=order.call,
        secret=order.secret,
        prefix=str(prefix),
        search_path=order.search_path,
        threads=int(threads) if threads.isdigit() else 0,
        collective_timeout_seconds=spec.nccl_collective_timeout_seconds,
        non_retryable=spec.non_retryable,
        storage=order.storage,
    )


def _nccl_variables(spec: Spec) -> dict[str, str]:
    """The block's NCCL settings as torch reads them; what is not set stays torch's default."""
    flags = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": spec.nccl_async_error_handling,
        "TORCH_NCCL_ENABLE_MONITORING": spec.nccl_enable_monitoring,
    }
    variables = {name: str(int(value)) for name, value in flags.items() if value is not None}
    if spec.nccl_heartbeat_timeout_seconds is not None:
        variables["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = str(int(spec.nccl_heartbeat_timeout_seconds))
    return variables


def _tracker_variables(order: RunGang, rank: int) -> dict[str, str]:
    """Let experiment trackers find one run per run key, over restarts, attempts and retries.

    Only rank 0 gets the id: a tracker that every rank starts would otherwise write one run from all of them.
    Whatever the surroundings set already wins.
    """
    run_id = hashlib.sha256(order.run_key.encode()).hexdigest()[:32]
    variables = {
        "WANDB_RUN_GROUP": run_id,
        "MLFLOW_TAGS": json.dumps(
            {"prefect_run_key": order.run_key, "prefect_flow_run_id": order.flow_run_id}
        ),
        "PTE_TRACKER_RUN_ID": run_id,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun
    }
    if rank == 0:
        variables |= {"WANDB_RUN_ID": run_id, "WANDB_RESUME": "allow"}
    else:
        variables |= {"WANDB_MODE": "disabled"}
    return variables
