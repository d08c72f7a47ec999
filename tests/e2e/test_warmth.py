"""The processes that outlive a call: they import once, and what ranks leave in them does not pile up."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from prefect_torch_elastic import elastic_task

if TYPE_CHECKING:
    from tests.e2e.conftest import LiveFlow


def test_hidden_import_of_an_optimizer_is_done_once_for_all_gangs_of_a_flow(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=1)
    def train() -> Any:
        import sys

        imported = "torch._dynamo" in sys.modules
        import torch

        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        agent = psutil.Process(os.getppid())
        servers = [child.pid for child in agent.children() if child.pid != os.getpid()]
        return imported, agent.pid, servers

    imported, _, servers = first = in_flow(train)
    assert imported, "it was imported ahead of the rank"
    assert len(servers) == 1
    assert in_flow(train) == first


def test_module_of_the_call_is_imported_once_for_all_gangs_of_a_flow(
    in_flow: LiveFlow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    importers = tmp_path / "importers"
    (tmp_path / "recorded_4711.py").write_text(
        f"import os\nwith open({str(importers)!r}, 'a') as file:\n    print(os.getpid(), file=file)\n\n"
        "def double(x):\n    return 2 * x\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    module = importlib.import_module("recorded_4711")
    monkeypatch.delitem(sys.modules, "recorded_4711")
    monkeypatch.setitem(sys.modules, "recorded_4711", module)

    @elastic_task(nproc_per_node=2)
    def train(function: Any) -> int:
        return function(4)

    assert [in_flow(lambda: train(module.double)) for _ in range(2)] == [8, 8]
    here, *others = importers.read_text().split()
    assert int(here) == os.getpid()
    assert len(others) == 1


def test_commands_in_the_background_leave_no_zombies(in_flow: LiveFlow):
    """Their parent ends at once, so the agent gets them; it must wait for them now and then."""

    @elastic_task(nproc_per_node=1)
    def train() -> Any:
        agent = psutil.Process(os.getppid())
        for _ in range(20):
            subprocess.run(["sh", "-c", "sleep 0.3 &"], check=True)
        adopted = len(agent.children())
        deadline = time.monotonic() + 8.0
        while time.monotonic() < deadline:
            time.sleep(0.1)
            if len(agent.children()) <= 2:  # this rank and the fork server
                break
        return adopted, [child.status() for child in agent.children() if child.pid != os.getpid()]

    adopted, left = in_flow(train)
    assert adopted > 5
    assert left == [psutil.STATUS_SLEEPING]
