"""`plan`: the manifests of a file's tasks, without a cluster, without Prefect's API, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import cyclopts
import pytest
import yaml

from prefect_torch_elastic.cli import UsageError
from prefect_torch_elastic.cli.plan import find_tasks, plan
from prefect_torch_elastic.dispatch.pools import ELASTIC_TYPE, Pool, build_job_variables
from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.kubernetes.podspec import MARGIN_SECONDS
from prefect_torch_elastic.kubernetes.variables import TorchElasticVariables

FLOWS = """
from prefect import task
from prefect_torch_elastic import elastic_task, pool_task

@elastic_task(name="Pretrain", nnodes=4, work_pool="k8s", queue="lq", image="train:1", gpu=8)
def pretrain(x): ...

@elastic_task(nnodes="2:4", work_pool="elastic")
def shrinking(x): ...

@elastic_task(
    work_pool="h200",
    gpu="H200:8",
    env={"A": "task"},
    job_variables={"ephemeral_storage": "9Gi", "image": "train:2", "env": {"B": "job"}},
)
def tune(x): ...

@elastic_task(work_pool="twice", job_variables={"nnodes": 4})
def said_twice(x): ...

@pool_task(work_pool="cpu", job_variables={"wrking_dir": "/"})
def tokenize(x): ...

@task
def plain(x): ...

same = pretrain
"""


@pytest.fixture
def flows(tmp_path: Path) -> str:
    file = tmp_path / "flows_to_plan.py"
    file.write_text(FLOWS)
    return str(file)


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str) -> list[dict[str, Any]]:
        app = cyclopts.App(result_action="return_value")
        app.command(plan)
        assert app(["plan", *arguments]) == 0
        return list(yaml.safe_load_all(capsys.readouterr().out))

    return run


def spec_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]


def trainer_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return spec_of(manifest)["template"]["spec"]["containers"][0]


def test_plan_prints_the_gang_of_a_task(flows, planned):
    [manifest] = planned(f"{flows}:pretrain")
    assert manifest["kind"] == "JobSet"
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "lq"
    assert spec_of(manifest)["parallelism"] == 4
    trainer = trainer_of(manifest)
    assert (trainer["image"], trainer["resources"]["limits"]) == ("train:1", {"nvidia.com/gpu": "8"})
    assert trainer["command"][:3] == ["python", "-m", "prefect_torch_elastic.node"]
    assert trainer["command"][-2:] == ["--nproc-per-node", "auto"]


def test_plan_finds_a_task_by_its_own_name(flows, planned):
    assert planned(f"{flows}:Pretrain") == planned(f"{flows}:pretrain")


def test_plan_prints_each_task_of_the_named_pools_once(flows, planned):
    manifests = planned(flows, "--pool", "k8s", "--pool", "cpu")
    assert [one["metadata"]["name"].rpartition("-")[0] for one in manifests] == ["pretrain", "tokenize"]
    assert "--nproc-per-node" not in trainer_of(manifests[1])["command"]


def test_plan_takes_the_form_of_the_pool_from_the_command_line(flows, planned):
    accelerators = 'accelerators={"H200": {"node_selector": {"gpu": "h200"}}}'
    options = ("-v", accelerators, "--variable", "namespace=ml", "-v", "image=pool:1")
    [manifest] = planned(f"{flows}:tune", *options)
    assert manifest["metadata"]["namespace"] == "ml"
    assert spec_of(manifest)["template"]["spec"]["nodeSelector"] == {"gpu": "h200"}


def test_plan_lays_job_variables_over_the_fields_as_a_worker_does(flows, planned):
    [manifest] = planned(f"{flows}:tune", "-v", 'accelerators={"H200": {}}', "-v", "image=pool:1")
    trainer = trainer_of(manifest)
    assert trainer["image"] == "train:2"
    assert trainer["resources"]["limits"]["ephemeral-storage"] == "9Gi"
    variables = {one["name"]: one.get("value") for one in trainer["env"]}
    assert (variables["A"], variables["B"]) == ("task", "job")


def test_plan_says_which_job_variables_mean_nothing(flows, capsys):
    plan(f"{flows}:tokenize")
    expected = '# A pool of type torch-elastic does not know job_variables["wrking_dir"].'
    assert expected in capsys.readouterr().out


def test_plan_says_that_elastic_gangs_are_to_come(flows):
    with pytest.raises(SpecError, match=r"`nnodes='2:4'`.*to come"):
        plan(f"{flows}:shrinking")


@pytest.mark.parametrize("task", ["pretrain", "tokenize"])
def test_plan_starts_pods_as_often_as_a_run_does(flows, planned, task):
    [manifest] = planned(f"{flows}:{task}", "-v", "max_attempts=7", "-v", "nnodes=3", "-v", "grace_seconds=9")
    found = find_tasks(flows)[task]
    pool = Pool(name="k8s", type=ELASTIC_TYPE, variables=frozenset(TorchElasticVariables.model_fields))
    sent = build_job_variables(pool, command=["python"], spec=found.resolve_spec(), kind=found.kind).values
    pod = spec_of(manifest)["template"]["spec"]
    assert spec_of(manifest)["parallelism"] == sent["nnodes"]
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == sent["max_attempts"] - 1
    assert pod["terminationGracePeriodSeconds"] == sent["grace_seconds"] + MARGIN_SECONDS


def test_plan_refuses_what_a_run_would_refuse(flows):
    with pytest.raises(SpecError, match="`job_variables` has `nnodes`"):
        plan(f"{flows}:said_twice")


def test_plan_refuses_a_task_that_is_not_there_with_those_that_are(flows):
    with pytest.raises(
        UsageError, match=r"no task `nope`.*`pretrain`, `shrinking`, `tune`, `said_twice`, `tokenize`"
    ):
        plan(f"{flows}:nope")


def test_plan_refuses_a_pool_without_tasks(flows):
    with pytest.raises(UsageError, match="no elastic task or pool task of work pool `gpus`"):
        plan(flows, pool=("gpus",))


@pytest.mark.parametrize("place", ["nowhere.py", "no_such_module_here"])
def test_plan_refuses_code_that_cannot_be_loaded(place):
    with pytest.raises(SpecError, match=f"`{place}` cannot be loaded: "):
        plan(place)


def test_plan_needs_no_prefect_api_no_cluster_and_no_torch(flows, tmp_path):
    code = (
        "import sys; from prefect_torch_elastic.cli.plan import plan; plan('flows_to_plan:pretrain'); "
        "print('#', [name for name in ('torch', 'kubernetes') if name in sys.modules])"
    )
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PREFECT_API_URL": "http://127.0.0.1:9/api",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "# []"
    assert yaml.safe_load(done.stdout)["kind"] == "JobSet"
