"""A body in a process of its own, as a worker starts one: cancelled, deaf, killed, cut off from the API."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from uuid import UUID

import pytest

from tests.conftest import RunningScript, ScriptRunner
from tests.hosted import create_run, read_logs, read_state, set_state, wait_for
from tests.leftovers import marked_processes
from tests.proxy import ClosableProxy

pytestmark = pytest.mark.usefixtures("prefect_server", "no_leftovers")

LEAVE_SECONDS = 15.0  # a look at the API, a report, the flush, two busy cores
HOST = """
import os, sys
from pathlib import Path
from prefect_torch_elastic.hosting.bodies import run_body
from prefect_torch_elastic.hosting.ownrun import OwnRun
from prefect_torch_elastic.hosting.signoflife import SignOfLife

started = Path(sys.argv[1])
{body}
own = OwnRun.from_environment()
if not own.begin():
    sys.exit(0)
warn = own.logger.warning
with own.watch(), SignOfLife(str(started.parent / "store"), {{}}, "calls/alive", warn=warn, seconds=0.2):
    end = run_body(own, lambda: (body, (), {{}}), task_name="body", grace_seconds={grace})
    print("END", end, flush=True)
    own.end(end.state)
    own.flush()
os._exit(0 if own.reported else 1)
"""

DEAF = """
def body():
    import time
    started.touch()
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            print("I do not care", flush=True)
"""
# it lets go of the interpreter's lock
IN_C = """
def body():
    import hashlib
    started.touch()
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", (1 << 31) - 1)  # hears no signal
"""
DEAF_ASYNC = """
async def body():
    import asyncio
    started.touch()
    while True:
        try:
            await asyncio.sleep(1000)
        except BaseException:
            print("I do not care", flush=True)
"""
POLITE = """
def body():
    import time
    started.touch()
    time.sleep(1000)
"""
WITH_PROCESSES = """
def body():
    import multiprocessing, subprocess, time
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    multiprocessing.get_context("fork").Process(target=time.sleep, args=[1000]).start()
    subprocess.run("sleep 1000 &", shell=True)
    time.sleep(0.5)
    started.touch()
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass
"""


class Host:
    """A host that carries out a body."""

    def __init__(
        self, run_script: ScriptRunner, folder: Path, body: str, *, grace: float, env: Mapping[str, str]
    ) -> None:
        self.run_id: UUID = create_run()
        self.started = folder / "started"
        self.store = folder / "store"
        self.script: RunningScript = run_script.start(
            HOST.format(body=body, grace=grace),
            args=[str(self.started)],
            env={"PREFECT__FLOW_RUN_ID": str(self.run_id), **env},
        )

    def wait_until_started(self) -> None:
        assert wait_for(self.started.exists, seconds=60), self.script.stderr

    def processes(self) -> list[int]:
        """Return what runs for the host, with itself."""
        found: list[int] = []
        for process in marked_processes().values():
            environment = Path(f"/proc/{process.pid}/environ")
            try:
                if str(self.run_id).encode() in environment.read_bytes():
                    found.append(process.pid)
            except OSError:
                continue
        return found

    def sign(self) -> str:
        return (self.store / "calls/alive").read_text()


@pytest.fixture
def start_host(run_script: ScriptRunner, tmp_path: Path) -> Callable[..., Host]:
    def start(body: str, *, grace: float = 3.0, env: Mapping[str, str] | None = None) -> Host:
        host = Host(run_script, tmp_path, body, grace=grace, env=env or {})
        host.wait_until_started()
        return host

    return start


@pytest.mark.parametrize(
    ("body", "where"),
    [
        pytest.param(DEAF, "in body", id="catches-everything"),
        pytest.param(IN_C, "in body", id="in-a-c-library"),
        pytest.param(DEAF_ASYNC, "select", id="async"),
    ],
)
def test_body_that_hears_nothing_is_killed_after_its_grace(
    start_host: Callable[..., Host], body: str, where: str
):
    from prefect.states import Cancelling

    host = start_host(body, grace=3.0)
    began = time.monotonic()
    set_state(host.run_id, Cancelling(message="enough"))
    assert host.script.wait(3.0 + LEAVE_SECONDS).rc == 0
    assert time.monotonic() - began >= 3.0
    assert read_state(host.run_id).name == "Cancelled"
    lines = [line.message for line in read_logs(flow_run=host.run_id)]
    assert any("did not end within 3 s" in line and where in line for line in lines)


def test_processes_of_a_body_are_killed_with_it(start_host: Callable[..., Host]):
    from prefect.states import Cancelled

    host = start_host(WITH_PROCESSES, grace=1.0)
    assert len(host.processes()) >= 4
    set_state(host.run_id, Cancelled())
    assert host.script.wait(LEAVE_SECONDS).rc == 0
    assert host.processes() == []
    assert read_state(host.run_id).name == "Cancelled"


@pytest.mark.parametrize("name", ["Cancelling", "Cancelled"])
def test_body_that_is_cancelled_stays_cancelled(start_host: Callable[..., Host], name: str):
    from prefect import states

    host = start_host(POLITE, grace=30.0)
    set_state(host.run_id, getattr(states, name)())
    assert host.script.wait(LEAVE_SECONDS).rc == 0
    assert read_state(host.run_id).name == "Cancelled"


def test_body_that_a_signal_ends_is_crashed(start_host: Callable[..., Host]):
    host = start_host(POLITE, grace=30.0)
    host.script.process.send_signal(signal.SIGTERM)
    assert host.script.wait(LEAVE_SECONDS).rc == 0
    state = read_state(host.run_id)
    assert (state.name, "its worker shuts down" in (state.message or "")) == ("Crashed", True)


def test_host_that_is_killed_leaves_nothing(start_host: Callable[..., Host]):
    host = start_host(WITH_PROCESSES)
    assert len(host.processes()) >= 4
    first = host.sign()
    assert wait_for(lambda: host.sign() != first)

    host.script.process.kill()
    host.script.process.wait()
    assert wait_for(lambda: not host.processes(), seconds=5)
    assert wait_for(lambda: host.sign() == "gone", seconds=5)


def test_body_that_holds_the_interpreter_is_alive_and_is_ended(start_host: Callable[..., Host]):
    from prefect.states import Cancelling

    host = start_host(
        """
from prefect_torch_elastic.hosting import interrupts
interrupts._HARD_MARGIN_SECONDS = 2.0

def body():
    import ctypes, time
    started.touch()
    while True:
        try:
            time.sleep(0.1)
        except BaseException:
            break
    started.with_name("stopping").touch()
    ctypes.PyDLL(None).usleep(900_000_000)  # keeps the interpreter's lock
""",
        grace=2.0,
    )
    set_state(host.run_id, Cancelling())
    assert wait_for(host.started.with_name("stopping").exists)
    first = host.sign()
    assert wait_for(lambda: host.sign() != first, seconds=2)
    assert host.script.wait(LEAVE_SECONDS).rc == 1
    assert "in body" in host.script.stderr


def test_run_that_was_cancelled_before_does_nothing(run_script: ScriptRunner, tmp_path: Path):
    from prefect.states import Cancelled

    run_id = create_run()
    set_state(run_id, Cancelled())
    ended = run_script(
        HOST.format(body=POLITE, grace=1.0),
        args=[str(tmp_path / "started")],
        env={"PREFECT__FLOW_RUN_ID": str(run_id)},
    )
    assert (ended.rc, (tmp_path / "started").exists()) == (0, False)
    assert read_state(run_id).name == "Cancelled"


def test_run_is_reported_when_the_api_is_back(start_host: Callable[..., Host], prefect_server: str):
    way = ClosableProxy(prefect_server)
    host = start_host(
        """
def body():
    import time
    from prefect import task
    started.touch()
    while not started.with_name("away").exists():
        time.sleep(0.1)
    return task(lambda: 5)()
""",
        env={"PREFECT_API_URL": way.url},
    )
    way.close()
    host.started.with_name("away").touch()
    assert wait_for(lambda: "END BodyEnd(value=5" in host.script.stdout), host.script.stderr
    time.sleep(3.0)
    assert read_state(host.run_id).name == "Running"
    way.open()
    assert host.script.wait(LEAVE_SECONDS + 10).rc == 0
    assert read_state(host.run_id).name == "Completed"
    way.close()
