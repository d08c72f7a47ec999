"""What Prefect imports to learn about this package: the `prefect.collections` entry point.

Prefect imports it when a worker starts, when a block is looked up by its slug, and in the server. Importing a
block's class registers it. It must stay light and never raise: torch and Kubernetes are not needed here.
"""

from __future__ import annotations

from prefect_torch_elastic.block import TorchElastic

__all__ = ["TorchElastic"]
