"""The bytes of a save in memory: staged over slabs that are kept, and final before they are read."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefect_torch_elastic.checkpoint import blocks
from prefect_torch_elastic.checkpoint.blocks import Arena, Blocks, LiveBlocks, wait_for_devices
from prefect_torch_elastic.checkpoint.plan import Part
from tests.checkpoint_stores import (
    MemoryStore,
    assert_is,
    load_fresh,
    make_state,
    open_session,
    use_small_blocks,
    wait_until_idle,
)


def make_parts(*sizes: int, value: int = 1) -> list[Part]:
    """Return parts of so many bytes, whose bytes count up from `value`."""
    return [
        Part(name=f"t{place}", offsets=(0,), data=(torch.arange(size) + value).to(torch.uint8))
        for place, size in enumerate(sizes)
    ]


def read_parts(staged: Blocks) -> list[bytes]:
    """Return the bytes of each part, gathered from the blocks."""
    found: list[bytes] = []
    for pieces in staged.layout.pieces:
        data = b""
        for piece in pieces:
            with staged.read(piece.block) as block:
                data += bytes(block[piece.offset : piece.offset + piece.length])
        found.append(data)
    return found


def bytes_of(parts: list[Part]) -> list[bytes]:
    return [part.data.numpy().tobytes() for part in parts]


@pytest.fixture
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_blocks(monkeypatch)  # of 256 bytes
    monkeypatch.setattr(blocks, "_SLAB_BLOCKS", 2)


# ------------------------------------------------------------ slabs


@pytest.mark.usefixtures("_small_slabs")
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((), id="nothing"),
        pytest.param((0,), id="no bytes"),
        pytest.param((512,), id="one slab exactly"),
        pytest.param((513,), id="a byte more"),
        pytest.param((1000, 3, 700, 0, 5, 256), id="several slabs"),
        pytest.param((100,) * 12, id="shared blocks"),
    ],
)
def test_arena_stages_over_slabs_what_there_is(sizes: tuple[int, ...]) -> None:
    parts = make_parts(*sizes)
    assert read_parts(Arena().stage(parts)) == bytes_of(parts)


@pytest.mark.usefixtures("_small_slabs")
def test_state_of_several_slabs_is_saved_and_loaded_again_and_again() -> None:
    store = MemoryStore()
    session = open_session(store)
    places: set[tuple[int, ...]] = set()
    for step in (1, 2, 3):
        assert session.save(make_state(float(step)), step=step)
        wait_until_idle(session)
        places.add(tuple(slab.data_ptr() for slab in session._saver._arena._slabs))
    session.close()
    assert len(places) == 1
    assert len(places.pop()) > 1
    step, state = load_fresh(store)
    assert step == 3
    assert_is(state, 3.0)


@pytest.mark.usefixtures("_small_slabs")
def test_arena_grows_and_keeps_what_is_large_enough() -> None:
    arena = Arena()
    arena.stage(make_parts(700))
    first, second = arena._slabs
    larger = make_parts(1500, value=7)
    assert read_parts(arena.stage(larger)) == bytes_of(larger)
    assert arena._slabs[0] is first
    assert arena._slabs[1] is not second
    slabs = list(arena._slabs)
    smaller = make_parts(300, value=9)
    assert read_parts(arena.stage(smaller)) == bytes_of(smaller)
    assert all(now is before for now, before in zip(arena._slabs, slabs, strict=True))


@pytest.mark.usefixtures("_small_slabs")
def test_arena_gives_up_a_slab_before_it_makes_a_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, allocate, held = Arena(), blocks.allocate, list[int]()

    def count(size: int, *, pinned: bool) -> torch.Tensor:
        if size:
            held.append(sum(slab.untyped_storage().nbytes() for slab in arena._slabs))
        return allocate(size, pinned=pinned)

    arena.stage(make_parts(300))
    monkeypatch.setattr(blocks, "allocate", count)
    arena.stage(make_parts(500))
    assert held == [1]


# ------------------------------------------------------------ GPUs


class OnGpu(torch.Tensor):
    """Host memory that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]
    device = torch.device("cuda:1")  # type: ignore[assignment]


class Streams:
    """The current stream of each device, which notes who waits for it, and what `look` sees then."""

    def __init__(self) -> None:
        self.waited: list[tuple[Any, int]] = []
        self.seen: list[Any] = []
        self.look: Any = lambda: None

    def current_stream(self, device: Any = None) -> SimpleNamespace:
        def synchronize() -> None:
            self.waited.append((device, threading.get_ident()))
            self.seen.append(self.look())

        return SimpleNamespace(synchronize=synchronize)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", streams.current_stream)
    return streams


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Give plain memory where pinned is asked for, and note what was asked for."""
    asked: list[bool] = []

    def allocate(size: int, *, pinned: bool) -> torch.Tensor:
        asked.append(pinned)
        return torch.zeros(max(size, 1), dtype=torch.uint8)

    monkeypatch.setattr(blocks, "allocate", allocate)
    return asked


def put_on_gpu(parts: list[Part]) -> list[Part]:
    return [Part(name=p.name, offsets=p.offsets, data=p.data.as_subclass(OnGpu)) for p in parts]


def test_each_gpu_is_waited_for_once_by_its_own_stream(streams: Streams) -> None:
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in (0, 1, 1))]
    parts: list[Any] = [
        SimpleNamespace(data=SimpleNamespace(is_cuda=device.type == "cuda", device=device))
        for device in devices
    ]
    wait_for_devices(parts)
    assert sorted(str(device) for device, _ in streams.waited) == ["cuda:0", "cuda:1"]


def test_cpu_tensors_wait_for_no_gpu_and_need_no_pinned_memory(streams: Streams, pinned: list[bool]) -> None:
    parts = make_parts(700)
    LiveBlocks(parts)
    Arena().stage(parts)
    assert not streams.waited
    assert not any(pinned)


def test_staged_copy_from_a_gpu_is_waited_for_when_it_was_asked_for(
    streams: Streams, pinned: list[bool]
) -> None:
    arena, parts = Arena(), make_parts(700, 40)
    streams.look = lambda: [slab.any().item() for slab in arena._slabs]
    staged = arena.stage(put_on_gpu(parts))
    assert streams.waited == [(OnGpu.device, threading.get_ident())]
    assert streams.seen == [[True]]  # behind the copies
    assert pinned == [True]
    assert read_parts(staged) == bytes_of(parts)


@pytest.mark.usefixtures("_small_slabs")
def test_save_straight_from_a_gpu_waits_for_its_stream_before_threads_read(
    streams: Streams, pinned: list[bool]
) -> None:
    parts = make_parts(700, 40)
    live = LiveBlocks(put_on_gpu(parts))
    assert streams.waited == [(OnGpu.device, threading.get_ident())]
    assert read_parts(live) == bytes_of(parts)
    assert pinned
    assert all(pinned)
