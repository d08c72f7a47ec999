"""Steps in work pools, in a real stack: what arrives, what comes back, and what a person sees of it.

The flows are in `pooled/tour.py`. Each runs once, and all tests look at what it left.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.poolruns import POOLED, Api, Driver, drive, open_api

if TYPE_CHECKING:
    from prefect_torch_elastic.dev.stack import DevStack

pytestmark = pytest.mark.timeout(400)  # the first test starts the stack, and waits for a flow with it

# What the driver has set, and its steps must not get.
CALLERS = {"PREFECT_CLIENT_MAX_RETRIES": "3", "ONLY_THE_CALLER_HAS": "1"}
PHASES = "( WaitingForWorker)*( Starting)?( Running)?"
HISTORY = f"Pending Running{PHASES} Completed"
RETRIED = f"Pending Running{PHASES} Retrying{PHASES} Completed"


@pytest.fixture(scope="module")
def api(shared_stack: DevStack) -> Iterator[Api]:
    with open_api(shared_stack) as api:
        yield api


@pytest.fixture(scope="module")
def drivers(shared_stack: DevStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Driver]]:
    """Two drivers at once: their flows wait more than they work."""
    folder = tmp_path_factory.mktemp("tour")
    env = {
        **CALLERS,
        "PREFECT_API_URL": shared_stack.api_url.replace("127.0.0.1", "localhost"),
        "PREFECT_HOME": str(folder / "home"),
    }
    with (
        drive(shared_stack, folder / "one", "tour.py", "tour", "again", "without", env=env) as one,
        drive(shared_stack, folder / "two", "tour.py", "failing", "retrying", "together", env=env) as two,
    ):
        yield [one, two]


@pytest.fixture(scope="module")
def tour(drivers: list[Driver]) -> dict[str, Any]:
    return drivers[0].read("tour")


@pytest.fixture(scope="module")
def failing(drivers: list[Driver]) -> dict[str, Any]:
    return drivers[1].read("failing")


@pytest.fixture(scope="module")
def retrying(drivers: list[Driver]) -> dict[str, Any]:
    return drivers[1].read("retrying")


# ---------------------------------------------------------------- values


def test_steps_in_pools_return_their_values(tour: dict[str, Any]):
    assert Path(tour["prepare"]["uri"]).read_text() == "to be or not"
    assert (tour["train"]["world_size"], tour["train"]["words"]) == (2, 4)
    assert tour["measure"] == {"weight": 7, "module": "corpus"}


def test_ranks_in_a_pool_know_the_run_of_the_driver(tour: dict[str, Any]):
    assert tour["train"]["flow_run_id"] == tour["flow_run_id"]
    assert tour["train"]["task_run_id"] == tour["task_run_ids"]["train"]


def test_body_calls_a_gang_in_another_pool(tour: dict[str, Any], api: Api):
    assert tour["nest"]["trained"]["world_size"] == 2
    body = api.child(tour["flow_run_id"], "nest")
    assert str(body.id) == tour["nest"]["flow_run_id"] == tour["nest"]["trained"]["flow_run_id"]
    gang = api.child(str(body.id), "train")
    assert (body.work_pool_name, gang.work_pool_name) == ("data", "train")


def test_step_without_a_pool_runs_in_the_flow(tour: dict[str, Any], api: Api):
    assert tour["here"]["pid"] == tour["pid"] != tour["look"]["pid"]
    assert tour["here"]["in_a_task"] is True
    assert len(api.children(tour["flow_run_id"], "look")) == 1


def test_steps_that_were_submitted_mapped_or_awaited_run_at_once(drivers: list[Driver]):
    met = drivers[1].read("together")
    assert met["values"] == ["MEET-MAP-1", "MEET-MAP-2", "MEET-SUBMIT", "MEET-AWAIT"]


def test_step_runs_without_a_flow(drivers: list[Driver]):
    assert drivers[0].read("without")["value"] == {"weight": 4, "module": "corpus"}


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize("name", ["tensor", "array", "path", "blob"])
def test_arguments_that_are_no_json_arrive_as_they_are_c075(tour: dict[str, Any], name: str):
    """C075: no size or type of an argument is the API's business."""
    blob = b"\x00\xff" * (5 << 19)
    assert tour["look"][name] == tour["here"][name]
    assert tour["look"]["tensor"] == ["Tensor", [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]]
    assert tour["look"]["array"] == ["ndarray", "float32", [0.5, 1.5]]
    assert tour["look"]["blob"] == [5 << 20, hashlib.sha256(blob).hexdigest()]


def test_object_of_a_class_of_the_users_arrives_equal_c075(tour: dict[str, Any]):
    is_equal, file = tour["look"]["recipe"]
    assert is_equal
    assert Path(file).name == "corpus.py"
    assert not Path(file).is_relative_to(POOLED), "its module has travelled"


def test_parameters_of_a_child_are_short_texts_c075(tour: dict[str, Any], api: Api):
    assert api.child(tour["flow_run_id"], "look").parameters == {
        "tensor": "Tensor[2, 3] float32",
        "array": "ndarray[2] float32",
        "path": "PosixPath('/some/where')",
        "recipe": "Recipe(name='plain', vocabulary=7)",
        "blob": "bytes[5242880]",
    }


def test_modules_and_files_of_the_user_travel_with_a_call(tour: dict[str, Any]):
    assert tour["look"]["weight"] == len("tobe")
    assert tour["look"]["included"] == (POOLED / "words.txt").read_text()


# ---------------------------------------------------------------- surroundings


def test_body_has_the_settings_of_its_worker(tour: dict[str, Any], shared_stack: DevStack):
    variables = tour["look"]["variables"]
    assert variables["PREFECT_API_URL"] == shared_stack.api_url
    assert variables["PREFECT_HOME"] == shared_stack.environment["PREFECT_HOME"]
    assert not variables.keys() & CALLERS.keys()
    assert (tour["look"]["max_retries"], tour["here"]["max_retries"]) == (5, 3)


def test_variables_of_the_task_arrive_and_nothing_else(tour: dict[str, Any], api: Api):
    assert tour["look"]["variables"]["GIVEN"] == "by the task"
    flow_run_id = tour["flow_run_id"]
    assert api.child(flow_run_id, "look").job_variables == {
        "env": {"GIVEN": "by the task"},
        "command": api.child(flow_run_id, "look").job_variables["command"],  # pyright: ignore[reportOptionalSubscript]
    }
    assert list(api.child(flow_run_id, "measure").job_variables or {}) == ["command"]


def test_body_runs_in_the_context_of_its_own_run(tour: dict[str, Any], api: Api):
    child = api.child(tour["flow_run_id"], "look")
    assert tour["look"]["flow_run_id"] == str(child.id)
    assert tour["look"]["in_a_task"] is False
    assert child.tags == ["tagged"]
    assert child.state_name == "Completed"


def test_tasks_of_a_body_belong_to_its_run(tour: dict[str, Any], api: Api):
    assert tour["look"]["cached"] == ["Completed", "Cached"]
    runs = api.task_runs(tour["look"]["flow_run_id"], "double")
    assert sorted(str(run.state_name) for run in runs) == ["Cached", "Completed"]


def test_artifact_of_a_body_belongs_to_its_run(tour: dict[str, Any], api: Api):
    from prefect.client.schemas.filters import ArtifactFilter

    chosen = ArtifactFilter.model_validate({"flow_run_id": {"any_": [tour["look"]["flow_run_id"]]}})
    (artifact,) = api.client.read_artifacts(artifact_filter=chosen)
    assert (artifact.key, artifact.data) == ("looked", "# Looked")


def test_what_was_on_its_way_to_a_pool_is_removed(tour: dict[str, Any], api: Api, shared_stack: DevStack):
    """Arguments may be large, and somebody's secret; results and endings stay."""
    home = shared_stack.plan.home
    stored = [
        path for path in home.glob("store/*/calls/*/*") if path.name.startswith(("call-", "code-", "order-"))
    ]
    calls = {str((run.labels or {}).get("torch-elastic.call")) for run in api.children(tour["flow_run_id"])}
    assert len(calls) == 5
    assert [path for path in stored if path.parent.name in calls] == []
    ids = {str(run.id) for run in api.children(tour["flow_run_id"])}
    jobs = home / "prefect" / "torch-elastic-jobs"
    assert [path for path in jobs.iterdir() if path.name[:36] in ids] == []


# ---------------------------------------------------------------- what the UI shows


@pytest.mark.parametrize(
    ("task", "pool"), [("look", "data"), ("measure", "data"), ("nest", "data"), ("train", "train")]
)
def test_child_stands_in_the_graph_below_its_task(tour: dict[str, Any], api: Api, task: str, pool: str):
    child = api.child(tour["flow_run_id"], task)
    assert child.work_pool_name == pool
    nodes = api.graph(tour["flow_run_id"])
    (node,) = [node for node in nodes if node["id"] == str(child.id)]
    assert (node["kind"], node["state_type"]) == ("flow-run", "COMPLETED")
    assert [one["id"] for one in node["encapsulating"]] == [tour["task_run_ids"][task]]
    (above,) = [node for node in nodes if node["id"] == tour["task_run_ids"][task]]
    assert (above["kind"], above["label"]) == ("task-run", child.name)


def test_child_of_a_body_stands_in_the_graph_of_that_body(tour: dict[str, Any], api: Api):
    body = tour["nest"]["flow_run_id"]
    gang = api.child(body, "train")
    (node,) = [node for node in api.graph(body) if node["id"] == str(gang.id)]
    assert [one["id"] for one in node["encapsulating"]] == [tour["nest"]["trained"]["task_run_id"]]


@pytest.mark.parametrize(
    ("task", "lines"),
    [
        pytest.param("look", ["looking at /some/where", "printed in the body"], id="body"),
        pytest.param("nest", ["the body calls a gang"], id="body-with-a-gang"),
        pytest.param("train", ["[rank 0] rank 0 has 4 words", "[rank 0] task - rank 0 logs"], id="gang"),
        pytest.param("train", ["rank 0 warns", "rank 1 warns"], id="gang-warnings"),
    ],
)
@pytest.mark.parametrize("page", ["flow_run", "task_run"])
def test_lines_of_a_step_are_on_the_pages_of_its_task_and_of_its_child(
    tour: dict[str, Any], api: Api, task: str, lines: list[str], page: str
):
    ids = {"flow_run": api.child(tour["flow_run_id"], task).id, "task_run": tour["task_run_ids"][task]}
    found = api.logs(**{page: ids[page]}, has=lines[-1])
    for line in lines:
        assert sum(line in one for one in found) == 1, found
    if task == "train":
        assert any(one.startswith("[rank 1] ") for one in found)


def test_lines_of_a_gang_in_a_body_are_on_the_pages_of_its_own_task(tour: dict[str, Any], api: Api):
    trained = tour["nest"]["trained"]
    assert any("[rank 0] rank 0 has 4 words" in one for one in api.logs(task_run=trained["task_run_id"]))
    assert not any("[rank 0]" in one for one in api.logs(task_run=tour["task_run_ids"]["nest"]))


def test_phases_of_a_step_are_states_of_its_task(tour: dict[str, Any], api: Api):
    """A worker may be faster than the driver's next look, so one phase or another may be missing."""
    shown: set[str] = set()
    for task_run_id in tour["task_run_ids"].values():
        history = api.history(task_run_id)
        assert re.fullmatch(HISTORY, " ".join(name for name, _ in history))
        shown.update(name for name, _ in history)
        assert api.task_run(task_run_id).run_count == 1
    assert shown >= {"WaitingForWorker", "Starting", "Running"}


# ---------------------------------------------------------------- data, once


def test_data_is_prepared_once_in_a_step_of_its_own_c072(
    tour: dict[str, Any], drivers: list[Driver], api: Api
):
    """C072: two gangs read what one step has made, by a reference; another flow run finds it in the cache."""
    again = drivers[0].read("again")
    assert (drivers[0].folder / "prepared").read_text() == "raw/v3\n"
    assert (again["name"], again["value"]) == ("Cached", tour["prepare"])
    assert api.children(again["flow_run_id"]) == [], "a hit starts nothing"


def test_gang_is_asked_for_when_its_data_is_there_c072(tour: dict[str, Any], api: Api):
    """C072: nobody waits at a barrier for data, or holds a machine meanwhile."""
    prepared, trained = (api.child(tour["flow_run_id"], task) for task in ("prepare", "train"))
    assert prepared.end_time
    assert trained.expected_start_time
    assert prepared.end_time <= trained.expected_start_time
    assert trained.parameters == {"reference": f"{{'uri': '{tour['prepare']['uri']}'}}"}


# ---------------------------------------------------------------- failures


def test_exception_of_a_body_is_raised_in_the_flow(failing: dict[str, Any]):
    seen = failing["raise_own"]
    assert (seen["is_own"], seen["text"], seen["code"]) == (True, "there are no words", "7")
    (note,) = seen["notes"]
    assert note.startswith("In work pool `data`, flow run 'raise_own-")
    assert 'tour.py", line' in note
    assert 'raise corpus.BadCorpusError("there are no words", code=7)' in note
    assert seen["state"] == "Failed"


def test_exception_that_cannot_travel_comes_as_text(failing: dict[str, Any], api: Api):
    seen = failing["raise_unpicklable"]
    child = api.child(failing["flow_run_id"], "raise_unpicklable")
    assert (seen["type"], seen["work_pool"], seen["flow_run_id"]) == ("PoolRunFailed", "data", str(child.id))
    first = seen["text"].splitlines()[0]
    assert f"`raise_unpicklable` failed in flow run '{child.name}': RuntimeError: this holds a lock" in first
    assert seen["traceback"].endswith("raise error\nRuntimeError: this holds a lock\n")


def test_state_that_a_body_returns_fails_its_task(failing: dict[str, Any], api: Api):
    seen = failing["return_failed"]
    assert (seen["state"], seen["text"]) == ("Failed", "the corpus is empty")
    child = api.child(failing["flow_run_id"], "return_failed")
    assert (child.state_name, child.state.message if child.state else "") == (
        "Failed",
        "Flow run encountered an exception: prefect.exceptions.FailedRun: the corpus is empty",
    )


def test_gang_that_fails_in_a_pool_says_which_rank_and_why(failing: dict[str, Any], api: Api):
    seen = failing["raise_in_rank"]
    assert (seen["type"], seen["rank"], seen["exc_type"]) == ("GangFailed", "1", "BadCorpusError")
    assert seen["category"] == "UserError"
    assert seen["traceback"].startswith("Traceback (most recent call last)")
    assert seen["cause"] == ["BadCorpusError", "rank 1 has no words", 8]
    assert seen["text"].startswith("rank 1 failed: BadCorpusError: rank 1 has no words\n")
    child = api.child(failing["flow_run_id"], "raise_in_rank")
    assert child.state
    assert (child.state_name, child.state.message) == (
        "Failed",
        "rank 1 failed: BadCorpusError: rank 1 has no words",
    )


@pytest.mark.parametrize("task", ["raise_own", "raise_in_rank"])
def test_failure_is_in_the_log_of_the_child(failing: dict[str, Any], api: Api, task: str):
    child = api.child(failing["flow_run_id"], task)
    assert any("Traceback" in line for line in api.logs(flow_run=child.id, has="Traceback"))


# ---------------------------------------------------------------- retries


@pytest.mark.parametrize("task", ["fail_once", "resume"])
def test_retry_of_a_task_is_another_child(retrying: dict[str, Any], api: Api, task: str):
    children = api.children(retrying["flow_run_id"], task)
    assert [child.state_name for child in children] == ["Failed", "Completed"]
    task_run_id = retrying["task_run_ids"][task]
    assert re.fullmatch(RETRIED, " ".join(name for name, _ in api.history(task_run_id)))
    assert api.task_run(task_run_id).run_count == 2


def test_retry_of_a_body_runs_it_again(retrying: dict[str, Any], api: Api, drivers: list[Driver]):
    first, second = (str(one.id) for one in api.children(retrying["flow_run_id"], "fail_once"))
    assert (drivers[1].folder / "failed-once").read_text() == first
    assert retrying["fail_once"] == second


def test_retry_of_a_gang_in_a_pool_goes_on_from_its_checkpoint(retrying: dict[str, Any]):
    assert retrying["resume"] == {"first": 2, "weight": 3.0, "attempt": 2}
