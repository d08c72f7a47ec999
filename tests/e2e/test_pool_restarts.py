"""Steps in a work pool when driver, job, worker, server or store go away: nothing is lost or run twice.

The flows are in `pooled/restarts.py`. Where several tests look at one flow run, a fixture tells its story.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from prefect_torch_elastic.dev.plan import StackPlan
from prefect_torch_elastic.dispatch.childruns import CALL_LABEL
from prefect_torch_elastic.runlog import RunLog, RunState
from prefect_torch_elastic.store import open_store
from tests.gangs import wait_until
from tests.poolfarm import SETTLE_SECONDS, Farm, Story
from tests.poolruns import POOLED, Api

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

pytestmark = pytest.mark.timeout(400)  # the first test of a story waits for all of it

OUTAGE_SECONDS = 60.0

Tell = Callable[..., Story]


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    plan = StackPlan(home=tmp_path_factory.mktemp("farm"))
    plan.make_folders()
    farm = Farm(plan=plan)
    try:
        farm.start_server()
        farm.start_worker()
        yield farm
    finally:
        farm.close()


@pytest.fixture(scope="module")
def tell(farm: Farm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tell]:
    """`tell(flow)` starts a flow run; when the tests are over, its driver is killed."""
    with ExitStack() as stack:

        def tell(flow: str, **options: Any) -> Story:
            folder = tmp_path_factory.mktemp(flow)
            story = Story(farm=farm, script=POOLED / "restarts.py", folder=folder, flow=flow, **options)
            stack.callback(story.close)
            story.start()
            return story

        yield tell


@pytest.fixture(autouse=True)
def nothing_left(farm: Farm) -> Iterator[None]:
    """Whatever happened: no process, no call in the store and no private folder outlives a flow run."""
    yield
    deadline = time.monotonic() + SETTLE_SECONDS
    while (left := farm.leftovers()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def read_log(farm: Farm, child: FlowRun) -> RunState:
    """Return the log of the run that a child run works on."""
    store = farm.plan.home / "store"
    (call,) = store.glob(f"*/calls/{child.labels[CALL_LABEL]}")
    return RunLog(open_store(str(store)), call.parents[1].name).refresh()


def states(runs: list[FlowRun]) -> list[str]:
    """Return the names of their states."""
    return [run.state.name for run in runs if run.state and run.state.name]


# ---------------------------------------------------------------- the driver is killed


@pytest.fixture(scope="module")
def restarted(tell: Tell) -> Story:
    """A driver was killed while three gangs ran; two of them ended before it was run again."""
    story = tell("restarted")
    story.let_end("data")
    for name in ("good", "bad", "long"):
        story.until(lambda name=name: story.notes("begin", name), name)
    story.kill_driver()
    story.let_end("good", "bad")
    story.until(
        lambda: sum(state in ("Completed", "Failed") for state in states(story.children())) == 3, "ends"
    )
    story.start()
    story.until(lambda: "runs this call already" in story.said(), "the gang")
    story.until(lambda: story.notes("result", "bad") or len(story.notes("step", "long")) > 5, "news")
    story.let_end("long")
    return story


@pytest.fixture(scope="module")
def restarted_result(restarted: Story) -> dict[str, Any]:
    return restarted.result()


def test_driver_that_was_killed_finds_its_gang_again_c039(
    restarted: Story, restarted_result: dict[str, Any], farm: Farm
):
    (child,) = restarted.children("train")
    log = read_log(farm, child)
    assert (log.epoch, log.attempts) == (1, 1)
    long = restarted_result["long"]
    assert (long["first"], long["attempt"]) == (0, 1)
    assert long["step"] == long["weights"] == len(restarted.notes("step", "long"))


def test_driver_that_was_killed_gets_what_its_gangs_ended_with_meanwhile_c039(
    restarted: Story, restarted_result: dict[str, Any]
):
    assert restarted_result["good"] == "good has waited"
    assert "GangFailed: rank 0 failed: ValueError: bad failed" in restarted_result["bad"]
    assert [len(restarted.notes("begin", name)) for name in ("good", "bad")] == [1, 1]
    assert len(restarted.children("wait")) == 2


def test_driver_that_was_killed_does_not_prepare_again_c039(
    restarted: Story, restarted_result: dict[str, Any]
):
    assert restarted_result["data"] == "data is prepared"
    assert len(restarted.notes("begin", "data")) == 1
    assert "prepare" in restarted.said()
    assert "This call has succeeded already" in restarted.said()


def test_flow_run_of_a_driver_that_was_killed_completes_once_c039(
    restarted: Story, restarted_result: dict[str, Any], farm: Farm
):
    with farm.open_client() as client:
        answer = client.request("GET", "/flow_run_states/", params={"flow_run_id": restarted.run_id})
    names = [state["name"] for state in sorted(answer.json(), key=lambda state: state["timestamp"])]
    assert names[-1] == "Completed"
    assert names.count("Completed") == 1
    assert "Crashed" not in names


# ---------------------------------------------------------------- the server is away


@dataclass
class Outage:
    """A minute without a server, from `began` to `ended`, in the middle of a flow run."""

    story: Story
    began: float = 0.0
    ended: float = 0.0
    result: dict[str, Any] = field(default_factory=dict[str, Any])


@pytest.fixture(scope="module")
def outage(tell: Tell, farm: Farm) -> Outage:
    story = tell("outlived")
    for name in ("long", "short", "bad", "body"):
        story.until(lambda name=name: story.notes("begin", name), name)
    outage = Outage(story)
    farm.end("server", signal.SIGTERM)
    outage.began = time.time()
    story.wait_for("tick", "long", more=5)
    story.let_end("short", "bad", "body")  # nobody can be told
    story.until(lambda: time.time() > outage.began + OUTAGE_SECONDS - 10, "the server's return")
    farm.start_server()
    story.until(lambda: time.time() > outage.began + OUTAGE_SECONDS, "the end of the outage")
    outage.ended = time.time()
    story.wait_for("tick", "long", more=3)
    story.let_end("long")
    outage.result = story.result()
    return outage


def test_gang_that_trains_while_the_server_is_away_does_not_notice_c041(outage: Outage):
    assert outage.result["long"] == "long has waited"
    assert len(outage.story.notes("begin", "long")) == 1
    ticks = [tick["at"] for tick in outage.story.notes("tick", "long")]
    assert ticks[-1] - ticks[0] > OUTAGE_SECONDS
    assert max(after - before for before, after in pairwise(ticks)) < 5.0


def test_steps_that_end_while_the_server_is_away_reach_their_driver_meanwhile_c041(outage: Outage):
    assert outage.result["short"] == "short has waited"
    assert outage.result["body"] == "body is prepared"
    assert "GangFailed: rank 0 failed: ValueError: bad failed" in outage.result["bad"]
    for name in ("short", "bad", "body"):
        (came,) = outage.story.notes("result", name)
        assert outage.began < came["at"] < outage.ended
    assert "The Prefect API does not answer" in outage.story.said()


def test_states_are_true_after_the_server_was_away_c041(outage: Outage, farm: Farm):
    story = outage.story
    wait_until(lambda: "Running" not in states(story.children()), 40.0)
    assert sorted(states(story.children())) == ["Completed", "Completed", "Completed", "Failed"]
    with farm.open_client() as client:
        api = Api(client=client)
        run = client.read_flow_run(story.run_id)  # pyright: ignore[reportArgumentType]
        assert run.state
        assert run.state.is_completed()
        for task, names in (("prepare", ["Completed"]), ("wait", ["Completed", "Completed", "Failed"])):
            own = [
                run for run in api.task_runs(story.run_id, task) if "torch_elastic.child" not in run.task_key
            ]
            assert sorted(run.state_name or "" for run in own) == names


def test_log_lines_from_while_the_server_was_away_arrive_later_c041(outage: Outage, farm: Farm):
    last = len(outage.story.notes("tick", "long")) - 1
    with farm.open_client() as client:
        api = Api(client=client)
        (run,) = [
            run
            for run in outage.story.children("wait")
            if any(line.endswith("line 0 of long") for line in api.logs(flow_run=run.id))
        ]
        lines = api.logs(flow_run=run.id, has=f"line {last} of long")
    numbers = [int(line.split()[-3]) for line in lines if line.endswith("of long")]
    assert numbers == list(range(last + 1))
    assert any(line.startswith("The Prefect API is back after") for line in lines)


# ---------------------------------------------------------------- worker, job or machine are killed


@dataclass
class Deaths:
    """A gang that lost worker, machine, worker and job one after the other.

    Attributes:
        story: Its flow run.
        seconds: After what time each loss was followed by another child run.
    """

    story: Story
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    result: dict[str, Any] = field(default_factory=dict[str, Any])


@pytest.fixture(scope="module")
def deaths(tell: Tell, farm: Farm) -> Deaths:
    story = tell("killed", still=30.0, lost=25.0)
    deaths = Deaths(story)
    story.wait_for("step", "train", more=2)
    farm.end("worker", signal.SIGKILL)
    story.wait_for("step", "train", more=2)
    for process in farm.job_processes(story.driver):  # all at once, as with the machine
        process.kill()
    deaths.seconds["machine"] = story.wait_for_child(1)
    farm.start_worker()
    story.wait_for("step", "train", more=2)
    farm.end("worker", signal.SIGTERM)
    deaths.seconds["worker"] = story.wait_for_child(2)
    farm.start_worker()
    story.wait_for("step", "train", more=2)
    farm.host().kill()
    deaths.seconds["job"] = story.wait_for_child(3)
    story.wait_for("step", "train", more=2)
    story.let_end("train")
    deaths.result = story.result()
    return deaths


def test_gang_goes_on_when_its_worker_is_killed(deaths: Deaths):
    assert len(deaths.story.notes("begin", "train")) == 4  # the first one died with its machine only
    assert deaths.story.notes("begin", "train")[1]["first"] >= 3


@pytest.mark.parametrize(
    ("loss", "at_most", "said"),
    [
        pytest.param("machine", 60.0, "no sign of life for 25 s: its process or its machine", id="machine"),
        pytest.param(
            "worker", 20.0, "its process was killed; a worker that is stopped does that", id="worker"
        ),
        pytest.param("job", 20.0, "Process exited with status code: -9", id="job"),
    ],
)
def test_call_is_sent_again_soon_after_the_loss_of_its(loss: str, at_most: float, said: str, deaths: Deaths):
    assert deaths.seconds[loss] < at_most
    (line,) = [line for line in deaths.story.said().splitlines() if said in line and "sent again" in line]
    assert "WARNING" in line


def test_call_that_is_sent_again_goes_on_from_its_checkpoint(deaths: Deaths, farm: Farm):
    begins = deaths.story.notes("begin", "train")
    assert [begin["attempt"] for begin in begins] == [1, 2, 3, 4]
    firsts = [begin["first"] for begin in begins]
    assert firsts == sorted(set(firsts))
    assert all(begin["weights"] == begin["first"] for begin in begins)
    assert deaths.result["weights"] == deaths.result["step"]
    assert states(deaths.story.children()) == ["Crashed", "Crashed", "Crashed", "Completed"]


@pytest.fixture(scope="module")
def retried(tell: Tell, farm: Farm) -> Story:
    """The job of a body was killed; then a gang raised, and its next job was killed. Retries were left."""
    story = tell("retried")
    (story.folder / "fail-train-3").touch()
    story.wait_for("begin", "data")
    farm.host().kill()
    story.wait_for("begin", "data")
    story.let_end("data")
    story.until(lambda: len(story.notes("begin", "train")) == 2, "the retry")
    story.wait_for("step", "train", more=2)
    farm.host().kill()
    story.until(lambda: len(story.notes("begin", "train")) == 3, "the second retry")
    story.let_end("train")
    story.result()
    return story


def test_body_whose_job_is_killed_is_for_the_retries_of_its_task(retried: Story):
    assert states(retried.children("prepare")) == ["Crashed", "Completed"]
    said = retried.said()
    assert "in work pool `train` ended without a result: The child run is Crashed: Process exited" in said
    assert "PoolRunFailed" in said


def test_retry_goes_on_from_the_checkpoint_after_an_exception_and_after_a_lost_job(retried: Story):
    assert states(retried.children("train")) == ["Failed", "Crashed", "Completed"]
    firsts = [begin["first"] for begin in retried.notes("begin", "train")]
    assert firsts[:2] == [0, 3]
    assert firsts[2] > 3
    result = retried.result()
    assert result["weights"] == result["step"] >= firsts[2]
    assert "the gang's job in work pool `train`, flow run" in retried.said()
    assert "is gone: The child run is Crashed: Process exited with status code: -9" in retried.said()


def test_gang_of_another_flow_run_takes_the_run_over(tell: Tell):
    one = tell("first")
    one.wait_for("step", "first", more=2)
    two = tell("second")
    failed = one.result()
    assert "GangFailed: rank 0 failed: Superseded: a newer gang has taken this run over" in failed
    two.let_end("second")
    result = two.result()
    steps = [step["step"] for step in one.notes("step", "first")]
    assert 0 < result["first"] <= steps[-1]
    assert (result["attempt"], result["weights"]) == (2, result["step"])


def test_store_that_is_away_for_a_while_costs_nothing(tell: Tell):
    story = tell("stored")
    for name in ("short", "long"):
        story.until(lambda name=name: story.notes("begin", name), name)
    store, away = story.folder / "store", story.folder / "away"
    store.rename(away)
    store.write_text("in the way")
    story.let_end("short")
    story.until(lambda: story.said().count("The store does not answer") == 2, "the news")
    store.unlink()
    away.rename(store)
    story.let_end("long")
    assert story.result() == {"short": "short has waited", "long": "long has waited"}
    assert [len(story.notes("begin", name)) for name in ("short", "long")] == [1, 1]
    assert "The result cannot be written, which is tried again for a while" in story.said()
