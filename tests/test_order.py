"""The order of a call: it reaches the other side as it was, or is refused with the field's name."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_elastic.dispatch import documents
from prefect_torch_elastic.dispatch.documents import parse_document, sign_document
from prefect_torch_elastic.dispatch.order import (
    CallKind,
    CallOrder,
    CallReference,
    parse_order,
    render_command,
    render_order,
)
from prefect_torch_elastic.errors import SpecError, TransferError
from prefect_torch_elastic.logentries import StoredPart
from prefect_torch_elastic.spec import build_spec, restore_spec

KEY = b"k" * 32
NAME = "file:///store/run/calls/c0ffee/order-1"
SPEC = build_spec(
    {"nnodes": "1:2", "work_pool": "train", "env": {"GREETING": "grüß"}, "store": "s3://bucket/runs"}
)
ORDER = CallOrder(
    kind=CallKind.GANG,
    task_name="pretrain",
    root="0192f7de-0000-7000-8000-000000000000",
    run_key="pretrain-7b",
    call="c0ffee",
    parcel=StoredPart(key="calls/c0ffee/call-17af", size=4096, crc32c=0xFFFFFFFF),
    code=StoredPart(key="calls/c0ffee/code-17af", size=100, crc32c=0),
    code_sha256="5e" * 32,
    modules=["torch", "mine.models"],
    fields=dataclasses.asdict(SPEC),
    flow_run_id="f",
    task_run_id="t",
    task_run_name="pretrain-0",
    retries=2,
    log_prints=None,
    versions={"python": "3.11.7", "prefect_torch_elastic": "0.1.0"},
)
REFERENCE = CallReference(
    store="s3://bucket/runs", order="pretrain-7b/calls/c0ffee/order-17af", root="0192f7de-1"
)


def change(**fields: Any) -> bytes:
    """Return the order with other fields, properly signed; `...` takes a field out."""
    body = json.loads(json.dumps(dataclasses.asdict(ORDER)))
    for name, value in fields.items():
        inner, _, field = name.partition("__")
        target, field = (body[inner], field) if field else (body, inner)
        if value is ...:
            del target[field]
        else:
            target[field] = value
    return sign_document(body, key=KEY)


# ---------------------------------------------------------------- orders


@pytest.mark.parametrize("order", [ORDER, dataclasses.replace(ORDER, code=None, kind=CallKind.BODY)])
def test_order_arrives_as_it_was(order):
    found = parse_order(memoryview(render_order(order, key=KEY)), NAME, key=KEY)
    assert found == order
    assert restore_spec(found.fields) == SPEC


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        pytest.param({"kind": "both"}, "order.kind", id="kind"),
        pytest.param({"kind": ["gang"]}, "order.kind", id="kind-list"),
        pytest.param({"task_name": 1}, "order.task_name", id="number-for-text"),
        pytest.param({"task_name": None}, "order.task_name", id="null-for-text"),
        pytest.param({"root": "../other"}, "order.root", id="root-not-a-word"),
        pytest.param({"call": "a/b"}, "order.call", id="call-not-a-word"),
        pytest.param({"call": "coffee"}, "order.parcel.key", id="parcel-of-another-call"),
        pytest.param({"parcel": None}, "order.parcel", id="no-parcel"),
        pytest.param({"parcel__key": "calls/../../x"}, "order.parcel.key", id="key-that-climbs"),
        pytest.param({"parcel__size": -1}, "order.parcel.size", id="negative"),
        pytest.param({"parcel__size": True}, "order.parcel.size", id="true-for-number"),
        pytest.param({"parcel__size": 1.0}, "order.parcel.size", id="fraction"),
        pytest.param({"parcel__crc32c": ...}, "order.parcel.crc32c", id="part-without-checksum"),
        pytest.param({"code__more": 1}, "more", id="part-with-more"),
        pytest.param({"code__key": "calls/coffee/code-1"}, "order.code.key", id="code-of-another-call"),
        pytest.param({"modules": "torch"}, "order.modules", id="text-for-list"),
        pytest.param({"modules": ["torch", 1]}, "order.modules[1]", id="number-in-list"),
        pytest.param({"fields": []}, "order.fields", id="list-for-object"),
        pytest.param({"fields__nnodes": ...}, "order.fields.nnodes", id="spec-without-field"),
        pytest.param({"fields__colour": "red"}, "colour", id="spec-with-unknown-field"),
        pytest.param({"retries": "2"}, "order.retries", id="text-for-number"),
        pytest.param({"versions": {"python": 3}}, "order.versions.python", id="number-for-version"),
        pytest.param({"versions": ...}, "order.versions", id="missing"),
        pytest.param({"priority": 1}, "priority", id="unknown"),
    ],
)
def test_signed_order_with_an_odd_field_is_refused_by_name(fields, field):
    with pytest.raises(TransferError) as refused:
        parse_order(change(**fields), NAME, key=KEY)
    assert f"`{NAME}` cannot be carried out" in str(refused.value)
    assert field in str(refused.value)
    assert "same version" in str(refused.value)


def test_order_of_a_newer_version_says_who_wrote_it():
    data = change(colour="red", versions={"prefect_torch_elastic": "0.2.0"})
    with pytest.raises(TransferError, match=r"unknown field 'colour'.*by version '0\.2\.0'"):
        parse_order(data, NAME, key=KEY)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CallOrder)])
def test_every_field_of_an_order_has_to_be_there(field):
    with pytest.raises(TransferError, match=f"`order.{field}` is missing"):
        parse_order(change(**{field: ...}), NAME, key=KEY)


# ---------------------------------------------------------------- signed documents


def test_same_document_has_the_same_bytes_whatever_the_order_of_its_fields():
    assert sign_document({"a": 1, "b": [2]}, key=KEY) == sign_document({"b": (2,), "a": 1}, key=KEY)


def test_keys_of_a_mapping_that_are_numbers_arrive_as_texts():
    data = sign_document({"ports": {2: "a", 10: "b"}}, key=KEY)
    assert parse_document(data, NAME, key=KEY) == {"ports": {"2": "a", "10": "b"}}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), _JSON, max_size=5))
def test_any_document_arrives_as_it_was(body):
    assert parse_document(sign_document(body, key=KEY), NAME, key=KEY) == body


@given(st.data())
def test_document_with_any_byte_changed_is_refused(data):
    document = bytearray(render_order(ORDER, key=KEY))
    place = data.draw(st.integers(0, len(document) - 1))
    document[place] ^= data.draw(st.integers(1, 255))
    try:
        found = parse_order(bytes(document), NAME, key=KEY)
    except TransferError:
        return
    assert found == ORDER  # the change was in how JSON writes the same value


@given(st.integers(0, 300))
def test_document_that_is_cut_is_refused(kept):
    document = sign_document({"text": "x" * 300}, key=KEY)
    with pytest.raises(TransferError, match="not whole"):
        parse_document(document[:kept], NAME, key=KEY)


def test_document_of_another_key_is_refused_with_the_cure():
    with pytest.raises(TransferError) as refused:
        parse_order(render_order(ORDER, key=b"o" * 32), NAME, key=KEY)
    assert f"`{NAME}` was not signed with the key of this call" in str(refused.value)
    assert "same Prefect API" in str(refused.value)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x80\x04K\x01.", id="pickle"),
        pytest.param(b"[]", id="list"),
        pytest.param(b'{"body": {}}', id="no-mac"),
        pytest.param(b'{"body": {}, "mac": 1}', id="mac-number"),
        pytest.param(b'{"body": {}, "mac": "\\u00e9"}', id="mac-not-ascii"),
        pytest.param(b'{"body": [], "mac": "%s"}' % (b"0" * 64), id="body-list"),
        pytest.param(b'{"body": {"a": NaN}, "mac": "%s"}' % (b"0" * 64), id="nan"),
        pytest.param(b'{"body": {"a": 1e999}, "mac": "%s"}' % (b"0" * 64), id="infinite"),
        pytest.param(b'{"body": {"a": %s}, "mac": ""}' % (b"[" * 100_000), id="deep"),
        pytest.param(b'{"body": {"a": %s}, "mac": ""}' % (b"1" * 10_000), id="long-number"),
        pytest.param('{"body": {"a": "ü"}, "mac": ""}'.encode(), id="not-ascii"),
    ],
)
def test_anything_else_in_the_place_of_a_document_is_refused(data):
    with pytest.raises(TransferError, match=f"`{NAME}` is not whole, or no document of ours"):
        parse_document(data, NAME, key=KEY)


def test_field_that_stands_twice_is_read_as_it_was_verified():
    data = sign_document({"a": 1}, key=KEY).replace(b'{"a":1}', b'{"a":2,"a":1}')
    assert parse_document(data, NAME, key=KEY) == {"a": 1}


def test_document_that_is_too_large_is_neither_written_nor_read(monkeypatch):
    document = sign_document({"text": "x" * 300}, key=KEY)
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 200)
    with pytest.raises(TransferError, match="at most 200 are read"):
        sign_document({"text": "x" * 300}, key=KEY)
    with pytest.raises(TransferError, match="at most 200 are read"):
        parse_document(document, NAME, key=KEY)


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, b"bytes", object(), {(1, 2): 3}], ids=repr)
def test_value_that_json_cannot_carry_is_an_error(value):
    with pytest.raises(TransferError, match=r"cannot be written.*`job_variables`"):
        sign_document({"value": value}, key=KEY)


# ---------------------------------------------------------------- the command


def test_reference_knows_its_run_folder_and_its_call():
    assert (REFERENCE.folder, REFERENCE.call) == ("pretrain-7b", "c0ffee")


def test_command_names_the_order():
    assert shlex.join(render_command(REFERENCE)) == (
        "python -m prefect_torch_elastic.node --store s3://bucket/runs "
        "--call pretrain-7b/calls/c0ffee/order-17af --root 0192f7de-1"
    )


def test_command_names_the_block_with_the_credentials():
    reference = dataclasses.replace(REFERENCE, store_credentials="aws-credentials/training")
    assert render_command(reference)[-2:] == ["--store-credentials", "aws-credentials/training"]


def test_command_of_a_gang_lets_its_job_import_torch_early():
    assert render_command(REFERENCE, nproc_per_node="auto")[-2:] == ["--nproc-per-node", "auto"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param("store", "", id="no-store"),
        pytest.param("store", "--root", id="option-for-store"),
        pytest.param("store", "/data\nrm", id="line-in-store"),
        pytest.param("order", "", id="no-order"),
        pytest.param("order", "run/calls/c0ffee/parcel-1", id="parcel"),
        pytest.param("order", "run/log/c0ffee/order-1", id="elsewhere"),
        pytest.param("order", "/run/calls/c0ffee/order-1", id="absolute"),
        pytest.param("order", "../calls/c0ffee/order-1", id="climbs"),
        pytest.param("order", "a/b/calls/c0ffee/order-1", id="two-folders"),
        pytest.param("order", "run/calls/../order-1", id="call-climbs"),
        pytest.param("order", "run/calls/c0ffee/order-1/more", id="deeper"),
        pytest.param("order", "run/calls/c0ffee/order-1\n", id="line-in-order"),
        pytest.param("order", "-run/calls/c0ffee/order-1", id="option-for-order"),
        pytest.param("root", "", id="no-root"),
        pytest.param("root", "a/b", id="path-for-root"),
        pytest.param("root", "-h", id="option-for-root"),
        pytest.param("store_credentials", "--call", id="option-for-credentials"),
    ],
)
def test_reference_with_an_odd_value_is_refused(field, value):
    with pytest.raises(SpecError) as refused:
        dataclasses.replace(REFERENCE, **{field: value})
    option = "call" if field == "order" else field.replace("_", "-")
    assert f"`--{option} {value!r}` names no call" in str(refused.value)


def test_secret_in_a_store_is_not_shown():
    with pytest.raises(SpecError) as refused:
        dataclasses.replace(REFERENCE, store="s3://me:hunter2@bucket/\n")
    assert "hunter2" not in str(refused.value)
