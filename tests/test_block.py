"""The block: the same defaults and messages as the spec, saved, loaded and shown in a form."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from pydantic import ValidationError

from prefect_torch_elastic.block import TorchElastic
from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.spec import FIELD_NAMES, CheckpointPolicy, Spec, build_spec

FORM_TYPES = {"string", "integer", "number", "boolean", "null", "object", "array"}

EVERYTHING = {
    "nnodes": "2:4",
    "nproc_per_node": "gpu",
    "rdzv_configs": {"last_call_timeout": 30},
    "max_restarts": 0,
    "non_retryable": ["builtins.ValueError"],
    "work_pool": "train",
    "gpu": "H200:8",
    "env": {"HF_HOME": "/models"},
    "volumes": [{"name": "data", "mountPath": "/data", "emptyDir": {}}],
    "nccl_enable_monitoring": False,
    "store": "s3://bucket/runs",
    "store_credentials": "aws-credentials/training",
    "checkpoint": CheckpointPolicy(every_steps=100),
}


def test_block_has_the_fields_and_defaults_of_the_spec():
    assert tuple(TorchElastic.model_fields) == FIELD_NAMES
    block, spec = TorchElastic(), Spec()
    assert {name: getattr(block, name) for name in FIELD_NAMES} == {
        field.name: getattr(spec, field.name) for field in fields(spec)
    }


@pytest.mark.parametrize(
    "values",
    [
        {"nnodes": "4:2"},
        {"nproc_per_node": 0},
        {"nodes": 2},
        {"env": {"RANK": "1"}},
        {"start_method": "fork"},
        {"nnodes": "1:2", "rdzv_backend": "static"},
        {"checkpoint": {"keep_best": 1}},
        {"cpu": "four"},
    ],
    ids=str,
)
def test_block_refuses_with_the_text_of_the_spec_c018_c023(values):
    with pytest.raises(SpecError) as expected:
        build_spec(values)
    with pytest.raises(ValidationError) as refused:
        TorchElastic(**values)
    assert str(expected.value) in str(refused.value)


def test_block_error_does_not_show_other_values():
    with pytest.raises(ValidationError) as refused:
        TorchElastic(env={"TOKEN": "hunter2", "RANK": "0"})
    assert "hunter2" not in str(refused.value)


def test_block_gives_the_fields_that_were_set():
    block = TorchElastic(nnodes=" 2 ", env={"A": "1"}, queue=None)  # pyright: ignore[reportArgumentType]
    assert block.to_fields() == {"nnodes": 2, "env": {"A": "1"}}
    assert block.to_spec() == build_spec({"nnodes": 2, "env": {"A": "1"}})


def test_block_in_code_gives_a_default_that_was_set():
    assert TorchElastic(max_restarts=1).to_fields() == {"max_restarts": 1}


def test_block_checks_a_value_that_was_assigned_later():
    block = TorchElastic()
    block.nnodes = "4:2"
    with pytest.raises(SpecError, match="4 is more than 2"):
        block.to_spec()


def test_blocks_share_no_default():
    TorchElastic().env["A"] = "1"
    assert TorchElastic().env == {}


def test_block_refuses_credentials_that_were_not_saved():
    with pytest.raises(ValidationError, match=r"Save it with `.save\(name\)`"):
        TorchElastic(store_credentials=TorchElastic())


def test_form_has_a_title_and_a_sentence_for_every_field():
    for name, field in TorchElastic.model_fields.items():
        assert field.title, name
        assert (field.description or "").endswith("."), name


def test_form_knows_only_what_the_ui_can_show():
    schema = TorchElastic.model_json_schema()
    assert len(json.dumps(schema)) < 12_000
    assert list(schema["definitions"]) == ["CheckpointPolicy"]
    assert schema.get("required", []) == []
    for part in (schema, schema["definitions"]["CheckpointPolicy"]):
        for name, field in part["properties"].items():
            shown = schema["definitions"]["CheckpointPolicy"] | field if "$ref" in field else field
            assert "description" in shown, name
            assert shown["title"], name
            assert all(choice["type"] in FORM_TYPES for choice in shown.get("anyOf", [shown])), name


def test_block_tells_prefect_what_it_is():
    assert (TorchElastic.get_block_type_name(), TorchElastic.get_block_type_slug()) == (
        "Torch Elastic",
        "torch-elastic",
    )
    assert "gang" in (TorchElastic.get_description() or "")
    assert 'TorchElastic.load("BLOCK_NAME")' in (TorchElastic.get_code_example() or "")
    assert str(TorchElastic._logo_url).startswith("https://")
    assert str(TorchElastic._documentation_url).startswith("https://")


def load(name: str) -> TorchElastic:
    block = TorchElastic.load(name)
    assert isinstance(block, TorchElastic)  # `load` may be awaited elsewhere
    return block


def test_block_is_saved_and_loaded_with_what_was_set(prefect_server):
    saved = TorchElastic(**EVERYTHING)
    saved.save("everything")
    loaded = load("everything")
    assert loaded.to_fields() == saved.to_fields() == EVERYTHING
    assert loaded.to_spec() == build_spec(EVERYTHING)


def test_block_forgets_what_is_no_longer_set_when_it_is_saved_again(prefect_server):
    TorchElastic(nnodes=2, queue="a", max_restarts=5).save("less")
    TorchElastic(nnodes=3).save("less", overwrite=True)  # Prefect merges old and new values
    assert load("less").to_fields() == {"nnodes": 3}


def test_block_takes_a_saved_block_as_credentials(prefect_server):
    credentials = TorchElastic()  # any block will do
    credentials.save("bucket")
    assert TorchElastic(store_credentials=credentials).store_credentials == "torch-elastic/bucket"


def test_block_is_found_by_its_slug_through_the_entry_point_module(run_script):
    result = run_script(
        "import prefect_torch_elastic.collection\n"
        "from prefect.blocks.core import Block\n"
        "print(Block.get_block_class_from_key('torch-elastic').__name__)"
    )
    assert result.stdout.split() == ["TorchElastic"], result.stderr


def test_collection_is_imported_without_any_extra(run_script):
    result = run_script(
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'kubernetes', 'obstore', 'numpy')))\n"
        "import prefect_torch_elastic.collection\n"
        "print('imported')"
    )
    assert result.stdout.split() == ["imported"], result.stderr
