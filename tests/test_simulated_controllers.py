"""The simulated controllers against a real control plane: the same scenarios, words, counters and order."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.simulators.kubernetes.conditions import is_true
from tests.simulators.kubernetes.jobpods import format_indexes, parse_indexes
from tests.simulators.kubernetes.kueue_flavors import sum_requests
from tests.simulators.kubernetes.objects import Obj
from tests.simulators.kubernetes.onlooker import Write, list_conditions, list_milestones, read_counters
from tests.simulators.kubernetes.quantities import format_quantity, parse_quantity
from tests.simulators.kubernetes.rehearsal import PLAN, Rehearsal
from tests.simulators.kubernetes.runner import Controllers
from tests.simulators.kubernetes.storage import Storage

FIXTURES = Path(__file__).parent / "fixtures" / "simulator"
SCENARIOS = sorted(path.stem for path in FIXTURES.glob("*.json"))


@cache
def read_scenario(name: str) -> Obj:
    return json.loads((FIXTURES / f"{name}.json").read_text())


@cache
def play(name: str) -> tuple[Write, ...]:
    return tuple(Rehearsal(read_scenario(name)).play())


@pytest.mark.parametrize("name", SCENARIOS)
def test_controllers_say_what_a_real_cluster_says(name):
    scenario = read_scenario(name)
    told = list_conditions(play(name))
    for left_out in scenario["leftOut"]:  # what a race decided in the captured run
        who, condition = left_out.split()
        told[who].pop(condition, None)
    assert told == scenario["conditions"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_controllers_count_as_a_real_cluster_does(name):
    counted = {who: counters for who, counters in read_counters(play(name)).items() if counters}
    assert counted == read_scenario(name)["counters"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_controllers_keep_the_order_of_a_real_cluster(name):
    seen = list_milestones(play(name))
    rest = iter(seen)
    for milestone in read_scenario(name)["order"]:
        assert milestone in rest, f"`{milestone}` came too early or never; seen: {seen}"


@pytest.mark.parametrize(
    ("indexes", "text"), [(set(), ""), ({0, 1}, "0,1"), ({0, 1, 2, 5}, "0-2,5"), ({7}, "7")], ids=str
)
def test_completed_indexes_are_spelt_as_the_job_controller_does(indexes, text):
    assert (format_indexes(indexes), parse_indexes(text)) == (text, indexes)


@pytest.mark.parametrize(
    ("resource", "text", "times", "product"),
    [
        ("cpu", "500m", 3, "1500m"),
        ("cpu", "2", 2, "4"),
        ("memory", "1Gi", 2, "2Gi"),
        ("memory", "1G", 1, "1000000000"),
        ("nvidia.com/gpu", 8, 4, "32"),
    ],
    ids=str,
)
def test_quantities_are_added_up_and_spelt_as_kueue_does(resource, text, times, product):
    assert format_quantity(resource, parse_quantity(text) * times) == product


def test_requests_of_a_gang_are_those_of_all_its_pods():
    container = {"resources": {"limits": {"nvidia.com/gpu": "4"}, "requests": {"cpu": "1"}}}
    first = {"resources": {"requests": {"cpu": "3"}}}
    spec = {"containers": [container, {}], "initContainers": [first]}
    requests = sum_requests({"count": 2, "template": {"spec": spec}})
    assert requests == {"nvidia.com/gpu": 8, "cpu": 6}


def test_two_hundred_gangs_of_eight_pods_live_and_end_within_seconds():
    scenario = copy.deepcopy(read_scenario("js-suspend"))
    spec = scenario["actions"][0]["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    job.update(parallelism=8, completions=8)
    job["template"]["metadata"]["annotations"] = {PLAN: "run=2"}
    creations = [{"at": 0.0, "do": "create", "name": f"gang-{number}", "spec": spec} for number in range(200)]
    rehearsal = Rehearsal({**scenario, "actions": creations, "seconds": 6.0})
    before = time.process_time()
    rehearsal.play()
    spent_seconds = time.process_time() - before
    ends = [jobset["status"].get("terminalState") for jobset in rehearsal.storage.list("jobsets")]
    assert ends == ["Completed"] * 200
    assert spent_seconds < 20.0  # about 2 on a quiet core


# --- in the background --------------------------------------------------------------------------------------


@pytest.fixture
def running() -> Iterator[tuple[Storage, Controllers]]:
    storage = Storage()
    controllers = Controllers(storage, batch_seconds=0.0)
    controllers.start()
    yield storage, controllers
    controllers.close()


def wait_until(holds: Callable[[], bool], *, seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.005)


def create_jobset(storage: Storage, name: str) -> None:
    spec = copy.deepcopy(read_scenario("js-suspend")["actions"][0]["spec"])
    storage.create("jobsets", {"metadata": {"name": name, "namespace": "default"}, "spec": spec})


def test_controllers_work_in_the_background(running):
    storage, _ = running
    create_jobset(storage, "gang")
    wait_until(lambda: len(storage.list("pods")) == 2)

    def succeed(pod: Obj) -> None:
        pod["status"]["phase"] = "Succeeded"

    for pod in storage.list("pods"):
        storage.mutate("pods", "default", pod["metadata"]["name"], succeed, status=True)
    wait_until(lambda: is_true(storage.list("jobsets")[0], "Completed"))


def test_closed_controllers_leave_no_thread(running):
    _, controllers = running
    controllers.close()
    assert "simulated-controllers" not in {thread.name for thread in threading.enumerate()}
