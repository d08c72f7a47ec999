"""A job, and a flow that waits for one, outlive whoever reads what they print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

JOB = """
import sys, time
from pathlib import Path
from rich.console import Console
from prefect_torch_elastic.hosting.output import outlive_reader

outlive_reader()
sys.stdin.read()  # until the reader has gone
deadline = time.monotonic() + 10
while time.monotonic() < deadline:
    {line}
    sys.stdout.flush()
    if Path("/proc/self/fd/1").readlink() == Path("/dev/null"):
        break
Path(sys.argv[1]).write_text("goes on")
"""


FLOW = """
import sys
from pathlib import Path
from prefect.logging import get_logger
from prefect.logging.configuration import setup_logging
from prefect_torch_elastic.dispatch.console import outlive_console

setup_logging()
{guard}
sys.stdin.read()  # until the reader has gone
for number in range(3):
    get_logger("x").warning("line %s", number)
Path(sys.argv[1]).write_text("goes on")
"""


def run_without_reader(script: str, mark: Path) -> int:
    """Run a script whose output nobody reads from some moment on, and return its exit code."""
    job = subprocess.Popen(
        [sys.executable, "-c", script, str(mark)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert job.stdin
    assert job.stdout
    job.stdout.close()
    job.stdin.close()
    return job.wait(60)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("Console(file=sys.stderr).print('a line of a log')", id="console"),
        pytest.param("time.sleep(0.1); print('a line')", id="print"),
    ],
)
def test_job_goes_on_when_the_reader_of_its_output_has_gone(tmp_path: Path, line: str):
    mark = tmp_path / "mark"
    assert run_without_reader(JOB.format(line=line), mark) == 0
    assert mark.read_text() == "goes on"


@pytest.mark.parametrize(
    ("guard", "said"), [("outlive_console()", "goes on"), ("pass", "")], ids=["with-ours", "without-ours"]
)
def test_flow_goes_on_when_the_reader_of_its_log_has_gone(tmp_path: Path, guard: str, said: str):
    """The second case is Prefect's: when it passes, nothing of ours is needed any more."""
    mark = tmp_path / "mark"
    run_without_reader(FLOW.format(guard=guard), mark)
    assert (mark.read_text() if mark.exists() else "") == said
