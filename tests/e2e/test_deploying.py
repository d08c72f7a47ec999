"""Deployed flows run in a real worker, from a file and from a package, and the flow that we ship deploys."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client

from prefect_torch_elastic.deploying import deploy, load_flow
from tests.deployed import writing

FLOWS = Path(__file__).parent.parent.parent / "flows"
WORKER_SECONDS = 100.0

FILE = """
    import os
    from pathlib import Path
    from prefect import flow
    from sibling import WORD  # only its own folder has it

    @flow
    def main(note: str, value: int = 0):
        Path(note).write_text(f"{WORD} {value} {os.getcwd()}")
"""
MODULE = """
    from pathlib import Path
    from prefect import flow
    from ..words import WORD  # a script could not

    @flow
    def nightly(note: str):
        Path(note).write_text(WORD)
"""


@pytest.fixture
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    with writing(tmp_path / "code") as write:
        yield write


def run_worker(pool: str) -> str:
    """Start a worker as our warning says, but for one round; return what it printed."""
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool]
    done = subprocess.run(
        [*command, "--run-once", "--install-policy", "never"],
        capture_output=True,
        text=True,
        timeout=WORKER_SECONDS,
        check=False,
    )
    return done.stdout + done.stderr


def test_deployed_flows_run_in_a_process_worker(client, write, tmp_path, monkeypatch):
    write("WORD = 'file'", "sibling.py")
    file = write(FILE, "deployed_file.py")
    write("WORD = 'package'", "some_company/words.py")
    write("", "some_company/__init__.py")
    write("", "some_company/jobs/__init__.py")
    write(MODULE, "some_company/jobs/main.py")
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    from some_company.jobs.main import nightly  # pyright: ignore[reportMissingImports]

    first, second = tmp_path / "first", tmp_path / "second"
    pool = "deployed-flows"
    reports = [
        deploy(load_flow(str(file)), work_pool=pool, parameters={"note": str(first), "value": 7}),
        deploy(nightly, work_pool=pool, parameters={"note": str(second)}),
    ]
    runs = [client.create_flow_run_from_deployment(report.deployment_id) for report in reports]
    printed = run_worker(pool)
    states = [client.read_flow_run(run.id).state for run in runs]
    assert [state.type.value if state else None for state in states] == ["COMPLETED"] * 2, printed
    assert first.read_text() == f"file 7 {tmp_path / 'code'}"
    assert second.read_text() == "package"


def test_flow_that_we_ship_deploys_twice_and_changes_only_what_differs(client):
    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, str(FLOWS / "deploy.py"), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def stamps() -> list[object]:
        deployment = client.read_deployment_by_name("pretraining/nightly")
        pools = [client.read_work_pool(pool.name) for pool in client.read_work_pools()]
        return [thing.updated for thing in (deployment, *deployment.schedules, *pools)]

    printed = run("--timezone", "Europe/Berlin")
    assert "created    work pool `driver`" in printed
    assert "created    schedule\n             cron `0 2 * * *`, Europe/Berlin" in printed
    assert "prefect worker start --pool driver" in printed
    before = stamps()
    printed = run("--timezone", "Europe/Berlin")
    assert "created" not in printed
    assert "changed  " not in printed.replace("unchanged", "")
    assert stamps() == before
    printed = run("--timezone", "Europe/Berlin", "--cron", "0 4 * * *")
    assert "changed    schedule\n             cron `0 2 * * *`, Europe/Berlin -> cron `0 4 * * *`" in printed
    assert "unchanged  deployment `pretraining/nightly`" in printed
    deployment = client.read_deployment_by_name("pretraining/nightly")
    assert deployment.entrypoint == "pretrain.py:pretraining"
    assert json.dumps(deployment.pull_steps).count(str(FLOWS)) == 1
