"""Steps in work pools that are stopped: nothing of them goes on, and the states say what happened.

The flows are in `pooled/endings.py`. All drivers start at once and wait; each test stops one of them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psutil
import pytest

from prefect_torch_elastic.deploying import deploy, load_flow
from tests.gangs import wait_until, wait_until_gone
from tests.leftovers import marked_processes
from tests.poolruns import POOLED, Api, Driver, drive, open_api

if TYPE_CHECKING:
    from prefect_torch_elastic.dev.stack import DevStack

pytestmark = pytest.mark.timeout(400)  # the first test starts the stack and all drivers

GRACE_SECONDS = 3
MARGIN_SECONDS = 10.0  # the contract: everything is gone by the grace + 10 s
LATE_SECONDS = 120.0  # two cores start ten drivers and their steps
SETTLE_SECONDS = 30.0  # events go in batches
FLOWS = {
    "cancelled": ["direct"],
    "cancelled-submit": ["both"],
    "cancelled-async": ["awaited"],
    "cancelled-outer": ["outer"],
    "interrupted": ["both"],
    "terminated": ["direct"],
    "timeouts": ["timeouts", "failing"],
    "limited": ["limited"],
}
LIMITED = ("timeouts", "limited")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A flow that waits for its steps.

    Attributes:
        folder: Where it and its steps leave their marks.
        api: What a person sees of it.
        driver: Its process; None in a pool.
    """

    folder: Path
    api: Api
    driver: Driver | None

    def pids(self, *names: str) -> list[int]:
        """Return the processes that left marks, once they all have."""
        deadline = time.monotonic() + LATE_SECONDS
        while missing := [name for name in names if not (self.folder / name).exists()]:
            said = self.driver.tail() if self.driver else ""
            assert time.monotonic() < deadline, f"{missing} did not come\n{said}"
            assert self.driver is None or self.driver.process.poll() is None, said
            time.sleep(0.1)
        return [int((self.folder / name).read_text()) for name in names]

    @property
    def id(self) -> str:
        """The flow run."""
        (mark,) = self.folder.glob("flow-*")
        return mark.name.removeprefix("flow-")

    def children(self) -> dict[str, Any]:
        """Return the runs of the steps by the name of the task."""
        return {run.name.rpartition("-")[0]: run for run in self.api.children(self.id)}

    def processes(self) -> list[int]:
        """Return all processes of all steps: hosts, agents, ranks and what they started."""
        ids = {str(run.id) for run in self.api.children(self.id)}
        found: list[int] = []
        for process in marked_processes().values():
            try:
                if process.environ().get("PREFECT__FLOW_RUN_ID") in ids:
                    found.append(process.pid)
            except psutil.Error:
                continue
        assert found
        return found

    def cancel(self, run_id: str | None = None) -> None:
        """Do what the button in the UI does."""
        from prefect.states import Cancelling

        self.api.client.set_flow_run_state(UUID(run_id or self.id), Cancelling())

    def states(self, *, until: str) -> dict[str, str]:
        """Return the states of the flow, its tasks and their children, once the flow's is the one awaited."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            flow = str(self.api.client.read_flow_run(UUID(self.id)).state_name)
            tasks = {run.name.rpartition("-")[0]: run for run in self._task_runs()}
            seen = {"flow": flow}
            seen |= {name: str(run.state_name) for name, run in tasks.items()}
            seen |= {f"{name} child": str(run.state_name) for name, run in self.children().items()}
            over = all(run.state is not None and run.state.is_final() for run in tasks.values())
            if (flow == until and over) or time.monotonic() > deadline:
                return seen
            time.sleep(0.3)

    def _task_runs(self) -> list[Any]:
        from prefect.client.schemas.filters import FlowRunFilter

        chosen = FlowRunFilter.model_validate({"id": {"any_": [self.id]}})
        runs = self.api.client.read_task_runs(flow_run_filter=chosen, limit=200)
        tracking = {run.parent_task_run_id for run in self.api.children(self.id)}
        return [run for run in runs if run.id not in tracking]

    def spent_retries(self) -> list[str]:
        """Return the tasks that ran more than once."""
        return [run.name for run in self._task_runs() if run.run_count > 1]

    def went_on(self) -> bool:
        """Whether the flow went on after its step."""
        return (self.folder / "went-on").exists()

    def tail(self) -> str:
        return self.driver.tail() if self.driver else ""


@pytest.fixture(scope="module")
def api(shared_stack: DevStack) -> Iterator[Api]:
    with open_api(shared_stack) as api:
        yield api


@pytest.fixture(scope="module")
def runs(
    shared_stack: DevStack, api: Api, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Run]]:
    """Most drivers at once: they wait more than they work. Those with a limit come first."""
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    api.client.create_work_pool(WorkPoolCreate(name="nobody", type="process", base_job_template=template))
    folder = tmp_path_factory.mktemp("endings")
    found: dict[str, Run] = {}
    with ExitStack() as stack:

        def start(names: Iterable[str]) -> None:
            for name in names:
                flows = FLOWS[name]
                given = drive(shared_stack, folder / name, "endings.py", *flows)
                driver = stack.enter_context(given)
                found[name] = Run(folder=folder / name / flows[0], api=api, driver=driver)

        start(LIMITED)
        for name in LIMITED:
            found[name].pids("rank")
        start(FLOWS.keys() - set(LIMITED))
        yield found


@pytest.fixture
def deployed(stack: DevStack, api: Api, tmp_path: Path) -> Run:
    """A driver in a pool, which its worker supervises."""
    flow = load_flow(f"{POOLED / 'endings.py'}:direct")
    report = deploy(flow, work_pool="driver", parameters={"folder": str(tmp_path)})
    api.client.create_flow_run_from_deployment(report.deployment_id)
    return Run(folder=tmp_path, api=api, driver=None)


def end(run: Run) -> int:
    """Return how the driver's process ended."""
    assert run.driver
    return run.driver.process.wait(SETTLE_SECONDS)


# ---------------------------------------------------------------- the flow run is cancelled in the UI


def test_flow_that_nobody_supervises_ends_cancelled_with_its_gang_c031(runs: dict[str, Run]):
    run = runs["cancelled"]
    run.pids("rank")
    processes = run.processes()
    run.cancel()
    seconds = wait_until_gone(processes, GRACE_SECONDS + MARGIN_SECONDS)
    assert seconds > GRACE_SECONDS - 1, "a rank that ignores SIGTERM has its grace"
    states = run.states(until="Cancelled")
    assert states == {"flow": "Cancelled", "train": "Cancelled", "train child": "Cancelled"}, run.tail()
    assert end(run) != 0
    assert not run.went_on()
    assert run.spent_retries() == []


def test_submitted_steps_end_with_a_flow_that_is_cancelled_c031(runs: dict[str, Run]):
    run = runs["cancelled-submit"]
    run.pids("rank", "body", "submitted")
    wait_until(lambda: "late" in run.children(), SETTLE_SECONDS)
    processes = run.processes()
    run.cancel()
    wait_until_gone(processes, GRACE_SECONDS + MARGIN_SECONDS)
    assert (run.folder / "body-was-asked").exists()
    states = run.states(until="Cancelled")
    assert states["flow"] == "Cancelled", run.tail()
    assert {name: state for name, state in states.items() if state != "Cancelled"} == {}, run.tail()
    assert not run.went_on()


def test_step_that_waits_for_a_worker_is_cancelled_and_never_starts_c031(runs: dict[str, Run]):
    late = runs["cancelled-submit"].children()["late"]
    assert (late.work_pool_name, late.state_name, late.run_count) == ("nobody", "Cancelled", 0)


def test_async_flow_ends_cancelled_with_its_body_c031(runs: dict[str, Run]):
    run = runs["cancelled-async"]
    run.pids("body")
    processes = run.processes()
    run.cancel()
    wait_until_gone(processes, GRACE_SECONDS + MARGIN_SECONDS)
    states = run.states(until="Cancelled")
    assert states == {"flow": "Cancelled", "work_async": "Cancelled", "work_async child": "Cancelled"}, (
        run.tail()
    )
    assert not run.went_on()


def test_flow_around_a_flow_takes_nested_steps_with_it_c031(runs: dict[str, Run]):
    run = runs["cancelled-outer"]
    pids = run.pids("body", "rank")
    run.cancel()
    wait_until_gone(pids, GRACE_SECONDS + MARGIN_SECONDS)
    assert run.states(until="Cancelled")["flow"] == "Cancelled", run.tail()
    (inner,) = run.api.children(run.id)
    (nest,) = run.api.children(str(inner.id))
    (train,) = run.api.children(str(nest.id))
    assert [one.state_name for one in (inner, nest, train)] == ["Cancelled"] * 3, run.tail()
    assert not run.went_on()


def test_flow_in_a_pool_ends_cancelled_with_its_gang_c031(deployed: Run):
    run = deployed
    run.pids("rank")
    processes = run.processes()
    run.cancel()
    wait_until_gone(processes, GRACE_SECONDS + MARGIN_SECONDS)
    states = run.states(until="Cancelled")
    assert states == {"flow": "Cancelled", "train": "Cancelled", "train child": "Cancelled"}
    assert not run.went_on()


# ---------------------------------------------------------------- the driver's process is told to stop


def test_ctrl_c_ends_gangs_and_bodies_c031(runs: dict[str, Run]):
    run = runs["interrupted"]
    run.pids("rank", "body", "submitted")
    processes = run.processes()
    assert run.driver
    os.kill(run.driver.process.pid, signal.SIGINT)
    wait_until_gone(processes, GRACE_SECONDS + MARGIN_SECONDS)
    states = run.states(until="Crashed")
    assert states.pop("flow") == "Crashed", run.tail()
    assert set(states.values()) == {"Cancelled"}, (states, run.tail())
    assert end(run) != 0


def test_sigterm_of_the_driver_ends_its_gang_c031(runs: dict[str, Run]):
    run = runs["terminated"]
    run.pids("rank")
    processes = run.processes()
    assert run.driver
    os.kill(run.driver.process.pid, signal.SIGTERM)
    wait_until_gone(processes, GRACE_SECONDS + MARGIN_SECONDS)
    states = run.states(until="Crashed")
    assert states == {"flow": "Crashed", "train": "Crashed", "train child": "Cancelled"}, run.tail()
    assert end(run) == -signal.SIGTERM
    assert run.spent_retries() == []


# ---------------------------------------------------------------- one step ends


def test_step_whose_run_is_cancelled_is_cancelled_and_the_flow_goes_on_c031(runs: dict[str, Run]):
    run = runs["timeouts"]
    pids = run.pids("called", "submitted")
    for name in ("called", "submitted"):
        run.cancel(str(run.children()[name].id))
    wait_until_gone(pids, GRACE_SECONDS + MARGIN_SECONDS)
    assert run.driver
    seen = run.driver.read("timeouts")
    assert seen["called"]["type"] == "CancelledRun", seen
    assert (seen["submitted"]["state"], seen["submitted"]["error"]["type"]) == ("Cancelled", "CancelledRun")
    assert "cancelled" in seen["called"]["text"]
    assert run.spent_retries() == []


def test_step_that_takes_too_long_times_out_and_the_flow_goes_on_c031(runs: dict[str, Run]):
    run = runs["timeouts"]
    assert run.driver
    seen = run.driver.read("timeouts")
    assert (seen["train"]["state"], seen["work"]["state"]) == ("TimedOut", "TimedOut")
    pids = run.pids("rank", "body")
    wait_until_gone(pids, MARGIN_SECONDS)
    states = run.states(until="Completed")
    assert (states["flow"], states["train child"], states["work child"]) == (
        "Completed",
        "Cancelled",
        "Cancelled",
    )


def test_gang_ends_with_a_flow_that_fails_by_another_step_c031(runs: dict[str, Run]):
    first = runs["timeouts"]
    run = Run(folder=first.folder.parent / "failing", api=first.api, driver=first.driver)
    pids = run.pids("sibling")
    wait_until_gone(pids, GRACE_SECONDS + MARGIN_SECONDS)
    states = run.states(until="Failed")
    assert states == {
        "flow": "Failed",
        "fail": "Failed",
        "train": "Cancelled",
        "train child": "Cancelled",
    }, run.tail()


def test_gang_ends_with_a_flow_that_takes_too_long_c031(runs: dict[str, Run]):
    run = runs["limited"]
    pids = run.pids("rank")
    wait_until_gone(pids, LATE_SECONDS)
    states = run.states(until="TimedOut")
    # Prefect calls a task Crashed whose flow times out
    assert states == {"flow": "TimedOut", "train": "Crashed", "train child": "Cancelled"}, run.tail()
    assert not run.went_on()
    assert run.spent_retries() == []
