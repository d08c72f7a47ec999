"""A stack as a context manager: entered when all of it answers, left when all of it has ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prefect_torch_elastic.dev.ending import ask, kill, sweep
from prefect_torch_elastic.dev.plan import (
    StackError,
    StackPlan,
    add_python_path,
    render_addresses,
    render_environment,
    scrub_environment,
)
from prefect_torch_elastic.dev.state import StackState, find_state, read_state

Show = Callable[[str], None]
"""What shows a line of progress to the person who waits."""

_STOP_SECONDS = 30.0  # more than the supervisor allows all parts together


class DevStack:
    """A Prefect server with SQLite and one process worker for each pool, all on loopback.

    Everything ends with the context, and with this process, in whatever way it ends.

    Attributes:
        plan: What was asked for.
        state: What runs: port, process of each part (`state.pids["data-worker"]`), pools.
        environment: Variables that point a process at this stack (`PREFECT_API_URL`, `PREFECT_HOME`, ...).
    """

    def __init__(self, plan: StackPlan, *, detached: bool = False, show: Show | None = None) -> None:
        """Prepare a stack; nothing starts before it is entered.

        Args:
            plan: What to start.
            detached: Leave the stack running after the context and this process; `stop_stack` ends it.
            show: Called with each line of progress.
        """
        self.plan = plan
        self.state: StackState | None = None
        self._detached = detached
        self._show = show or _keep_quiet
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def of_state(cls, state: StackState) -> Self:
        """Return a stack that runs already and belongs to somebody else."""
        stack = cls(state.plan, detached=True)
        stack.state = state
        return stack

    @property
    def running(self) -> StackState:
        """What runs; StackError when nothing does."""
        if self.state is None:
            raise StackError(
                f"no stack runs in `{self.plan.home}`. Start one: `prefect-torch-elastic dev up`."
            )
        return self.state

    @property
    def api_url(self) -> str:
        """Address of the API."""
        return render_addresses(self.running.port)[0]

    @property
    def ui_url(self) -> str:
        """Address of the UI."""
        return render_addresses(self.running.port)[1]

    @property
    def environment(self) -> dict[str, str]:
        """The variables that point a process at this stack."""
        return render_environment(self.plan, self.running.port, os.environ)

    def child_environment(self) -> dict[str, str]:
        """Return the whole environment of a child process: this one's, without other settings of Prefect."""
        return {**scrub_environment(os.environ), **self.environment}

    def __enter__(self) -> Self:
        if self.state is not None:  # somebody else's, and it runs
            return self
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._detached:
            self.stop()

    def wait(self) -> int:
        """Wait until the stack ends: 0 if somebody asked for it, 1 if not; `supervisor.log` says why."""
        assert self._process is not None, "only who started a stack can wait for it"
        return self._process.wait()

    def stop(self) -> None:
        """End the stack and return when nothing of it is left; nothing happens when none runs."""
        if self._process is not None and self._process.poll() is None:
            end_keeper(self._process.pid, self._process.wait)
        self._process = None
        if self.state is not None:
            _finish(self.state)
            self.state = None

    def _start(self) -> None:
        self.plan.make_folders()
        order = {
            "home": str(self.plan.home),
            "pools": dict(self.plan.pools),
            "port": self.plan.port,
            "start_seconds": self.plan.start_seconds,
            "holder": 0 if self._detached else os.getpid(),
        }
        self._show(f"starting Prefect in {self.plan.home}")
        with (self.plan.logs / "supervisor.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "prefect_torch_elastic.dev.supervisor", json.dumps(order)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=add_python_path(os.environ),
                start_new_session=True,  # Ctrl-C in a terminal reaches it through us only
            )
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                answer: dict[str, Any] = json.loads(line)
                match answer["event"]:
                    case "part":
                        self._show(f"{answer['part']} is ready ({answer['seconds']:.1f} s)")
                    case "ready":
                        self.state = read_state(self.plan.home)
                        return
                    case event:
                        assert event == "failed", event
                        raise StackError(f"the stack did not start: {answer['message']}")
        last = read_last_line(self.plan.logs / "supervisor.log")
        raise StackError(f"the stack did not start, its supervisor ended: {last}")


def find_stack(home: Path) -> DevStack | None:
    """Return the stack that runs in `home`, whoever started it; None if there is none, or none ready."""
    state = find_state(StackPlan(home=home).home)
    return DevStack.of_state(state) if state is not None and state.ready else None


def stop_stack(home: Path) -> bool:
    """End the stack that runs in `home`, whoever started it; False if there is none.

    What a stack left behind whose supervisor was killed is ended too.
    """
    plan = StackPlan(home=home)
    state = find_state(plan.home)
    if state is None:
        if (old := read_state(plan.home)) is not None:
            sweep(old.token)
            plan.state_file.unlink(missing_ok=True)
        return False
    end_keeper(state.keeper, lambda seconds: _wait_for_stranger(state.keeper, seconds))
    _finish(state)
    return True


def end_keeper(pid: int, wait: Callable[[float], object]) -> None:
    """Ask a stack to end, by its keeper; kill it when it does not."""
    ask(pid)
    try:
        wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        kill(pid)
        wait(_STOP_SECONDS)


def _finish(state: StackState) -> None:
    """Wait for a supervisor whose keeper was killed, and end what is left if both were."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        _wait_for_stranger(state.pids["supervisor"], _STOP_SECONDS)
    sweep(state.token)


def read_last_line(log: Path) -> str:
    """Return the last line of a log."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return lines[-1] if lines else f"`{log}` is empty"


def _wait_for_stranger(pid: int, seconds: float) -> None:
    """Wait until a process has ended that is not our child."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            ended = select.poll()
            ended.register(pidfd, select.POLLIN)
            if not ended.poll(seconds * 1000):
                raise subprocess.TimeoutExpired(str(pid), seconds)
        finally:
            os.close(pidfd)


def _keep_quiet(line: str) -> None:
    """Show nothing."""
