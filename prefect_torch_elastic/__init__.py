"""Distributed training as a Prefect task: a gang of TorchElastic ranks behind one decorator."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect_torch_elastic.block import TorchElastic
    from prefect_torch_elastic.checkpoint.shards import ElasticShards
    from prefect_torch_elastic.checkpoint.state import per_rank
    from prefect_torch_elastic.context import ElasticContext, get_context
    from prefect_torch_elastic.deploying import deploy
    from prefect_torch_elastic.errors import (
        CheckpointError,
        CheckpointMismatch,
        ElasticError,
        GangFailed,
        GangTimedOut,
        MissingExtraError,
        NonRetryable,
        PoolRunFailed,
        SpecError,
        StopTraining,
        StoreError,
        Superseded,
        TransferError,
    )
    from prefect_torch_elastic.pooltask import PoolTask, pool_task
    from prefect_torch_elastic.spec import CheckpointPolicy
    from prefect_torch_elastic.task import ElasticTask, elastic_task

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointPolicy",
    "ElasticContext",
    "ElasticError",
    "ElasticShards",
    "ElasticTask",
    "GangFailed",
    "GangTimedOut",
    "MissingExtraError",
    "NonRetryable",
    "PoolRunFailed",
    "PoolTask",
    "SpecError",
    "StopTraining",
    "StoreError",
    "Superseded",
    "TorchElastic",
    "TransferError",
    "deploy",
    "elastic_task",
    "get_context",
    "per_rank",
    "pool_task",
]

# Loaded on first use: a rank wants `get_context` without Prefect, a driver wants none of torch.
_ROOMS = {
    "CheckpointPolicy": "spec",
    "ElasticContext": "context",
    "ElasticShards": "checkpoint.shards",
    "ElasticTask": "task",
    "PoolTask": "pooltask",
    "TorchElastic": "block",
    "deploy": "deploying",
    "elastic_task": "task",
    "get_context": "context",
    "per_rank": "checkpoint.state",
    "pool_task": "pooltask",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    room = importlib.import_module(f"{__name__}.{_ROOMS.get(name, 'errors')}")
    value = getattr(room, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
