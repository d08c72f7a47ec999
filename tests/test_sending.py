"""What a job of a work pool is told to do: the order in the run folder."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_torch_elastic.dispatch import driver
from prefect_torch_elastic.dispatch.order import CallKind, CallOrder, parse_order
from prefect_torch_elastic.dispatch.sending import send_call
from prefect_torch_elastic.outcomes import CallRecord
from prefect_torch_elastic.payload import PythonPayload
from prefect_torch_elastic.runkey import CallIdentity
from prefect_torch_elastic.runlog import RunLog
from prefect_torch_elastic.spec import build_spec, restore_spec
from prefect_torch_elastic.store import open_store

KEY = b"k" * 32


def train(steps: int) -> None: ...


PAYLOAD = PythonPayload(function=train, args=(3,), kwargs={}, warn=print)


def make_call(folder: Path, **fields: Any) -> Any:
    """Return as much of a call as goes to a pool."""
    store = open_store(str(folder))
    record = CallRecord(
        store=store, folder="run", log=RunLog(store, "run"), call="c0ffee", key=KEY, warn=print
    )
    return SimpleNamespace(
        spec=build_spec({"work_pool": "train", **fields}),
        identity=CallIdentity(root="root", run_key="run", digest="c0ffee"),
        record=record,
        patience=SimpleNamespace(wait_for=lambda work: work()),
        task_name="train",
        task_run_name="train-0",
        task_run_id="t",
        flow_run_id="f",
        retries=0,
        log_prints=None,
        log=logging.getLogger(__name__),
    )


def fetch_order(call: Any, name: str) -> CallOrder:
    return parse_order(call.record.store.get(name), name, key=KEY)


def test_order_has_what_is_left_of_the_attempts_and_the_other_options(tmp_path: Path):
    call = make_call(tmp_path, nproc_per_node=2, max_attempts=3)
    reference = send_call(call, PAYLOAD, kind=CallKind.GANG, max_attempts=1)
    spec = restore_spec(fetch_order(call, reference.order).fields)
    assert (spec.max_attempts, spec.nproc_per_node) == (1, 2)
    assert call.spec.max_attempts == 3


@pytest.mark.parametrize(("used", "left"), [(1, 3), (2, 2), (3, 1)], ids=["first", "second", "last"])
def test_job_that_is_sent_again_gets_the_attempts_that_are_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, used: int, left: int
):
    class Sent(Exception):  # noqa: N818
        """What the test waits for."""

    def send(*_: object, max_attempts: int, **__: object) -> None:
        raise Sent(max_attempts)

    monkeypatch.setattr(driver, "send_call", send)
    dispatch: Any = object.__new__(driver._Dispatch)
    dispatch._call, dispatch._payload = make_call(tmp_path, max_attempts=3), PAYLOAD
    dispatch._kind = CallKind.GANG
    with pytest.raises(Sent, match=f"^{left}$"):
        dispatch._request(used)
