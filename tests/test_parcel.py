"""Calls and results as signed files: they come back equal, share memory, and are never loaded damaged."""

from __future__ import annotations

import gc
import hashlib
import hmac
import os
import pickle
import resource
import threading
from pathlib import Path

import pytest

from prefect_torch_elastic import parcel
from prefect_torch_elastic.errors import TransferError

KEY = b"k" * 32


class Bomb:
    """Unpickling it is noticed."""

    went_off = False

    def __reduce__(self):
        return _go_off, ()


def _go_off() -> None:
    Bomb.went_off = True


@pytest.fixture
def bomb(tmp_path):
    """A parcel that must not be unpickled."""
    Bomb.went_off = False
    path = tmp_path / "call"
    parcel.write_parcel(path, [Bomb(), pickle.PickleBuffer(b"buffer" * 40)], key=KEY)
    return path


def read(path: Path):
    return parcel.read_parcel(path, key=KEY)


def test_value_comes_back_equal(tmp_path):
    value = {"steps": [1, 2], "path": Path("/data"), "text": "ü" * 1000, "nothing": None}
    size = parcel.write_parcel(tmp_path / "call", value, key=KEY)
    assert read(tmp_path / "call") == value
    assert size == (tmp_path / "call").stat().st_size


def test_call_comes_with_the_modules_that_a_node_imports_first(tmp_path):
    import yaml

    size, modules = parcel.write_call(tmp_path / "call", (yaml.safe_load, ("a: 1",), {}), key=KEY)
    function, args, kwargs = read(tmp_path / "call")
    assert function(*args, **kwargs) == {"a": 1}
    assert modules == ["yaml"]
    assert size == (tmp_path / "call").stat().st_size


def test_parts_are_aligned_for_tensors(tmp_path):
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "call"
    parcel.write_parcel(path, [numpy.arange(3, dtype="u1"), numpy.arange(5, dtype="u1")], key=KEY)
    first, second = read(path)
    assert (first.ctypes.data % 64, second.ctypes.data % 64) == (0, 0)
    assert (first.tolist(), second.tolist()) == ([0, 1, 2], [0, 1, 2, 3, 4])


def test_parcel_is_for_its_owner_only(tmp_path):
    before = os.umask(0)
    try:
        parcel.write_parcel(tmp_path / "call", 1, key=KEY)
    finally:
        os.umask(before)
    assert (tmp_path / "call").stat().st_mode & 0o777 == 0o600


def test_parcel_replaces_an_older_one_in_one_step(tmp_path):
    parcel.write_parcel(tmp_path / "call", "old", key=KEY)
    with (tmp_path / "call").open("rb") as older:
        parcel.write_parcel(tmp_path / "call", "new", key=KEY)
        assert b"old" in older.read()  # a reader that has it open keeps the whole older file
    assert read(tmp_path / "call") == "new"
    assert os.listdir(tmp_path) == ["call"]


def test_nothing_is_left_when_the_value_cannot_be_pickled(tmp_path):
    with pytest.raises(TransferError):
        parcel.write_parcel(tmp_path / "call", [threading.Lock()], key=KEY)
    assert os.listdir(tmp_path) == []


def test_nothing_is_left_when_the_disk_is_full(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (50_000, limits[1])
    )  # what a file may grow to, as on a full disk
    try:
        with pytest.raises(OSError, match="File too large"):
            parcel.write_parcel(tmp_path / "call", bytes(1_000_000), key=KEY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []


def test_parcel_is_for_its_owner_only_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        parcel.write_parcel(tmp_path / "call", 1, key=KEY)
    finally:
        os.umask(before)
    assert (tmp_path / "call").stat().st_mode & 0o777 == 0o600


def test_parcel_that_is_replaced_after_its_check_is_not_loaded(tmp_path, monkeypatch):
    path, other = tmp_path / "call", tmp_path / "other"
    parcel.write_parcel(path, "checked", key=KEY)
    parcel.write_parcel(other, "somebody else's", key=b"x" * 32)
    verify = parcel.verify_bytes

    def verify_and_replace(*args, **options) -> None:
        verify(*args, **options)
        other.replace(path)

    monkeypatch.setattr(parcel, "verify_bytes", verify_and_replace)
    assert read(path) == "checked"


# ---------------------------------------------------------------- refused, and never unpickled


def signed_offsets(raw: bytes) -> list[int]:
    """Return the offsets of all bytes that mean something: the head, the table, every part."""
    count = parcel._HEAD.unpack_from(raw)[2]
    table_end = parcel._HEAD.size + parcel._PART.size * count
    spans = parcel._PART.iter_unpack(raw[parcel._HEAD.size : table_end])
    parts = (index for offset, length in spans for index in range(offset, offset + length))
    return [*range(table_end), *parts]


def test_one_flipped_bit_is_refused_wherever_it_is(bomb):
    raw = bomb.read_bytes()
    for offset in signed_offsets(raw):
        damaged = bytearray(raw)
        damaged[offset] ^= 1
        bomb.write_bytes(damaged)
        with pytest.raises(TransferError, match="It was not loaded"):
            read(bomb)
    assert not Bomb.went_off


@pytest.mark.parametrize("kept", [0, 1, 43, 44, 60, 75, -1], ids=lambda kept: f"{kept}-bytes")
def test_file_that_was_cut_is_refused(bomb, kept):
    bomb.write_bytes(bomb.read_bytes()[:kept])
    with pytest.raises(TransferError, match="not loaded") as refused:
        read(bomb)
    assert str(bomb) in str(refused.value)
    assert not Bomb.went_off


def test_parcel_of_another_run_is_refused(bomb):
    with pytest.raises(TransferError, match="its signature does not match") as refused:
        parcel.read_parcel(bomb, key=b"another")
    assert "Run the task again" in str(refused.value)
    assert not Bomb.went_off


def test_file_of_somebody_else_is_refused(tmp_path):
    path = tmp_path / "call"
    path.write_bytes(pickle.dumps(Bomb()) + bytes(100))
    with pytest.raises(TransferError, match="it is not a parcel"):
        read(path)
    assert not Bomb.went_off


def test_verify_unpickles_nothing(bomb):
    parcel.verify_parcel(bomb, key=KEY)
    assert not Bomb.went_off
    read(bomb)
    assert Bomb.went_off


def test_signature_is_hmac_sha256_over_table_and_parts(bomb):
    raw = bomb.read_bytes()
    mac = parcel._HEAD.unpack_from(raw)[1]
    signed = bytes(raw[offset] for offset in signed_offsets(raw)[parcel._HEAD.size :])
    assert mac == hmac.new(KEY, signed, hashlib.sha256).digest()


def test_reader_without_a_key_takes_the_word_of_its_agent(tmp_path):
    parcel.write_parcel(tmp_path / "call", [1], key=KEY)
    assert parcel.read_parcel(tmp_path / "call", key=None) == [1]


# ---------------------------------------------------------------- zero copy


def mapped_file(address: int) -> str:
    """Return the path of the file that this process has mapped at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, _, *path = line.split(maxsplit=5)
        low, high = (int(number, 16) for number in span.split("-"))
        if low <= address < high:
            return "".join(path)
    return ""


def test_tensor_lies_in_the_mapped_file_c077(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "call"
    parcel.write_parcel(path, {"model": torch.arange(100_000)}, key=KEY)
    tensor = read(path)["model"]
    assert mapped_file(tensor.data_ptr()) == str(path)
    assert torch.equal(tensor, torch.arange(100_000))


def test_array_lies_in_the_mapped_file_c077(tmp_path):
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "call"
    parcel.write_parcel(path, numpy.arange(1000.0), key=KEY)
    array = read(path)
    assert mapped_file(array.ctypes.data) == str(path)
    assert array.flags.writeable


def test_ranks_share_the_pages_until_one_writes_c077(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "call"
    parcel.write_parcel(path, torch.zeros(2000), key=KEY)
    first, second = read(path), read(path)
    first += 1.0
    assert (first.sum().item(), second.sum().item(), read(path).sum().item()) == (2000.0, 0.0, 0.0)


def test_tensor_keeps_its_memory_when_the_file_is_gone(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "call"
    parcel.write_parcel(path, torch.ones(5000), key=KEY)
    tensor = read(path)
    path.unlink()
    gc.collect()
    assert tensor.sum().item() == 5000.0
