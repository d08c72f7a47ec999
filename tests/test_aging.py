"""What is old in a directory and in a store, and that nothing of a live run is taken for it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_elastic.aging import (
    DAY_SECONDS,
    AttemptUse,
    choose_old_attempts,
    is_old,
    list_runs,
    remove_run,
    tidy,
)
from prefect_torch_elastic.errors import StoreError, Superseded
from prefect_torch_elastic.runfolder import AttemptFolder
from prefect_torch_elastic.runlog import CallStatus, Commit, Outcome, RunLog, StoredPart
from prefect_torch_elastic.store.directory import DirectoryStore

NOW = 1_000 * DAY_SECONDS


def make_use(days: float, *, size: int = 1, is_open: bool = False, is_held: bool = False) -> AttemptUse:
    return AttemptUse(
        path=Path(f"run/attempts/{days}"),
        size_bytes=size,
        modified=NOW - days * DAY_SECONDS,
        is_open=is_open,
        is_held=is_held,
    )


@pytest.mark.parametrize(
    ("use", "goes"),
    [
        pytest.param(make_use(31), True, id="old"),
        pytest.param(make_use(29), False, id="young"),
        pytest.param(make_use(31, is_open=True), True, id="its-driver-was-killed-long-ago"),
        pytest.param(make_use(400, is_open=True, is_held=True), False, id="its-driver-waits"),
        pytest.param(make_use(0.5, size=5 << 30), False, id="large-and-live"),
        pytest.param(make_use(2, size=5 << 30), True, id="large-and-over"),
        pytest.param(make_use(2, size=5 << 30, is_open=True), False, id="large-and-silent-for-two-days"),
    ],
)
def test_attempt_goes_by_age_or_size(use, goes):
    assert choose_old_attempts([use], now=NOW) == ([use] if goes else [])


def test_oldest_attempts_go_first_until_the_rest_is_small():
    uses = [make_use(days, size=10) for days in (2, 5, 3, 4)]
    chosen = choose_old_attempts(uses, now=NOW, max_bytes=20)
    assert [use.modified for use in chosen] == [NOW - 5 * DAY_SECONDS, NOW - 4 * DAY_SECONDS]


uses = st.builds(make_use, st.floats(0, 60), size=st.integers(0, 100), is_open=st.booleans())


@given(attempts=st.lists(uses, max_size=10), max_bytes=st.integers(0, 300))
def test_what_stays_is_small_or_live(attempts, max_bytes):
    chosen = choose_old_attempts(attempts, now=NOW, max_bytes=max_bytes)
    stays = [use for use in attempts if use not in chosen]
    assert all(NOW - use.modified > DAY_SECONDS for use in chosen)
    over = [use for use in stays if NOW - use.modified > 7 * DAY_SECONDS]
    assert sum(use.size_bytes for use in stays) <= max_bytes or not over


def make_attempt(local: Path, run: str, *, days: float) -> Path:
    path = local / run / "attempts" / "0001"
    (path / "node-0").mkdir(parents=True)
    (path / "node-0" / "rank-0.log").write_text("loss 1\n")
    when = time.time() - days * DAY_SECONDS
    for entry in (path / "node-0" / "rank-0.log", path / "node-0", path):
        os.utime(entry, (when, when))
    return path


def test_tidying_removes_old_attempts_once_a_day_and_nothing_else(tmp_path):
    old = make_attempt(tmp_path, "old", days=40)
    young = make_attempt(tmp_path, "young", days=3)
    log = tmp_path / "young" / "log" / "000000000001.json"
    log.parent.mkdir()
    log.touch()
    assert tidy(tmp_path) == ["old/attempts/0001"]
    assert not old.exists()
    assert not (tmp_path / "old").exists()
    assert young.exists()
    assert log.exists()
    make_attempt(tmp_path, "older", days=50)
    assert tidy(tmp_path) == []  # not again today
    assert len(tidy(tmp_path, every_seconds=0.0)) == 1


def test_tidying_a_directory_that_is_not_there_does_nothing(tmp_path):
    assert tidy(tmp_path / "nowhere") == []
    assert not (tmp_path / "nowhere").exists()


def test_attempt_whose_driver_waits_stays_however_long_its_ranks_say_nothing(tmp_path):
    silent = make_attempt(tmp_path, "silent", days=0)
    (silent / "call").write_text("")
    age(tmp_path, days=400)
    with AttemptFolder(number=1, path=silent).hold():
        assert tidy(tmp_path) == []
    assert tidy(tmp_path, every_seconds=0.0) == ["silent/attempts/0001"]


def age(folder: Path, *, days: float) -> None:
    when = time.time() - days * DAY_SECONDS
    for path in folder.rglob("*"):
        os.utime(path, (when, when))


@pytest.fixture
def store(tmp_path) -> DirectoryStore:
    store = DirectoryStore(tmp_path)
    for run in ("a", "b"):
        RunLog(store, run).take_epoch(attempt=1, by="test")
        store.put(f"{run}/checkpoints/000000000001/000001-0/manifest.json", b"{}")
    store.put("keys/other", b"not a run")
    return store


def test_runs_of_a_store_are_those_with_a_log(store):
    assert list_runs(store) == ["a", "b"]


def test_run_is_old_when_nothing_in_it_changed(store, tmp_path):
    age(tmp_path, days=40)
    assert is_old(store, "a", older_than_seconds=30 * DAY_SECONDS)
    assert not is_old(store, "a", older_than_seconds=50 * DAY_SECONDS)


def test_run_whose_ranks_still_write_is_not_old(store, tmp_path):
    age(tmp_path, days=40)
    make_attempt(tmp_path, "a", days=0)
    assert not is_old(store, "a", older_than_seconds=30 * DAY_SECONDS)


def test_run_whose_log_is_young_is_not_old(store, tmp_path):
    age(tmp_path, days=40)
    RunLog(store, "a").take_epoch(attempt=2, by="test")
    assert not is_old(store, "a", older_than_seconds=30 * DAY_SECONDS)


def test_removed_run_leaves_nothing_and_others_stay(store, tmp_path):
    remove_run(store, "a")
    assert not (tmp_path / "a").exists()
    assert list_runs(store) == ["b"]


def test_log_of_a_removed_run_can_be_read_after_every_step(store, monkeypatch):
    delete, looks = DirectoryStore.delete, []

    def watch(self, keys):
        for key in list(keys):
            delete(self, [key])
            looks.append(RunLog(store, "a").refresh().epoch)

    monkeypatch.setattr(DirectoryStore, "delete", watch)
    remove_run(store, "a")
    assert looks == [2, 1, 0]


# ---------------------------------------------------------------- a run that comes alive, or cannot be read


def make_commit(epoch: int) -> Commit:
    return Commit(
        step=1, uuid="000001-0", epoch=epoch, manifest_crc32c=1, size_bytes=2, world_size=1, metrics={}
    )


def test_gang_of_a_run_that_is_removed_can_commit_nothing(store, monkeypatch):
    gang = RunLog(store, "a")
    epoch = gang.refresh().epoch
    delete, refused = DirectoryStore.delete, []

    def commit_first(self, keys):
        if not refused:
            with pytest.raises(Superseded, match="`prune`") as error:
                gang.append(make_commit(epoch), epoch=epoch)
            refused.append(error)
        delete(self, keys)

    monkeypatch.setattr(DirectoryStore, "delete", commit_first)
    remove_run(store, "a")
    assert refused


@pytest.mark.parametrize("key", ["a/checkpoints/000000000002/000001-1/r00000/000000", "a/attempts/0002/call"])
def test_run_that_comes_alive_after_it_was_looked_at_stays(store, tmp_path, monkeypatch, key):
    age(tmp_path, days=40)
    take_epoch = RunLog.take_epoch

    def write_first(self, **options):
        store.put(key, b"x")
        return take_epoch(self, **options)

    monkeypatch.setattr(RunLog, "take_epoch", write_first)
    with pytest.raises(StoreError, match=f"came alive: `{key}`"):
        remove_run(store, "a")
    assert (tmp_path / key).exists()
    assert (tmp_path / "a/checkpoints/000000000001/000001-0/manifest.json").exists()


def test_run_that_another_gang_takes_meanwhile_stays(store, monkeypatch):
    take_epoch = RunLog.take_epoch

    def take_twice(self, **options):
        epoch = take_epoch(self, **options)
        take_epoch(RunLog(store, "a"), attempt=2, by="gang")
        return epoch

    monkeypatch.setattr(RunLog, "take_epoch", take_twice)
    with pytest.raises(StoreError, match="came alive"):
        remove_run(store, "a")
    assert RunLog(store, "a").refresh().epoch == 3


def test_run_whose_log_is_damaged_can_be_removed(store, tmp_path):
    (tmp_path / "a/log/000000000001.json").write_text("{")
    assert remove_run(store, "a") > 0
    assert not (tmp_path / "a").exists()


# ---------------------------------------------------------------- what goes by itself


@pytest.fixture
def own(tmp_path) -> DirectoryStore:
    """The default store with a run that was left 40 days ago: its call is over, and it has no checkpoint."""
    own = DirectoryStore(tmp_path)
    log = RunLog(own, "left")
    log.take_epoch(attempt=1, by="test")
    for name in ("named", "lost"):
        own.put(f"left/calls/c0ffee/result-{name}", b"abc")
    result = StoredPart(key="calls/c0ffee/result-named", size=3, crc32c=1)
    log.append(Outcome(call="c0ffee", status=CallStatus.SUCCEEDED, attempt=1, result=result), epoch=None)
    return own


def test_old_run_without_checkpoints_goes_from_the_default_store(own, tmp_path):
    assert tidy(tmp_path, own=own, every_seconds=0.0) == []
    age(tmp_path, days=40)
    assert tidy(tmp_path, own=None, every_seconds=0.0) == []  # somebody chose this one
    assert tidy(tmp_path, own=own, every_seconds=0.0) == ["left"]
    assert list_runs(own) == []


def test_old_run_with_a_checkpoint_stays_and_its_lost_results_go(own, tmp_path):
    RunLog(own, "left").append(make_commit(1), epoch=1)
    age(tmp_path, days=40)
    assert tidy(tmp_path, own=own) == ["left/calls/c0ffee/result-lost"]
    assert [entry.key for entry in own.list("left/calls")] == ["left/calls/c0ffee/result-named"]


def test_old_run_whose_driver_waits_stays(own, tmp_path):
    call = tmp_path / "left" / "attempts" / "0001" / "call"
    call.parent.mkdir(parents=True)
    call.touch()
    age(tmp_path, days=400)
    with AttemptFolder(number=1, path=call.parent).hold():
        tidy(tmp_path, own=own)
    assert list_runs(own) == ["left"]


def test_old_run_whose_log_is_damaged_hides_no_other_run(own, tmp_path):
    own.put("damaged/log/000000000001.json", b"{")
    age(tmp_path, days=40)
    assert tidy(tmp_path, own=own) == ["left"]
    assert list_runs(own) == ["damaged"]
