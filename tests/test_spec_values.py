"""Values with a grammar of their own: nodes, processes, GPUs, topology, start methods."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_elastic.block import TorchElastic
from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.spec import (
    build_spec,
    check_field,
    parse_gpu,
    parse_nnodes,
    parse_nproc_per_node,
    parse_topology,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(2, (2, 2), id="number"),
        pytest.param("2", (2, 2), id="text"),
        pytest.param(" 1:2 ", (1, 2), id="spaces"),
        pytest.param("1 : 3", (1, 3), id="inner-spaces"),
        pytest.param("2:2", (2, 2), id="equal"),
    ],
)
def test_nnodes_is_parsed_c023(value, expected):
    assert parse_nnodes(value) == expected
    spec = build_spec({"nnodes": value})
    assert (spec.min_nodes, spec.max_nodes) == expected


BAD_NNODES = [
    "4:2",
    "1-2",
    "2:",
    ":2",
    0,
    -1,
    "0:2",
    "1:2:3",
    "two",
    True,
    1.5,
    "",
    ":",
    None,
    "-1",
    "¹",
    "9" * 5000,
]


@pytest.mark.parametrize("value", BAD_NNODES, ids=lambda value: repr(value)[:10])
def test_nnodes_refuses_value_and_says_the_forms_c023(value):
    with pytest.raises(SpecError) as refused:
        build_spec({"nnodes": value})
    message = str(refused.value)
    assert message.startswith("`nnodes=")
    assert repr(value)[:60] in message
    assert "`N` or `MIN:MAX` with 1 <= MIN <= MAX" in message
    assert len(message) < 300


@given(smallest=st.integers(1, 9999), more=st.integers(0, 9999))
def test_nnodes_range_survives_the_normal_form_c023(smallest, more):
    text = f" {smallest}:{smallest + more}"
    assert parse_nnodes(text) == (smallest, smallest + more)
    assert check_field("nnodes", check_field("nnodes", text)) == text.strip()


@given(st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none(), st.lists(st.integers())))
def test_nnodes_is_parsed_or_refused_whatever_the_value_c023(value):
    try:
        smallest, largest = parse_nnodes(value)
    except SpecError:
        return
    assert 1 <= smallest <= largest


@pytest.mark.parametrize("value", [0, -1, "many", "0", True, 1.5, None, ""], ids=repr)
def test_nproc_per_node_refuses_value_c018(value):
    with pytest.raises(SpecError, match='Pass a whole number >= 1, or "auto", "gpu" or "cpu"'):
        build_spec({"nproc_per_node": value})


@pytest.mark.parametrize(
    ("value", "expected"), [(4, 4), ("4", 4), ("GPU", "gpu"), (" auto ", "auto")], ids=repr
)
def test_nproc_per_node_is_parsed_c018(value, expected):
    assert parse_nproc_per_node(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(8, (None, 8)), ("8", (None, 8)), (0, (None, 0)), ("H200:8", ("H200", 8))],
    ids=repr,
)
def test_gpu_is_parsed(value, expected):
    assert parse_gpu(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("cloud.provider.com/rack", ("required", "cloud.provider.com/rack")),
        ("preferred:rack", ("preferred", "rack")),
        ("unconstrained", ("unconstrained", None)),
    ],
    ids=str,
)
def test_topology_is_parsed(value, expected):
    assert parse_topology(value) == expected


def test_start_method_fork_is_refused_and_names_warm_c011():
    with pytest.raises(SpecError, match="CUDA context") as refused:
        build_spec({"start_method": "fork"})
    assert '`start_method="warm"`' in str(refused.value)


CREDENTIALS_IN_URLS = [
    "https://user:topsecret@host/runs",
    "s3://AK:topsecret@bucket/runs",
    "s3://topsecret@bucket",
    "file://user:topsecret@host/runs",
    "az://container/runs?sv=1&sig=topsecret",
    "gs://bucket/runs#topsecret",
    "s3://[topsecret@bucket",
]


@pytest.mark.parametrize("url", CREDENTIALS_IN_URLS, ids=lambda url: url.replace("topsecret", "x"))
def test_store_with_credentials_in_its_url_is_refused_without_showing_them(url):
    with pytest.raises(SpecError) as refused:
        check_field("store", url)
    message = str(refused.value)
    assert "topsecret" not in message
    assert message.startswith(f"`store='{url.partition('://')[0]}://")
    with pytest.raises(ValueError, match="store") as caught:
        TorchElastic(store=url)
    assert "topsecret" not in str(caught.value)


@pytest.mark.parametrize("path", ["/data/me@host/runs", "s3://bucket/user@host", "file:///data/a@b"])
def test_store_may_have_an_at_sign_in_its_path(path):
    assert check_field("store", path) == path


@pytest.mark.parametrize(
    "value",
    ["AKIA:topsecret", {"aws_secret_access_key": "topsecret"}, ["topsecret"], b"topsecret"],
    ids=lambda value: type(value).__name__,
)
def test_store_credentials_are_not_shown_when_they_are_refused(value):
    with pytest.raises(SpecError) as refused:
        check_field("store_credentials", value)
    message = str(refused.value)
    assert "topsecret" not in message
    assert f"`{type(value).__name__}`" in message
    assert 'store_credentials="aws-credentials/training"' in message
