"""A stack without Prefect: plans, files, reports, starts that fail, sweeps, the log of a tree of runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.exceptions import ObjectNotFound

from prefect_torch_elastic.cli import run as run_command
from prefect_torch_elastic.cli.dev import _parse_pools
from prefect_torch_elastic.dev.ending import find_marked, sweep
from prefect_torch_elastic.dev.following import TreeFollower
from prefect_torch_elastic.dev.plan import (
    MARK,
    POOLS,
    StackError,
    StackPlan,
    render_environment,
    scrub_environment,
)
from prefect_torch_elastic.dev.programs.report import Event, Report, parse_reports
from prefect_torch_elastic.dev.running import load_for, render_value
from prefect_torch_elastic.dev.stack import DevStack, find_stack, stop_stack
from prefect_torch_elastic.dev.state import StackLock, StackState, find_state, read_state
from prefect_torch_elastic.errors import SpecError

HOLD_LOCK = """
import sys
from pathlib import Path
from prefect_torch_elastic.dev.state import StackLock
assert StackLock(Path(sys.argv[1])).take()
print("taken", flush=True)
sys.stdin.read()
"""
LIGHT = """
import sys
sys.argv = ["prefect-torch-elastic", *{arguments!r}]
from prefect_torch_elastic.cli import main
try:
    main()
except SystemExit as end:
    print([name for name in ("prefect", "torch", "pydantic") if name in sys.modules], end.code)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    StackPlan(home=tmp_path / "home").make_folders()
    return tmp_path / "home"


@pytest.fixture
def state(home: Path) -> StackState:
    """A stack that somebody has started."""
    made = StackState(home=str(home), token=uuid4().hex, port=4321, pools=dict(POOLS), pids={"keeper": 1})
    made.ready = True
    made.write()
    return made


@pytest.fixture
def held(home: Path) -> Iterator[None]:
    """Another process has the lock of the home, as a supervisor does."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"taken\n"
        yield
        process.stdin.close()


# ---------------------------------------------------------------- plans and environments


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        pytest.param({"pools": {"a/b": "process"}}, "`a/b` is no name for a pool", id="name"),
        pytest.param({"pools": {"gpu": ""}}, "Write `gpu=process`", id="type"),
        pytest.param({"port": 70000}, "`port=70000` is not accepted", id="port"),
    ],
)
def test_plan_refuses_what_cannot_start(tmp_path, wrong, message):
    with pytest.raises(SpecError, match=message):
        StackPlan(home=tmp_path, **wrong)


def test_environment_hides_the_servers_that_a_person_uses_otherwise(tmp_path):
    given = {
        "PREFECT_API_KEY": "secret",
        "PREFECT_PROFILE": "cloud",
        "PREFECT_INTEGRATIONS_TORCH_ELASTIC_STORE": "s3://theirs",
        "PREFECT_LOGGING_LEVEL": "DEBUG",
        "HOME": "/home/me",
    }
    assert scrub_environment(given) == {"PREFECT_LOGGING_LEVEL": "DEBUG", "HOME": "/home/me"}
    made = render_environment(StackPlan(home=tmp_path), 4321, given)
    assert made["PREFECT_API_URL"] == "http://127.0.0.1:4321/api"
    assert made["PREFECT_HOME"] == str(tmp_path / "prefect")
    assert made["PREFECT_INTEGRATIONS_TORCH_ELASTIC_STORE"] == f"file://{tmp_path}/store"


def test_environment_keeps_loopback_away_from_proxies_and_finds_this_python_first(tmp_path):
    given = {"no_proxy": "example.org", "NO_PROXY": "other.org", "PATH": "/usr/bin:/bin"}
    made = render_environment(StackPlan(home=tmp_path), 1, given)
    assert made["no_proxy"] == made["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    assert made["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/usr/bin", "/bin"]
    assert render_environment(StackPlan(home=tmp_path), 1, made) == made


@pytest.mark.parametrize(
    ("given", "pools"),
    [
        pytest.param((), dict(POOLS), id="default"),
        pytest.param(("gpu",), {"driver": "process", "gpu": "process"}, id="name"),
        pytest.param(
            ("gpu=torch-elastic", "driver=docker"), {"driver": "docker", "gpu": "torch-elastic"}, id="type"
        ),
    ],
)
def test_pools_of_the_command_line(given, pools):
    assert _parse_pools(given) == pools


def test_logs_of_the_stack_before_are_kept_aside(home):
    plan = StackPlan(home=home)
    for text in ("first", "second"):
        (plan.logs / "server.log").write_text(text)
        plan.set_logs_aside()
    assert (plan.logs / "server.previous.log").read_text() == "second"
    assert not (plan.logs / "server.log").exists()


# ---------------------------------------------------------------- who runs


def test_stack_is_found_as_long_as_its_supervisor_lives(home, state, held):
    found = find_stack(home)
    assert found is not None
    assert (found.ui_url, found.running.pools) == ("http://127.0.0.1:4321", dict(POOLS))


def test_stack_whose_supervisor_has_died_is_not_found(home, state):
    assert find_state(home) is None
    assert stop_stack(home) is False
    assert read_state(home) is None


def test_stack_that_still_starts_is_not_found(home, state, held):
    state.ready = False
    state.write()
    assert find_stack(home) is None


def test_home_without_a_stack_stays_untouched(tmp_path):
    assert find_stack(tmp_path / "none") is None
    assert stop_stack(tmp_path / "none") is False
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("text", ["", "{", '{"another": "version"}'])
def test_state_that_cannot_be_read_is_none(home, text):
    (home / "stack.json").write_text(text)
    assert read_state(home) is None


def test_lock_is_free_again_after_it_is_released(home):
    lock = StackLock(home)
    assert lock.take()
    lock.release()
    assert StackLock(home).take()


def test_reports_are_read_whole_and_the_rest_kept():
    lines = b'{"part": "server", "event": "ready", "pid": 7}\n{"part": "data-'
    assert parse_reports(lines) == ([Report(part="server", event=Event.READY, pid=7)], b'{"part": "data-')


# ---------------------------------------------------------------- starts that fail


def test_start_fails_when_the_port_is_taken(home, no_leftovers):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(StackError, match=f"`port={port}` is taken"),
            DevStack(StackPlan(home=home, port=port)),
        ):
            pass


def test_start_fails_when_a_stack_runs_in_the_home(home, held, no_leftovers):
    with pytest.raises(StackError, match=r"a stack runs in .* already"), DevStack(StackPlan(home=home)):
        pass


def test_start_names_what_is_not_ready_at_the_deadline_with_its_log(home, no_leftovers):
    plan = StackPlan(home=home, pools={"driver": "process"}, start_seconds=0.2)
    with pytest.raises(StackError) as caught, DevStack(plan):
        pass
    assert "not ready after 0.2 s: `server`, `driver-worker`." in str(caught.value)
    assert f"The end of `{home}/logs/server.log`:" in str(caught.value)
    assert not (home / "stack.json").exists()


def test_sweep_kills_what_carries_the_mark_in_whatever_session(no_leftovers):
    token = uuid4().hex
    command = ["sh", "-c", "setsid sleep 60 & exec sleep 60"]
    with subprocess.Popen(command, env={**os.environ, MARK: token}) as process:
        while len(find_marked(token)) < 2:
            time.sleep(0.01)
        assert len(sweep(token)) == 2
    assert process.returncode == -9
    assert find_marked(token) == []


# ---------------------------------------------------------------- the log of a tree of runs


@dataclass
class TreeApi:
    """An API with runs and lines, as far as a follower asks for them."""

    children: dict[UUID, list[SimpleNamespace]] = field(default_factory=dict)
    lines: list[SimpleNamespace] = field(default_factory=list)
    between_pages: Callable[[], None] = field(default=lambda: None)

    def read_flow_runs(self, *, flow_run_filter: Any, limit: int, offset: int) -> list[SimpleNamespace]:
        found = [run for id in flow_run_filter.parent_flow_run_id.any_ for run in self.children.get(id, [])]
        return found[offset : offset + limit]

    def read_logs(self, *, log_filter: Any, limit: int, offset: int, sort: Any) -> list[SimpleNamespace]:
        found = [
            line
            for line in self.lines
            if line.flow_run_id in log_filter.flow_run_id.any_
            and line.timestamp >= log_filter.timestamp.after_
        ]
        page = sorted(found, key=lambda line: line.timestamp)[offset : offset + limit]
        self.between_pages()
        return page

    def read_task_run(self, id: UUID) -> SimpleNamespace:
        raise ObjectNotFound(Exception())

    def log(self, run: SimpleNamespace, message: str, *, seconds_ago: float) -> None:
        at = datetime.now(UTC) - timedelta(seconds=seconds_ago)
        line = SimpleNamespace(
            id=uuid4(), flow_run_id=run.id, task_run_id=None, timestamp=at, level=20, message=message
        )
        self.lines.append(line)


def make_run(name: str) -> SimpleNamespace:
    return SimpleNamespace(id=uuid4(), name=name)


@pytest.fixture
def root() -> SimpleNamespace:
    return make_run("root")


@pytest.fixture
def api() -> TreeApi:
    return TreeApi()


@pytest.fixture
def shown() -> list[str]:
    return []


@pytest.fixture
def follower(api, root, shown) -> TreeFollower:
    return TreeFollower(api, root, lambda line: shown.append(line.partition(" | ")[2]))


def test_follower_shows_lines_of_all_generations_in_the_order_of_time(api, root, follower, shown):
    child, grandchild = make_run("child"), make_run("grandchild")
    api.children = {root.id: [child], child.id: [grandchild]}
    api.log(root, "third", seconds_ago=10)
    api.log(grandchild, "first", seconds_ago=30)
    api.log(child, "second", seconds_ago=20)
    follower.poll()
    assert shown == [
        "INFO    | Flow run 'grandchild' - first",
        "INFO    | Flow run 'child' - second",
        "INFO    | Flow run 'root' - third",
    ]


def test_follower_shows_each_line_once_and_more_than_a_page(api, root, follower, shown):
    for i in range(450):
        api.log(root, f"line {i}", seconds_ago=1000 - i)
    follower.poll()
    follower.poll()
    assert [line.rpartition(" ")[2] for line in shown] == [str(i) for i in range(450)]


def test_follower_holds_young_lines_back_for_older_ones_of_another_process(api, root, follower, shown):
    api.log(root, "young", seconds_ago=0)
    follower.poll()
    assert shown == []
    api.log(root, "late", seconds_ago=0.5)
    follower.poll(flush=True)
    assert [line.rpartition(" ")[2] for line in shown] == ["late", "young"]


def test_follower_finds_a_line_that_arrives_late(api, root, follower, shown):
    api.log(root, "now", seconds_ago=3)
    follower.poll()
    api.log(root, "late", seconds_ago=9)
    follower.poll()
    assert [line.rpartition(" ")[2] for line in shown] == ["now", "late"]


def test_follower_shows_a_line_once_that_is_shifted_to_the_next_page(api, root, follower, shown):
    api.log(root, "now", seconds_ago=3)
    late = iter(["late"])

    def log_late() -> None:
        for message in late:
            api.log(root, message, seconds_ago=9)

    api.between_pages = log_late
    follower.poll()
    follower.poll()
    assert [line.rpartition(" ")[2] for line in shown] == ["now", "late"]


# ---------------------------------------------------------------- flows and values


def test_flow_with_a_step_in_a_pool_that_the_stack_lacks_is_refused(tmp_path):
    path = tmp_path / "some_flow.py"
    path.write_text(
        "from prefect import flow\n"
        "from prefect_torch_elastic import pool_task\n"
        "@pool_task(work_pool='gpu')\n"
        "def step(): ...\n"
        "@flow\n"
        "def run_it(): step()\n"
    )
    assert load_for(str(path), {"driver": "process", "gpu": "process"}).name == "run-it"
    with pytest.raises(SpecError, match="Start one with `--pool gpu`"):
        load_for(str(path), dict(POOLS))


def test_value_is_one_line_of_json_whatever_it_is():
    numpy = pytest.importorskip("numpy")
    value = {"loss": numpy.float32(0.5), "nan": float("nan"), "path": Path("/a"), "other": object}
    assert json.loads(render_value(value)) == {
        "loss": 0.5,
        "nan": "NaN",
        "path": "/a",
        "other": "<class 'object'>",
    }
    assert "\n" not in render_value({"a": ["x\ny"]})


# ---------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        pytest.param(["status", "--home", "HOME"], 1, "no stack runs in", id="status"),
        pytest.param(["down", "--home", "HOME"], 0, "no stack runs in", id="down"),
        pytest.param(["env", "--home", "HOME"], 1, "Start one with `prefect-torch-elastic dev up", id="env"),
        pytest.param(["run", "none.py", "--home", "HOME"], 2, "there is no such file", id="run-file"),
        pytest.param(["run", __file__, "-p", "x", "--home", "HOME"], 2, "has no name", id="run-parameter"),
        pytest.param(["up", "--port", "-1", "--home", "HOME"], 1, "`port=-1` is not accepted", id="port"),
        pytest.param(["up", "--pool", "a b", "--home", "HOME"], 1, "`a b` is no name", id="pool"),
    ],
)
def test_command_without_a_stack_says_so(tmp_path, capsys, arguments, code, message):
    given = [str(tmp_path / "none") if word == "HOME" else word for word in arguments]
    assert run_command(["dev", *given]) == code
    said = capsys.readouterr()
    assert message in said.out + said.err
    assert (said.out + said.err).count("\n") == 1
    assert not (tmp_path / "none").exists()


def test_status_without_a_stack_is_null_for_programs(tmp_path, capsys):
    assert run_command(["dev", "status", "--json", "--home", str(tmp_path)]) == 1
    assert json.loads(capsys.readouterr().out) is None


def test_commands_that_only_look_import_no_framework(run_script, tmp_path):
    arguments = ["dev", "status", "--home", str(tmp_path)]
    result = run_script(LIGHT.format(arguments=arguments))
    assert result.stdout.splitlines()[-1] == "[] 1", result.stderr
