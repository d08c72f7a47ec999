"""How many ranks, on which GPUs, and addresses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.ranks import (
    assign_gpus,
    decide_processes,
    parse_endpoint,
    render_endpoint,
)


@pytest.mark.parametrize(
    ("asked", "gpus", "processes"),
    [
        pytest.param("auto", 2, 2, id="auto-gpus"),
        pytest.param("auto", 0, 16, id="auto-cpus"),
        pytest.param("gpu", 2, 2, id="gpu"),
        pytest.param("cpu", 2, 16, id="cpu-next-to-gpus"),
        pytest.param(2, 2, 2, id="all-gpus"),
        pytest.param(4, 0, 4, id="cpu-only-node"),
    ],
)
def test_processes_follow_torchrun_c018(asked, gpus, processes):
    assert decide_processes(asked, gpu_count=gpus, cpu_count=16) == processes


def test_processes_above_the_visible_gpus_are_refused_c018():
    with pytest.raises(SpecError) as refused:
        decide_processes(4, gpu_count=2, cpu_count=16, visible_devices="4,5")
    assert str(refused.value).startswith("asked for 4 processes, 2 GPUs visible (4,5)")
    assert "`nproc_per_node=2`" in str(refused.value)


def test_processes_may_share_gpus_when_allowed_c018():
    assert decide_processes(4, gpu_count=2, cpu_count=16, allow_shared_gpus=True) == 4


def test_processes_by_gpu_are_refused_on_a_node_without_one_c018():
    with pytest.raises(SpecError, match="0 GPUs visible"):
        decide_processes("gpu", gpu_count=0, cpu_count=16, visible_devices="")


@pytest.mark.parametrize("asked", ["many", 0, -1], ids=repr)
def test_processes_refuse_what_a_spec_would_refuse(asked):
    with pytest.raises(SpecError, match="is not accepted"):
        decide_processes(asked, gpu_count=0, cpu_count=1)


def test_second_gang_gets_other_gpus_c019():
    visible = ("4", "5", "6", "7")
    first = assign_gpus(visible, taken=(), wanted=2)
    second = assign_gpus(visible, taken=first, wanted=2)
    assert (first, second) == (("4", "5"), ("6", "7"))


def test_gang_is_refused_when_too_few_gpus_are_free_c019():
    with pytest.raises(SpecError) as refused:
        assign_gpus(("0", "1", "2"), taken={"1", "2"}, wanted=2)
    assert str(refused.value).startswith(
        "asked for 2 GPUs, 1 of 3 are free (0); other gangs on this node hold 1,2."
    )


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        pytest.param("[fd00:abcd::5]:29400", ("fd00:abcd::5", 29400), id="ipv6"),
        pytest.param("[::1]", ("::1", 29400), id="ipv6-without-port"),
        pytest.param("host", ("host", 29400), id="host"),
        pytest.param("localhost:0", ("localhost", 0), id="any-free-port"),
        pytest.param(" 10.0.0.1:80 ", ("10.0.0.1", 80), id="ipv4"),
    ],
)
def test_endpoint_is_split_at_its_port_c028(endpoint, expected):
    assert parse_endpoint(endpoint) == expected


@pytest.mark.parametrize(
    ("endpoint", "cure"),
    [
        pytest.param("fd00:abcd::5", "`[fd00:abcd::5]`", id="address"),
        pytest.param("fd00::5:80", "`[fd00::5]:80` or `[fd00::5:80]`", id="both"),
        pytest.param("::1:29400", "`[::1]:29400`", id="address-or-port"),
    ],
)
def test_endpoint_of_bare_ipv6_is_refused_with_brackets_c028(endpoint, cure):
    with pytest.raises(SpecError) as refused:
        parse_endpoint(endpoint)
    assert cure in str(refused.value)


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        ":1",
        "host:",
        "host:x",
        "host:65536",
        "host:-1",
        "[::1",
        "[::1]1",
        "[host]:1",
        "a:b:c",
        "tcp://host:1",
    ],
    ids=str,
)
def test_endpoint_refuses_what_is_no_address_c028(endpoint):
    with pytest.raises(SpecError, match="is not an address"):
        parse_endpoint(endpoint)


@given(st.text(max_size=20))
def test_endpoint_is_parsed_or_refused_whatever_the_text_c028(text):
    try:
        host, port = parse_endpoint(text)
    except SpecError:
        return
    assert parse_endpoint(render_endpoint(host, port)) == (host, port)


@given(st.one_of(st.ip_addresses().map(str), st.just("node-0.gang")), st.integers(0, 65535))
def test_rendered_endpoint_is_parsed_back_c028(host, port):
    assert parse_endpoint(render_endpoint(host, port)) == (host, port)
