"""How a call ended, and whether its job lives, as the driver reads it from the store."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from uuid import UUID

import pytest

from prefect_torch_elastic import signing
from prefect_torch_elastic.dispatch.endings import (
    MAX_PULSE_BYTES,
    Ending,
    EndingKind,
    StoreEvidence,
    fetch_ending,
    name_pulse,
    put_ending,
)
from prefect_torch_elastic.errors import TransferError
from prefect_torch_elastic.outcomes import CallRecord
from prefect_torch_elastic.runlog import RunLog
from prefect_torch_elastic.store import open_store
from prefect_torch_elastic.wire import GangStatus

CHILD = UUID(int=1)


def open_record(folder: Path, *, key: bytes = b"k" * 32) -> CallRecord:
    store = open_store(str(folder))
    return CallRecord(store=store, folder="run", log=RunLog(store, "run"), call="c0ffee", key=key, warn=print)


@pytest.fixture
def known_keys(monkeypatch: pytest.MonkeyPatch) -> dict[str, Future[bytes]]:
    """The keys that this process keeps: one."""
    key: Future[bytes] = Future()
    key.set_result(b"s" * 32)
    keys = {"http://api": key}
    monkeypatch.setattr(signing, "_keys", keys)
    return keys


def test_ending_reaches_the_driver(tmp_path: Path, known_keys: dict[str, Future[bytes]]):
    record, ending = open_record(tmp_path), Ending(status=GangStatus.FAILED, message="ValueError: no")
    assert fetch_ending(record, CHILD) is None
    put_ending(record, CHILD, ending)
    assert fetch_ending(record, CHILD) == ending
    assert known_keys


def test_setback_is_kept_apart_with_its_attempt(tmp_path: Path):
    record, setback = open_record(tmp_path), Ending(status=GangStatus.FAILED, attempt=2)
    put_ending(record, CHILD, setback, kind=EndingKind.SETBACK)
    assert fetch_ending(record, CHILD) is None
    assert fetch_ending(record, CHILD, kind=EndingKind.SETBACK) == setback


def test_ending_with_another_signature_lets_the_next_call_ask_for_the_key(
    tmp_path: Path, known_keys: dict[str, Future[bytes]]
):
    put_ending(open_record(tmp_path, key=b"n" * 32), CHILD, Ending(status=GangStatus.SUCCEEDED))
    with pytest.raises(TransferError, match="the next try of the task asks for it anew"):
        fetch_ending(open_record(tmp_path), CHILD)
    assert not known_keys


@pytest.mark.parametrize(
    ("data", "pulse"),
    [
        pytest.param(None, "", id="none"),
        pytest.param(b"3f:12", "3f:12", id="of-a-job"),
        pytest.param(b"a\xffb", "a\ufffdb", id="no-text"),
        pytest.param(b"x" * 100_000, "x" * MAX_PULSE_BYTES, id="too-long"),
    ],
)
def test_pulse_is_a_short_text_whatever_lies_there(tmp_path: Path, data: bytes | None, pulse: str):
    record = open_record(tmp_path)
    if data is not None:
        record.store.put(name_pulse(record, CHILD), data)
    assert StoreEvidence(record=record, child_id=CHILD).pulse() == pulse
