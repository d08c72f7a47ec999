"""What Prefect imports to learn about this package: the `prefect.collections` entry point.

Prefect imports it when a worker starts, when a block is looked up by its slug, and in the server. Importing a
class registers it: the block by its slug, the worker by its type. It must stay light and never raise: torch
and Kubernetes are not needed here; the worker asks for its client library when it starts.
"""

from __future__ import annotations

from prefect_torch_elastic.block import TorchElastic
from prefect_torch_elastic.kubernetes.worker import TorchElasticWorker

__all__ = ["TorchElastic", "TorchElasticWorker"]
