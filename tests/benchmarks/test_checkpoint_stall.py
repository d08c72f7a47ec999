"""What a save costs the training that it happens behind: `ckpt-stall`.

`ratio` is the time inside `save()`, the first one aside, over one copy of the same state into warm memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.checkpoint_gangs import write_result
from tests.benchmarks.checkpoint_server import BenchmarkServer

MIB = int(os.environ.get("PTE_BENCH_CHECKPOINT_MIB", "512"))
_SAVES = 30
_MOST_GROWTH_MIB = 32

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]


def test_checkpoint_blocks_training_for_about_one_copy():
    with BenchmarkServer() as server:
        order = {"url": server.url(), "credentials": server.credentials, "mib": MIB, "saves": _SAVES}
        done = subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.checkpoint_stall", json.dumps(order)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            timeout=500,
            check=True,
        )
    found = json.loads(done.stdout)
    ratio = found["save"] / found["copy"]
    slowdown = found["step_while_uploading"] / found["step"] if "step_while_uploading" in found else 1.0
    low, high = found["spread"]
    line = (
        f"ckpt-stall: {found['save']:.3f} s [{low:.3f}..{high:.3f}] inside save(), one warm copy "
        f"{found['copy']:.3f} s, ratio {ratio:.2f} (target <= 1.5); steps take {slowdown:.2f} times as long "
        f"while it uploads ({found['slower'] * 1e3:.0f} ms lost in {found['uploaded']:.2f} s); "
        f"memory {found['growth_mib']:+.0f} MiB from save 5 to {found['saves']}"
    )
    result = {
        "bench": "ckpt-stall",
        "ours": round(found["save"], 4),
        "peer": round(found["copy"], 4),
        "ratio": round(ratio, 3),
        "unit": "s",
        "first_save": round(found["first_save"], 4),
        "step_slowdown": round(slowdown, 3),
        "lost_seconds": round(found["slower"], 4),
        "upload_seconds": round(found["uploaded"], 4),
        "growth_mib": round(found["growth_mib"], 1),
        "saves": found["saves"],
        "mib": MIB,
    }
    write_result(line, result)
    assert found["growth_mib"] <= _MOST_GROWTH_MIB
