"""Where a run's files are: the store, the folder of an attempt, and what is left of it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prefect_torch_elastic.errors import SpecError, StoreError
from prefect_torch_elastic.runfolder import (
    STORE_VARIABLE,
    AttemptFolder,
    RunPlace,
    create_attempt,
    is_held,
    resolve_store,
)

HOME = Path("/home/me/.prefect")


@pytest.mark.parametrize(
    ("store", "environment", "expected"),
    [
        pytest.param(None, None, HOME / "torch-elastic", id="default"),
        pytest.param(None, "", HOME / "torch-elastic", id="empty-variable"),
        pytest.param(None, "/mnt/runs", Path("/mnt/runs"), id="variable"),
        pytest.param("/data/runs", "/mnt/runs", Path("/data/runs"), id="block-wins"),
        pytest.param("file:///data/runs", None, Path("/data/runs"), id="url"),
        pytest.param("file:///data/my%20runs", None, Path("/data/my runs"), id="quoted-url"),
        pytest.param("/data/my%20runs#1", None, Path("/data/my%20runs#1"), id="plain-path-as-it-is"),
        pytest.param("~/runs", None, Path.home() / "runs", id="home"),
    ],
)
def test_store_is_resolved_to_a_directory(store, environment, expected):
    place = resolve_store(store, from_environment=environment, home=HOME)
    assert place == RunPlace(url=str(expected), local=expected, is_default=expected == HOME / "torch-elastic")


def test_relative_store_is_below_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_store("runs", from_environment=None, home=HOME).local == tmp_path / "runs"


@pytest.mark.parametrize("store", ["s3://bucket/runs", "gs://bucket", "az://container/a%20b"])
def test_files_of_attempts_stay_on_this_machine_when_the_store_is_elsewhere(store):
    expected = RunPlace(url=store, local=HOME / "torch-elastic")
    assert resolve_store(store, from_environment=None, home=HOME) == expected
    assert resolve_store(None, from_environment=store, home=HOME) == expected


@pytest.mark.parametrize("store", ["memory://runs", "ftp://host/runs"])
def test_store_that_ranks_cannot_see_is_refused(store):
    with pytest.raises(SpecError) as refused:
        resolve_store(store, from_environment=None, home=HOME)
    assert f"`store={store!r}`" in str(refused.value)
    assert "Pass a directory" in str(refused.value)


@pytest.mark.parametrize("store", ["file://runs", "file://runs/mine", "file://"])
def test_file_url_without_an_absolute_path_is_refused(store):
    with pytest.raises(SpecError, match="file:///"):
        resolve_store(store, from_environment=None, home=HOME)


def test_file_url_of_this_host_is_accepted():
    assert resolve_store("file://localhost/a", from_environment=None, home=HOME).url == "/a"


# ---------------------------------------------------------------- attempts


def test_attempts_count_from_one_and_go_on(tmp_path):
    folders = [create_attempt(tmp_path, "run") for _ in range(3)]
    assert [folder.number for folder in folders] == [1, 2, 3]
    assert folders[0].path == tmp_path / "run" / "attempts" / "0001"
    assert all(folder.path.is_dir() for folder in folders)


def test_attempts_go_on_after_the_highest_number(tmp_path):
    (tmp_path / "run" / "attempts" / "0041").mkdir(parents=True)
    (tmp_path / "run" / "attempts" / "notes").mkdir()
    assert create_attempt(tmp_path, "run").number == 42


def test_attempts_go_on_after_those_of_other_machines(tmp_path):
    assert create_attempt(tmp_path, "run", after=6).number == 7
    assert create_attempt(tmp_path, "run", after=2).number == 8


def test_two_callers_never_get_the_same_attempt(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        folders = list(threads.map(lambda _: create_attempt(tmp_path, "run"), range(64)))
    assert sorted(folder.number for folder in folders) == list(range(1, 65))
    assert len({folder.path for folder in folders}) == 64


def test_attempt_is_made_again_when_the_empty_run_folder_is_removed_meanwhile(tmp_path, monkeypatch):
    mkdir, removed = Path.mkdir, []

    def remove_once(path: Path, *args, **options) -> None:
        if path.name in ("attempts", "0001") and path.name not in removed:
            removed.append(path.name)
            for folder in (tmp_path / "run" / "attempts", tmp_path / "run"):
                if folder.exists():
                    folder.rmdir()
        mkdir(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", remove_once)
    assert create_attempt(tmp_path, "run").path.is_dir()
    assert removed == ["attempts", "0001"]


def test_attempt_is_held_while_its_driver_waits(tmp_path):
    folder = create_attempt(tmp_path, "run")
    assert not is_held(folder.path)
    folder.call.touch()
    assert not is_held(folder.path)
    with folder.hold(), folder.hold():
        assert is_held(folder.path)
    assert not is_held(folder.path)


def test_store_that_cannot_be_written_is_named_with_the_cure(tmp_path):
    (tmp_path / "runs").write_text("a file is in the way: not even root can make a folder here")
    with pytest.raises(StoreError) as refused:
        create_attempt(tmp_path / "runs", "run")
    message = str(refused.value)
    assert str(tmp_path / "runs") in message
    assert "cannot be made" in message
    assert "File exists" in message
    assert "`store=`" in message
    assert STORE_VARIABLE in message


def test_run_folder_is_for_its_owner_only_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        create_attempt(tmp_path / "store", "run")
    finally:
        os.umask(before)
    assert (tmp_path / "store" / "run").stat().st_mode & 0o777 == 0o700


def test_file_in_the_place_of_the_run_is_named(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(StoreError, match="cannot be made"):
        create_attempt(tmp_path, "run")


def test_tidy_leaves_logs_and_evidence_only(tmp_path):
    folder = AttemptFolder(number=1, path=tmp_path)
    node = tmp_path / "node-0"
    node.mkdir()
    gone = ["call", "call.17.tmp"]
    gone += [
        "node-0/rank-0.result",
        "node-0/rank-1.error",
        "node-0/rank-0.result.9.tmp",
        "node-0/rank-0.stacks",
    ]
    for name in gone:
        (tmp_path / name).write_bytes(b"" if name.endswith((".log", ".stacks")) else b"x")
    kept = ["node-0/rank-0.log", "node-0/rank-1.stacks", "node-0/rank-1.error.json"]
    for name in kept:
        (tmp_path / name).write_text("text")
    folder.tidy()
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == sorted(kept)


def test_tidy_keeps_a_launcher_log_that_says_something(tmp_path):
    (tmp_path / "launcher.log").write_text("Traceback")
    AttemptFolder(number=1, path=tmp_path).tidy()
    assert (tmp_path / "launcher.log").read_text() == "Traceback"


def test_tidy_of_an_empty_folder_does_nothing(tmp_path):
    AttemptFolder(number=1, path=tmp_path).tidy()
    AttemptFolder(number=1, path=tmp_path / "never-made").tidy()
    assert list(tmp_path.iterdir()) == []
