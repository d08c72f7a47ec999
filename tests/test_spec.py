"""What the user asks for: every field, what is accepted, and what a refusal says."""

from __future__ import annotations

import dataclasses
import json
import typing

import pytest

from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.ranks import ALLOW_SHARED_GPUS_VARIABLE
from prefect_torch_elastic.spec import (
    FIELD_NAMES,
    CheckpointPolicy,
    Spec,
    SpecOptions,
    build_spec,
    check_field,
    fields_without_meaning_here,
    merge_fields,
    render_budgets,
    render_worst_case_wait,
    worst_case_wait_seconds,
)

WIDER_AS_OPTIONS = {
    "checkpoint",
    "store_credentials",
}  # a dictionary and a block are turned into the field's type


def test_options_are_the_fields_in_name_order_and_type():
    fields = typing.get_type_hints(Spec)
    options = typing.get_type_hints(SpecOptions)
    assert tuple(options) == tuple(fields) == FIELD_NAMES
    assert {name for name in fields if options[name] != fields[name]} == WIDER_AS_OPTIONS


def test_spec_without_fields_has_the_defaults():
    assert build_spec({}) == Spec()


def test_spec_accepts_its_own_defaults():
    defaults = {field.name: getattr(Spec(), field.name) for field in dataclasses.fields(Spec)}
    assert build_spec(defaults) == Spec()


REFUSED = [
    ({"gpu": "H200"}, '`gpu="H200:8"`'),
    ({"gpu": "H200:0"}, '`gpu="H200:8"`'),
    ({"cpu": "4 cores"}, '`cpu="500m"`'),
    ({"memory": "64"}, '`memory="64Gi"`'),
    ({"memory": "64GB"}, '`memory="64Gi"`'),
    ({"max_restarts": -1}, "a whole number >= 0"),
    ({"max_attempts": 0}, "a whole number >= 1"),
    ({"max_restarts": True}, "a whole number >= 0"),
    ({"grace_seconds": float("nan")}, "a number >= 0"),
    ({"run_timeout_seconds": 0}, "a number > 0"),
    ({"resume_after_preemption": "yes"}, "True or False"),
    ({"rdzv_backend": "etcd"}, '"static", "c10d"'),
    ({"log_level_leader": "LOUD"}, '"DEBUG", "INFO"'),
    ({"preload": "torch"}, "a list"),
    ({"non_retryable": [ValueError]}, "`builtins.ValueError`"),
    ({"namespace": "Team_A"}, "a Kubernetes name"),
    ({"labels": {"team": "a b"}}, "`labels['team']='a b'`"),
    ({"env": {"A-B": "1"}}, "`HF_HOME`"),
    ({"env": {"PORT": 8080}}, "`env['PORT']` is of type `int`"),
    ({"secret_env": {"TOKEN": "hf"}}, "`SECRET/KEY`"),
    ({"volumes": [{"name": "data"}]}, "`volumes[0]="),
    ({"pod_template": {"spec": {"x": {1, 2}}}}, "`pod_template['spec']['x']="),
    ({"store": "memory://runs"}, "cannot see the memory of one process"),
    ({"store": "ftp://host/runs"}, "`s3://`"),
    ({"store": "s3://"}, "`s3://`"),
    ({"store_credentials": "training"}, "aws-credentials/training"),
    ({"checkpoint": {"every_steps": 0}}, "`checkpoint.every_steps=0`"),
    ({"checkpoint": {"every_step": 1}}, "Did you mean `every_steps`?"),
    ({"checkpoint": {"keep_best": 2}}, "`metric`"),
    ({"topology": "nearest:rack"}, "`preferred:LABEL`"),
    ({"price_per_node_hour": -1}, "a number >= 0"),
]


@pytest.mark.parametrize(("fields", "text"), REFUSED, ids=[str(fields)[:40] for fields, _ in REFUSED])
def test_spec_refuses_value_and_says_what_is_accepted(fields, text):
    with pytest.raises(SpecError) as refused:
        build_spec(fields)
    assert text in str(refused.value)
    assert next(iter(fields)) in str(refused.value)


NORMAL_FORMS = [
    ("cpu", 4, "4"),
    ("cpu", 0.5, "0.5"),
    ("shm_size", 0, "0"),
    ("gpu", "8", 8),
    ("log_level_leader", "debug", "DEBUG"),
    ("preload", ("torch",), ["torch"]),
    ("checkpoint", {"every_steps": 100}, CheckpointPolicy(every_steps=100)),
    ("store", " s3://bucket/runs ", "s3://bucket/runs"),
]


@pytest.mark.parametrize(("name", "value", "normal"), NORMAL_FORMS, ids=[name for name, _, _ in NORMAL_FORMS])
def test_field_is_brought_into_its_normal_form(name, value, normal):
    assert check_field(name, value) == normal


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PET_NNODES"])
@pytest.mark.parametrize("field", ["env", "secret_env"])
def test_env_refuses_what_the_agent_sets_c021(field, name):
    with pytest.raises(SpecError, match=f"`{name}` cannot be set in `{field}`: the agent sets it"):
        build_spec({field: {name: "secret/key"}})


def test_env_refusal_does_not_repeat_the_value():
    with pytest.raises(SpecError) as refused:
        build_spec({"env": {"TOKEN": b"hunter2"}})
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "cure"),
    [("nodes", "Did you mean `nnodes`?"), ("zzz", "Its fields are nnodes,")],
    ids=["near", "far"],
)
def test_unknown_field_is_refused_with_the_nearest_name(name, cure):
    with pytest.raises(SpecError) as refused:
        build_spec({name: 2})
    assert f"`{name}` is not a field of `TorchElastic`. {cure}" in str(refused.value)


CONTRADICTIONS = [
    ({"nnodes": "1:2", "rdzv_backend": "static"}, '`rdzv_backend="c10d"`'),
    ({"store": "/runs", "work_pool": "train"}, "`file://`"),
    (
        {"env": {"TOKEN": "a"}, "secret_env": {"TOKEN": "hf/token"}},
        "`TOKEN` is set in `env` and in `secret_env`",
    ),
    ({"gpu": 2, "nproc_per_node": 4}, "`gpu=2` asks for 2 on each node"),
    ({"gpu": 0, "nproc_per_node": "gpu"}, "without GPUs"),
]


@pytest.mark.parametrize(
    ("fields", "text"), CONTRADICTIONS, ids=[str(list(fields)) for fields, _ in CONTRADICTIONS]
)
def test_spec_refuses_values_that_contradict_each_other(fields, text):
    with pytest.raises(SpecError) as refused:
        build_spec(fields)
    assert text in str(refused.value)


def test_spec_accepts_shared_gpus_when_env_allows_them_c018():
    spec = build_spec({"gpu": 1, "nproc_per_node": 2, "env": {ALLOW_SHARED_GPUS_VARIABLE: "1"}})
    assert spec.nproc_per_node == 2


def test_spec_accepts_shared_disk_of_a_pool_when_it_is_a_url():
    assert build_spec({"store": "file:///mnt/runs", "work_pool": "train"}).store == "file:///mnt/runs"


def test_rendezvous_waits_longer_in_a_pool_unless_set_c024():
    assert build_spec({"work_pool": "train"}).rdzv_timeout_seconds == 900
    assert build_spec({"work_pool": "train", "rdzv_timeout_seconds": 60}).rdzv_timeout_seconds == 60


def test_store_credentials_take_a_saved_block():
    class Saved:
        _block_document_name = "training"

        def get_block_type_slug(self) -> str:
            return "aws-credentials"

    assert check_field("store_credentials", Saved()) == "aws-credentials/training"


def test_later_layer_wins_and_none_is_a_value():
    merged = merge_fields({"nnodes": 1, "work_pool": "train"}, {"nnodes": 4}, {"work_pool": None})
    assert merged == {"nnodes": 4, "work_pool": None}


def test_field_that_is_none_is_not_set_and_zero_gpus_mean_something_everywhere():
    assert fields_without_meaning_here({"queue": None, "gpu": 0, "image": "x"}, work_pool=None) == ("image",)
    assert fields_without_meaning_here({"gpu": 1}, work_pool=None) == ("gpu",)


def test_field_that_nothing_reads_yet_is_named():
    assert fields_without_meaning_here({"rdzv_backend": "c10d"}, work_pool=None) == ("rdzv_backend",)


def test_fields_of_a_pool_mean_nothing_here():
    names = {"queue": "q", "nnodes": 2, "image": "x", "env": {}, "resume_after_preemption": False}
    meaningless = ("resume_after_preemption", "queue", "image")
    assert fields_without_meaning_here(names, work_pool=None) == meaningless
    assert fields_without_meaning_here(names, work_pool="train") == ()


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        pytest.param({}, 2 * (600 + 15 + 480), id="torch-defaults"),
        pytest.param({"nccl_enable_monitoring": False, "max_restarts": 0}, 615, id="no-heartbeat"),
        pytest.param(
            {"nccl_collective_timeout_seconds": 60, "nccl_heartbeat_timeout_seconds": 30}, 210, id="settings"
        ),
        pytest.param({"nccl_async_error_handling": False}, float("inf"), id="no-error-handling"),
        pytest.param({"run_timeout_seconds": 100}, 100, id="run-timeout"),
    ],
)
def test_worst_case_wait_follows_from_settings_and_restarts(fields, seconds):
    spec = build_spec(fields)
    assert worst_case_wait_seconds(spec) == seconds
    assert ("for ever" if seconds == float("inf") else f"at most {seconds:g} s") in render_worst_case_wait(
        spec
    )


def test_budgets_are_multiplied_in_one_sentence():
    assert render_budgets(build_spec({"max_restarts": 2, "max_attempts": 1}), retries=1) == (
        "The function starts at most 6 times: (1 + 2 restarts) x 1 attempt x (1 + 1 retry); "
        "a preemption or a lost node spends none."
    )


@pytest.mark.parametrize("room", ["spec", "ranks"])
def test_room_imports_only_the_standard_library(run_script, room):
    script = f"import json, sys\nimport prefect_torch_elastic.{room}\nprint(json.dumps(sorted(sys.modules)))"
    result = run_script(script)
    assert result.rc == 0, result.stderr
    assert not {"prefect", "pydantic", "torch", "numpy", "kubernetes"} & set(json.loads(result.stdout))
