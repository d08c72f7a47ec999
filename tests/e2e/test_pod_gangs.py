"""Gangs of several pods, each a process with its own address: how they meet, and how all of them leave."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_elastic import get_context
from prefect_torch_elastic.dispatch.endings import EndingKind, fetch_ending
from prefect_torch_elastic.wire import GangStatus
from tests.hosted import read_state, wait_for
from tests.podgangs import PodGang, send_gang

pytestmark = pytest.mark.usefixtures("prefect_server", "no_leftovers")

Form = Callable[..., PodGang]


@pytest.fixture
def form(tmp_path: Path) -> Iterator[Form]:
    """`form(function, *args, **fields)` sends a call; its pods are gone after the test."""
    formed: list[PodGang] = []

    def send(function: Callable[..., Any], *args: Any, **fields: Any) -> PodGang:
        formed.append(send_gang(tmp_path / f"gang-{len(formed)}", function, *args, **fields))
        return formed[-1]

    yield send
    for gang in formed:
        gang.end()


def sum_ranks() -> tuple[float, int, int]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    context = get_context()
    total = torch.tensor([float(context.rank + 1)])
    dist.all_reduce(total)
    return total.item(), context.world_size, context.nnodes


def test_pods_meet_and_leave_with_0_when_the_outcome_is_kept(form: Form):
    gang = form(sum_ranks)
    pods = gang.start()
    assert [pod.wait() for pod in pods] == [0, 0], gang.tell()
    ending = fetch_ending(gang.record, gang.run_id)
    assert ending
    assert ending.status is GangStatus.SUCCEEDED, gang.tell()
    assert read_state(gang.run_id).is_completed()
    assert gang.record.find()


def train(folder: str, steps: int, fail: str = "") -> tuple[int, int, float]:
    """Return where it began, how often it was preempted, and a number that says what was summed up."""
    import os
    import signal

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    context = get_context()
    state = {"sum": torch.zeros(1)}
    begun = context.checkpoint.load(state)
    for step in range(begun, steps):
        value = torch.tensor([float(step * (context.rank + 1))])
        dist.all_reduce(value)
        state["sum"] += value
        context.report({}, step=step + 1)
        if step == 5 and context.rank == 1 and fail == "raise":
            raise ValueError("the data of rank 1 is bad")
        if step == 5 and context.rank == 1 and fail == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 5 and context.rank == 1 and fail == "raise-once" and context.restart_count == 0:
            raise ValueError("the data of rank 1 was bad")
        context.checkpoint.save_if_due(state, step=step + 1)
        Path(folder, f"rank-{context.rank}").write_text(str(step + 1))
        time.sleep(0.02)
    return begun, context.preemption_count, state["sum"].item()


def wait_for_step(folder: Path, step: int) -> None:
    def has_come() -> bool:
        marks = [folder / f"rank-{rank}" for rank in range(2)]
        return all(mark.exists() and int(mark.read_text() or 0) >= step for mark in marks)

    assert wait_for(has_come, seconds=60)


def read_value(gang: PodGang) -> Any:
    from prefect_torch_elastic import parcel

    found = gang.record.find()
    assert found, gang.tell()
    return parcel.load_verified(found[1], "the value")


def expected_sum(steps: int) -> float:
    return float(sum(3 * step for step in range(steps)))


def test_preempted_gang_reports_nothing_and_goes_on_where_it_was(form: Form, tmp_path: Path):
    gang = form(train, str(tmp_path), 150)
    pods = gang.start()
    wait_for_step(tmp_path, 30)
    for pod in pods:
        pod.terminate()
    assert [pod.wait() for pod in pods] == [143, 143], gang.tell()
    assert read_state(gang.run_id).is_running()
    assert fetch_ending(gang.record, gang.run_id) is None
    pods = gang.start()
    assert [pod.wait() for pod in pods] == [0, 0], gang.tell()
    begun, preemptions, total = read_value(gang)
    assert begun >= 30, "the last save of the preempted gang was not found"
    assert (preemptions, total) == (1, expected_sum(150))


def test_error_of_a_rank_on_another_pod_ends_all_pods_with_65_and_travels(form: Form, tmp_path: Path):
    gang = form(train, str(tmp_path), 100, "raise")
    pods = gang.start()
    assert [pod.wait() for pod in pods] == [65, 65], gang.tell()
    ending = fetch_ending(gang.record, gang.run_id)
    assert ending
    assert (ending.diagnosis["rank"], ending.diagnosis["exc_message"]) == (1, "the data of rank 1 is bad")
    assert ending.error, "the exception itself did not come along"
    assert read_state(gang.run_id).is_failed()
    words = pods[0].last_words
    assert (words["exit_code"], words["rank"], words["category"]) == (65, 1, "UserError")


def test_ranks_start_again_in_the_same_pods_although_a_peer_waits_for_the_failed_one(
    form: Form, tmp_path: Path
):
    every_step = {"every_steps": 1, "when_busy": "wait"}  # so that rank 0 waits for rank 1 to save
    gang = form(train, str(tmp_path), 20, "raise-once", max_restarts=1, checkpoint=every_step)
    pods = gang.start()
    assert [pod.wait() for pod in pods] == [0, 0], gang.tell()
    begun, preemptions, total = read_value(gang)
    assert (begun, preemptions, total) == (5, 0, expected_sum(20))


def test_killed_rank_leaves_the_run_to_the_next_attempt(form: Form, tmp_path: Path):
    gang = form(train, str(tmp_path), 60, "kill")
    pods = gang.start()
    assert [pod.wait() for pod in pods] == [1, 1], gang.tell()
    assert read_state(gang.run_id).is_running()
    assert fetch_ending(gang.record, gang.run_id) is None
    setback = fetch_ending(gang.record, gang.run_id, kind=EndingKind.SETBACK)
    assert setback
    assert (setback.diagnosis["category"], setback.diagnosis["rank"]) == ("Killed", 1)


def test_pods_that_lose_their_leader_wait_for_their_own_signal_c029(form: Form, tmp_path: Path):
    gang = form(train, str(tmp_path), 10_000)
    leader, follower = gang.start()
    wait_for_step(tmp_path, 5)
    leader.kill()
    time.sleep(2.0)
    assert follower.process.poll() is None, "the victim spoke before it was asked to go"
    follower.terminate()
    assert follower.wait() == 143
    assert follower.last_words["why"] == "lost-node"


def test_leader_that_loses_a_pod_waits_for_its_own_signal(form: Form, tmp_path: Path):
    gang = form(train, str(tmp_path), 10_000)
    leader, follower = gang.start()
    wait_for_step(tmp_path, 5)
    follower.kill()
    assert wait_for(lambda: fetch_ending(gang.record, gang.run_id, kind=EndingKind.SETBACK), seconds=20)
    assert leader.process.poll() is None
    leader.terminate()
    assert leader.wait() == 143
    setback = fetch_ending(gang.record, gang.run_id, kind=EndingKind.SETBACK)
    assert setback
    assert (setback.diagnosis["category"], setback.diagnosis["node_rank"]) == ("NodeLost", 1)
    assert "gang-node-0-1-abcde" in setback.diagnosis["summary"]


def test_drained_pod_lets_the_whole_gang_save(form: Form, tmp_path: Path):
    gang = form(train, str(tmp_path), 10_000)
    leader, follower = gang.start()
    wait_for_step(tmp_path, 20)
    follower.terminate()
    assert follower.wait() == 143, gang.tell()
    commits = gang.record.log.refresh().commits
    assert commits, "nobody saved before the pod went"
    assert commits[0].step >= 20
    assert leader.process.poll() is None
    leader.terminate()
    assert leader.wait() == 143
    assert read_state(gang.run_id).is_running()


def test_pods_of_a_call_that_is_over_leave_at_once(form: Form):
    gang = form(sum_ranks)
    pods = gang.start()
    assert [pod.wait() for pod in pods] == [0, 0], gang.tell()
    (follower,) = gang.start(1, attempt=1)
    assert follower.wait() == 0, gang.tell()
    assert follower.last_words["why"] == "done"


def test_pod_names_the_leader_that_it_does_not_find_c025(form: Form):
    gang = form(sum_ranks, rdzv_timeout_seconds=3)
    (follower,) = gang.start(1, environment={"PREFECT_TORCH_ELASTIC_LEADER": "gang-node-0-0.gang:29400"})
    assert follower.wait() == 1
    assert "`gang-node-0-0.gang:29400`" in follower.last_words["message"]
    assert follower.last_words["why"] == "leader-unreachable"


def test_leader_names_the_nodes_that_have_not_come_c024(form: Form):
    gang = form(sum_ranks, rdzv_timeout_seconds=4)
    (leader,) = gang.start(0)
    assert leader.wait() == 1, gang.tell()
    message = leader.last_words["message"]
    assert "only 1 of 2 nodes have joined in 4 s" in message
    assert "missing: node 1" in message


@pytest.mark.parametrize(
    ("node", "change", "said"),
    [
        pytest.param(0, {"PREFECT_TORCH_ELASTIC_CONTRACT": "0"}, "different versions", id="contract"),
        pytest.param(1, {"PREFECT__FLOW_RUN_ID": "none"}, "is not the id of a flow run", id="flow-run"),
        pytest.param(1, {"PREFECT_HOME": "/proc/nowhere"}, "/proc/nowhere", id="home"),
    ],
)
def test_pod_that_no_attempt_can_help_says_why_and_ends_the_gang(
    form: Form, node: int, change: dict[str, str], said: str
):
    gang = form(sum_ranks)
    (pod,) = gang.start(node, environment=change)
    assert pod.wait() == 78, gang.tell()
    words = pod.last_words
    assert (words["why"], words["exit_code"], words["node"]) == ("refused", 78, node)
    assert said in words["message"]


def test_follower_leaves_at_once_when_it_is_asked_to_while_its_call_arrives(form: Form):
    gang = form(sum_ranks)
    order = gang.store / gang.reference.order
    order.unlink()
    os.mkfifo(order)  # it never comes

    def is_read() -> int | None:
        with suppress(OSError):
            return os.open(order, os.O_WRONLY | os.O_NONBLOCK)
        return None

    (pod,) = gang.start(1)
    end = wait_for(is_read, seconds=60)
    assert end, gang.tell()
    pod.terminate()
    try:
        assert pod.wait(10) == 143, gang.tell()
    finally:
        os.close(end)


def test_late_pod_finds_a_gang_that_has_waited_c024(form: Form):
    gang = form(sum_ranks)
    (leader,) = gang.start(0)
    time.sleep(8.0)
    assert leader.process.poll() is None
    address = "PREFECT_TORCH_ELASTIC_LEADER"
    environ = Path(f"/proc/{leader.process.pid}/environ").read_bytes().decode().split("\0")
    where = next(entry.partition("=")[2] for entry in environ if entry.startswith(address))
    (follower,) = gang.start(1, environment={address: where})
    assert [leader.wait(), follower.wait()] == [0, 0], gang.tell()
