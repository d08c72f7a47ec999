"""A stack as people use it: the command line in processes of its own, real workers, real ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefect_torch_elastic.dev.plan import StackError, StackPlan
from prefect_torch_elastic.dev.stack import DevStack, find_stack, stop_stack
from prefect_torch_elastic.dev.state import StackState, read_state

# Each starts several Prefect processes, which take their time where many tests share two cores.
pytestmark = pytest.mark.timeout(300)

CLI = [sys.executable, "-c", "from prefect_torch_elastic.cli import main; main()"]
FLOWS = """
import os, subprocess, sys, time
from prefect import flow, get_run_logger, task
from prefect_torch_elastic import elastic_task, get_context
from beside import double

@task
def count(i):
    get_run_logger().info(f"count {i}")
    return i

@flow
def below(n: int):
    get_run_logger().info(f"below {n}")
    return n

@flow
def tree(n: int = 1, text: str = "x"):
    get_run_logger().info("first line")
    total = sum(count(i) for i in range(3))
    below(double(n))
    get_run_logger().info("last line")
    return {"total": total + n, "text": text, "folder": os.getcwd(), "nan": float("nan")}

@flow
def failing():
    raise ValueError("no such corpus")

@flow
def waiting(marker: str):
    open(marker, "w").close()
    time.sleep(600)

@elastic_task(nproc_per_node=2)
def gang(marker: str):
    # knows the stack neither by its environment nor by its session nor as its parent
    subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
    open(f"{marker}-{get_context().rank}", "w").close()
    time.sleep(600)

@flow
def training(marker: str):
    gang(marker)
"""


@pytest.fixture
def flows(tmp_path: Path) -> Path:
    """A file with flows, and a module beside it that they import."""
    (tmp_path / "beside.py").write_text("def double(n):\n    return 2 * n\n")
    path = tmp_path / "some_flows.py"
    path.write_text(FLOWS)
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home for stacks that tests end: its database is made once."""
    folder = tmp_path_factory.mktemp("dev") / "my home"
    yield folder
    stop_stack(folder)


def start_cli(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*CLI, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def call_cli(*arguments: object, timeout_seconds: float = 90.0) -> tuple[int, str, str]:
    """Return the exit code and the output of a command."""
    process = start_cli(*arguments)
    try:
        out, err = process.communicate(timeout=timeout_seconds)
    finally:
        process.kill()
    return process.returncode, out, err


def wait_for(condition: Callable[[], Any], timeout_seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_seconds:g} s"
        time.sleep(0.05)
    return found


def processes_of(state: StackState) -> list[psutil.Process]:
    keeper = psutil.Process(state.keeper)
    return [keeper, *keeper.children(recursive=True)]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ---------------------------------------------------------------- what runs


def test_stack_has_a_worker_online_in_each_pool(stack: DevStack):
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.objects import WorkerStatus

    with get_client(sync_client=True) as client:
        assert str(client.api_url).rstrip("/") == stack.api_url
        for pool in ("driver", "data", "train"):
            rows = client.read_workers_for_work_pool(pool)
            assert [(row.name, row.status) for row in rows] == [(f"{pool}-worker", WorkerStatus.ONLINE)]


def test_stack_listens_and_connects_on_loopback_only(stack: DevStack):
    seen: set[str] = set()
    for process in processes_of(stack.running):
        for connection in process.net_connections(kind="inet"):
            seen.update(end.ip for end in (connection.laddr, connection.raddr) if end)
    assert seen == {"127.0.0.1"}


def test_stack_points_this_process_and_its_children_at_itself(stack: DevStack, run_script):
    text = "from prefect.settings import PREFECT_API_URL; print(PREFECT_API_URL.value())"
    assert run_script(text).stdout.split() == [stack.api_url]


def test_python_of_a_pool_is_this_one(stack: DevStack):
    first = stack.environment["PATH"].split(os.pathsep)[0]
    assert Path(first, "python").resolve() == Path(sys.executable).resolve()


def test_two_stacks_run_at_once(stack: DevStack, home: Path):
    with DevStack(StackPlan(home=home, pools={"driver": "process"})) as other:
        assert other.api_url != stack.api_url
        for api in (stack.api_url, other.api_url):
            assert urllib.request.urlopen(f"{api}/health").read() == b"true"
    assert urllib.request.urlopen(f"{stack.api_url}/health").read() == b"true"


# ---------------------------------------------------------------- dev run


def test_run_prints_the_value_and_the_logs_of_all_in_order(stack: DevStack, flows: Path):
    code, out, err = call_cli("dev", "run", f"{flows}:tree", "-p", "n=4", "-p", "text=4,5", *at(stack))
    assert code == 0, err
    expected = {"total": 7, "text": "4,5", "folder": str(flows.parent), "nan": "NaN"}
    assert [json.loads(line) for line in out.splitlines()] == [expected]
    said = ["first line", "count 0", "count 1", "count 2", "below 8", "last line"]
    assert [line.rpartition(" - ")[2] for line in err.splitlines() if line.endswith(tuple(said))] == said
    assert f"{stack.ui_url}/runs/flow-run/" in err
    assert "Task run 'count-" in err


def test_run_that_fails_ends_with_1_and_its_message(stack: DevStack, flows: Path):
    code, out, err = call_cli("dev", "run", f"{flows}:failing", *at(stack))
    assert (code, out) == (1, "")
    assert "ended as Failed" in err.splitlines()[-1]
    assert "no such corpus" in err.splitlines()[-1]


def test_run_refuses_parameters_that_the_flow_does_not_take(stack: DevStack, flows: Path):
    code, out, err = call_cli("dev", "run", f"{flows}:tree", "-p", "n=many", *at(stack))
    assert (code, out) == (1, "")
    assert "parameters" in err.splitlines()[-1]


def test_interrupt_cancels_the_run(stack: DevStack, flows: Path, tmp_path: Path):
    from prefect.client.orchestration import get_client

    marker = tmp_path / "marker"
    process = start_cli("dev", "run", f"{flows}:waiting", "-p", f"marker={marker}", *at(stack))
    wait_for(marker.exists)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    run_id = err.partition("/runs/flow-run/")[2].split()[0]
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(run_id).state  # type: ignore[arg-type]
    assert state is not None
    assert state.is_cancelled()


def at(stack: DevStack) -> list[object]:
    return ["--home", stack.plan.home]


# ---------------------------------------------------------------- how it ends


def test_start_fails_at_once_when_the_type_of_a_pool_is_unknown(home: Path, no_leftovers: None):
    with pytest.raises(StackError) as caught, DevStack(StackPlan(home=home, pools={"gpu": "nope"})):
        pass
    assert "`workers` ended with exit code 1 before the stack was ready." in str(caught.value)
    assert "no worker of the type `nope` is installed. There are: `process`" in str(caught.value)


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        pytest.param("holder", signal.SIGKILL, id="holder-killed"),
        pytest.param("supervisor", signal.SIGKILL, id="supervisor-killed"),
        pytest.param("keeper", signal.SIGKILL, id="keeper-killed"),
        pytest.param("server", signal.SIGKILL, id="server-killed"),
    ],
)
def test_all_of_a_stack_ends_with_the_gangs_on_it(home, flows, tmp_path, victim, number, no_leftovers):
    process = start_cli("dev", "run", f"{flows}:training", "-p", f"marker={tmp_path}/rank", "--home", home)
    wait_for(lambda: (tmp_path / "rank-0").exists() and (tmp_path / "rank-1").exists(), 90)
    state = read_state(home)
    assert state is not None
    family = processes_of(state)
    assert sum(child.name() == "sleep" for child in family) == 2
    os.kill({"holder": process.pid, **state.pids}[victim], number)
    wait_for(lambda: not any(map(is_alive, family)), 20)
    _, err = process.communicate(timeout=20)
    assert process.returncode == (-number if victim == "holder" else 1), err
    assert victim == "holder" or "the stack has ended" in err.splitlines()[-1]
    assert find_stack(home) is None
    assert not (home / "stack.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_ends_well_when_it_is_asked_to(home, number, no_leftovers):
    process = start_cli("dev", "up", "--home", home, "--pool", "driver")
    state = wait_for(lambda: (found := read_state(home)) and found.ready and found)
    family = processes_of(state)
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert f"http://127.0.0.1:{state.port}" in out
    assert not any(map(is_alive, family))


def test_detached_stack_stays_until_down_and_its_status_names_a_dead_worker(home: Path, no_leftovers: None):
    assert call_cli("dev", "up", "--home", home, "--pool", "driver", "--detach")[0] == 0
    code, out, _ = call_cli("dev", "status", "--home", home, "--json")
    facts = json.loads(out)
    assert (code, facts["home"], facts["ready"]) == (0, str(home), True)
    code, _, err = call_cli("dev", "up", "--home", home)
    assert code == 1
    assert "dev down --home" in err
    shell = subprocess.run(
        ["sh", "-c", f'{call_cli("dev", "env", "--home", home)[1]}\nprintf %s "$PREFECT_API_URL"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shell.stdout == facts["api_url"]
    family = [psutil.Process(pid) for pid in facts["pids"].values()]
    os.kill(facts["pids"]["driver-worker"], signal.SIGKILL)
    wait_for(lambda: (found := read_state(home)) and found.ended, 10)
    code, out, _ = call_cli("dev", "status", "--home", home)
    assert code == 1
    assert "`driver-worker` was ended by signal 9" in out
    assert call_cli("dev", "down", "--home", home)[0] == 0
    assert not any(map(is_alive, family))
    assert call_cli("dev", "status", "--home", home)[0] == 1
