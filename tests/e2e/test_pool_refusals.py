"""Steps that cannot run in a work pool, or cannot run yet: what is said, and that nothing starts.

The flows are in `pooled/refused.py`. Each runs once, and all tests look at what it left.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.poolruns import Api, Driver, drive, open_api
from tests.simulators.s3 import S3Server

if TYPE_CHECKING:
    from prefect_torch_elastic.dev.stack import DevStack

pytest.importorskip("obstore")
pytestmark = pytest.mark.timeout(400)  # the first test starts the stack, and waits for a flow with it

ONE_COMMAND = {
    "job_configuration": {"command": "{{ command }}", "image": "{{ image }}"},
    "variables": {"properties": {"command": {"type": "string"}, "image": {"type": "string"}}},
}
NO_COMMAND = {"job_configuration": {"image": "{{ image }}"}, "variables": {"properties": {"image": {}}}}


@pytest.fixture(scope="module")
def api(shared_stack: DevStack) -> Iterator[Api]:
    with open_api(shared_stack) as api:
        yield api


@pytest.fixture(scope="module")
def driver(shared_stack: DevStack, api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """A driver that has two buckets of one name: its own, and the one that its steps see."""
    make_pools(api)
    with S3Server() as here, S3Server() as there:
        env: dict[str, str | None] = {name: None for name in os.environ if name.startswith("AWS_")}
        env |= {
            "AWS_ACCESS_KEY_ID": here.credentials["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": here.credentials["secret_access_key"],
            "AWS_REGION": here.credentials["region"],
            "DRIVERS_S3": here.endpoint,
            "STEPS_S3": there.endpoint,
        }
        folder = tmp_path_factory.mktemp("refused")
        try:
            with drive(shared_stack, folder, "refused.py", "refusals", "waiting", env=env) as driver:
                yield driver
        finally:
            resume(api, "data")


def make_pools(api: Api) -> None:
    """Make a pool that nobody works for, and two of other types."""
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.workers.process import ProcessWorker

    process = ProcessWorker.get_default_base_job_template()
    pools = {
        "idle": ("process", process),
        "docker": ("docker", ONE_COMMAND),
        "bare": ("process", NO_COMMAND),
    }
    for name, (kind, template) in pools.items():
        pool = WorkPoolCreate(name=name, type=kind, base_job_template=template)
        api.client.create_work_pool(pool, overwrite=True)


def resume(api: Api, pool: str) -> None:
    from prefect.client.schemas.actions import WorkPoolUpdate

    api.client.update_work_pool(pool, WorkPoolUpdate(is_paused=False))


@pytest.fixture(scope="module")
def refusals(driver: Driver) -> dict[str, Any]:
    return driver.read("refusals")


@pytest.fixture(scope="module")
def waiting(driver: Driver, refusals: dict[str, Any]) -> dict[str, Any]:
    return driver.read("waiting")


# ---------------------------------------------------------------- never


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        pytest.param(
            "missing",
            "SpecError",
            [
                "`work_pool='datta'`: there is no such work pool. There are ",
                "`data` (process)",
                "`train` (process)",
                "`prefect work-pool create datta --type process`",
            ],
            id="no-such-pool",
        ),
        pytest.param(
            "bare",
            "SpecError",
            [
                "`work_pool='bare'`: ",
                "has no `{{ command }}`",
                "Add it, as in the answer of",
            ],
            id="no-command",
        ),
        pytest.param(
            "two-nodes",
            "SpecError",
            [
                "`nnodes=2`: work pool `docker` of type `docker` starts one machine for each run.",
                "Use a pool of type `process` or `torch-elastic`, or `nnodes=1`.",
            ],
            id="two-nodes",
        ),
        pytest.param(
            "lock",
            "TransferError",
            ["argument `value` (_thread.lock) cannot be sent", "Pass plain data, a path or a URL"],
            id="argument",
        ),
        pytest.param(
            "command", "SpecError", ["`job_variables` has a `command`", "Take it out"], id="own-command"
        ),
        pytest.param("no-file", "SpecError", ["`include_files`", "`nowhere.txt`"], id="no-such-file"),
        pytest.param(
            "no-store",
            "SpecError",
            [
                "`store` is not set, and the machines of `work_pool='data'` cannot see this one's home.",
                "Pass `store=` a URL that both reach",
                "or set `PREFECT_INTEGRATIONS_TORCH_ELASTIC_STORE`",
            ],
            id="no-store",
        ),
        pytest.param(
            "path",
            "SpecError",
            ["the machines of `work_pool='data'` cannot see a directory of this one", "mounts the same disk"],
            id="path-of-this-machine",
        ),
        pytest.param(
            "memory",
            "SpecError",
            ["`store='memory://calls'` is not accepted", "Pass a directory"],
            id="memory",
        ),
    ],
)
def test_step_that_cannot_run_is_refused_with_the_cure(
    refusals: dict[str, Any], name: str, kind: str, words: list[str]
):
    seen = refusals[name]
    assert seen["type"] == kind, seen
    for word in words:
        assert word in seen["text"]


def test_refused_step_starts_nothing_and_stores_nothing(refusals: dict[str, Any], driver: Driver, api: Api):
    assert api.children(refusals["flow_run_id"]) == []
    assert not (driver.folder / "was-called").exists()
    left = [path for path in (driver.folder / "store").rglob("calls/*/*") if path.is_file()]
    assert left == []


def test_refused_step_is_not_retried(refusals: dict[str, Any], api: Api):
    runs = api.task_runs(refusals["flow_run_id"], "body")
    assert len(runs) >= 5
    assert {(run.state_name, run.run_count) for run in runs} == {("Failed", 1)}


# ---------------------------------------------------------------- not yet


@pytest.mark.parametrize(("name", "kind"), [("idle-body", "PoolRunFailed"), ("idle-gang", "GangFailed")])
def test_step_that_no_worker_takes_is_given_up_when_its_time_is_over(
    waiting: dict[str, Any], api: Api, name: str, kind: str
):
    seen = waiting[name]
    assert (seen["state"], seen["type"]) == ("Failed", kind)
    assert "has not started within 4 s" in seen["text"]
    cure = "No worker of work pool `idle` is online. Start one: `prefect worker start --pool idle`."
    assert cure in seen["text"]
    assert any(cure in text for _, text in api.history(seen["task_run_id"]))
    for child in api.children(waiting["flow_run_id"]):
        if child.work_pool_name == "idle":
            assert (child.state_name, child.run_count) == ("Cancelled", 0), "a worker may come later"


def test_reason_of_a_wait_is_on_the_screen(waiting: dict[str, Any], driver: Driver):
    lines = driver.log.read_text().splitlines()
    for reason in ("No worker of work pool `idle` is online.", "Work pool `data` is paused."):
        assert any("WARNING" in line and reason in line for line in lines)


def test_step_in_a_paused_pool_says_so_and_goes_on_when_it_is_resumed(waiting: dict[str, Any], api: Api):
    paused = "Work pool `data` is paused. Resume it: `prefect work-pool resume data`."
    assert waiting["reason"] == f"WaitingForWorker: {paused}"
    seen = waiting["paused"]
    assert (seen["state"], seen["value"]) == ("Completed", "went on")
    assert ("WaitingForWorker", paused) in api.history(seen["task_run_id"])


def test_two_steps_under_one_run_key_at_once_are_refused(waiting: dict[str, Any]):
    seen = waiting["same-key"]
    assert (seen["state"], seen["type"]) == ("Failed", "SpecError")
    assert "`run_key='one-key'` of `other` is in use" in seen["text"]
    assert waiting["paused"]["task_run_id"] in seen["text"]
    assert "give each a key of its own" in seen["text"]


def test_step_that_does_not_see_the_drivers_store_says_so(waiting: dict[str, Any], api: Api):
    seen = waiting["elsewhere"]
    assert (seen["state"], seen["type"]) == ("Failed", "PoolRunFailed")
    assert "though the driver wrote it there: the two machines do not see the same store." in seen["text"]
    assert "Use a URL that both reach" in seen["text"]
    (child,) = [one for one in api.children(waiting["flow_run_id"]) if str(one.id) == seen["flow_run_id"]]
    assert (child.state_name, child.run_count) == ("Failed", 1)
