"""The folder of a job: its own while it runs, and removed by the next job when it was left behind."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from prefect_torch_elastic.hosting.workspace import open_workspace


def test_workspace_goes_with_its_job(tmp_path: Path):
    with open_workspace(tmp_path, "one") as folder:
        (folder / "file").touch()
    assert not folder.exists()


def test_workspace_of_a_running_job_is_left_alone(tmp_path: Path):
    with open_workspace(tmp_path, "one") as one, open_workspace(tmp_path, "two"):
        assert one.exists()


def test_workspace_of_a_killed_job_is_removed_by_the_next_one(tmp_path: Path):
    left = tmp_path / "torch-elastic-jobs" / "left"
    left.mkdir(parents=True)
    (left / ".lock").touch()
    with open_workspace(tmp_path, "next"):
        assert not left.exists()


def test_workspace_cannot_be_swept_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another job starts in the moment before the lock."""
    lock = fcntl.flock

    def sweep_first(file: object, how: int) -> None:
        if not how & fcntl.LOCK_NB:
            monkeypatch.setattr(fcntl, "flock", lock)
            with open_workspace(tmp_path, "other"):
                pass
        lock(file, how)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    with open_workspace(tmp_path, "one") as folder:
        assert folder.exists()
