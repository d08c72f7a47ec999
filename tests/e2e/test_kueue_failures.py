"""Gangs on a cluster that fail: by their program, by a killed process, by a pod or a machine that goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kueueruns import KueueLab, KueueRun, expected_sum, open_lab
from tests.simulators.cluster import Cluster

pytestmark = [pytest.mark.kueue, pytest.mark.usefixtures("prefect_server", "nothing_left")]

STEPS = 40
EVERY_STEP = {"every_steps": 1, "when_busy": "wait"}

# A gang waits five minutes for a pod that cannot start; here, 3 s.
_HASTY = """
from prefect_torch_elastic.kubernetes import judging
judging.BLOCKED_SECONDS = 3.0
"""


@pytest.fixture(scope="module")
def lab(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KueueLab]:
    folder = tmp_path_factory.mktemp("lab")
    with Cluster(nodes=2) as cluster:
        cluster.add_queue("lq", cpu=2)
        with open_lab(cluster, folder, queue="lq", worker_prelude=_HASTY) as opened:
            yield opened


@pytest.fixture
def nothing_left(lab: KueueLab, no_leftovers: None) -> Iterator[None]:
    yield
    lab.cluster.assert_empty()


def train(lab: KueueLab, *, fail: str = "", seconds: float = 0.02, **limits: Any) -> KueueRun:
    body = f"return pretrain(str(FOLDER), {STEPS}, {seconds}, {fail!r})"
    return lab.start(body, checkpoint=EVERY_STEP, **limits)


# --- a rank fails -----------------------------------------------------------------------------------------


def test_rank_that_raises_starts_again_in_the_same_pods(lab: KueueLab):
    run = train(lab, fail="raise-once", max_restarts=1, max_attempts=1)
    value = run.result()
    assert (value["attempt"], value["restarts"], value["begun"]) == (1, 1, 5)
    assert value["sum"] == expected_sum(STEPS)
    (event,) = run.events("succeeded", count=1)
    assert event["payload"]["restarts"] == 0


@pytest.fixture(scope="module")
def raised(lab: KueueLab) -> tuple[KueueRun, str, list[dict[str, Any]]]:
    """A gang whose rank 1 raised and may not start again, its error, and its pods as they ended."""
    body = f"""
try:
    return pretrain(str(FOLDER), {STEPS}, 0.02, "raise")
except GangFailed as error:
    facts = (error.rank, error.node_rank, error.category, "the data of rank 1 is bad" in error.traceback)
    (FOLDER / "facts").write_text(json.dumps(facts))
    raise
"""
    run = lab.start(body, max_restarts=0, max_attempts=3)
    run.wait_for_step(5)
    pods = run.lab.until(lambda: run.ended_pods(), "pods that ended", run)
    return run, run.error(), pods


def test_rank_that_raises_fails_the_run_at_once(raised: tuple[KueueRun, str, list[dict[str, Any]]]):
    run, error, pods = raised
    assert error.startswith(
        "GangFailed: rank 1 (node 1) failed at step 6: ValueError: the data of rank 1 is bad"
    )
    assert (run.folder / "facts").read_text() == '[1, 1, "UserError", true]'
    assert {pod["exit_code"] for pod in pods} == {65}
    assert run.history()[-2:] == ["Running", "Failed"]
    assert "ValueError: the data of rank 1 is bad" in run.message()
    assert len(run.children()) == 1
    (event,) = run.events("failed", count=1)
    assert event["payload"]["restarts"] == 0


def test_killed_rank_costs_an_attempt_and_the_next_one_resumes(lab: KueueLab):
    run = train(lab, fail="kill", max_attempts=2)
    run.wait_for_step(10)
    jobset = run.jobset()
    value = run.result()
    assert (jobset["status"]["restarts"], jobset["status"]["restartsCountTowardsMax"]) == (1, 1)
    assert (value["begun"], value["attempt"], value["preemptions"]) == (5, 2, 0)
    assert value["sum"] == expected_sum(STEPS)
    told = run.lines(has="The gang waited")
    cause = "rank 1 (node 1) was killed by SIGKILL at step 6"
    assert any(line.startswith(cause) for line in told)
    assert "1 new attempt" in told[-1]
    assert run.task_run().run_count == 1


def test_run_fails_with_the_verdict_when_no_attempt_is_left(lab: KueueLab):
    run = train(lab, fail="kill", max_attempts=1)
    error = run.error()
    assert error.startswith("GangFailed: rank 1 (node 1) was killed by SIGKILL at step 6")
    assert run.history()[-1] == "Failed"
    assert run.message().startswith("rank 1 (node 1) was killed by SIGKILL at step 6")
    (event,) = run.events("failed", count=1)
    assert event["payload"]["restarts"] == 0


# --- a pod goes -------------------------------------------------------------------------------------------


def test_drained_pod_costs_no_attempt_and_no_step(lab: KueueLab):
    run = lab.start(f"return pretrain(str(FOLDER), {STEPS}, 0.1)", max_attempts=1)
    run.wait_for_step(10)
    lab.cluster.drain(run.pods()[1])
    lab.until(lambda: run.jobset()["status"].get("restarts"), "a restart", run)
    begun = run.step()
    value = run.result()
    assert value["begun"] >= 10
    assert value["begun"] == begun
    assert (value["attempt"], value["sum"]) == (2, expected_sum(STEPS))
    told = run.lines(has="The gang waited")
    assert any("after a disruption, which does not count" in line for line in told)


Harm = Callable[[KueueRun, str], None]


def kill_for_memory(run: KueueRun, pod: str) -> None:
    run.lab.cluster.oom_kill(pod)


def kill(run: KueueRun, pod: str) -> None:
    run.lab.cluster.kill(pod)


def evict(run: KueueRun, pod: str) -> None:
    run.lab.cluster.evict(pod)


def lose_node(run: KueueRun, pod: str) -> None:
    cluster = run.lab.cluster
    found = cluster.api.get("pods", pod, namespace=cluster.namespace)
    assert found
    cluster.add_nodes(1)
    cluster.lose_node(found["spec"]["nodeName"])


@pytest.mark.parametrize(
    ("harm", "node", "reason"),
    [
        pytest.param(kill_for_memory, 1, "OOMKilled", id="oom-killed"),
        pytest.param(kill, 0, "SIGKILL", id="leader-killed-c029"),
    ],
)
def test_lost_pod_costs_an_attempt_and_is_named_when_none_is_left(
    lab: KueueLab, harm: Harm, node: int, reason: str
):
    run = train(lab, seconds=0.2, max_attempts=2)
    run.wait_for_step(3)
    first = run.pods()[node]
    harm(run, first)
    lab.until(lambda: run.jobset()["status"].get("restartsCountTowardsMax"), "a restart that counts", run)
    run.wait_for_step(run.step() + 2)  # without that pod there was none
    second = run.pods(phase="Running")[node]
    harm(run, second)
    error = run.error()
    for text in (error, run.message()):
        assert f"`{second}` (node {node} on `node-" in text
        assert reason in text
        assert "no restart is left (1 of 1 used)" in text
    assert run.history()[-1] == "Failed"
    assert any(f"`{first}` (node {node} on" in line and reason in line for line in run.lines())


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        pytest.param(evict, "ephemeral-storage", id="evicted-c049"),
        pytest.param(lose_node, "its machine does not answer", id="node-lost"),
    ],
)
def test_pod_that_the_cluster_takes_away_costs_no_attempt_and_is_named(
    lab: KueueLab, harm: Harm, reason: str
):
    run = train(lab, seconds=0.1, max_attempts=1)
    run.wait_for_step(5)
    pod = run.pods()[1]
    harm(run, pod)
    value = run.result()
    assert value["begun"] >= 5
    assert (value["attempt"], value["sum"]) == (2, expected_sum(STEPS))
    told = run.lines(has="The gang waited")
    assert any(f"`{pod}` (node 1 on `node-" in line and reason in line for line in told), "\n".join(told)


# --- a pod cannot start -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        pytest.param({"image": "missing:1"}, ["ImagePull", "`missing:1`"], id="image-missing-c049"),
        pytest.param(
            {"secret_env": {"TOKEN": "no-such/key"}},
            ["CreateContainerConfigError", "no-such"],
            id="secret-missing-c049",
        ),
    ],
)
def test_gang_whose_pods_cannot_start_fails_and_says_why(
    lab: KueueLab, limits: dict[str, Any], words: list[str]
):
    run = lab.start("return pretrain(str(FOLDER), 1)", **limits)
    error = run.error()
    assert run.message().startswith("The gang cannot start: Pod `")
    for word in (*words, "node-0-"):
        assert word in error
        assert word in run.message()
    assert run.history()[-2:] == ["Starting", "Failed"]
