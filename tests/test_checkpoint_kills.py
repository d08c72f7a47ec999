"""Killed or asleep between any two store operations: a whole checkpoint is always there, and the right one.

The sweeps run in this process: a dead gang is one whose store raises from some operation on, a sleeping one
waits there until another gang has taken its place. A few places are tried with real signals.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from prefect_torch_elastic.checkpoint import retention
from prefect_torch_elastic.checkpoint.verify import verify
from prefect_torch_elastic.errors import Superseded
from prefect_torch_elastic.logformat import parse_record
from prefect_torch_elastic.runlog import Commit, RunLog
from prefect_torch_elastic.store import Store
from tests.checkpoint_stores import (
    RUN,
    MemoryStore,
    WatchedStore,
    assert_is,
    load_fresh,
    make_state,
    open_session,
    save_steps,
    use_small_blocks,
)

if TYPE_CHECKING:
    from tests.conftest import ScriptRunner

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_blocks(monkeypatch)


@pytest.fixture
def _hours_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every folder that no checkpoint needs be old enough to be removed at once."""
    monkeypatch.setattr(retention, "GARBAGE_SECONDS", -60.0)
    monkeypatch.setattr(retention, "ABANDONED_SECONDS", -60.0)


class Killed(BaseException):
    """The gang is dead."""


def make_base() -> MemoryStore:
    """Return a run with three checkpoints, of which the next gang keeps none."""
    store = MemoryStore()
    save_steps(store, 8, 9, 10, keep_last=3)
    return store


def train(store: Store) -> None:
    """Be the gang that is killed, or sleeps: load, save step 20 and prune all before it."""
    session = open_session(store, keep_last=1)
    session.load(make_state(-1.0))
    session.save(make_state(20.0), step=20, wait=True)
    session.close()


def count_operations(*, of: str = "") -> int:
    watched = WatchedStore(make_base())
    train(watched)
    return sum(verb.startswith(of) for verb, _ in watched.operations)


def read_log(store: Store) -> list[Any]:
    """Return the entries of the log, oldest first."""
    return [parse_record(bytes(store.get(found.key))).entry for found in store.list(f"{RUN}/log")]


def verify_all(store: Store) -> None:
    """Check that everything that can be loaded is whole."""
    commits = RunLog(store, RUN).refresh().commits
    assert commits
    for commit in commits:
        assert verify(store, RUN, commit).damages == ()


def test_gang_killed_between_any_two_operations_leaves_a_whole_checkpoint_report_11() -> None:
    operations = count_operations()
    assert count_operations(of="delete") > 10  # the prune is swept too
    for cut in range(operations):
        store = make_base()

        watched = WatchedStore(store)

        def die(verb: str, key: str, cut: int = cut, watched: WatchedStore = watched) -> None:
            if len(watched.operations) > cut:
                raise Killed

        watched.before = die
        with pytest.raises(Killed):
            train(watched)
        committed = any(isinstance(entry, Commit) and entry.step == 20 for entry in read_log(store))
        verify_all(store)
        step, state = load_fresh(store)
        assert step == (20 if committed else 10)
        assert_is(state, float(step))
        store.age(7200.0)
        save_steps(store, 30, keep_last=1)
        assert_is(load_fresh(store)[1], 30.0)
        (left,) = store.list_folders(f"{RUN}/checkpoints")  # what died left nothing for good
        assert int(left) == 30


def test_gang_whose_answer_was_lost_at_any_operation_leaves_a_whole_checkpoint() -> None:
    """The operation happens, and the gang dies before it hears of it."""
    for cut in range(count_operations()):
        store = make_base()

        class Deaf(WatchedStore):
            def put(self, key: str, data: bytes | memoryview) -> None:
                super().put(key, data)
                self.die()

            def create(self, key: str, data: bytes) -> bool:
                super().create(key, data)
                return self.die()

            def die(self, cut: int = cut) -> bool:
                if len(self.operations) > cut:
                    raise Killed
                return True

        deaf = Deaf(store)
        try:
            train(deaf)
        except Killed:
            verify_all(store)
        step, state = load_fresh(store)
        assert step in (10, 20)
        assert_is(state, float(step))


class Sleeper:
    """A gang in a thread that falls asleep before its n-th store operation."""

    def __init__(self, store: Store, number: int) -> None:
        self.asleep, self.wake = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.watched = WatchedStore(store, self._before)
        self._number = number
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _before(self, verb: str, key: str) -> None:
        if len(self.watched.operations) == self._number + 1:
            self.asleep.set()
            assert self.wake.wait(30.0)

    def _run(self) -> None:
        try:
            train(self.watched)
        except BaseException as error:  # noqa: BLE001  (the test looks at it)
            self.error = error

    def finish(self) -> None:
        self.wake.set()
        self._thread.join(30.0)
        assert not self._thread.is_alive()


@pytest.mark.usefixtures("_hours_pass")
@pytest.mark.parametrize("keep_last", [1, 3], ids=lambda keep: f"keep {keep}")
def test_gang_that_slept_through_its_replacement_commits_and_removes_nothing_t2(keep_last: int) -> None:
    operations, superseded = count_operations(), 0
    for number in range(operations):
        store = make_base()
        sleeper = Sleeper(store, number)
        assert sleeper.asleep.wait(10.0)
        replacement = open_session(store, keep_last=keep_last, attempt=2)
        resumed = replacement.load(make_state(-1.0))
        replacement.save(make_state(30.0), step=30, wait=True)
        known = {commit.uuid for commit in RunLog(store, RUN).refresh().commits}
        needed = {key for key in store.keys(f"{RUN}/checkpoints") if key.split("/")[3] in known}
        entries = read_log(store)

        sleeper.finish()
        if resumed == 20:  # all it had to say was said before it fell asleep; what it removes is nobody's
            assert sleeper.error is None
        else:
            assert isinstance(sleeper.error, Superseded)
            superseded += 1
        assert read_log(store) == entries
        assert needed <= set(store.keys(f"{RUN}/checkpoints"))
        verify_all(store)
        step, state = load_fresh(store, attempt=2)
        assert step == 30
        assert_is(state, 30.0)
    assert 10 < superseded < operations - 10  # both before its commit and behind it


def test_gang_that_slept_before_it_began_does_not_take_the_run_from_a_later_attempt() -> None:
    store = make_base()
    newer = save_steps(store, 20, attempt=2)
    with pytest.raises(Superseded, match="attempt 2 of this run has begun, this gang is of attempt 1"):
        load_fresh(store, attempt=1)
    newer.save(make_state(30.0), step=30, wait=True)
    assert load_fresh(store, attempt=2)[0] == 30  # a restart of the same attempt may


SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import pytest
from prefect_torch_elastic.runlog import RunLog
from prefect_torch_elastic.store.directory import DirectoryStore
from tests.checkpoint_stores import (
    RUN, WatchedStore, assert_is, load_fresh, make_state, open_session, save_steps, use_small_blocks
)

use_small_blocks(pytest.MonkeyPatch())
ROOT = Path(sys.argv[1])


def fork(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(type(error).__name__, error, file=sys.stderr, flush=True)
            os._exit(70 if type(error).__name__ == "Superseded" else 71)
    return pid


def train(store):
    session = open_session(store, keep_last=1)
    session.load(make_state(-1.0))
    session.save(make_state(20.0), step=20)  # behind the training
    session.close()


def signal_at(store, number, what):
    def before(verb, key):
        if len(watched.operations) == number + 1:
            os.kill(os.getpid(), what)
    watched = WatchedStore(store, before)
    return watched


def count(store):
    watched = WatchedStore(store)
    train(watched)
    (ROOT / "operations").write_text(str(len(watched.operations)))


def replace(store):
    session = open_session(store, keep_last=1, attempt=2)
    resumed = session.load(state := make_state(-1.0))
    assert_is(state, float(resumed))
    session.save(make_state(30.0), step=30, wait=True)
    (store.path / "resumed").write_text(str(resumed))


def check(store):
    step, state = load_fresh(store, attempt=2)
    assert_is(state, float(step))
    (store.path / "loaded").write_text(str(step))


def finish(pid):
    status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status)


def new_store(name):
    (ROOT / name).mkdir()
    store = DirectoryStore(ROOT / name)
    assert finish(fork(lambda: save_steps(store, 9, 10))) == 0
    return store


store = new_store("count")
assert finish(fork(lambda: count(store))) == 0
operations = int((ROOT / "operations").read_text())
results = []
for place in range(6):
    number = 1 + place * (operations - 2) // 5
    for what in (signal.SIGKILL, signal.SIGSTOP):
        store = new_store(f"{what.name}-{number}")
        victim = fork(lambda: train(signal_at(store, number, what)))
        _, status = os.waitpid(victim, os.WUNTRACED)
        if what is signal.SIGKILL:
            assert os.WTERMSIG(status) == signal.SIGKILL
            exit_code = -9
        else:
            assert os.WIFSTOPPED(status), status
        replaced = finish(fork(lambda: replace(store)))
        if what is signal.SIGSTOP:
            os.kill(victim, signal.SIGCONT)
            exit_code = finish(victim)
        checked = finish(fork(lambda: check(store)))
        resumed, loaded = (int((store.path / name).read_text()) for name in ("resumed", "loaded"))
        results.append({
            "signal": what.name, "number": number, "victim": exit_code,
            "replaced": replaced, "checked": checked, "resumed": resumed, "loaded": loaded,
        })
print(json.dumps(results))
"""


def test_real_signals_between_store_operations_leave_the_right_checkpoint(
    run_script: ScriptRunner, tmp_path: Path
) -> None:
    root = tmp_path / "stores"
    root.mkdir()
    result = run_script(SCRIPT, args=[str(root)], env={"PYTHONPATH": str(ROOT)}, timeout_seconds=90.0)
    assert result.rc == 0, result.stderr
    results = json.loads(result.stdout.splitlines()[-1])
    assert len(results) == 12
    for one in results:
        assert one["replaced"] == one["checked"] == 0, one
        assert one["resumed"] in (10, 20), one
        assert one["loaded"] == 30, one
        assert one["victim"] in ((-9,) if one["signal"] == "SIGKILL" else (0, 70)), one
    assert {one["resumed"] for one in results} == {10, 20}
    assert any(one["victim"] == 70 for one in results)  # a sleeper that was told it was replaced
