"""Work pools: what they can run, what their workers are told, and why a run waits in them."""

from __future__ import annotations

import copy
import json
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.workers.base import BaseJobConfiguration, BaseVariables
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker

from prefect_torch_elastic.dispatch.order import CallKind
from prefect_torch_elastic.dispatch.pools import (
    ELASTIC_TYPE,
    Pool,
    build_job_variables,
    check_pool,
    explain_wait,
    fetch_pool,
)
from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.spec import build_spec

COMMAND = ["python", "-m", "prefect_torch_elastic.node", "--store", "file:///a b"]


class KubernetesVariables(BaseVariables):
    """Variables of the Kubernetes worker's template that fields of ours can mean."""

    namespace: str = "default"
    image: str | None = None
    service_account_name: str | None = None
    finished_job_ttl: int | None = None
    cpu_request: str | None = None
    cpu_limit: str | None = None
    memory_request: str | None = None
    memory_limit: str | None = None


def make_template(variables: type[BaseVariables]) -> dict[str, Any]:
    schema = variables.model_json_schema()
    manifest = {name: f"{{{{ {name} }}}}" for name in schema["properties"]}
    return {"job_configuration": manifest, "variables": schema}


PROCESS = ProcessWorker.get_default_base_job_template()
KUBERNETES = make_template(KubernetesVariables)


def pool(type: str = "process", template: dict[str, Any] = PROCESS, **facts: Any) -> Pool:
    known = {"name": "train", "is_paused": False, "workers": 1, "workers_online": 1, "limit": None}
    variables = frozenset(template["variables"]["properties"])
    return Pool(**{**known, "type": type, "has_command": True, "variables": variables, **facts})


@pytest.fixture
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def create(client: SyncPrefectClient) -> Iterator[Any]:
    names: list[str] = []

    def create_pool(type: str = "process", template: dict[str, Any] = PROCESS, **options: Any) -> str:
        names.append(f"pool-{uuid.uuid4().hex[:8]}")
        client.create_work_pool(
            WorkPoolCreate(name=names[-1], type=type, base_job_template=template, **options)
        )
        return names[-1]

    yield create_pool
    for name in names:
        client.delete_work_pool(name)


# --- fetch -----------------------------------------------------------------------------------------------


def test_pool_is_read_with_what_it_can_do(client, create):
    name = create(concurrency_limit=3)
    found = fetch_pool(client, name)
    assert (found.name, found.type, found.is_paused, found.limit) == (name, "process", False, 3)
    assert found.has_command
    assert {"command", "env", "working_dir"} <= found.variables
    assert (found.active, found.queue, found.queue_is_paused) == (0, "default", False)


def test_pool_counts_workers_that_were_heard_of(client, create):
    name = create()
    assert (fetch_pool(client, name).workers, fetch_pool(client, name).workers_online) == (0, 0)
    client.send_worker_heartbeat(name, "one", heartbeat_interval_seconds=30)
    assert (fetch_pool(client, name).workers, fetch_pool(client, name).workers_online) == (1, 1)


def test_pool_that_does_not_exist_is_refused_with_those_that_do(client, create):
    name = create("kubernetes", KUBERNETES)
    with pytest.raises(SpecError) as error:
        fetch_pool(client, "trian")
    assert "`work_pool='trian'`" in str(error.value)
    assert f"`{name}` (kubernetes)" in str(error.value)
    assert "`prefect work-pool create trian --type process`" in str(error.value)


@pytest.mark.parametrize("fields", [{"nnodes": 2}, {"queue": "lq"}, {"image": "train:1"}])
def test_pool_that_does_not_exist_is_of_our_type_for_a_task_of_a_cluster(client, fields):
    with pytest.raises(SpecError, match="`prefect work-pool create trian --type torch-elastic`"):
        fetch_pool(client, "trian", spec=build_spec(fields))


def test_template_without_a_place_for_the_command_has_none(client, create):
    template = copy.deepcopy(PROCESS)
    template["job_configuration"]["command"] = "fixed by the administrator"
    assert not fetch_pool(client, create(template=template)).has_command


def test_command_may_stand_anywhere_in_the_template(client, create):
    template = copy.deepcopy(KUBERNETES)
    template["job_configuration"]["command"] = None
    template["job_configuration"]["manifest"] = {"containers": [{"args": "{{command}}"}]}
    assert fetch_pool(client, create("kubernetes", template)).has_command


# --- check -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", ["process", "kubernetes", "docker", "ecs:push"])
@pytest.mark.parametrize("kind", CallKind)
def test_one_machine_runs_in_every_pool_with_a_command(type, kind):
    check_pool(pool(type), kind=kind, nnodes=1, max_nodes=1)


@pytest.mark.parametrize(
    ("type", "nnodes"), [("process", 4), ("process", "2:4"), (ELASTIC_TYPE, 4), (ELASTIC_TYPE, "4:4")]
)
def test_gang_of_several_nodes_runs_where_they_come_together(type, nnodes):
    check_pool(pool(type), kind=CallKind.GANG, nnodes=nnodes, max_nodes=4)


def test_gang_of_a_range_of_nodes_is_refused_by_a_pool_of_fixed_gangs():
    with pytest.raises(SpecError) as error:
        check_pool(pool(ELASTIC_TYPE), kind=CallKind.GANG, nnodes="2:4", max_nodes=4)
    assert "`nnodes='2:4'`" in str(error.value)
    assert "are to come. Pass `nnodes=4` or `nnodes=2`" in str(error.value)
    check_pool(pool(ELASTIC_TYPE), kind=CallKind.BODY, nnodes="2:4", max_nodes=4)


def test_gang_of_several_nodes_is_refused_by_a_pool_of_single_machines():
    with pytest.raises(SpecError) as error:
        check_pool(pool("kubernetes"), kind=CallKind.GANG, nnodes="1:4", max_nodes=4)
    assert "`nnodes='1:4'`: work pool `train` of type `kubernetes`" in str(error.value)
    assert "`process` or `torch-elastic`" in str(error.value)


def test_plain_function_has_no_nodes_to_refuse():
    check_pool(pool("kubernetes"), kind=CallKind.BODY, nnodes=4, max_nodes=4)


@pytest.mark.parametrize("kind", CallKind)
def test_pool_without_a_command_is_refused(kind):
    with pytest.raises(SpecError, match=r"its job template has no `\{\{ command \}\}`"):
        check_pool(pool("prefect:managed", has_command=False), kind=kind, nnodes=1, max_nodes=1)


# --- job variables ---------------------------------------------------------------------------------------


def build(to: Pool, *, kind: CallKind = CallKind.GANG, **fields: Any):
    return build_job_variables(to, command=COMMAND, spec=build_spec(fields), kind=kind)


def test_command_of_an_image_is_its_own_python_quoted_for_a_shell():
    variables = build(pool("kubernetes", KUBERNETES))
    assert variables.values == {"command": "python -m prefect_torch_elastic.node --store 'file:///a b'"}
    assert shlex.split(variables.values["command"]) == COMMAND


def run_as_worker(program: list[str], command: str, cwd: Path, path: str = "") -> Any:
    """Start a command as a process worker does, and return what the Python says that it starts."""
    code = "import subprocess, sys; subprocess.run(sys.argv[1:], check=True, cwd='/')"
    worker = [*program, "-c", code, *shlex.split(command)]
    environment = {"PATH": path or "/usr/bin:/bin", "PYTHONPATH": str(cwd)}
    done = subprocess.run(worker, cwd=cwd, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def whoami(tmp_path: Path) -> list[str]:
    code = "import json, sys; print(json.dumps([sys.executable, sys.prefix, sys.argv[1:]]))"
    (tmp_path / "whoami.py").write_text(code)
    return ["python", "-m", "whoami", "a b", "$HOME"]


@pytest.mark.parametrize("how", ["absolute", "relative", "on PATH"])
def test_command_of_a_process_pool_uses_the_interpreter_of_its_worker(whoami, tmp_path, how):
    (tmp_path / "venv").symlink_to(Path(sys.prefix))
    program, path = {
        "absolute": (sys.executable, ""),
        "relative": ("venv/bin/python", ""),
        "on PATH": ("python", f"{sys.prefix}/bin:/usr/bin:/bin"),
    }[how]
    values = build_job_variables(pool(), command=whoami, spec=build_spec({}), kind=CallKind.GANG).values
    executable, prefix, arguments = run_as_worker([program], values["command"], tmp_path, path)
    assert Path(executable).resolve() == Path(sys.executable).resolve()
    assert Path(prefix).resolve() == Path(sys.prefix).resolve()  # its packages, not those of the system
    assert arguments == ["a b", "$HOME"]


def test_command_of_a_process_pool_is_python_when_the_parent_is_none(whoami, tmp_path):
    """Such as under a process supervisor of the user between the worker and the run."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    values = build_job_variables(pool(), command=whoami, spec=build_spec({}), kind=CallKind.GANG).values
    parent = [shutil.which("sh") or "sh", "-c", '"$@"; exit $?', "sh", *shlex.split(values["command"])]
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(parent, env=environment, capture_output=True, text=True, timeout=30)
    assert json.loads(done.stdout)[0] == f"{tmp_path}/bin/python"


def test_command_of_a_process_pool_keeps_the_process_that_the_worker_stops(tmp_path):
    (tmp_path / "whoami.py").write_text("import json, os; print(json.dumps(os.getpid()))")
    command = ["python", "-m", "whoami"]
    values = build_job_variables(pool(), command=command, spec=build_spec({}), kind=CallKind.BODY).values
    process = subprocess.Popen(
        shlex.split(values["command"]), env={"PYTHONPATH": str(tmp_path)}, stdout=subprocess.PIPE
    )
    assert json.loads(process.communicate(timeout=30)[0]) == process.pid


def test_environment_and_labels_join_those_of_job_variables():
    variables = build(
        pool(),
        env={"A": "1", "B": "1"},
        labels={"team": "x", "cost": "1"},
        job_variables={"env": {"B": "2", "C": "2"}, "labels": {"cost": "2"}, "working_dir": "/w"},
    )
    assert variables.values["env"] == {"A": "1", "B": "2", "C": "2"}
    assert variables.values["labels"] == {"team": "x", "cost": "2"}
    assert variables.values["working_dir"] == "/w"
    assert not variables.ignored


def test_nothing_but_the_command_is_said_when_nothing_was_set():
    assert build(pool()).values.keys() == {"command"}


def test_fields_mean_the_variables_of_the_pool():
    variables = build(
        pool("kubernetes", KUBERNETES),
        image="ghcr.io/me/train:1",
        namespace="training",
        service_account="trainer",
        ttl_seconds_after_finished=60,
        cpu="4",
        memory="16Gi",
    )
    del variables.values["command"]
    assert variables.values == {
        "image": "ghcr.io/me/train:1",
        "namespace": "training",
        "service_account_name": "trainer",
        "finished_job_ttl": 60,
        "cpu_request": "4",
        "cpu_limit": "4",
        "memory_request": "16Gi",
        "memory_limit": "16Gi",
    }
    assert not variables.ignored


def test_fields_without_a_variable_are_named():
    variables = build(pool(), image="x", gpu=8, queue="q", env={"A": "1"}, job_variables={"wrking_dir": "/"})
    assert variables.ignored == ("queue", "image", "gpu", 'job_variables["wrking_dir"]')
    assert "image" not in variables.values


def test_field_that_forbids_gpus_is_not_named():
    assert not build(pool(), gpu=0).ignored


def test_cpu_of_another_type_of_pool_means_something_else_and_is_not_passed():
    ecs = pool("ecs", make_template(KubernetesVariables), variables=frozenset({"command", "cpu", "memory"}))
    variables = build(ecs, cpu="4", memory="16Gi")
    assert variables.values.keys() == {"command"}
    assert variables.ignored == ("cpu", "memory")


@pytest.mark.parametrize("name", ["command", "command.0"])
def test_command_of_the_user_is_refused(name):
    with pytest.raises(SpecError, match="`job_variables` has a `command`"):
        build(pool(), job_variables={name: "bash"})


def test_variable_of_a_part_of_a_mapping_is_known_by_its_first_word():
    variables = build(pool(), job_variables={"env.A": "1"})
    assert variables.values["env.A"] == "1"
    assert not variables.ignored


async def test_worker_joins_our_environment_with_those_of_pool_and_worker(prefect_server):
    template = copy.deepcopy(PROCESS)
    template["variables"]["properties"]["env"]["default"] = {"POOL": "1", "BOTH": "pool"}
    values = build(pool(), env={"OURS": "1", "BOTH": "ours"}).values
    async with get_client() as client:
        job: BaseJobConfiguration = await ProcessJobConfiguration.from_template_and_values(
            template, values, client=client
        )
    assert job.env == {"POOL": "1", "BOTH": "ours", "OURS": "1"}
    assert job.command == values["command"]


# --- job variables of our own type of pool ---------------------------------------------------------------

CLUSTER = pool(ELASTIC_TYPE, variables=frozenset({"command"}))
FIELDS_OF_A_CLUSTER: dict[str, Any] = {
    "env": {"A": "1"},
    "labels": {"team": "x"},
    "image": "ghcr.io/me/train:1",
    "namespace": "training",
    "service_account": "trainer",
    "ttl_seconds_after_finished": 60,
    "cpu": "4",
    "memory": "16Gi",
    "gpu": "H200:8",
    "shm_size": "8Gi",
    "secret_env": {"HF_TOKEN": "hub/token"},
    "volumes": [{"name": "data", "emptyDir": {}, "mountPath": "/data"}],
    "node_selector": {"pool": "gpu"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "annotations": {"a": "b"},
    "pod_template": {"spec": {"priorityClassName": "high"}},
    "queue": "lq",
    "queue_priority": "low",
    "topology": "rack",
    "inadmissible_grace_seconds": 30,
    "active_deadline_seconds": 3600,
    "resume_after_preemption": False,
}


def test_fields_of_a_cluster_keep_their_names_whatever_the_template_has():
    variables = build(CLUSTER, **FIELDS_OF_A_CLUSTER)
    expected = build_spec(FIELDS_OF_A_CLUSTER)
    assert {name: variables.values[name] for name in FIELDS_OF_A_CLUSTER} == {
        name: getattr(expected, name) for name in FIELDS_OF_A_CLUSTER
    }
    assert not variables.ignored


def test_names_that_are_sent_are_those_of_the_form():
    from prefect_torch_elastic.kubernetes.variables import TorchElasticVariables

    sent = build(CLUSTER, **FIELDS_OF_A_CLUSTER).values.keys()
    assert sent <= TorchElasticVariables.model_fields.keys()


def test_resuming_after_a_preemption_means_something_in_our_own_pools_only():
    assert build(pool("kubernetes", KUBERNETES), resume_after_preemption=False).ignored == (
        "resume_after_preemption",
    )


def test_size_of_a_gang_is_said_to_the_cluster_although_nobody_set_it():
    values = build(CLUSTER).values
    assert {name: values[name] for name in values if name != "command"} == {
        "nnodes": 1,
        "max_attempts": 3,
        "grace_seconds": 60,
    }


def test_size_of_a_gang_is_that_of_the_order():
    values = build(CLUSTER, nnodes="4:4", max_attempts=2, grace_seconds=90).values
    assert (values["nnodes"], values["max_attempts"], values["grace_seconds"]) == (4, 2, 90)


def test_plain_function_is_one_pod_that_is_started_once():
    values = build(CLUSTER, kind=CallKind.BODY, nnodes=4, max_attempts=3, grace_seconds=90).values
    assert (values["nnodes"], values["max_attempts"], values["grace_seconds"]) == (1, 1, 90)


def test_no_gpus_are_asked_for_where_a_pool_may_have_some_by_default():
    assert build(CLUSTER, gpu=0).values["gpu"] == 0
    assert "gpu" not in build(CLUSTER).values


def test_other_pools_are_told_no_size_of_a_gang():
    assert build(pool("kubernetes", KUBERNETES), max_attempts=2).values.keys() == {"command"}


@pytest.mark.parametrize("name", ["nnodes", "max_attempts", "grace_seconds"])
def test_size_of_a_gang_is_refused_as_a_job_variable(name):
    with pytest.raises(SpecError) as error:
        build(CLUSTER, job_variables={name: 2})
    assert f"set the field of the task: `{name}=2`" in str(error.value)


@pytest.mark.parametrize(("type", "again"), [(ELASTIC_TYPE, True), ("kubernetes", False)])
def test_pool_of_our_own_type_starts_gangs_again(type, again):
    assert pool(type).starts_gangs_again is again


# --- waiting ---------------------------------------------------------------------------------------------


def test_wait_has_no_reason_when_a_worker_polls():
    assert not explain_wait(pool())


def test_wait_names_the_worker_to_start_in_a_new_pool(client, create):
    name = create()
    assert f"`prefect worker start --pool {name}`" in explain_wait(fetch_pool(client, name))


def test_wait_says_that_workers_went_away():
    assert explain_wait(pool(workers=2, workers_online=0)).startswith(
        "None of the 2 known workers of work pool"
    )


def test_wait_says_that_the_pool_is_paused(client, create):
    name = create()
    client.send_worker_heartbeat(name, "one", heartbeat_interval_seconds=30)
    client.update_work_pool(name, WorkPoolUpdate(is_paused=True))
    assert f"`prefect work-pool resume {name}`" in explain_wait(fetch_pool(client, name))


def test_wait_says_that_the_queue_of_the_pool_is_paused(client, create):
    name = create()
    client.send_worker_heartbeat(name, "one", heartbeat_interval_seconds=30)
    queue = client.read_work_pool(name).default_queue_id
    client.update_work_queue(queue, is_paused=True)
    reason = explain_wait(fetch_pool(client, name))
    assert f"`prefect work-queue resume default --pool {name}`" in reason


def test_wait_says_that_the_pool_is_full():
    reason = explain_wait(pool(limit=2, active=2))
    assert "runs 2 of at most 2 at once" in reason
    assert "`prefect work-pool set-concurrency-limit train 3`" in reason
    assert not explain_wait(pool(limit=2, active=1))


def test_wait_says_that_workers_ask_another_queue():
    assert "none has asked its queue `default` yet" in explain_wait(pool(queue_is_polled=False))


@pytest.mark.parametrize("type", ["ecs:push", "prefect:managed"])
def test_pool_that_prefect_serves_itself_waits_for_no_worker(type):
    assert not explain_wait(pool(type, workers=0, workers_online=0, queue_is_polled=False))
    assert "is paused" in explain_wait(pool(type, is_paused=True))
