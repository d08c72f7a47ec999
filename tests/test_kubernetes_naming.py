"""Names of gangs: valid for every title and size, the same again, and different for different runs."""

from __future__ import annotations

import re
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_elastic import pod
from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.kubernetes import naming
from prefect_torch_elastic.spec_fields import check_field

DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

titles = st.text(max_size=120)
sizes = st.integers(1, 999_999)
runs = st.uuids().map(str)


@given(titles, runs, sizes)
def test_name_of_a_gang_is_valid_for_every_title_and_size_c043(title, run, nnodes):
    name = naming.name_jobset(title, flow_run_id=run, nnodes=nnodes)
    assert len(name) <= naming.LONGEST_NAME
    assert DNS_LABEL.fullmatch(name)
    assert naming.check_name(name, nnodes=nnodes) == name


@given(titles, runs, sizes)
def test_longest_names_that_come_of_it_are_dns_labels_c043(title, run, nnodes):
    name = naming.name_jobset(title, flow_run_id=run, nnodes=nnodes)
    pod = f"{naming.name_job(name)}-{nnodes - 1}-abcde"
    host, subdomain = naming.name_host(name, nnodes - 1).split(".")
    for derived in (naming.name_job(name), pod, host, subdomain):
        assert DNS_LABEL.fullmatch(derived)
        assert len(derived) <= 63


@given(titles, runs, runs)
def test_two_runs_have_two_names_c043(title, one, other):
    names = {naming.name_jobset(title, flow_run_id=run, nnodes=4) for run in (one, other)}
    assert len(names) == len({one, other})


def test_runs_of_the_same_minute_have_two_names():
    """Time-ordered ids begin alike."""
    one, other = "0199c0de-0000-7000-8000-000000000001", "0199c0de-0000-7000-8000-000000000002"
    assert naming.name_jobset("x", flow_run_id=one, nnodes=1) != naming.name_jobset(
        "x", flow_run_id=other, nnodes=1
    )


def test_run_keeps_its_name():
    run = str(uuid.uuid4())
    names = {naming.name_jobset("train", flow_run_id=run, nnodes=nnodes) for nnodes in (1, 8, 512)}
    assert len(names) == 1


@pytest.mark.parametrize(
    ("title", "slug"),
    [
        ("pretrain-llama", "pretrain-llama"),
        ("I_am_a_Flow/" + "very-long-" * 8, "i-am-a-flow-very-long-very-long"),
        ("-9 Übung!", "gang-9-ubung"),
        ("训练", "gang"),
        ("", "gang"),
    ],
    ids=["plain", "long", "odd", "no-latin", "empty"],
)
def test_name_keeps_what_it_can_of_the_title_c043(title, slug):
    name = naming.name_jobset(title, flow_run_id="r", nnodes=12)
    assert name.rpartition("-")[0] == slug


# A real API server accepts these lengths and refuses one more (JobSet 0.12.0).
@pytest.mark.parametrize(("nnodes", "longest"), [(1, 48), (10, 48), (11, 47), (100, 47), (1000, 46)])
def test_budget_is_that_of_jobset_c043(nnodes, longest):
    assert naming.check_name("a" * longest, nnodes=nnodes)
    with pytest.raises(SpecError, match=f"at most {longest} small letters"):
        naming.check_name("a" * (longest + 1), nnodes=nnodes)


@pytest.mark.parametrize("name", ["Bad_Name", "x.y", "1abc", "a-", "", "ü"])
def test_name_that_jobset_refuses_is_refused_with_the_limit_c043(name):
    with pytest.raises(SpecError, match="at most 48 small letters, digits and `-` for 2 nodes"):
        naming.check_name(name, nnodes=2)


@pytest.mark.parametrize("value", ["a" * 64, "a b", "-a", "a/b", "é"])
def test_label_value_that_kubernetes_refuses_is_refused(value):
    with pytest.raises(SpecError, match=r"labels\['team'\]"):
        naming.check_label_value("labels['team']", value)


@given(st.text(max_size=70))
def test_label_values_are_those_that_a_task_may_have(value):
    def accepts(check) -> bool:
        try:
            check()
        except SpecError:
            return False
        return True

    stripped = value.strip()
    in_a_task = accepts(lambda: check_field("labels", {"a": stripped}))
    assert accepts(lambda: naming.check_label_value("labels", stripped)) == in_a_task


def test_variables_of_the_gang_are_refused():
    naming.check_variables("env", ["HF_HOME", "PREFECT_API_URL"])
    with pytest.raises(SpecError, match="`PREFECT_TORCH_ELASTIC_LEADER` cannot be set in `env`"):
        naming.check_variables("env", ["HF_HOME", pod.LEADER_VARIABLE])


def test_leader_is_reached_by_the_host_name_that_jobset_gives():
    assert naming.name_leader("train-1a2b3c4d") == "train-1a2b3c4d-node-0-0.train-1a2b3c4d:29400"
