"""What every test shares: a Prefect of its own, scripts in fresh interpreters, and a hunt for leftovers.

Importing this file isolates the session, before any test imports Prefect: the settings of the person who runs
the tests have no effect, and nothing of theirs is touched.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.leftovers import MARK, describe, kill, marked_processes, our_files, our_processes

if TYPE_CHECKING:
    from tests.simulators.s3 import S3Server

SETTLE_SECONDS = 10.0  # how long processes may take to leave after the test

TESTS = Path(__file__).parent
TIER_OF_FOLDER = {"e2e": "e2e", "gpu": "gpu", "benchmarks": "benchmark"}
TIERS = ("e2e", "kueue", "chaos", "soak", "benchmark", "gpu")


def _isolate_session() -> None:
    """Give this session its own Prefect home, temp folder and mark."""
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        del os.environ[name]
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # `tmp_path` outlives the session
    # A short path: a Unix socket's is at most 107 bytes long.
    root = Path(tempfile.mkdtemp(prefix="te-"))
    # First registered, last run: Prefect's test harness removes its own folder at exit and insists on it.
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    (root / "tmp").mkdir()
    tempfile.tempdir = None
    os.environ.update(
        {
            MARK: uuid.uuid4().hex,
            "TMPDIR": str(root / "tmp"),
            "PREFECT_HOME": str(root / "prefect"),
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
            # Two busy cores need 15 to 23 s to start a server; Prefect waits 20 s by default.
            "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
            "PREFECT_LOGGING_COLORS": "false",  # tests read the text
            "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
            "PREFECT_CLI_PROMPT": "false",
            "DO_NOT_TRACK": "1",
        }
    )


_isolate_session()


@pytest.hookimpl(tryfirst=True)  # before pytest's own hook deselects by `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test of a tier's folder the tier's marker, unless it names another tier itself."""
    for item in items:
        if not item.path.is_relative_to(TESTS):
            continue
        tier = TIER_OF_FOLDER.get(item.path.relative_to(TESTS).parts[0])
        if tier and not any(item.get_closest_marker(name) for name in TIERS):
            item.add_marker(tier)


def pytest_sessionfinish() -> None:
    """End whatever a failed test left running, so that nothing outlives the session."""
    for process in marked_processes().values():
        kill(process)


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[str]:
    """One real Prefect server on a new SQLite file, for this process and, by environment, its children."""
    from prefect.settings import PREFECT_API_URL
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120), pytest.MonkeyPatch.context() as environment:
        url = str(PREFECT_API_URL.value())
        # The harness keeps its settings in a context, which no child process sees.
        environment.setenv("PREFECT_API_URL", url)
        yield url


@dataclass(frozen=True, kw_only=True)
class ScriptResult:
    """How a script ended; `rc` is negative when a signal ended it, as in `subprocess`."""

    rc: int
    stdout: str
    stderr: str


@dataclass(frozen=True, kw_only=True)
class RunningScript:
    """A script in its own process group. Its output is in files: an orphan that holds them blocks nobody."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")

    def wait(self, timeout_seconds: float) -> ScriptResult:
        """Return how the script ended, or fail the test with its last output at the deadline."""
        try:
            rc = self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.end()
            tail = f"stdout:\n{self.stdout[-4000:]}\nstderr:\n{self.stderr[-4000:]}"
            pytest.fail(f"The script was still running after {timeout_seconds:g} s.\n{tail}", pytrace=False)
        return ScriptResult(rc=rc, stdout=self.stdout, stderr=self.stderr)

    def end(self) -> None:
        """Kill what is left of the script's process group."""
        for process in marked_processes().values():
            try:
                if os.getpgid(process.pid) == self.process.pid:
                    kill(process)
            except ProcessLookupError:
                continue
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


@dataclass
class ScriptRunner:
    """Runs the text of a Python script in a fresh interpreter; see the fixture `run_script`."""

    folder: Path
    running: list[RunningScript] = field(default_factory=list)

    def __call__(
        self,
        text: str,
        *,
        timeout_seconds: float = 60.0,
        args: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
    ) -> ScriptResult:
        """Run the script to its end; a variable that is None in `env` is taken out."""
        return self.start(text, args=args, env=env, cwd=cwd).wait(timeout_seconds)

    def start(
        self,
        text: str,
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
    ) -> RunningScript:
        """Start the script and return at once, for tests that kill something on the way."""
        folder = self.folder / f"script-{len(self.running)}"
        folder.mkdir(parents=True)
        script = folder / "script.py"
        script.write_text(text)
        environment = {k: v for k, v in {**os.environ, **(env or {})}.items() if v is not None}
        with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, str(script), *args],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                cwd=cwd or folder,
                start_new_session=True,
            )
        self.running.append(RunningScript(process=process, folder=folder))
        return self.running[-1]


@pytest.fixture
def checkpoint_log(caplog: pytest.LogCaptureFixture) -> None:
    """Catch what checkpoints say in the log of rank 0."""
    caplog.set_level(logging.INFO, logger="prefect_torch_elastic.checkpoint")


@pytest.fixture
def no_cloud_settings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hide the credentials of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture
def s3() -> Iterator[S3Server]:
    """An S3 server on loopback, in this process."""
    from tests.simulators.s3 import S3Server

    with S3Server() as server:
        yield server


@pytest.fixture
def run_script(tmp_path: Path) -> Iterator[ScriptRunner]:
    """`run_script(text)` runs a script in a fresh interpreter; its process group is killed after the test."""
    runner = ScriptRunner(folder=tmp_path / "scripts")
    yield runner
    for script in runner.running:
        script.end()


@pytest.fixture
def no_leftovers(run_script: ScriptRunner) -> Iterator[None]:
    """Fail the test if a process, a shared memory file or a temp folder of ours is left after it.

    It asks for `run_script` so that it looks before that fixture kills what a script left behind.
    """
    processes, files = our_processes(), our_files()
    yield
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        left = {key: process for key, process in our_processes().items() if key not in processes}
        left_files = sorted(our_files() - files)
        if not left and not left_files:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    lines = [f"process {process.pid}: {describe(process)}" for process in left.values()] + left_files
    for process in left.values():
        kill(process)
    pytest.fail(f"Left {SETTLE_SECONDS:g} s after the test:\n" + "\n".join(lines), pytrace=False)
