"""The process that holds a stack together: it starts the parts, says when they are ready, and ends them all.

It has a session of its own and imports no Prefect. It ends the stack at SIGTERM, when its holder (the process
with the `DevStack`) dies in whatever way, and when the server dies. Its parent, the keeper, only waits: if
the supervisor is killed, the kernel kills the parts (PDEATHSIG), and the keeper inherits and kills the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
import uuid
from pathlib import Path

from prefect_torch_elastic.dev.ending import sweep
from prefect_torch_elastic.dev.parts import STOP_SIGNALS, Parts
from prefect_torch_elastic.dev.plan import (
    HOST,
    MARK,
    StackError,
    StackPlan,
    add_python_path,
    render_environment,
    scrub_environment,
)
from prefect_torch_elastic.dev.state import StackLock, StackState, read_state
from prefect_torch_elastic.node.processes import adopt_orphans, kill_children, redirect_output

_LOCK_SECONDS = 1.0  # who looks whether a stack runs has the lock for an instant
_TAIL_LINES = 15


def main(order: str) -> int:
    """Hold a stack until it has to end; return 1 when it did not start, or ended unasked."""
    given = json.loads(order)
    plan = StackPlan(
        home=Path(given["home"]),
        pools=given["pools"],
        port=given["port"],
        start_seconds=given["start_seconds"],
    )
    answers = os.dup(1)  # the pipe of the holder, which flows shall not inherit
    redirect_output(os.open(plan.logs / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    token, keeper = uuid.uuid4().hex, os.getpid()
    adopt_orphans()
    if supervisor := os.fork():
        os.close(answers)
        return _keep(supervisor, plan, token)
    code = 1
    try:
        code = _supervise(plan, token, keeper=keeper, holder=given["holder"], answers=answers)
    except BaseException:  # noqa: BLE001  (the last frame of a forked process)
        traceback.print_exc()
    finally:
        os._exit(code)


def _keep(supervisor: int, plan: StackPlan, token: str) -> int:
    """Outlive the supervisor and end what it has left; return its exit code."""

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor, number)

    for number in STOP_SIGNALS:
        signal.signal(number, forward)
    _, status = os.waitpid(supervisor, 0)
    if not os.WIFEXITED(status):
        _say(f"the supervisor was killed by signal {os.WTERMSIG(status)}")
        kill_children(keep=set())
        sweep(token)
        if (state := read_state(plan.home)) is not None and state.token == token:
            plan.state_file.unlink(missing_ok=True)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 1


def _supervise(plan: StackPlan, token: str, *, keeper: int, holder: int, answers: int) -> int:
    adopt_orphans()
    lock = StackLock(plan.home)
    parts: Parts | None = None
    code = 0
    try:
        _take(lock, plan)
        plan.set_logs_aside()
        with _listen(plan.port) as listening:  # then it is the server's alone: a dead one refuses connections
            pids = {"keeper": keeper, "supervisor": os.getpid()}
            port = listening.getsockname()[1]
            state = StackState(home=str(plan.home), token=token, port=port, pools=dict(plan.pools), pids=pids)
            parts = Parts(plan, state, watched={keeper: "its keeper", holder: "the process that held it"})
            environment = add_python_path(scrub_environment(os.environ))
            environment.update(render_environment(plan, port, environment))
            parts.start(listening.fileno(), {**environment, MARK: token})
        state.write()
        _wait_until_ready(plan, parts, answers)
        state.ready = True
        state.write()
        _say(f"ready at {port}: {state.pids}")
        _answer(answers, event="ready")
        _watch(plan, parts, state)
    except StackError as error:
        _say(str(error))
        _answer(answers, event="failed", message=str(error))
        code = 1
    finally:
        if parts is not None:
            started = time.monotonic()
            parts.stop()
            plan.state_file.unlink(missing_ok=True)
            _say(f"ended in {time.monotonic() - started:.2f} s")
    return code


def _take(lock: StackLock, plan: StackPlan) -> None:
    """Take the lock, and end what a killed stack may have left in this home."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while not lock.take():
        if time.monotonic() > deadline:
            raise StackError(f"a stack runs in `{plan.home}` already.")
        time.sleep(0.05)
    if (old := read_state(plan.home)) is not None:
        sweep(old.token)
        plan.state_file.unlink()


def _wait_until_ready(plan: StackPlan, parts: Parts, answers: int) -> None:
    """Return when all parts are ready, saying so of each; StackError with the cause when they are not."""
    started = time.monotonic()
    deadline = started + plan.start_seconds
    said: set[str] = set()
    while missing := [part for part in plan.parts if part not in parts.ready]:
        parts.look(deadline - time.monotonic())
        for part in sorted(parts.ready - said):
            _answer(answers, event="part", part=part, seconds=round(time.monotonic() - started, 2))
        said |= parts.ready
        if parts.stop_reason:
            raise StackError(f"the start was given up: {parts.stop_reason}.")
        for part, how in parts.ended.items():
            if how:
                raise StackError(f"`{part}` {how} before the stack was ready.{_tail(plan, part)}")
        if time.monotonic() > deadline and missing:
            names = ", ".join(f"`{part}`" for part in missing)
            raise StackError(f"not ready after {plan.start_seconds:g} s: {names}.{_tail(plan, *missing)}")


def _watch(plan: StackPlan, parts: Parts, state: StackState) -> None:
    """Return when the stack has to end; StackError when nobody has asked for it."""
    while not parts.stop_reason:
        parts.look(None)
        ended = {part: how for part, how in parts.ended.items() if how}
        if ended != state.ended:
            state.ended = ended
            state.write()
            _say(f"no longer runs: {ended}")
        if "server" in ended:
            raise StackError(f"the server {ended['server']}.{_tail(plan, 'server')}")
    _say(f"ends: {parts.stop_reason}")


def _tail(plan: StackPlan, *parts: str) -> str:
    """Return where the logs of these parts are, and their last lines."""
    lines: list[str] = []
    for part in parts:
        path = plan.logs / f"{part}.log"
        if not path.exists():  # a worker that was not forked yet
            path = plan.logs / "workers.log"
        text = path.read_text(errors="replace") if path.exists() else ""
        lines += [f"The end of `{path}`:", *(text.splitlines()[-_TAIL_LINES:] or ["(empty)"])]
    return "\n".join(["", *lines])


def _listen(port: int) -> socket.socket:
    """Return a listening socket; connections wait in its queue until the server takes them."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
    except OSError as error:
        listening.close()
        raise StackError(
            f"`port={port}` is taken: {error}. Name another one, or 0 for a free one."
        ) from error
    listening.listen(128)
    return listening


def _answer(pipe: int, **facts: object) -> None:
    """Tell the holder; it may have gone, or have heard enough."""
    with contextlib.suppress(BrokenPipeError):
        os.write(pipe, json.dumps(facts).encode() + b"\n")


def _say(line: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", flush=True)  # noqa: T201  (its log)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
