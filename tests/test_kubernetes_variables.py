"""The form of a pool of type `torch-elastic`, and the gang that comes of what it says."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from prefect.client.schemas.objects import FlowRun, WorkPool
from prefect.settings import PREFECT_API_KEY, PREFECT_API_URL, PREFECT_HOME, temporary_settings
from prefect.workers.base import BaseVariables

from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.kubernetes.credentials import split_credentials
from prefect_torch_elastic.kubernetes.manifest import render_jobset
from prefect_torch_elastic.kubernetes.request import GangRequest
from prefect_torch_elastic.kubernetes.variables import (
    TorchElasticJobConfiguration,
    TorchElasticVariables,
    fill_form,
    request_gang,
)
from prefect_torch_elastic.kubernetes.worker import TorchElasticWorker
from prefect_torch_elastic.spec import FIELD_NAMES

RUN_ID = "5f2c0f6e-1111-4222-8333-444455556666"
COMMAND = "python -m prefect_torch_elastic.node --store 's3://bucket/a b'"
OURS_ONLY = {"name", "command", "ephemeral_storage", "accelerators", "cluster_config"}


def ask_for(**fields: Any) -> GangRequest:
    values = {"image": "train:1", "command": COMMAND, **fields}
    configuration = TorchElasticJobConfiguration(**values)
    return request_gang(
        configuration, flow_run_id=RUN_ID, flow_run_name="happy-owl", pool_id="pool-1", worker_name="w"
    )


SECRET_NAMES = (
    *("PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN"),
    *("WANDB_API_KEY", "PGPASSWORD", "DB_PASSWD", "AZURE_STORAGE_ACCOUNT_KEY", "MY_SECRET", "hf_token"),
    *("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_SAS", "PREFECT_CLIENT_CUSTOM_HEADERS"),
    *(
        "HF_TOKEN_2",
        "API_KEY2",
        "GITHUB_PAT",
        "MYSQL_PWD",
        "SENTRY_DSN",
        "SLACK_WEBHOOK",
        "SLACK_WEBHOOK_URL",
    ),
)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_variable_with_the_name_of_a_secret_is_a_credential(name: str):
    assert split_credentials({name: "x"}) == ({}, {name: "x"})


def test_url_with_a_password_is_a_credential_whatever_its_name():
    env = {"DATABASE": "postgresql://me:pass@host/db", "PROXY": "http://host:3128"}
    assert split_credentials(env) == ({"PROXY": "http://host:3128"}, {"DATABASE": env["DATABASE"]})


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("https://ghp_token@github.com/me/code", id="token"),
        pytest.param("git+https://ghp_token@github.com/me/code", id="git"),
        pytest.param("https://pypi.org/simple https://:tok@pypi.example/simple", id="second-of-two"),
    ],
)
def test_url_with_a_token_is_a_credential_whatever_its_name(url: str):
    assert split_credentials({"PLACE": url}) == ({}, {"PLACE": url})


@pytest.mark.parametrize(
    "value", ["ssh://git@github.com/me/code", "https://host/a@b", "postgresql://me@host/db", "me@host"]
)
def test_value_with_a_name_or_an_at_sign_is_no_credential(value: str):
    assert split_credentials({"PLACE": value}) == ({"PLACE": value}, {})


OPEN_NAMES = (
    *("PREFECT_API_URL", "HF_HOME", "TOKENIZERS_PARALLELISM", "MONKEY", "AUTHOR", "PWD", "OLDPWD", "PATH"),
    *("PATTERN", "CUDA_PATH", "DSN_TIMEOUT"),
)


@pytest.mark.parametrize("name", OPEN_NAMES)
def test_other_variable_is_no_credential(name: str):
    assert split_credentials({name: "x", "NONE": None}) == ({name: "x"}, {})


def test_every_field_of_the_form_has_a_title_and_a_description():
    schema = TorchElasticVariables.model_json_schema()["properties"]
    ours = schema.keys() - BaseVariables.model_fields.keys()
    assert not [name for name in ours if not (schema[name].get("title") and schema[name].get("description"))]


def test_fields_of_the_form_have_the_names_of_the_spec():
    assert TorchElasticVariables.model_fields.keys() - OURS_ONLY <= set(FIELD_NAMES)


def test_form_and_configuration_have_the_same_fields_and_defaults():
    form, job = TorchElasticVariables(), TorchElasticJobConfiguration()
    assert form.model_dump() == job.model_dump()


def test_request_has_what_the_variables_say():
    request = ask_for(nnodes=2, queue="lq", gpu="8", memory="64Gi", name="Train it", labels={"team": "a"})
    assert request.command == ("python", "-m", "prefect_torch_elastic.node", "--store", "s3://bucket/a b")
    assert (request.nnodes, request.queue, request.gpu, request.memory) == (2, "lq", 8, "64Gi")
    assert request.name.startswith("train-it-")
    assert (request.labels, request.flow_run_id, request.pool_id) == ({"team": "a"}, RUN_ID, "pool-1")


def test_credentials_are_in_no_manifest():
    request = ask_for(env={"PREFECT_API_KEY": "pnu_hidden", "A": "1"})
    assert request.env == {"A": "1"}
    assert (request.credential_names, bool(request.credentials_secret)) == (("PREFECT_API_KEY",), True)
    assert "pnu_hidden" not in str(render_jobset(request))


def test_gang_without_credentials_needs_no_secret():
    assert ask_for(env={"A": "1"}).credentials_secret is None


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        pytest.param({"nnodes": "2:4"}, r"`nnodes='2:4'`: .* are to come", id="range"),
        pytest.param({"image": None}, "`image` is not set", id="no-image"),
        pytest.param({"command": ""}, "`command` is empty", id="no-command"),
        pytest.param({"memory": "64"}, r"`memory='64'` is not accepted", id="memory-without-unit"),
        pytest.param({"ephemeral_storage": "9"}, "`ephemeral_storage='9'`", id="disk-without-unit"),
        pytest.param({"labels": {"a": "b c"}}, r"labels\['a'\]", id="label"),
        pytest.param({"env": {"JOB_COMPLETION_INDEX": "0"}}, "`JOB_COMPLETION_INDEX`", id="our-variable"),
        pytest.param({"accelerators": {"H200": {"x": 1}}}, "x", id="accelerator"),
    ],
)
def test_request_refuses_a_wrong_value(fields: dict[str, Any], match: str):
    with pytest.raises(SpecError, match=match):
        ask_for(**fields)


def test_gang_does_not_know_whether_it_resumes_which_is_for_its_worker():
    assert render_jobset(ask_for(resume_after_preemption=False)) == render_jobset(ask_for())


def test_same_run_asks_for_the_same_name_again():
    assert ask_for().name == ask_for().name


def test_form_has_the_values_of_a_run_over_those_of_its_pool():
    filled = fill_form(
        {"queue": "lq", "image": "pool", "resume_after_preemption": False, "env": {"A": "pool", "P": "1"}},
        {"nnodes": 4, "image": "mine:2", "env": {"A": "run"}, "env.B": "2", "wrking_dir": "/"},
    )
    assert (filled.nnodes, filled.image, filled.queue) == (4, "mine:2", "lq")
    assert not filled.resume_after_preemption
    assert filled.env == {"A": "run", "P": "1", "B": "2"}


async def test_form_is_filled_in_as_prefect_does_it():
    template = TorchElasticWorker.get_default_base_job_template()
    defaults = {"queue": "lq", "env": {"A": "pool"}, "annotations": {"a": "pool"}, "labels": {"l": "pool"}}
    for name, value in defaults.items():
        template["variables"]["properties"][name]["default"] = value
    sent = {
        "command": "run",
        "env": {"A": "run"},
        "env.B": "2",
        "annotations": {"b": "run"},
        "labels.m": "run",
    }
    nobody: Any = object()  # no block is named, so no API is asked
    real = await TorchElasticJobConfiguration.from_template_and_values(template, sent, client=nobody)
    assert fill_form(defaults, sent).model_dump() == real.model_dump()


def test_run_gets_settings_of_the_api_and_none_of_the_workers_machine():
    run = FlowRun(id=uuid.UUID(RUN_ID), flow_id=uuid.uuid4(), name="happy owl")
    settings: Any = {PREFECT_API_URL: "http://api", PREFECT_API_KEY: "k", PREFECT_HOME: "/home/w/.prefect"}
    configuration = TorchElasticJobConfiguration(labels={"team": "a"}, env={"PREFECT_LOGGING_LEVEL": "DEBUG"})
    pool = WorkPool(id=uuid.uuid4(), name="my pool", type="torch-elastic", default_queue_id=uuid.uuid4())
    with temporary_settings(settings):
        configuration.prepare_for_flow_run(run, work_pool=pool, worker_name="w 1")
    assert configuration.env["PREFECT__FLOW_RUN_ID"] == RUN_ID
    assert configuration.env["PREFECT_API_URL"] == "http://api"
    assert configuration.env["PREFECT_LOGGING_LEVEL"] == "DEBUG"
    assert "PREFECT_HOME" not in configuration.env
    assert not [name for name in configuration.env if name.startswith(("PREFECT_SERVER_", "PREFECT_WORKER_"))]
    assert configuration.labels == {"team": "a"}, "Prefect's own have values that Kubernetes refuses"
    assert configuration.name == "happy owl"
