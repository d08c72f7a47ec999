"""Stores for tests of checkpoints: one in memory to look into, and one that stops at any operation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from prefect_torch_elastic.checkpoint import blocks, layout, manifest, writer
from prefect_torch_elastic.checkpoint.session import CheckpointSession
from prefect_torch_elastic.errors import ObjectMissing, StoreError
from prefect_torch_elastic.runlog import RunLog
from prefect_torch_elastic.spec import CheckpointPolicy
from prefect_torch_elastic.store import Store, StoredObject

RUN = "run"


class MemoryStore:
    """Objects in a dictionary that tests read and damage."""

    url = "memory://test"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.modified: dict[str, float] = {}
        self._lock = threading.Lock()

    def copy(self) -> MemoryStore:
        """Return a store of the same objects."""
        other = MemoryStore()
        other.objects, other.modified = dict(self.objects), dict(self.modified)
        return other

    def age(self, seconds: float, *, prefix: str = "") -> None:
        """Make objects older."""
        for key in self.keys(prefix):
            self.modified[key] -= seconds

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with `prefix`, sorted."""
        with self._lock:
            return sorted(key for key in self.objects if key.startswith(prefix))

    def put(self, key: str, data: bytes | memoryview) -> None:
        with self._lock:
            self.objects[key], self.modified[key] = bytes(data), time.time()

    def create(self, key: str, data: bytes) -> bool:
        with self._lock:
            if key in self.objects:
                return self.objects[key] == data
            self.objects[key], self.modified[key] = bytes(data), time.time()
            return True

    def get(self, key: str) -> memoryview:
        try:
            return memoryview(self.objects[key])
        except KeyError:
            raise ObjectMissing(f"`{key}` is not in `{self.url}`.") from None

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        data = self.get(key)
        if start + length > len(data):
            raise StoreError(f"`{key}` in `{self.url}` is cut short.")
        return data[start : start + length]

    def stream(self, key: str, length: int) -> Iterator[memoryview]:
        if length:
            yield self.get_range(key, 0, length)

    def list(self, prefix: str, *, after: str = "") -> Iterator[StoredObject]:
        for key in self.keys(f"{prefix}/" if prefix else ""):
            data = self.objects.get(key)
            if key > after and data is not None:
                yield StoredObject(key=key, size=len(data), modified=self.modified.get(key, 0.0))

    def list_folders(self, prefix: str) -> list[str]:
        rest = [key.removeprefix(f"{prefix}/") for key in self.keys(f"{prefix}/")]
        return sorted({name.partition("/")[0] for name in rest if "/" in name})

    def delete(self, keys: Iterable[str]) -> None:
        for key in list(keys):
            with self._lock:
                self.objects.pop(key, None)
                self.modified.pop(key, None)


class WatchedStore:
    """A store that calls `before(verb, key)` at each operation, which may raise or wait."""

    def __init__(self, inner: Store, before: Callable[[str, str], None] = lambda verb, key: None) -> None:
        self.inner, self.before = inner, before
        self.url = inner.url
        self.operations: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def _note(self, verb: str, key: str) -> None:
        with self._lock:
            self.operations.append((verb, key))
        self.before(verb, key)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._note("put", key)
        self.inner.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self._note("create", key)
        return self.inner.create(key, data)

    def get(self, key: str) -> memoryview:
        self._note("get", key)
        return self.inner.get(key)

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        self._note("get_range", key)
        return self.inner.get_range(key, start, length)

    def stream(self, key: str, length: int) -> Iterator[memoryview]:
        if length:
            yield self.get_range(key, 0, length)

    def list(self, prefix: str, *, after: str = "") -> Iterator[StoredObject]:
        self._note("list", prefix)
        return self.inner.list(prefix, after=after)

    def list_folders(self, prefix: str) -> list[str]:
        self._note("list_folders", prefix)
        return list(self.inner.list_folders(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        for key in list(keys):  # one by one, so that a test can cut in between
            self._note("delete", key)
            self.inner.delete([key])


class Gate:
    """Holds back writes of blocks, as a slow store does, until it is opened."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.reached = threading.Event()

    def __call__(self, verb: str, key: str) -> None:
        if verb == "put" and "/r00000/" in key:
            self.reached.set()
            assert self.is_open.wait(20.0)


def use_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a state of a few hundred bytes a checkpoint of several blocks, written one after the other."""
    for module in (layout, blocks, manifest):
        monkeypatch.setattr(module, "BLOCK_BYTES", 256)
    monkeypatch.setattr(layout, "_SHARED_BYTES", 128)
    monkeypatch.setattr(writer, "WRITERS", 1)


def make_state(value: float) -> dict[str, Any]:
    """Return a state whose every part tells `value`: a few blocks of a few tensors, and plain values."""
    return {
        "weights": torch.arange(150, dtype=torch.float32) + value,
        "bias": torch.full((7,), value),
        "scale": torch.tensor(value, dtype=torch.float64),
        "note": {"value": value},
    }


def assert_is(state: dict[str, Any], value: float) -> None:
    """Check that a state is `make_state(value)`."""
    wanted = make_state(value)
    for name in ("weights", "bias", "scale"):
        assert torch.equal(state[name], wanted[name]), f"`{name}` is {state[name]}, not of {value}"
    assert state["note"] == wanted["note"]


def open_session(store: Store, *, folder: str = RUN, **options: Any) -> CheckpointSession:
    """Return the session of a gang of one; `policy` options may be given directly."""
    names = set(CheckpointPolicy.__dataclass_fields__)
    policy = CheckpointPolicy(**{name: options.pop(name) for name in list(options) if name in names})
    return CheckpointSession(store, folder, policy=policy, **options)


def load_fresh(store: Store, **options: Any) -> tuple[int, dict[str, Any]]:
    """Return what a new gang loads, as the step and the state."""
    state = make_state(-1.0)
    step = open_session(store, **options).load(state)
    return step, state


def save_steps(store: Store, *steps: int, **options: Any) -> CheckpointSession:
    """Load, and save these steps by one gang, each with its own number as its value, and wait for each."""
    session = open_session(store, **options)
    session.load(make_state(-1.0))  # a run that has checkpoints is not saved to before
    for step in steps:
        session.save(make_state(float(step)), step=step, wait=True)
    return session


def wait_until_idle(session: CheckpointSession) -> None:
    """Wait for the save on its way without hearing how it ended."""
    session._saver.join()


def committed_steps(store: Store) -> list[int]:
    """Return the steps that can be loaded, newest first."""
    return [commit.step for commit in RunLog(store, RUN).refresh().commits]


def folder_of(store: Store, step: int) -> str:
    """Return the folder of the newest checkpoint of `step`."""
    commits = RunLog(store, RUN).refresh().all_commits
    commit = next(commit for commit in commits if commit.step == step)
    return f"{RUN}/{manifest.render_folder(commit.step, commit.uuid)}"
