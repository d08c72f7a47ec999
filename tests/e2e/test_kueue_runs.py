"""Gangs on a cluster with Kueue, from the driver's call to its value: queued, run, preempted, resumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.kueueruns import KueueLab, KueueRun, open_lab
from tests.simulators.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.kueue, pytest.mark.usefixtures("prefect_server", "nothing_left")]

STEPS = 90


@pytest.fixture(scope="module")
def lab(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KueueLab]:
    folder = tmp_path_factory.mktemp("lab")
    with Cluster(nodes=2) as cluster:
        cluster.add_queue("lq", cpu=2)
        cluster.add_priority_class("low", 100)
        cluster.add_priority_class("high", 1000)
        with open_lab(cluster, folder, queue="lq", queue_priority="low") as opened:
            yield opened


@pytest.fixture
def nothing_left(lab: KueueLab, no_leftovers: None) -> Iterator[None]:
    yield
    lab.cluster.assert_empty()


@dataclass(frozen=True, kw_only=True)
class Story:
    """A run that is over, with what it returned and what could be seen only on its way.

    Attributes:
        message: Of its state when it waited.
        begun: The step at which the ranks began after the first preemption.
        restarts: Of the JobSet, shortly before the end.
    """

    run: KueueRun
    value: dict[str, Any]
    message: str = ""
    begun: int = 0
    restarts: int = 0


def learn(lab: KueueLab, *, seconds: float, deaf_at: int = -1, held: bool = False) -> KueueRun:
    hold = "(FOLDER / 'held').touch()" if held else "pass"
    body = f"{hold}\nreturn study(str(FOLDER), {STEPS}, {seconds}, {deaf_at})"
    return lab.start(body, max_attempts=1)


def preempt(run: KueueRun, number: int) -> str:
    """Take a gang's quota until it is seen to wait, and return the message of its state then."""
    name = f"preemptor-{number}"
    run.lab.preempt(name, seconds=60)
    said = f"(preemption {number})"
    run.lab.until(lambda: run.state() == "Preempted" and said in run.message(), said, run)
    run.lab.until(lambda: run.task_state() == "Preempted", f"{said} on the task", run)
    message = run.message()
    run.lab.end_preemptor(name)
    return message


@pytest.fixture(scope="module")
def pair(lab: KueueLab) -> tuple[Story, Story]:
    """A gang that nobody preempts, and one that waits behind it."""
    first = learn(lab, seconds=0.05, held=True)
    first.wait_for_state("Starting", "Running")
    second = lab.start("return pretrain(str(FOLDER), 3)", nnodes=1)
    message = second.wait_for_state("Queued")
    (first.folder / "held").unlink()
    return Story(run=first, value=first.result()), Story(run=second, value=second.result(), message=message)


def test_gang_is_admitted_and_run_and_its_value_returned(pair: tuple[Story, Story]):
    first, _ = pair
    assert (first.value["begun"], first.value["preemptions"], first.value["attempt"]) == (0, 0, 1)
    assert first.value["losses"][-1] < first.value["losses"][0]
    assert first.run.history()[-3:] == ["Starting", "Running", "Completed"]
    assert first.run.task_history()[-1] == "Completed"


def test_gang_behind_another_one_says_what_it_waits_for_and_runs_after_it(pair: tuple[Story, Story]):
    _, second = pair
    assert "Queued in `lq`" in second.message
    assert "`cpu`" in second.message
    assert second.value["world_size"] == 1
    history = second.run.history()
    assert history[history.index("Queued") :] == ["Queued", "Starting", "Running", "Completed"]
    shown = second.run.task_history()
    assert shown[shown.index("Queued") :] == ["Queued", "Starting", "Running", "Completed"]


@pytest.fixture(scope="module")
def preempted(lab: KueueLab) -> Story:
    """A gang of a single attempt that is preempted three times.

    In mid-training; then when its ranks do not look for stops, so that rank 0 fails of the collective that
    rank 1 broke; then while its pods start.
    """
    run = learn(lab, seconds=0.05, deaf_at=1)
    run.wait_for_step(15)
    message = preempt(run, 1)
    begun = run.wait_for_begin(preemptions=1)
    run.wait_for_step(begun + 12)
    preempt(run, 2)
    lab.until(lambda: len(run.pods(phase="Running")) == 2, "two pods", run)
    run.wait_for_state("Starting", "Running")
    preempt(run, 3)
    run.wait_for_state("Running")
    restarts = run.jobset()["status"].get("restarts", 0)
    return Story(run=run, value=run.result(), message=message, begun=begun, restarts=restarts)


def test_preempted_gang_computes_what_an_undisturbed_one_does(preempted: Story, pair: tuple[Story, Story]):
    undisturbed, _ = pair
    assert preempted.value["begun"] > 0
    assert preempted.value["losses"] == undisturbed.value["losses"]
    assert preempted.value["weights"] == undisturbed.value["weights"]


def test_preempted_gang_saves_within_its_grace(preempted: Story):
    assert preempted.begun >= 15


def test_preemptions_spend_no_budget_even_if_a_rank_fails_of_them(preempted: Story):
    assert preempted.restarts == 0
    assert preempted.value["attempt"] == 1
    assert preempted.run.task_run().run_count == 1
    assert len(preempted.run.children()) == 1


def test_preempted_run_shows_it_in_its_states(preempted: Story):
    assert "Preempted for a workload with a higher priority" in preempted.message
    history = preempted.run.history()
    assert history.count("Preempted") == 3
    assert history[-3:] == ["Starting", "Running", "Completed"]
    shown = preempted.run.task_history()
    assert shown.count("Preempted") == 3
    assert shown[-1] == "Completed"


def test_preemptions_are_events(preempted: Story):
    events = preempted.run.events("preempted", count=3)
    assert [event["payload"]["preemptions"] for event in events] == [1, 2, 3]
    assert {event["payload"]["restarts"] for event in events} == {0}


def test_log_of_a_preempted_run_tells_one_story(preempted: Story):
    lines = preempted.run.lines(has="The gang waited")
    told = [line.partition(" ")[0] for line in lines if line.startswith(("Preempted ", "Running: "))]
    assert [word.rstrip(":") for word in told] == [*("Running", "Preempted") * 3, "Running"]
    stops = [number for number, line in enumerate(lines) if "goes on from its last checkpoint" in line]
    resumed = [number for number, line in enumerate(lines) if "Resuming from step" in line]
    assert len(resumed) == 2
    assert stops[0] < resumed[0] < stops[-1] < resumed[1]
    assert "It had 3 preemptions." in lines[-1]


def test_task_of_one_process_runs_as_a_gang_of_one_pod(lab: KueueLab):
    run = lab.start(
        """
@pool_task(work_pool=POOL, store=STORE, grace_seconds=5)
def count(words: list) -> dict:
    return {"words": len(words), "pods": os.environ["PREFECT_TORCH_ELASTIC_NNODES"]}

return count(["a", "b"])
"""
    )
    assert run.result() == {"words": 2, "pods": "1"}
    assert run.history()[-2:] == ["Running", "Completed"]
