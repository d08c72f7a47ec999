"""Distributed training as a Prefect task: a gang of TorchElastic ranks behind one decorator."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect_torch_elastic.block import TorchElastic
    from prefect_torch_elastic.context import ElasticContext, get_context
    from prefect_torch_elastic.errors import (
        CheckpointError,
        ElasticError,
        GangFailed,
        GangTimedOut,
        MissingExtraError,
        NonRetryable,
        SpecError,
        StoreError,
        TransferError,
    )
    from prefect_torch_elastic.task import ElasticTask, elastic_task

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ElasticContext",
    "ElasticError",
    "ElasticTask",
    "GangFailed",
    "GangTimedOut",
    "MissingExtraError",
    "NonRetryable",
    "SpecError",
    "StoreError",
    "TorchElastic",
    "TransferError",
    "elastic_task",
    "get_context",
]

# Loaded on first use: a rank wants `get_context` without Prefect, a driver wants none of torch.
_ROOMS = {
    "ElasticContext": "context",
    "ElasticTask": "task",
    "TorchElastic": "block",
    "elastic_task": "task",
    "get_context": "context",
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
