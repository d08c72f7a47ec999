"""The host's sign of life: it goes on while the host lives, whatever that does."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefect_torch_elastic.hosting import signoflife
from prefect_torch_elastic.hosting.signoflife import SignOfLife

KEY = "run/calls/digest/alive-child"
SECONDS = 0.1


class Witness:
    """Collects what a sign of life says, and reads the sign."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.said: list[str] = []

    def give(self, **options: Any) -> SignOfLife:
        return SignOfLife(str(self.store), {}, KEY, warn=self.said.append, seconds=SECONDS, **options)

    def sign(self) -> str:
        path = self.store / KEY
        return path.read_text() if path.is_file() else ""

    def changes(self, *, seconds: float = 5.0) -> bool:
        """Whether the sign changes within some time."""
        first = self.sign()
        return wait_until(lambda: self.sign() not in {first, ""}, seconds=seconds)


def wait_until(look: Callable[[], bool], *, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def companions() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "hosting.companion" in " ".join(one.cmdline())]


@pytest.fixture
def witness(tmp_path: Path) -> Witness:
    return Witness(tmp_path / "store")


def test_sign_of_life_is_given_again_and_again(witness: Witness):
    with witness.give():
        assert witness.changes()
        assert witness.changes()
    assert witness.said == []


def test_sign_of_life_ends_with_its_block(witness: Witness):
    with witness.give():
        assert witness.changes()
    assert companions() == []
    assert not witness.changes(seconds=5 * SECONDS)


def test_sign_of_life_goes_on_while_a_library_holds_the_interpreter(witness: Witness):
    with witness.give():
        assert witness.changes()
        first = witness.sign()
        ctypes.PyDLL(None).usleep(int(10 * SECONDS * 1e6))
        assert witness.sign() != first


def test_sign_of_life_tells_once_that_the_store_is_away_and_that_it_is_back(witness: Witness):
    witness.store.write_text("a file where the directory should be")
    with witness.give():
        assert wait_until(lambda: bool(witness.said))
        time.sleep(5 * SECONDS)
        witness.store.unlink()
        assert witness.changes()
        assert wait_until(lambda: len(witness.said) == 2)
    away, back = witness.said
    assert away.startswith("The driver cannot be shown that this run is alive:")
    assert back.startswith("The driver can be shown again that this run is alive, after")


def test_sign_of_life_survives_the_death_of_its_companion(witness: Witness):
    with witness.give():
        assert witness.changes()
        (companion,) = companions()
        companion.kill()
        assert wait_until(lambda: bool(witness.said))
        assert witness.changes()
    assert "it is started again" in witness.said[0]


def test_sign_of_life_shows_no_credentials_to_other_processes(tmp_path: Path):
    with SignOfLife(str(tmp_path), {"password": "hunter2"}, KEY, warn=print, seconds=SECONDS):
        assert wait_until(lambda: bool(companions()))  # between fork and exec it has no command line
        (companion,) = companions()
        shown = " ".join(companion.cmdline()) + str(companion.environ())
    assert "hunter2" not in shown


def test_companion_imports_no_prefect_and_no_torch():
    program = "import sys, prefect_torch_elastic.hosting.companion; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {"prefect", "torch", "numpy", "pydantic"}.isdisjoint(loaded)


def test_companion_ends_what_a_killed_host_leaves(run_script: Any, tmp_path: Path):
    host = run_script.start(
        f"""
import subprocess, time
from prefect_torch_elastic.hosting.signoflife import SignOfLife
with SignOfLife({str(tmp_path / "store")!r}, {{}}, {KEY!r}, warn=print, seconds={SECONDS}):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print(child.pid, flush=True)
    time.sleep(1000)
""",
        env={"PREFECT__FLOW_RUN_ID": "a-run-of-this-test"},
    )
    assert wait_until(lambda: host.stdout.endswith("\n"), seconds=20), host.stderr
    child = psutil.Process(int(host.stdout))
    assert Witness(tmp_path / "store").changes()
    os.kill(host.process.pid, signal.SIGKILL)
    host.process.wait()
    assert wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert wait_until(lambda: Witness(tmp_path / "store").sign() == "gone")
    assert "killed after it: [" in host.stderr


def test_sign_of_life_leaves_processes_alone_when_it_ends_in_order(witness: Witness):
    with witness.give():
        child = subprocess.Popen([shutil.which("sleep") or "sleep", "1000"], start_new_session=True)
        assert witness.changes()
    time.sleep(0.5)
    assert child.poll() is None
    child.kill()
    child.wait()


class Reluctant(SignOfLife):
    """The first companion cannot be started, as on a machine with too many processes."""

    failures = 1

    def _start(self) -> subprocess.Popen[str]:
        if self.failures:
            self.failures -= 1
            raise BlockingIOError("too many processes")
        return super()._start()


def test_sign_of_life_begins_later_when_no_process_can_be_started(
    witness: Witness, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(signoflife, "_RESTART_SECONDS", 0.1)
    with Reluctant(str(witness.store), {}, KEY, warn=witness.said.append, seconds=SECONDS):
        assert witness.changes()
    assert witness.said[0].startswith(
        "The driver cannot be shown that this run is alive: too many processes."
    )
    assert len(witness.said) == 1


def test_sign_of_life_survives_a_line_that_is_no_json(witness: Witness, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(signoflife, "_PROGRAM", f"print('hello', flush=True); {signoflife._PROGRAM}")
    with witness.give():
        assert wait_until(lambda: bool(witness.said))
        assert witness.changes()
    assert witness.said == ["The process that says that this run is alive wrote: hello"]
