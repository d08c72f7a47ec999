"""Manifests are read with suspicion: whatever they say, nothing else is read, run, allocated or believed."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Callable
from typing import Any

import crc32c
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_elastic.checkpoint.coverage import parse_item_size
from prefect_torch_elastic.checkpoint.layout import BLOCK_BYTES, Piece
from prefect_torch_elastic.checkpoint.manifest import (
    Block,
    Chunk,
    DamagedError,
    Manifest,
    RankManifest,
    Signed,
    TensorEntry,
    parse_manifest,
    parse_rank_manifest,
    render_block_key,
    render_folder,
    render_json,
    render_manifest_key,
    render_rank_key,
)
from prefect_torch_elastic.checkpoint.reader import fetch_checkpoint, read_tensors
from prefect_torch_elastic.checkpoint.tensors import name_dtype
from prefect_torch_elastic.checkpoint.verify import verify
from prefect_torch_elastic.errors import CheckpointError
from prefect_torch_elastic.runlog import Commit
from prefect_torch_elastic.store.keys import check_key
from tests.checkpoint_stores import MemoryStore, WatchedStore

FOLDER = "run/checkpoints/000000000010/000001-aa"
ROWS, COLUMNS = 4, 6

counts = st.integers(min_value=0, max_value=1 << 40)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def make_manifests() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the JSON of a good checkpoint of two ranks that hold two rows each of one tensor."""
    size = ROWS // 2 * COLUMNS * 4
    manifest = Manifest(
        step=10,
        uuid="000001-aa",
        epoch=1,
        world_size=2,
        tensors={"w": TensorEntry(dtype="float32", shape=(ROWS, COLUMNS))},
        values={"note": {"a": 1}},
        metrics={"loss": 0.5},
        ranks=(Signed(size=1, crc32c=1), Signed(size=1, crc32c=1)),
        versions={"torch": "2"},
    )
    ranks: list[dict[str, Any]] = []
    for rank in range(2):
        chunk = Chunk(
            name="w",
            offsets=(2 * rank, 0),
            sizes=(2, COLUMNS),
            pieces=(Piece(block=0, offset=0, length=size),),
        )
        blocks = (Block(size=size, crc32c=crc32c.crc32c(make_block(rank))),)
        ranks.append(json.loads(render_json(RankManifest(rank=rank, chunks=(chunk,), blocks=blocks))))
    return json.loads(render_json(manifest)), ranks


def make_block(rank: int) -> bytes:
    rows = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    return rows[2 * rank : 2 * rank + 2].numpy().tobytes()


def store_checkpoint(manifest: dict[str, Any], ranks: list[dict[str, Any]]) -> tuple[MemoryStore, int]:
    """Store these manifests with right checksums, as an attacker would, and return the one for the log."""
    store = MemoryStore()
    for rank, body in enumerate(ranks):
        data = json.dumps(body).encode()
        store.put(render_rank_key(FOLDER, rank), data)
        store.put(render_block_key(FOLDER, rank, 0), make_block(rank))
        if rank < len(manifest["ranks"]):
            manifest["ranks"][rank] = {"size": len(data), "crc32c": crc32c.crc32c(data)}
    data = json.dumps(manifest).encode()
    store.put(render_manifest_key(FOLDER), data)
    return store, crc32c.crc32c(data)


def make_commit(checksum: int) -> Commit:
    """Return what the log would say of the checkpoint."""
    return Commit(
        step=10,
        uuid="000001-aa",
        epoch=1,
        manifest_crc32c=checksum,
        size_bytes=ROWS * COLUMNS * 4,
        world_size=2,
        metrics={},
        seconds=1.0,
    )


def read(store: MemoryStore, checksum: int) -> torch.Tensor:
    target = torch.zeros(ROWS, COLUMNS)
    read_tensors(store, fetch_checkpoint(store, FOLDER, checksum=checksum), {"w": target})
    return target


def test_manifest_of_an_honest_checkpoint_is_read() -> None:
    store, checksum = store_checkpoint(*make_manifests())
    assert torch.equal(read(store, checksum), torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS).float())


@given(
    st.dictionaries(st.text(max_size=5), st.lists(counts, max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=5), json_values, max_size=3),
    st.dictionaries(st.text(max_size=5), st.floats(), max_size=2),
)
def test_manifest_survives_its_own_text(
    shapes: dict[str, list[int]], values: dict[str, Any], metrics: dict[str, float]
) -> None:
    manifest = Manifest(
        step=1,
        uuid="u",
        epoch=2,
        world_size=1,
        tensors={name: TensorEntry(dtype="int8", shape=tuple(shape)) for name, shape in shapes.items()},
        values=values,
        metrics=metrics,
        ranks=(Signed(size=3, crc32c=4),),
        versions={},
    )
    assert repr(parse_manifest(render_json(manifest), key="k")) == repr(manifest)  # `nan` is not itself


@given(json_values | st.dictionaries(st.sampled_from(["format", "rank", "chunks", "blocks"]), json_values))
def test_manifest_of_any_json_is_damage_and_nothing_else(body: Any) -> None:
    data = json.dumps(body).encode()
    for parse in (parse_manifest, lambda data, key: parse_rank_manifest(data, key=key, rank=0)):
        with pytest.raises(DamagedError, match="`k` is not a manifest"):
            parse(data, key="k")


@given(st.data())
def test_manifest_with_one_value_replaced_is_damage_or_a_manifest(data: st.DataObject) -> None:
    manifest, ranks = make_manifests()
    body = data.draw(st.sampled_from([manifest, ranks[0]]))
    place: Any = body
    while True:  # walk down to a random place
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        place[key] = data.draw(json_values)
        break
    text = json.dumps(body).encode()
    try:
        if body is manifest:
            parse_manifest(text, key="k")
        else:
            parse_rank_manifest(text, key="k", rank=0)
    except DamagedError:
        pass


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff\xfe", id="no text"),
        pytest.param(b"[" * 200_000, id="deep lists"),
        pytest.param(b'{"format":1,"a":' * 100_000, id="deep objects"),
        pytest.param(b'{"format": 1, "step": ' + b"9" * 5000 + b"}", id="a number of 5000 digits"),
        pytest.param(b'{"format": 2}', id="a later format"),
        pytest.param(b'{"format": true}', id="true is no format"),
        pytest.param(pickle.dumps({"format": 1}), id="a pickle"),
    ],
)
def test_manifest_that_is_none_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(DamagedError, match="`the/key` is not a manifest") as caught:
        parse_manifest(data, key="the/key")
    assert len(str(caught.value)) < 1000
    with pytest.raises(DamagedError, match="`the/key` is not a manifest"):
        parse_rank_manifest(memoryview(data), key="the/key", rank=0)


class _Touch:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["PICKLE_MARK"],)


def test_manifest_that_is_a_pickle_is_not_run_t12(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    mark = tmp_path / "executed"
    monkeypatch.setenv("PICKLE_MARK", str(mark))
    evil = pickle.dumps(_Touch())
    for key in (render_manifest_key(FOLDER), render_rank_key(FOLDER, 1), render_block_key(FOLDER, 1, 0)):
        store, checksum = store_checkpoint(*make_manifests())
        store.put(key, evil)
        if key == render_manifest_key(FOLDER):
            checksum = crc32c.crc32c(evil)
        with pytest.raises(DamagedError):
            read(store, checksum)
        assert not mark.exists()


Change = Callable[[dict[str, Any], list[dict[str, Any]]], None]


def _set(*path: Any, to: Any) -> Change:
    """Return a change of one value: the path starts with `all` or a rank."""

    def change(manifest: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        place: Any = manifest if path[0] == "all" else ranks[path[0]]
        for key in path[1:-1]:
            place = place[key]
        place[path[-1]] = to

    return change


def _swap_ranks(manifest: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    ranks.reverse()


def _drop_chunk(manifest: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    ranks[1]["chunks"].clear()


def _repeat_chunk(manifest: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    ranks[1]["chunks"][0] = ranks[0]["chunks"][0]


def _add_chunk(manifest: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    ranks[1]["chunks"].append(ranks[0]["chunks"][0])


def _overlap_and_leave_a_hole(manifest: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    ranks[1]["chunks"][0][1] = [1, 0]  # rows 1 and 2: row 1 is there twice, row 3 not at all


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(_swap_ranks, "it is of rank 1, not 0", id="swapped ranks"),
        pytest.param(_set(0, "rank", to=7), "it is of rank 7, not 0", id="another rank"),
        pytest.param(_set("all", "world_size", to=3), "2 ranks of 3", id="more ranks than manifests"),
        pytest.param(_set("all", "world_size", to=1), "2 ranks of 1", id="fewer ranks than manifests"),
        pytest.param(_set("all", "step", to=-1), "-1 is not a count", id="negative step"),
        pytest.param(_set("all", "tensors", "w", "dtype", to="../../float32"), "dtype", id="dtype as a path"),
        pytest.param(_set("all", "tensors", "w", "dtype", to="__dict__"), "dtype", id="no dtype"),
        pytest.param(_set("all", "tensors", "w", "dtype", to="float64"), "sizes need", id="wider dtype"),
        pytest.param(_set("all", "tensors", "w", "shape", to=[1 << 62, 6]), "`w`", id="huge tensor"),
        pytest.param(_set("all", "tensors", "w", "shape", to=[10**40]), "`w`", id="a size beyond 64 bits"),
        pytest.param(
            _set("all", "tensors", "w", "shape", to=[1] * 70), "these are not sizes", id="70 dimensions"
        ),
        pytest.param(_set("all", "tensors", "w", "shape", to=[24]), "is not in a tensor", id="flat"),
        pytest.param(_set("all", "metrics", "loss", to=10**400), "is not a manifest", id="huge metric"),
        pytest.param(
            _set("all", "tensors", "ghost", to={"dtype": "int8", "shape": [1 << 50]}),
            "`ghost`",
            id="a petabyte that nobody wrote",
        ),
        pytest.param(_set(0, "blocks", 0, 0, to=BLOCK_BYTES + 1), "larger than", id="huge block"),
        pytest.param(_set(0, "blocks", 0, 0, to=1), "lies outside of block 0", id="block too small"),
        pytest.param(_set(0, "chunks", 0, 0, to="../w"), "is in no global manifest", id="unknown tensor"),
        pytest.param(_set(0, "chunks", 0, 1, to=[3, 0]), "is not in a tensor of shape", id="outside"),
        pytest.param(_set(0, "chunks", 0, 1, to=[0]), "offsets in 1 dimensions", id="offsets too short"),
        pytest.param(_set(0, "chunks", 0, 2, to=[1, 6]), "has 48 bytes", id="more bytes than sizes"),
        pytest.param(_set(0, "chunks", 0, 3, 0, 0, to=9), "lies outside of block 9", id="unknown block"),
        pytest.param(_set(0, "chunks", 0, 3, 0, 1, to=-8), "-8 is not a count", id="before the block"),
        pytest.param(_set(0, "chunks", 0, 3, 0, 1, to=8), "lies outside of block 0", id="beyond the block"),
        pytest.param(_set(0, "chunks", 0, 3, 0, 2, to=4), "has 4 bytes", id="fewer bytes than sizes"),
        pytest.param(_set(0, "chunks", 0, 3, 0, 0, to="../../../etc/passwd"), "not a count", id="a path"),
        pytest.param(_set(0, "chunks", 0, 3, 0, 0, to=0.0), "not a count", id="block as a fraction"),
        pytest.param(_drop_chunk, "`w`", id="a hole"),
        pytest.param(_repeat_chunk, "`w`", id="a hole and an overlap"),
        pytest.param(_add_chunk, "`w`", id="an overlap"),
        pytest.param(_overlap_and_leave_a_hole, "`w`", id="a hole and an overlap of rows"),
    ],
)
def test_manifest_that_lies_is_refused_by_name_t20(change: Change, says: str) -> None:
    manifest, ranks = make_manifests()
    change(manifest, ranks)
    store, checksum = store_checkpoint(manifest, ranks)
    watched = WatchedStore(store)
    with pytest.raises(DamagedError) as caught:
        fetch_checkpoint(watched, FOLDER, checksum=checksum)
    assert says in str(caught.value)
    assert FOLDER in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert all(key.startswith(f"{FOLDER}/") for _, key in watched.operations)
    assert verify(store, "run", make_commit(checksum)).damages  # what no load takes is not called whole


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(_overlap_and_leave_a_hole, "written twice in one place", id="a hole and an overlap"),
        pytest.param(_set(0, "chunks", 0, 3, 0, 2, to=4), "has 4 bytes", id="fewer bytes than sizes"),
        pytest.param(_set("all", "tensors", "w", "dtype", to="real"), "`real`", id="no dtype"),
        pytest.param(_drop_chunk, "all ranks together wrote 12", id="a hole"),
    ],
)
def test_verify_says_what_a_load_says_of_a_manifest_that_lies(change: Change, says: str) -> None:
    manifest, ranks = make_manifests()
    change(manifest, ranks)
    store, checksum = store_checkpoint(manifest, ranks)
    (damage,) = verify(store, "run", make_commit(checksum)).damages
    assert says in damage.found


def test_verify_takes_an_honest_checkpoint_for_whole() -> None:
    store, checksum = store_checkpoint(*make_manifests())
    assert verify(store, "run", make_commit(checksum)).damages == ()


def test_size_of_an_item_is_what_torch_says_for_each_of_its_dtypes() -> None:
    dtypes = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    assert {dtype: parse_item_size(name_dtype(dtype)) for dtype in dtypes} == {
        dtype: dtype.itemsize for dtype in dtypes
    }


@pytest.mark.parametrize("name", ["", "8", "float32 ", "../float32", "strided", "float0"])
def test_size_of_an_item_is_none_for_a_name_that_is_no_dtype(name: str) -> None:
    assert parse_item_size(name) is None


def test_manifest_from_another_checkpoint_is_refused_t2() -> None:
    """Same names, sizes and shapes: only the checksums tell them apart."""
    store, checksum = store_checkpoint(*make_manifests())
    manifest, ranks = make_manifests()
    manifest["step"] = 11
    other, _ = store_checkpoint(manifest, ranks)
    store.put(render_manifest_key(FOLDER), other.objects[render_manifest_key(FOLDER)])
    with pytest.raises(DamagedError, match=rf"manifest.json` was changed.*committed was {checksum:08x}"):
        fetch_checkpoint(store, FOLDER, checksum=checksum)


def test_rank_manifest_from_another_checkpoint_is_refused_t2() -> None:
    store, checksum = store_checkpoint(*make_manifests())
    manifest, ranks = make_manifests()
    ranks[1]["values"] = {"a": "b"}
    other, _ = store_checkpoint(manifest, ranks)
    store.put(render_rank_key(FOLDER, 1), other.objects[render_rank_key(FOLDER, 1)])
    with pytest.raises(DamagedError, match=r"rank 1's `.*r00001\.json` was changed"):
        fetch_checkpoint(store, FOLDER, checksum=checksum)


@given(step=st.integers(0, 10**12 - 1), rank=st.integers(0, 99_999), block=st.integers(0, 999_999))
def test_keys_are_made_of_numbers_and_sort_as_they_count(step: int, rank: int, block: int) -> None:
    folder = render_folder(step, "000001-0123456789abcdef")
    keys = [render_manifest_key(folder), render_rank_key(folder, rank), render_block_key(folder, rank, block)]
    assert [check_key(key) for key in keys] == keys
    assert render_folder(step, "x") < render_folder(step + 1, "x") or step == 10**12 - 1


def test_damage_is_an_error_of_checkpoints() -> None:
    assert issubclass(DamagedError, CheckpointError)
    assert math.prod((ROWS, COLUMNS)) * 4 == len(make_block(0)) + len(make_block(1))
