"""A task that is stopped, times out or ends takes its gang with it and leaves its process as it was."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest

from tests.conftest import RunningScript, ScriptRunner
from tests.gangs import (
    find_gang,
    kill,
    lives,
    read_marks,
    wait_until_gone,
    write_script,
)

MARGIN_SECONDS = 5.0  # the contract: everything is gone by the grace + 5 s


# ---------------------------------------------------------------- the flow's process is told to stop

SLEEPERS = """
@elastic_task(nproc_per_node=2, grace_seconds={grace}, retries=2)
def train():
    context = get_context()
    if context.rank == 0 and {stubborn}:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if context.rank == 1 and {stubborn}:
        def save(*_):
            mark("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
    start_children()
    mark_rank()
    time.sleep(300)

@flow
def main():
    from prefect.runtime import flow_run
    mark("flow", flow_run.id)
    {call}

main()
"""


@pytest.fixture
def start_sleepers(
    prefect_server: str, no_leftovers: None, run_script: ScriptRunner, tmp_path: Path
) -> Callable[..., tuple[RunningScript, list[int]]]:
    """`start_sleepers(grace=...)` starts a flow whose gang sleeps; its marks go to `tmp_path`.

    It returns the flow's script and all pids below it once the ranks run, rank 0's first.
    """

    def start(
        *, grace: float, stubborn: bool = True, call: str = "train()"
    ) -> tuple[RunningScript, list[int]]:
        text = SLEEPERS.format(grace=grace, stubborn=stubborn, call=call)
        script = run_script.start(write_script(text, tmp_path))
        ranks = read_marks(tmp_path, "rank-0-*", 2)
        gang = find_gang(ranks)
        children = read_marks(tmp_path, "child-0-*", 6)
        return script, [*ranks, *gang.agents, *gang.servers, gang.launcher, *children]

    return start


def read_states(folder: Path) -> tuple[str, list[str]]:
    """Return the state types of the flow run and of its task runs."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    flow_run_id = (folder / "flow").read_text()
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(UUID(flow_run_id))
        task_runs = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id]))
        )
    return str(flow_run.state_type and flow_run.state_type.value), [
        str(run.state_type and run.state_type.value) for run in task_runs
    ]


@pytest.mark.parametrize("call", ["train()", "train.submit().result()"], ids=["call", "submit"])
def test_sigterm_ends_ranks_that_ignore_it_after_the_grace_c015(start_sleepers, tmp_path, call):
    script, pids = start_sleepers(grace=5, call=call)
    kill(script.process.pid, signal.SIGTERM)
    seconds = wait_until_gone(pids, 5 + MARGIN_SECONDS)
    assert seconds > 4.0, "a rank that ignores SIGTERM has the whole grace"
    assert (tmp_path / "saved").exists(), "the handler of rank 1 ran"
    assert script.wait(20).rc == -signal.SIGTERM
    flow_state, _ = read_states(tmp_path)
    assert flow_state in {"CRASHED", "CANCELLED"}
    assert "SignalException" not in script.stderr


def test_sigterm_ends_ranks_without_a_handler_at_once_c015(start_sleepers, tmp_path):
    script, pids = start_sleepers(grace=60, stubborn=False)
    kill(script.process.pid, signal.SIGTERM)
    wait_until_gone(pids, MARGIN_SECONDS)
    assert script.wait(20).rc == -signal.SIGTERM
    flow_state, task_states = read_states(tmp_path)
    assert flow_state in {"CRASHED", "CANCELLED"}
    assert "FAILED" not in task_states


def test_sighup_of_the_flow_process_ends_the_gang_c015(start_sleepers, tmp_path):
    script, pids = start_sleepers(grace=2)
    kill(script.process.pid, signal.SIGHUP)
    wait_until_gone(pids, 2 + MARGIN_SECONDS)
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("call", ["train()", "train.submit().result()"], ids=["call", "submit"])
def test_ctrl_c_ends_the_gang_and_crashes_the_run(start_sleepers, tmp_path, call):
    script, pids = start_sleepers(grace=60, stubborn=False, call=call)
    kill(script.process.pid, signal.SIGINT)
    wait_until_gone(pids, MARGIN_SECONDS)
    assert script.wait(20).rc != 0
    assert read_states(tmp_path)[0] in {"CRASHED", "CANCELLED"}


def test_second_ctrl_c_cuts_the_grace(start_sleepers, tmp_path):
    script, pids = start_sleepers(grace=60)
    kill(script.process.pid, signal.SIGINT)
    read_marks(tmp_path, "saved", 1)
    time.sleep(1.0)
    assert lives(pids[0]), "rank 0 ignores SIGTERM and has its grace"
    kill(script.process.pid, signal.SIGINT)
    wait_until_gone(pids, MARGIN_SECONDS)
    assert script.wait(20).rc != 0


def test_kill_of_the_flow_process_leaves_nothing(start_sleepers, tmp_path):
    script, pids = start_sleepers(grace=2)
    kill(script.process.pid)
    wait_until_gone(pids, 2 + MARGIN_SECONDS)


def test_kill_of_flow_process_and_launcher_at_once_leaves_nothing(start_sleepers, tmp_path):
    script, pids = start_sleepers(grace=2)
    launcher = find_gang(pids[:2]).launcher
    for pid in (script.process.pid, launcher):
        kill(pid)
    wait_until_gone(pids, MARGIN_SECONDS)


# ---------------------------------------------------------------- timeouts

TIMEOUTS = """
@elastic_task(nproc_per_node=2, grace_seconds=1, timeout_seconds=4)
{body} train(number=0):
    start_children()
    mark_rank()
    time.sleep(300)

@task
def after():
    return "went on"

@flow
{flow} main():
    started = time.monotonic()
    {call}
    seconds = time.monotonic() - started
    left = [pid for pid in pids_of("rank-*") + pids_of("child-*") if lives(pid)]
    return [state.name for state in states], seconds, left, {after}

RESULT = {run}
"""
SYNC = {"flow": "def", "after": "after()", "run": "main()"}
ASYNC = {"flow": "async def", "after": "after()", "run": "asyncio.run(main())"}
TIMEOUT_CASES = {
    "call": {"call": "states = [train(return_state=True)]", "body": "def", **SYNC},
    "submit": {
        "call": "future = train.submit(); future.wait(); states = [future.state]",
        "body": "def",
        **SYNC,
    },
    "map": {
        "call": "futures = train.map([1, 2]); futures.wait(); states = [f.state for f in futures]",
        "body": "def",
        **SYNC,
    },
    "async flow, sync body": {"call": "states = [train(return_state=True)]", "body": "def", **ASYNC},
    "async flow and body": {
        "call": "states = [await train(return_state=True)]",
        "body": "async def",
        **ASYNC,
    },
    "async flow, submit": {
        "call": "future = train.submit(); future.wait(); states = [future.state]",
        "body": "async def",
        **ASYNC,
    },
}


@pytest.mark.parametrize("case", TIMEOUT_CASES)
def test_timeout_seconds_ends_the_gang_and_the_flow_goes_on_c030(driver, case):
    names, seconds, left, after = driver.run(TIMEOUTS.format(**TIMEOUT_CASES[case]))
    assert set(names) == {"TimedOut"}
    assert 3.5 < seconds < 4 + 1 + MARGIN_SECONDS
    assert left == []
    assert after == "went on"


def test_run_timeout_seconds_raises_gang_timed_out(driver):
    text = """
@elastic_task(nproc_per_node=2, grace_seconds=1, run_timeout_seconds=2, max_restarts=3)
def train():
    mark_rank()
    time.sleep(300)

@flow
def main():
    started = time.monotonic()
    try:
        train()
    except GangTimedOut as error:
        return str(error), time.monotonic() - started
RESULT = main()
"""
    message, seconds = driver.run(text)
    assert "run_timeout_seconds=2" in message
    assert 2.0 < seconds < 15.0


# ---------------------------------------------------------------- the flow's process is left as it was


def test_flow_process_is_as_before_after_ten_gangs(driver):
    text = """
@elastic_task(nproc_per_node=2, max_restarts=0)
def train(fail):
    if fail:
        raise ValueError("on purpose")
    return 1

def snapshot():
    return {
        "handlers": {number: repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "threads": sorted(thread.name.rstrip("0123456789") for thread in threading.enumerate()),
        "files": len(os.listdir("/proc/self/fd")),
        "path": list(sys.path),
    }

@flow
def main():
    seen = []
    for number in range(10):
        train(fail=number in (4, 5), return_state=True)
        seen.append(snapshot())
    deadline = time.monotonic() + 10.0  # threads of Prefect that only send something come and go
    while len(seen[9]["threads"]) > len(seen[1]["threads"]) and time.monotonic() < deadline:
        time.sleep(0.2)
        seen[9] = snapshot()
    return seen

before = snapshot()
seen = main()
after = snapshot()
RESULT = before, seen[1], seen[5], seen[9], after
"""
    before, second, sixth, tenth, after = driver.run(text)
    for name in ("handlers", "mask", "environment", "directory", "path"):
        assert second[name] == sixth[name] == tenth[name], name
        assert before[name] == after[name], name
    assert len(tenth["threads"]) <= len(second["threads"]), (tenth["threads"], second["threads"])
    assert tenth["files"] <= second["files"] + 2  # Prefect's own connections come and go


def test_failure_of_one_of_two_submitted_gangs_leaves_the_other(driver):
    text = """
@elastic_task(nproc_per_node=2, max_restarts=0)
def train(fail):
    mark(f"run-{fail}-{get_context().rank}")
    if fail:
        wait_for("run-False-0")
        raise ValueError("on purpose")
    time.sleep(2.0)
    return "trained"

@flow
def main():
    good, bad = train.submit(False), train.submit(True)
    good.wait()
    bad.wait()
    return good.state.name, good.result(), bad.state.name

RESULT = main()
"""
    assert driver.run(text) == ["Completed", "trained", "Failed"]


LAUNCHERS = """
@elastic_task(nproc_per_node=1)
def train():
    return os.getppid()

def launchers():
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line, parent = (entry / "cmdline").read_text(), int((entry / "stat").read_text().split()[3])
        except OSError:
            continue
        if "prefect_torch_elastic.node" in line and parent == os.getpid() and lives(entry.name):
            found.append(int(entry.name))
    return found
"""


def test_warm_processes_serve_all_tasks_of_a_flow_and_end_with_it(driver):
    text = (
        LAUNCHERS
        + """
@flow
def main():
    agents = [train() for _ in range(3)]
    return agents, launchers()

agents, during = main()
deadline = time.monotonic() + 10
while launchers() and time.monotonic() < deadline:
    time.sleep(0.05)
RESULT = len(set(agents)), len(during), launchers(), [pid for pid in agents if lives(pid)]
"""
    )
    assert driver.run(text) == [1, 1, [], []]


def test_warm_processes_end_after_idle_time_in_a_flow_that_goes_on(driver):
    text = (
        LAUNCHERS
        + """
from prefect_torch_elastic import local

@flow
def main():
    agent = train()
    during = launchers()
    deadline = time.monotonic() + 15
    while launchers() and time.monotonic() < deadline:
        time.sleep(0.05)
    left = launchers(), lives(agent)
    return len(during), left, train() != agent

local.IDLE_SECONDS, before = 1.0, local.IDLE_SECONDS
try:
    RESULT = main()
finally:
    local.IDLE_SECONDS = before
"""
    )
    assert driver.run(text) == [1, [[], False], True]
