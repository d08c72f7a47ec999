"""What a pool's job does with the call that it was started for: fetched, verified, compared, refused."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import logging
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_torch_elastic.dispatch.order import CallKind, CallOrder, CallReference, render_order
from prefect_torch_elastic.dispatch.versions import collect_versions
from prefect_torch_elastic.errors import StoreError, TransferError
from prefect_torch_elastic.hosting.arrival import Source, receive
from prefect_torch_elastic.outcomes import CallRecord
from prefect_torch_elastic.parcel import write_call
from prefect_torch_elastic.parts import put_file, put_part
from prefect_torch_elastic.runfolder import RunPlace
from prefect_torch_elastic.runlog import RunLog
from prefect_torch_elastic.spec import Spec
from prefect_torch_elastic.store import open_store

KEY = b"k" * 32
CALL = "c0ffee"


class Loaded:
    """An argument that says when somebody unpickles it."""

    loaded = False

    def __setstate__(self, state: Any) -> None:
        Loaded.loaded = True


def add(first: int, second: int, _: Any = None) -> int:
    return first + second


def make_record(folder: Path, *, key: bytes = KEY) -> CallRecord:
    folder.mkdir(exist_ok=True)
    store = open_store(str(folder))
    return CallRecord(
        store=store, folder="run", log=RunLog(store, "run"), call=CALL, key=key, warn=pytest.fail
    )


def send(record: CallRecord, folder: Path, *, key: bytes = KEY, **changes: Any) -> CallReference:
    """Write a call as a driver does."""
    from dataclasses import asdict

    path = folder / "sent"
    argument = Loaded()
    argument.__dict__["x"] = 1
    _, modules = write_call(path, (add, (2, 3, argument), {}), key=key)
    order = CallOrder(
        kind=CallKind.BODY,
        task_name="add",
        root="root",
        run_key="run",
        call=CALL,
        parcel=put_file(record.store, "run", record.name_part("call"), path),
        code=None,
        code_sha256="",
        modules=modules,
        fields=asdict(Spec()),
        flow_run_id="",
        task_run_id="task-run",
        task_run_name="add-1",
        retries=0,
        log_prints=None,
        versions=collect_versions(),
    )
    data = render_order(dataclasses.replace(order, **changes), key=key)
    part = put_part(record.store, "run", record.name_part("order"), data)
    return CallReference(store=record.store.url, order=f"run/{part.key}", root="root")


def arrive(reference: CallReference, record: CallRecord, folder: Path) -> Any:
    """Receive a call as a job does that sees the store of `record`."""
    source = Source(
        reference=reference,
        record=record,
        place=RunPlace(url=record.store.url, local=folder),
        credentials={},
    )
    (folder / "job").mkdir(exist_ok=True)
    return receive(source, folder=folder / "job")


def test_call_arrives_as_it_was_sent(tmp_path: Path):
    record = make_record(tmp_path / "store")
    arrival = arrive(send(record, tmp_path), record, tmp_path)
    assert (arrival.order.task_name, arrival.differences) == ("add", [])
    function, args, kwargs = arrival.payload.load(key=KEY)
    assert function(*args, **kwargs) == 5


def test_job_that_sees_another_store_says_so(tmp_path: Path):
    reference = send(make_record(tmp_path / "store"), tmp_path)
    with pytest.raises(StoreError) as refused:
        arrive(reference, make_record(tmp_path / "other"), tmp_path)
    message = str(refused.value)
    assert f"has no `{reference.order}` here, though the driver wrote it there" in message
    assert "the two machines do not see the same store. Use a URL that both reach" in message


@pytest.mark.parametrize(
    ("package", "there", "words"),
    [
        pytest.param("python", "3.9.18", ["`python`: 3.9.18 on the driver", "Use Python 3.9"], id="python"),
        pytest.param("cloudpickle", "2.2.1", ["'cloudpickle==2.2.1'"], id="cloudpickle"),
        pytest.param("prefect_torch_elastic", "9.0.0", ["'prefect-torch-elastic==9.0.0'"], id="ourselves"),
    ],
)
def test_call_of_another_python_is_refused_before_it_is_loaded(
    tmp_path: Path, package: str, there: str, words: list[str]
):
    record = make_record(tmp_path / "store")
    Loaded.loaded = False
    reference = send(record, tmp_path, versions=collect_versions() | {package: there})
    with pytest.raises(TransferError) as refused:
        arrive(reference, record, tmp_path)
    message = str(refused.value)
    assert message.startswith("`add` cannot be loaded here: driver and work pool differ:")
    for word in words:
        assert word in message
    assert not Loaded.loaded


def test_call_of_another_torch_arrives_and_the_difference_is_known(tmp_path: Path):
    record = make_record(tmp_path / "store")
    reference = send(record, tmp_path, versions=collect_versions() | {"torch": "1.0.0"})
    (difference,) = arrive(reference, record, tmp_path).differences
    assert (difference.package, difference.driver, difference.fatal) == ("torch", "1.0.0", False)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [pytest.param(cut, id="cut"), pytest.param(flip, id="flipped"), pytest.param(Path.unlink, id="gone")],
)
@pytest.mark.parametrize("part", ["order", "call"])
def test_damaged_call_is_refused_before_it_is_loaded(
    tmp_path: Path, part: str, damage: Callable[[Path], None]
):
    record = make_record(tmp_path / "store")
    reference = send(record, tmp_path)
    Loaded.loaded = False
    (path,) = (tmp_path / "store" / "run" / "calls" / CALL).glob(f"{part}-*")
    damage(path)
    with pytest.raises((StoreError, TransferError)):
        arrive(reference, record, tmp_path)
    assert not Loaded.loaded


@pytest.mark.parametrize("part", ["order", "parcel"])
def test_call_that_somebody_else_signed_is_refused_before_it_is_loaded(tmp_path: Path, part: str):
    record = make_record(tmp_path / "store")
    Loaded.loaded = False
    if part == "order":
        reference = send(record, tmp_path, key=b"x" * 32)
    else:
        forged = tmp_path / "forged"
        write_call(forged, (add, (2, 3, Loaded()), {}), key=b"x" * 32)
        reference = send(
            record, tmp_path, parcel=put_file(record.store, "run", f"calls/{CALL}/call-f", forged)
        )
    with pytest.raises(TransferError):
        arrive(reference, record, tmp_path)
    assert not Loaded.loaded


def pack(text: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("travelled_module.py", text)
    return packed.getvalue()


def test_code_of_a_call_is_found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    record = make_record(tmp_path / "store")
    packed = pack("WORD = 'travelled'")
    code = put_part(record.store, "run", record.name_part("code"), packed)
    digest = hashlib.sha256(packed).hexdigest()
    arrive(send(record, tmp_path, code=code, code_sha256=digest), record, tmp_path)
    assert sys.path[0] == str(tmp_path / "job" / "code")
    import travelled_module  # pyright: ignore[reportMissingImports]

    assert travelled_module.WORD == "travelled"


def test_code_of_somebody_else_is_not_unpacked_though_its_checksum_fits(tmp_path: Path):
    record = make_record(tmp_path / "store")
    forged = put_part(record.store, "run", record.name_part("code"), pack("WORD = 'forged'"))
    digest = hashlib.sha256(pack("WORD = 'travelled'")).hexdigest()
    with pytest.raises(TransferError, match="is not the code that the driver packed"):
        arrive(send(record, tmp_path, code=forged, code_sha256=digest), record, tmp_path)
    assert not (tmp_path / "job" / "code").exists()


def test_job_waits_for_an_api_that_is_away_when_it_arrives(
    prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The API keeps the key that signs calls; the driver waits for it as long as this."""
    import httpx

    from prefect_torch_elastic.hosting import arrival
    from prefect_torch_elastic.hosting.asking import Outage

    away, said = [httpx.ConnectError("refused"), httpx.ReadTimeout("slow")], list[str]()

    def open_record(*_: object) -> CallRecord:
        if away:
            raise StoreError("the key that signs pickles cannot be read") from away.pop()
        return make_record(tmp_path / "store")

    monkeypatch.setattr(arrival, "open_record", open_record)
    own: Any = SimpleNamespace(
        outage=Outage(said.append), stop_requested=lambda: False, logger=logging.getLogger(__name__)
    )
    reference = CallReference(store=str(tmp_path / "store"), order=f"run/calls/{CALL}/order-1", root="root")
    assert arrival.open_source(reference, own).record.call == CALL
    assert len(said) == 2  # that it is away, that it is back
