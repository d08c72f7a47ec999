"""What is written to a store that may be away: again and again, but nothing twice and not for ever."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from prefect_torch_elastic.errors import StoreError
from prefect_torch_elastic.hosting import persistence
from prefect_torch_elastic.hosting.persistence import persist, persist_outcome
from prefect_torch_elastic.outcomes import CallRecord
from prefect_torch_elastic.runlog import CallStatus, RunLog
from prefect_torch_elastic.store import open_store

LOG = logging.getLogger(__name__)


class Writer:
    """Fails with each error in turn, then writes."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def __call__(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "written"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistence, "_PAUSE_SECONDS", 0.01)


def test_persist_writes_as_soon_as_the_store_is_back():
    assert persist(Writer(StoreError("away"), OSError("full")), log=LOG) == "written"


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])
def test_persist_does_not_repeat_what_cannot_pass(error: type[OSError]):
    with pytest.raises(error):
        persist(Writer(error("no")), log=LOG)


def test_persist_gives_up_when_it_is_told_to():
    with pytest.raises(StoreError):
        persist(Writer(StoreError("away")), log=LOG, give_up=lambda: True)


def test_result_is_written_once_though_the_log_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "store").mkdir()
    (tmp_path / "result").write_bytes(b"value")
    store = open_store(str(tmp_path / "store"))
    log = RunLog(store, "run")
    record = CallRecord(store=store, folder="run", log=log, call="c0ffee", key=b"k" * 32, warn=pytest.fail)
    append, away = log.append, [StoreError("away"), StoreError("away")]

    def append_later(*args, **options):
        if away:
            raise away.pop()
        return append(*args, **options)

    monkeypatch.setattr(log, "append", append_later)
    stored = persist_outcome(record, CallStatus.SUCCEEDED, attempt=1, log=LOG, result=tmp_path / "result")
    assert log.refresh().outcomes["c0ffee"].result == stored
    assert len(list((tmp_path / "store").rglob("result-*"))) == 1
