"""`prefect-torch-elastic dev`: a Prefect on this machine with a worker for each pool, and flows run on it."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import cyclopts

from prefect_torch_elastic.cli import FAILED, INTERRUPTED, UsageError
from prefect_torch_elastic.cli.deploy import parse_pairs
from prefect_torch_elastic.cli.parameters import Json
from prefect_torch_elastic.cli.rendering import print_json, print_lines
from prefect_torch_elastic.dev.plan import DRIVER_POOL, POOLS, StackError, StackPlan
from prefect_torch_elastic.dev.stack import DevStack, find_stack, stop_stack

app = cyclopts.App(
    name="dev",
    help="Run a Prefect with workers on this machine, and flows on it.",
    help_flags=["--help", "-h"],
    version_flags=[],
)

_Home = Annotated[
    Path, cyclopts.Parameter(help="Folder of everything that it keeps: database, store, results, logs.")
]
_Pools = Annotated[
    tuple[str, ...],
    cyclopts.Parameter(
        "--pool", help="NAME or NAME=TYPE of a pool, instead of `data` and `train`; `driver` is always there."
    ),
]
_Port = Annotated[int, cyclopts.Parameter(help="Port of the server; 0 takes a free one.")]
_HOME = Path("~/.prefect/torch-elastic-dev")


@app.command
def up(
    *,
    home: _Home = _HOME,
    pool: _Pools = (),
    port: _Port = 0,
    detach: Annotated[
        bool, cyclopts.Parameter(negative="", help="Leave it running; `dev down` ends it.")
    ] = False,
) -> int:
    """Start a server and a worker for each pool; Ctrl-C ends them."""
    plan = StackPlan(home=home, pools=_parse_pools(pool), port=port)
    if (running := find_stack(plan.home)) is not None:
        raise StackError(
            f"a stack runs in `{plan.home}` already, at {running.ui_url}. End it with "
            f"`{_hint('down', plan)}`, or name another `--home`."
        )
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with _start(DevStack(plan, detached=detach, show=_show)) as stack:
            _print_stack(stack)
            if detach:
                return 0
            _show("Press Ctrl-C to end it.")
            if stack.wait() == 0:
                return 0
            raise StackError(f"it ended by itself. See `{plan.logs / 'supervisor.log'}`.")
    except KeyboardInterrupt:
        _show("ended")
        return 0


@app.command
def down(*, home: _Home = _HOME) -> int:
    """End the stack that runs in a home, and all that runs on it."""
    plan = StackPlan(home=home)
    print_lines(
        [f"ended the stack in {plan.home}" if stop_stack(plan.home) else f"no stack runs in {plan.home}"]
    )
    return 0


@app.command
def status(*, home: _Home = _HOME, json: Json = False) -> int:
    """Say whether a stack runs in a home, and where."""
    plan = StackPlan(home=home)
    stack = find_stack(plan.home)
    if json:
        print_json(None if stack is None else stack.running.as_dict())
    elif stack is None:
        print_lines([f"no stack runs in {plan.home}; start one with `{_hint('up', plan)}`"])
    else:
        _print_stack(stack)
    return FAILED if stack is None or stack.running.ended else 0


@app.command
def env(*, home: _Home = _HOME) -> int:
    """Print the variables that point a shell at the stack: `eval "$(prefect-torch-elastic dev env)"`."""
    stack = _find(StackPlan(home=home))
    print_lines([f"export {name}={shlex.quote(value)}" for name, value in stack.environment.items()])
    return 0


@app.command(name="run")
def run_(
    place: Annotated[str, cyclopts.Parameter(help="FILE.py, or FILE.py:FLOW if it has several.")],
    /,
    *,
    param: Annotated[
        tuple[str, ...],
        cyclopts.Parameter(("--param", "-p"), help="NAME=VALUE of the flow; JSON, or text."),
    ] = (),
    home: _Home = _HOME,
    pool: _Pools = (),
    port: _Port = 0,
) -> int:
    """Run a flow in the pool `driver` and print its value; starts a stack for it if none runs in the home."""
    parameters = parse_pairs(param, "--param")
    if not Path(place.partition(":")[0]).is_file():
        raise UsageError(f"`{place}`: there is no such file. Write `FILE.py` or `FILE.py:FLOW`.")
    plan = StackPlan(home=home, pools=_parse_pools(pool), port=port)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with _start(find_stack(plan.home) or DevStack(plan, show=_show)) as stack:
            print_lines([_run_on(stack, place, parameters)])
    except KeyboardInterrupt:
        _show("interrupted")
        return INTERRUPTED
    return 0


@contextmanager
def _start(stack: DevStack) -> Generator[DevStack]:
    """Enter a stack; what the logs say of one that did not start comes before the error."""
    with ExitStack() as ending:
        try:
            ending.enter_context(stack)
        except StackError as error:
            reason, *tail = str(error).splitlines()
            for line in tail:
                _show(line)
            raise StackError(reason) from error
        yield stack


def _run_on(stack: DevStack, place: str, parameters: Mapping[str, object]) -> str:
    """Run a flow on a stack and return its value as JSON."""
    assert "prefect" not in sys.modules, "Prefect reads its settings when it is imported"
    environment = stack.child_environment()
    os.environ.clear()
    os.environ.update(environment)
    from prefect_torch_elastic.dev.running import load_for, render_value, run_flow

    pools = stack.running.pools
    value = run_flow(
        load_for(place, pools),
        parameters,
        pools,
        show=_show,
        is_alive=lambda: find_stack(stack.plan.home) is not None,
    )
    return render_value(value)


def _parse_pools(names: tuple[str, ...]) -> dict[str, str]:
    if not names:
        return dict(POOLS)
    pools = {DRIVER_POOL: POOLS[DRIVER_POOL]}
    for name in names:
        pool, equals, kind = name.partition("=")
        pools[pool] = kind if equals else "process"
    return pools


def _find(plan: StackPlan) -> DevStack:
    if (stack := find_stack(plan.home)) is None:
        raise StackError(f"no stack runs in `{plan.home}`. Start one with `{_hint('up', plan)}`.")
    return stack


def _hint(command: str, plan: StackPlan) -> str:
    """Return a command of ours for the same home."""
    home = "" if plan.home == _HOME.expanduser() else f" --home {shlex.quote(str(plan.home))}"
    return f"prefect-torch-elastic dev {command}{home}"


def _print_stack(stack: DevStack) -> None:
    state = stack.running
    pools = ", ".join(name if kind == "process" else f"{name} ({kind})" for name, kind in state.pools.items())
    lines = [
        f"UI     {stack.ui_url}",
        f"API    {stack.api_url}",
        f"pools  {pools}",
        f"store  {stack.plan.store_url}",
        f"logs   {stack.plan.logs}",
        *(f"`{part}` {how}; see {stack.plan.logs / part}.log" for part, how in state.ended.items()),
        f'shell  eval "$({_hint("env", stack.plan)})"',
    ]
    print_lines(lines)


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201  (stdout belongs to the value)


def _interrupt(number: int, frame: object) -> None:  # noqa: ARG001  (Python's signature)
    raise KeyboardInterrupt
