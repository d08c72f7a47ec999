"""Which object belongs to which gang, and what is kept of it."""

from __future__ import annotations

import copy

import pytest

from prefect_torch_elastic.kubernetes.gangcache import GangCache, strip
from prefect_torch_elastic.kubernetes.resources import Kind
from tests.gangobjects import (
    Thing,
    job,
    jobset,
    pod,
    stamp,
    workload,
)


def filled(*things: Thing) -> GangCache:
    cache = GangCache()
    for version, thing in enumerate(things):
        thing["metadata"]["resourceVersion"] = str(version)
        cache.put(Kind(thing["kind"].lower()), thing)
    return cache


def test_cache_joins_the_objects_of_a_gang_in_any_order():
    gang = filled(job(), workload(), jobset(), workload("other")).find("uid-of-gang")
    assert gang is not None
    assert gang.job is not None
    assert gang.workload is not None
    assert gang.workload["metadata"]["name"] == "jobset-gang-16d98"
    assert (gang.name, gang.flow_run_id, gang.pod_stop_seconds) == ("gang", "run-of-gang", 50.0)


def test_cache_leaves_out_the_workloads_of_other_kinds_of_jobs():
    cache = filled(workload("gang", kind="Job"))
    assert cache.put(Kind.WORKLOAD, workload("other", kind="RayJob")) == set()


def test_cache_takes_the_newest_workload_when_kueue_made_another():
    newer = workload(suffix="99999")
    newer["metadata"]["creationTimestamp"] = stamp(60)
    for things in ((newer, workload()), (workload(), newer)):
        gang = filled(jobset(), *copy.deepcopy(things)).find("uid-of-gang")
        assert gang is not None
        assert gang.workload is not None
        assert gang.workload["metadata"]["name"] == "jobset-gang-99999"


def test_cache_replaces_all_of_one_kind_and_namespace_and_names_what_changed():
    cache = filled(jobset("same"), jobset("changed"), jobset("gone"))
    changed = jobset("changed")
    same, changed["metadata"]["resourceVersion"] = jobset("same"), "7"
    same["metadata"]["resourceVersion"] = "0"
    assert cache.replace(Kind.JOBSET, "ml", [same, changed, jobset("new")]) == {
        "uid-of-changed",
        "uid-of-gone",
        "uid-of-new",
    }
    assert cache.replace(Kind.JOBSET, "elsewhere", []) == set()
    assert sorted(cache.list_gangs()) == ["uid-of-changed", "uid-of-new", "uid-of-same"]


def test_cache_tells_a_gang_from_an_older_one_of_the_same_name():
    cache = filled(jobset())
    again = jobset()
    again["metadata"] |= {"uid": "uid-of-another", "resourceVersion": "8"}
    assert cache.put(Kind.JOBSET, again) == {"uid-of-gang", "uid-of-another"}
    assert cache.remove(Kind.JOBSET, jobset()) == set()
    assert cache.list_gangs() == ["uid-of-another"]


@pytest.mark.parametrize("thing", [jobset(), workload(), job(), pod(0)], ids=lambda thing: thing["kind"])
def test_cache_keeps_neither_pod_templates_nor_managed_fields(thing: Thing):
    kept = repr(strip(Kind(thing["kind"].lower()), thing))
    assert "managedFields" not in kept
    assert "..." not in kept
    assert "containers" not in kept or thing["kind"] == "Pod"
