"""What a user writes today to train in a work pool: a deployed flow whose run starts torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from prefect import flow


@flow(log_prints=True)
def launch_torchrun(script: str, out: str, nproc: int) -> None:
    """Run a script under torchrun."""
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={nproc}", str(Path(script)), out),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
