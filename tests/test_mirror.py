"""Named states on the driver's task run, and the child's log lines on its console."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import flow, get_run_logger, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import LogCreate
from prefect.client.schemas.filters import LogFilter
from prefect.client.schemas.objects import Log, State, StateType
from prefect.context import TaskRunContext
from prefect.exceptions import ObjectNotFound
from prefect.states import Scheduled

from prefect_torch_elastic.dispatch import mirror
from prefect_torch_elastic.dispatch.mirror import LogFollower, StateMirror
from prefect_torch_elastic.dispatch.phases import Phase
from prefect_torch_elastic.kubernetes.phases import GangPhase
from tests.simulators.childruns import SeenLog, VirtualTime

pytestmark = pytest.mark.timeout(120)

START = datetime(2026, 1, 1, tzinfo=UTC)


class FakeLogs:
    """The log of one run, as the API has it: lines may arrive late, and with older times than others."""

    def __init__(self) -> None:
        self.lines: list[Log] = []
        self.requests = 0

    def add(self, seconds: float, text: str) -> None:
        when = START + timedelta(seconds=seconds)
        line = {"id": uuid4(), "name": "x", "level": 20, "message": text, "timestamp": when}
        self.lines.append(Log.model_validate(line))

    def read_logs(self, log_filter: Any, limit: int, offset: int, sort: Any) -> list[Log]:
        self.requests += 1
        after: datetime = log_filter.timestamp.after_ if log_filter.timestamp else START
        found = sorted(
            (line for line in self.lines if line.timestamp >= after), key=lambda line: line.timestamp
        )
        return found[offset : offset + limit]


class Followed:
    """A follower of a fake log, and what it printed."""

    def __init__(self, **options: Any) -> None:
        self.api, self.log = FakeLogs(), SeenLog(VirtualTime())
        self.follower = LogFollower(self.api, uuid4(), self.log, **options)  # pyright: ignore[reportArgumentType]

    @property
    def printed(self) -> list[str]:
        return self.log.texts("child")


def test_lines_are_printed_once_and_in_order():
    followed = Followed()
    followed.api.add(2, "second")
    followed.api.add(1, "first")
    assert followed.follower.poll() == 2
    followed.api.add(3, "third")
    assert followed.follower.poll() == 1
    assert followed.follower.poll() == 0
    assert followed.printed == ["first", "second", "third"]


def test_line_that_arrives_late_is_printed():
    followed = Followed()
    followed.api.add(100, "of the child")
    followed.follower.poll()
    followed.api.add(60, "of the worker, which sends every few seconds")
    followed.follower.poll()
    assert len(followed.printed) == 2


def test_lines_say_where_they_come_from():
    followed = Followed(source="train")
    followed.api.add(1, "100 % done")
    followed.follower.poll()
    assert followed.printed == ["[train] 100 % done"]


def test_lines_before_a_moment_are_left_out():
    followed = Followed(since=START + timedelta(seconds=50))
    followed.api.add(1, "old")
    followed.api.add(60, "new")
    followed.follower.poll()
    assert followed.printed == ["new"]


@pytest.mark.parametrize("per_second", [1.0, 50.0, 5000.0])
def test_long_log_is_printed_whole_while_it_grows(per_second):
    followed = Followed()
    expected: list[str] = []
    for burst in range(5):
        for number in range(700):
            expected.append(f"{burst}.{number}")
            followed.api.add(len(expected) / per_second, expected[-1])
        followed.follower.poll()
    while followed.follower.poll():
        pass
    assert followed.printed == expected


def test_one_poll_of_a_long_log_is_short():
    followed = Followed()
    for number in range(3000):
        followed.api.add(number / 1000, str(number))
    assert followed.follower.poll() == 1000
    assert followed.api.requests == 5


def test_lines_of_one_moment_are_all_printed():
    followed = Followed()
    for number in range(1500):
        followed.api.add(1, str(number))
    while followed.follower.poll():
        pass
    assert sorted(map(int, followed.printed)) == list(range(1500))


def test_log_that_was_read_back_costs_two_pages_at_most_per_poll():
    followed = Followed()
    for number in range(900):
        followed.api.add(number / 1000, str(number))
    followed.follower.poll()
    before = followed.api.requests
    followed.follower.poll()
    assert followed.api.requests - before <= 3


def test_random_arrivals_within_a_minute_are_printed_once():
    followed, numbers = Followed(), random.Random(7)
    for number in range(300):
        followed.api.add(number + numbers.uniform(-50, 0), str(number))
        if number % 3 == 0:
            followed.follower.poll()
    followed.follower.poll()
    assert sorted(map(int, followed.printed)) == list(range(300))


# --- on a real server ---


def wait_until(look: Callable[[], bool], *, seconds: float = 15.0) -> None:
    """Task run states reach the database by events: soon, not at once."""
    deadline = time.monotonic() + seconds
    while not look() and time.monotonic() < deadline:
        time.sleep(0.2)


def read_history(task_run_id: UUID, *, last: str) -> list[tuple[str, str]]:
    """Return type and name of a task run's states, once the last has arrived."""
    with get_client(sync_client=True) as client:

        def read() -> list[tuple[str, str]]:
            states = client.request(
                "GET", "/task_run_states/", params={"task_run_id": str(task_run_id)}
            ).json()
            states.sort(key=lambda state: state["timestamp"])
            return [(state["type"], state["name"]) for state in states]

        wait_until(lambda: last in [name for _, name in read()])
        return read()


def test_phases_are_states_of_the_task_run_and_cost_no_retry(prefect_server):
    seen: dict[str, Any] = {"runs": 0}

    @task(retries=1)
    def train() -> int:
        run = TaskRunContext.get()
        assert run is not None
        seen["id"], seen["state"] = run.task_run.id, run.task_run.state
        seen["runs"] += 1
        states = StateMirror(run.task_run)
        states.show(Phase.WAITING, "no worker")
        states.show(Phase.WAITING, "no worker")
        states.show(GangPhase.QUEUED, "Queued in `lq`.")
        states.show(Phase.STARTING, "taken")
        states.show(Phase.RUNNING, "running")
        assert run.task_run.state is seen["state"]  # the engine's own
        if seen["runs"] == 1:
            raise ValueError("once")
        return 1

    @flow
    def pipeline() -> int:
        return train()

    assert pipeline() == 1
    names = [name for _, name in read_history(seen["id"], last="Completed")]
    phases = ["WaitingForWorker", "Queued", "Starting", "Running"]
    assert names == ["Pending", "Running", *phases, "Retrying", *phases, "Completed"]
    with get_client(sync_client=True) as client:
        task_run = client.read_task_run(seen["id"])
    assert task_run.run_count == 2
    assert task_run.flow_run_id is not None  # an event without it would take the task off its flow run


def test_message_of_a_phase_is_on_the_task_run(prefect_server):
    seen: dict[str, State] = {}

    @task
    def train() -> None:
        run = TaskRunContext.get()
        assert run is not None
        task_run_id = run.task_run.id
        StateMirror(run.task_run).show(Phase.WAITING, "Pool `train` has no worker." + "x" * 5000)
        with get_client(sync_client=True) as client:

            def look() -> bool:
                try:
                    state = client.read_task_run(task_run_id).state
                except ObjectNotFound:  # the row is written by events too
                    return False
                if state is not None and state.name == "WaitingForWorker":
                    seen["state"] = state
                return "state" in seen

            wait_until(look)

    @flow
    def pipeline() -> None:
        train()

    pipeline()
    state = seen["state"]
    assert state.type is StateType.RUNNING
    assert state.message is not None
    assert state.message.startswith("Pool `train` has no worker.")
    assert len(state.message) == mirror.MOST_MESSAGE


def test_lines_of_a_real_log_are_printed_here_and_not_sent_again(prefect_server, caplog):
    @flow
    def body() -> None:
        """Stands for a step in a work pool."""

    seen: dict[str, Any] = {}

    @task
    def train() -> None:
        run = TaskRunContext.get()
        assert run is not None
        seen["task_run_id"] = run.task_run.id
        with get_client(sync_client=True) as client:
            child = client.create_flow_run(body, state=Scheduled())
            follower = LogFollower(client, child.id, get_run_logger(), source="train")
            for start in (0, 300):
                client.create_logs(
                    [
                        LogCreate(
                            name="prefect.flow_runs",
                            level=20,
                            message=f"line {number}",
                            timestamp=START + timedelta(milliseconds=number),  # pyright: ignore[reportArgumentType]
                            flow_run_id=child.id,
                        )
                        for number in range(start, start + 300)
                    ]
                )
                seen[str(start)] = follower.poll()
            seen["idle"] = follower.poll()
        get_run_logger().info("the last line of the task")

    @flow
    def pipeline() -> None:
        train()

    pipeline()
    assert (seen["0"], seen["300"], seen["idle"]) == (300, 300, 0)
    lines = [text for text in caplog.messages if text.startswith("[train] ")]
    assert lines == [f"[train] line {number}" for number in range(600)]
    with get_client(sync_client=True) as client:

        def texts() -> list[str]:
            log_filter = LogFilter.model_validate({"task_run_id": {"any_": [seen["task_run_id"]]}})
            return [log.message for log in client.read_logs(log_filter)]

        wait_until(lambda: "the last line of the task" in texts())
        assert [text for text in texts() if "line" in text] == ["the last line of the task"]
