"""Where a run's files are: the store, the folder of an attempt, and what is left of it."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_elastic.errors import SpecError, StoreError
from prefect_torch_elastic.runfolder import (
    STORE_VARIABLE,
    AttemptFolder,
    create_attempt,
    name_folder,
    render_run_key,
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
    assert resolve_store(store, from_environment=environment, home=HOME) == expected


def test_relative_store_is_below_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_store("runs", from_environment=None, home=HOME) == tmp_path / "runs"


@pytest.mark.parametrize("store", ["s3://bucket/runs", "gs://bucket/runs", "memory://runs"])
def test_store_elsewhere_is_refused_for_a_gang_here(store):
    with pytest.raises(SpecError) as refused:
        resolve_store(store, from_environment=None, home=HOME)
    assert f"`store={store!r}`" in str(refused.value)
    assert "Pass a directory" in str(refused.value)


@pytest.mark.parametrize("store", ["file://runs", "file://runs/mine", "file://"])
def test_file_url_without_an_absolute_path_is_refused(store):
    with pytest.raises(SpecError, match="file:///"):
        resolve_store(store, from_environment=None, home=HOME)


def test_file_url_of_this_host_is_accepted():
    assert resolve_store("file://localhost/a", from_environment=None, home=HOME) == Path("/a")


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


def test_two_callers_never_get_the_same_attempt(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        folders = list(threads.map(lambda _: create_attempt(tmp_path, "run"), range(64)))
    assert sorted(folder.number for folder in folders) == list(range(1, 65))
    assert len({folder.path for folder in folders}) == 64


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


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("key", ["pretrain-7b", "a.b_c=1", "0198f2c3-5d1e-7c39-8f5a-0a6f1f3b2c4d"])
def test_plain_run_key_is_the_folder_name(key):
    assert name_folder(key) == key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a/b", "a-b"),
        ("a/b", "a b"),
        ("a", " a"),
        (".a", "a"),
        ("x" * 101, "x" * 102),
        ("x" * 100, "x" * 101),
        ("ä", "ö"),
        ("..", "."),
        ("", "run"),
    ],
)
def test_run_keys_that_look_alike_get_folders_of_their_own(one, other):
    assert name_folder(one) != name_folder(other)


@given(st.text(max_size=300))
def test_folder_name_is_one_short_component_that_hides_nothing(key):
    name = name_folder(key)
    assert name == Path(name).name
    assert not name.startswith(".")
    assert len(name) <= 110
    assert name == name_folder(key)


def test_folder_name_is_stable_over_versions():
    digest = hashlib.sha256(b"flow/train 1").hexdigest()[:8]
    assert name_folder("flow/train 1") == f"flow-train-1-{digest}"


# ---------------------------------------------------------------- run keys


@pytest.mark.parametrize(
    ("run_key", "name"),
    [
        pytest.param(None, None, id="none"),
        pytest.param("pretrain", "pretrain", id="text"),
        pytest.param("{size}-{lr:.0e}", "7b-3e-04", id="template"),
        pytest.param(lambda size, lr: f"{size}x", "7bx", id="callable"),
    ],
)
def test_run_key_is_made_of_the_parameters(run_key, name):
    assert render_run_key(run_key, {"size": "7b", "lr": 3e-4}) == name


def raise_key_error(**_):
    raise KeyError("size")


@pytest.mark.parametrize(
    "run_key",
    [
        pytest.param("{sise}", id="unknown-parameter"),
        pytest.param("{}", id="no-name"),
        pytest.param("{0}", id="number"),
        pytest.param("{size", id="open-bracket"),
        pytest.param("{size!z}", id="unknown-conversion"),
        pytest.param("{size:d}", id="wrong-format"),
        pytest.param("{size.width}", id="no-such-attribute"),
        pytest.param("{steps[0]}", id="no-such-item"),
        pytest.param("{nothing:>8}", id="format-of-none"),
        pytest.param("  ", id="blank"),
        pytest.param("{empty}", id="empty"),
        pytest.param(raise_key_error, id="callable-raises"),
        pytest.param(lambda: "x", id="callable-takes-nothing"),
    ],
)
def test_run_key_that_cannot_be_made_is_refused(run_key):
    with pytest.raises(SpecError, match="`run_key"):
        render_run_key(run_key, {"size": "7b", "steps": 3, "nothing": None, "empty": ""})


def test_run_key_that_does_not_fit_names_the_parameters():
    with pytest.raises(SpecError) as refused:
        render_run_key("{sise}", {"size": "7b", "lr": 1.0})
    assert "`run_key='{sise}'` does not fit the task's parameters: KeyError: 'sise'." in str(refused.value)
    assert "Use `{size}`, `{lr}`." in str(refused.value)


# ---------------------------------------------------------------- tidy


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
