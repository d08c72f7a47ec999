"""What a driver finds of a call that has ended already: its value, unless that has to be made again."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prefect_torch_elastic import parcel
from prefect_torch_elastic.calls import Call
from prefect_torch_elastic.conclusions import find_value
from prefect_torch_elastic.outcomes import CallRecord
from prefect_torch_elastic.patience import Patience
from prefect_torch_elastic.runlog import CallStatus, RunLog
from prefect_torch_elastic.store import open_store


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """A call whose run folder lies in a directory; of the rest it has what is looked at."""
    (tmp_path / "store").mkdir()
    store = open_store(str(tmp_path / "store"))
    log = RunLog(store, "run")
    fields = SimpleNamespace(
        record=CallRecord(store=store, folder="run", log=log, call="c0", key=b"k" * 32, warn=pytest.fail),
        patience=Patience(url=store.url, warn=pytest.fail, cancelled=lambda: False),
        identity=SimpleNamespace(run_key="run"),
        log=logging.getLogger(__name__),
    )
    return cast("Call", fields)


def succeed(call: Call, value: Any, folder: Path) -> None:
    parcel.write_parcel(folder / "result", value, key=call.record.key)
    call.record.keep(CallStatus.SUCCEEDED, attempt=1, result=folder / "result")


@pytest.mark.parametrize("value", [7, None])
def test_value_of_a_call_is_found(call: Call, tmp_path: Path, value: object):
    succeed(call, value, tmp_path)
    found = find_value(call)
    assert found
    assert found.value == value


def test_nothing_is_found_of_a_new_call(call: Call):
    assert find_value(call) is None


def test_failed_state_that_is_found_is_no_value_and_the_call_runs_again(call: Call, tmp_path: Path):
    """A driver that died between recording a pool's result and refusing it leaves such a one."""
    from prefect.states import Failed

    succeed(call, Failed(message="no data"), tmp_path)
    assert find_value(call) is None
    assert call.record.log.refresh().outcomes["c0"].status is CallStatus.REFUSED
