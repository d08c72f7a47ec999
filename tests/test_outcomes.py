"""Outcomes of calls: found again, verified, and never trusted without a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_torch_elastic import parcel, parts
from prefect_torch_elastic.errors import StoreError
from prefect_torch_elastic.outcomes import CallRecord, derive_key
from prefect_torch_elastic.runlog import CallStatus, Outcome, RunLog, StoredPart
from prefect_torch_elastic.store import open_store

SECRET = b"s" * 32


class Driver:
    """What one driver process knows; several share a store."""

    def __init__(self, root: Path, *, call: str = "c0ffee", secret: bytes = SECRET) -> None:
        (root / "store").mkdir(exist_ok=True)
        store = open_store(str(root / "store"))
        self.root, self.warnings = root, list[str]()
        self.log = RunLog(store, "run")
        self.record = CallRecord(
            store=store,
            folder="run",
            log=self.log,
            call=call,
            key=derive_key(secret, call),
            warn=self.warnings.append,
        )

    def succeed(self, value: Any, attempt: int = 1) -> None:
        path = self.root / "rank-0.result"
        parcel.write_parcel(path, value, key=self.record.key)
        self.record.keep(CallStatus.SUCCEEDED, attempt=attempt, result=path)

    def find(self) -> Any:
        found = self.record.find()
        return None if found is None else parcel.load_verified(found[1], "result")


def results(root: Path) -> list[Path]:
    return sorted((root / "store" / "run" / "calls").rglob("result-*"))


def test_call_that_nobody_made_has_no_outcome(tmp_path):
    driver = Driver(tmp_path)
    assert driver.find() is None
    assert not driver.warnings
    assert not list((tmp_path / "store").iterdir())


def test_restarted_driver_finds_the_result_of_its_call(tmp_path):
    Driver(tmp_path).succeed({"loss": 0.5}, attempt=3)
    outcome, _ = Driver(tmp_path).record.find() or pytest.fail("nothing was found")
    assert outcome.attempt == 3
    assert Driver(tmp_path).find() == {"loss": 0.5}
    assert Driver(tmp_path, call="another").find() is None


def test_found_tensors_can_be_written_to(tmp_path):
    Driver(tmp_path).succeed(torch.zeros(1000))
    tensor = Driver(tmp_path).find()
    tensor += 1
    assert tensor.sum() == 1000
    assert Driver(tmp_path).find().sum() == 0


@pytest.mark.parametrize("status", [CallStatus.FAILED, CallStatus.STOPPED, CallStatus.TIMED_OUT])
def test_failed_outcome_is_recorded_and_does_not_block(tmp_path, status):
    Driver(tmp_path).record.keep(status, attempt=1)
    driver = Driver(tmp_path)
    assert driver.find() is None
    assert driver.log.state.outcomes["c0ffee"].status is status
    assert driver.log.take_epoch(attempt=2, by="test", call="c0ffee") == 1


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        pytest.param(flip, "has the checksum", id="flipped"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-8]), "bytes instead of", id="cut"),
        pytest.param(lambda path: path.unlink(), "is gone", id="gone"),
    ],
)
def test_damaged_result_is_not_loaded_and_the_call_may_run_again(tmp_path, damage, why):
    Driver(tmp_path).succeed("value")
    damage(results(tmp_path)[0])
    driver = Driver(tmp_path)
    assert driver.find() is None
    (warning,) = driver.warnings
    assert why in warning
    assert "The function runs again." in warning
    assert driver.log.take_epoch(attempt=2, by="test", call="c0ffee") == 1
    driver.succeed("again", attempt=2)
    assert Driver(tmp_path).find() == "again"


def test_success_without_a_result_does_not_block_the_call_for_ever(tmp_path):
    """Somebody else wrote it: a driver names the result of what has succeeded."""
    Driver(tmp_path).record.keep(CallStatus.SUCCEEDED, attempt=1)
    driver = Driver(tmp_path)
    assert driver.find() is None
    assert "it names no result" in driver.warnings[0]
    assert driver.log.take_epoch(attempt=2, by="test", call="c0ffee") == 1
    assert driver.find() is None
    assert len(driver.warnings) == 1


def test_large_result_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_PIECE_BYTES", 1000)
    value = bytes(range(256)) * 100
    Driver(tmp_path).succeed(value)
    assert Driver(tmp_path).find() == value


def test_result_that_another_key_signed_is_not_loaded(tmp_path):
    """The key of the flow run is on another machine, or somebody else wrote the result."""
    Driver(tmp_path, secret=b"x" * 32).succeed("forged")
    driver = Driver(tmp_path)
    assert driver.find() is None
    assert "signature does not match" in driver.warnings[0]


def test_result_of_another_call_is_not_loaded(tmp_path):
    """Whoever can write the log may name another call's result with its right size and checksum."""
    other = Driver(tmp_path, call="two")
    other.succeed("two")
    result = other.log.state.outcomes["two"].result
    driver = Driver(tmp_path)
    driver.log.append(
        Outcome(call="c0ffee", status=CallStatus.SUCCEEDED, attempt=1, result=result), epoch=None
    )
    assert driver.find() is None
    assert "signature does not match" in driver.warnings[0]


@pytest.mark.parametrize("size", [1 << 62, 1])
def test_size_that_the_log_makes_up_is_not_believed(tmp_path, size):
    driver = Driver(tmp_path)
    driver.record.store.put("run/calls/c0ffee/result-1", b"abc")
    result = StoredPart(key="calls/c0ffee/result-1", size=size, crc32c=0)
    driver.log.append(
        Outcome(call="c0ffee", status=CallStatus.SUCCEEDED, attempt=1, result=result), epoch=None
    )
    assert driver.find() is None
    assert f"has 3 bytes instead of {size}" in driver.warnings[0]


def test_two_drivers_of_one_call_leave_a_result_that_fits(tmp_path):
    one, other = Driver(tmp_path), Driver(tmp_path)
    one.succeed("from one", attempt=1)
    other.succeed("from the other, longer", attempt=2)
    assert Driver(tmp_path).find() == "from the other, longer"
    assert len(results(tmp_path)) == 2


def test_outcome_that_cannot_be_written_is_a_warning(tmp_path):
    """The value is at hand: it is returned, and what is lost is said."""
    driver = Driver(tmp_path)
    (tmp_path / "store" / "run").write_text("a file is in the way")
    driver.succeed("value")
    assert "cannot be written to the run folder" in driver.warnings[0]
    assert "the function runs again" in driver.warnings[0]


def test_store_that_cannot_be_read_is_an_error(tmp_path):
    Driver(tmp_path).succeed("value")
    log = tmp_path / "store" / "run" / "log" / "000000000001.json"
    log.write_text("{")
    with pytest.raises(StoreError, match=r"000000000001.json"):
        Driver(tmp_path).find()
