"""What a pool's job says when something goes wrong in it: always an ending, with texts that fit."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest
from prefect.settings import PREFECT_HOME, temporary_settings

from prefect_torch_elastic import parcel
from prefect_torch_elastic.dispatch.endings import Ending, fetch_ending
from prefect_torch_elastic.dispatch.order import CallReference
from prefect_torch_elastic.errors import TransferError
from prefect_torch_elastic.hosting import host
from prefect_torch_elastic.hosting.bodyhost import describe_error
from prefect_torch_elastic.hosting.ownrun import OwnRun
from prefect_torch_elastic.hosting.reports import Report
from prefect_torch_elastic.outcomes import CallRecord
from prefect_torch_elastic.parts import fetch_part
from prefect_torch_elastic.runlog import RunLog
from prefect_torch_elastic.store import open_store
from prefect_torch_elastic.wire import GangStatus

REFERENCE = CallReference(store="unused", order="run/calls/c0/order-1", root="root")


class Job:
    """A job whose call arrives; what happens to it then is the test's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "store").mkdir()
        store = open_store(str(folder / "store"))
        log = RunLog(store, "run")
        self.record = CallRecord(
            store=store, folder="run", log=log, call="c0", key=b"k" * 32, warn=pytest.fail
        )
        self.own = SimpleNamespace(
            id=uuid4(), logger=logging.getLogger("prefect.test_host"), stop_requested=lambda: False
        )
        self._patch = monkeypatch
        source = SimpleNamespace(record=self.record, credentials={})
        monkeypatch.setattr(host, "open_source", lambda *_: source)
        monkeypatch.setattr(host, "receive", lambda *_, **__: None)

    def run(self, carry_out: Any) -> tuple[Report, Ending]:
        self._patch.setattr(host, "_carry_out", carry_out)
        report = host._run(REFERENCE, cast("OwnRun", self.own), None)
        ending = fetch_ending(self.record, self.own.id)
        assert ending
        return report, ending


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with temporary_settings({PREFECT_HOME: tmp_path / "home"}):
        yield Job(tmp_path, monkeypatch)


def fail_with(error: Exception):
    def carry_out(*_: object) -> Report:
        raise error

    return carry_out


class Rude(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        pytest.param(TransferError("cannot be loaded"), "TransferError: cannot be loaded", id="ours"),
        pytest.param(KeyError("grace"), "KeyError: 'grace'", id="another"),
        pytest.param(OSError(28, "disk full"), "OSError: [Errno 28] disk full", id="of-the-system"),
        pytest.param(Rude(), "Rude: <exception str() failed>", id="without-a-text"),
    ],
)
def test_job_leaves_an_ending_whatever_goes_wrong(job: Job, error: Exception, message: str):
    report, ending = job.run(fail_with(error))
    assert report.state
    assert (ending.status, report.state.type.value) == (GangStatus.FAILED, "FAILED")
    assert ending.message.endswith(message)
    assert report.state.message
    assert report.state.message in ending.message


def test_job_shows_where_an_error_that_is_not_ours_came_from(job: Job, caplog: pytest.LogCaptureFixture):
    logger = job.own.logger
    logger.addHandler(caplog.handler)
    try:
        _, ending = job.run(fail_with(KeyError("grace")))
    finally:
        logger.removeHandler(caplog.handler)
    assert "in carry_out" in ending.traceback
    assert "The job cannot go on: KeyError: 'grace'" in caplog.text
    assert "Traceback" in caplog.text


def test_job_sends_its_error_to_the_driver(job: Job):
    _, ending = job.run(fail_with(TransferError("cannot be loaded")))
    assert ending.error
    data = fetch_part(job.record.store, "run", ending.error)
    assert isinstance(parcel.load_verified(data, "the exception"), TransferError)


def test_texts_of_an_ending_are_cut(job: Job):
    long = Ending(status=GangStatus.FAILED, message="m" * 200_000, traceback="t" * 200_000 + "ValueError: x")
    from prefect.states import Failed

    _, ending = job.run(lambda *_: Report(ending=long, state=Failed()))
    assert len(ending.message) < 66_000 > len(ending.traceback)
    assert ending.message.endswith("(cut after 65536 characters)")
    assert ending.traceback.endswith("ValueError: x")


def test_error_is_described_as_type_and_text():
    assert describe_error(ValueError("no tokens")) == "ValueError: no tokens"
