"""A plain function in a pool's job, from the call that arrived to what the driver is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from prefect_torch_elastic import parcel
from prefect_torch_elastic.outcomes import CallRecord
from prefect_torch_elastic.parts import fetch_part
from prefect_torch_elastic.runlog import CallStatus, RunLog
from prefect_torch_elastic.store import open_store
from prefect_torch_elastic.wire import GangStatus
from tests.hosted import begin_run

if TYPE_CHECKING:
    from prefect_torch_elastic.hosting.reports import Report

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def record(tmp_path: Path) -> CallRecord:
    (tmp_path / "store").mkdir()
    store = open_store(str(tmp_path / "store"))
    log = RunLog(store, "run")
    return CallRecord(store=store, folder="run", log=log, call="c0", key=b"k" * 32, warn=pytest.fail)


def host(record: CallRecord, load: Callable[[], Any]) -> Report:
    """Host a call whose function and arguments `load` returns."""
    from prefect_torch_elastic.hosting.bodyhost import host_body

    order = SimpleNamespace(task_name="tokenize", fields={"grace_seconds": 5.0}, log_prints=None)
    payload = SimpleNamespace(load=lambda *, key: load())
    arrival: Any = SimpleNamespace(order=order, record=record, payload=payload, differences=[])
    own = begin_run()
    with own.watch():
        return host_body(arrival, own)


def status(record: CallRecord) -> CallStatus:
    return record.log.refresh().outcomes["c0"].status


def test_value_of_a_body_is_in_the_run_folder(record: CallRecord):
    report = host(record, lambda: (lambda a, b: a + b, (2, 3), {}))
    assert report.ending
    assert report.ending.result
    data = fetch_part(record.store, "run", report.ending.result)
    assert parcel.load_verified(data, "the result") == 5
    assert status(record) is CallStatus.SUCCEEDED


@pytest.mark.parametrize(
    "error", [ImportError("no module"), SystemExit(3)], ids=["no-module", "a-module-that-exits"]
)
def test_body_that_cannot_be_loaded_says_what_to_do(record: CallRecord, error: BaseException):
    def load() -> Any:
        raise error

    report = host(record, load)
    assert report.ending
    assert report.state
    assert report.state.message == report.ending.message
    assert report.ending.message == (
        f"TransferError: `tokenize` cannot be loaded in the work pool: {type(error).__name__}: {error}. "
        "Install there what it imports, or name its files in `include_files`."
    )
    assert (report.ending.status, status(record)) == (GangStatus.FAILED, CallStatus.FAILED)


def test_error_of_a_body_without_a_text_is_reported(record: CallRecord):
    class Rude(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def fail() -> None:
        raise Rude

    report = host(record, lambda: (fail, (), {}))
    assert report.ending
    assert report.ending.message.endswith("Rude: <exception str() failed>")
    assert "in fail" in report.ending.traceback
