"""The command line `prefect-torch-elastic`, in the manner of Prefect's own: cyclopts, rich, `--json`.

Exit codes: 0 is well, 1 is damage or a failure, 2 is a command that cannot be understood, 130 is Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import cyclopts

from prefect_torch_elastic import __version__
from prefect_torch_elastic.errors import ElasticError

FAILED = 1
USAGE = 2
INTERRUPTED = 130

app = cyclopts.App(
    name="prefect-torch-elastic",
    help="Run, deploy and look after elastic tasks: on this machine, in work pools, on Kubernetes.",
    help_flags=["--help", "-h"],
    version=__version__,
    exit_on_error=False,
    suppress_keyboard_interrupt=False,
    result_action="return_value",
)
# Loaded when it is used, so that `--help` is quick.
app.command(
    "prefect_torch_elastic.cli.checkpoints:app", name="checkpoints", help="See, check and keep checkpoints."
)
app.command(
    "prefect_torch_elastic.cli.dev:app",
    name="dev",
    help="Run a Prefect with workers on this machine, and flows on it.",
)
app.command(
    "prefect_torch_elastic.cli.deploy:deploy",
    name="deploy",
    help="Deploy a flow, and make the pools that it needs.",
)
app.command(
    "prefect_torch_elastic.cli.plan:plan",
    name="plan",
    help="Print what tasks would create in a cluster.",
)
app.command(
    "prefect_torch_elastic.cli.doctor:doctor",
    name="doctor",
    help="Check whether gangs can run in a Kubernetes cluster.",
)


class UsageError(Exception):
    """A command that cannot be carried out as it was given."""


def run(arguments: Sequence[str]) -> int:
    """Carry out one command and return its exit code."""
    try:
        return int(app(list(arguments)) or 0)
    except cyclopts.CycloptsError:  # cyclopts has said what is wrong
        return USAGE
    except UsageError as error:
        return _fail(str(error), USAGE)
    except BrokenPipeError:
        raise
    except (ElasticError, OSError) as error:
        return _fail(str(error), FAILED)
    except KeyboardInterrupt:
        return _fail(
            "interrupted. What it left half-done is no checkpoint and no file of yours; "
            "a later `checkpoints prune` of the run removes it from the store.",
            INTERRUPTED,
        )


def main() -> None:
    """Carry out the command of this process."""
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # who read our output has gone, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        code = FAILED
    raise SystemExit(code)


def _fail(message: str, code: int) -> int:
    print(f"Error: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201  (one line, unstyled)
    return code
