"""Equal arguments have equal hashes in every process, others differ."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import random
import threading
import time
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_elastic.fingerprint import hash_arguments, hash_closure, hash_source

if TYPE_CHECKING:
    from tests.conftest import ScriptRunner


@dataclass
class Config:
    lr: float
    tags: frozenset[str] = frozenset()


class Named(type(Path())):
    """A path that has more than its path."""

    def __init__(self, path: str, number: int) -> None:
        self.number = number

    def __new__(cls, path: str, number: int) -> Named:
        return super().__new__(cls, path)

    def __reduce__(self) -> tuple[Any, ...]:
        return Named, (str(self), self.number)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def hash_of(value: Any) -> str | None:
    return hash_arguments({"value": value})


DIFFERENT = [
    None,
    False,
    True,
    0,
    1,
    1.0,
    -0.0,
    float("nan"),
    1j,
    "1",
    b"1",
    bytearray(b"1"),
    [1],
    (1,),
    {1},
    {1: 1},
    [1, 2],
    [[1], 2],
    [1, [2]],
    ["ab", "c"],
    ["a", "bc"],
    {"a": 1},
    {"a": "1"},
    {"a": {"b": 1}},
    Path("/a"),
    Path("/b"),
    Color.RED,
    Color.BLUE,
    Config(0.1),
    Config(0.2),
    Config(0.1, frozenset("ab")),
    SimpleNamespace(a=1),
    OrderedDict(a=1),
    defaultdict(int, a=1),
    Counter("a"),
    deque([1]),
    decimal.Decimal("1.0"),
    fractions.Fraction(1, 3),
    datetime.date(2026, 1, 1),
    datetime.timedelta(1),
    uuid.UUID(int=1),
    range(3),
    slice(1, 2),
    len,
    int,
    Config,
    hash_of,
    functools.partial(hash_of, 1),
    lambda x: x + 1,
    lambda x: x + 2,
    random.Random(1),
    random.Random(2),
    np.arange(3),
    np.arange(3.0),
    np.arange(4),
    np.arange(6).reshape(2, 3),
    np.arange(6).reshape(3, 2),
    np.float32(1),
    np.random.default_rng(1),
    np.array(["a", None], dtype=object),
    np.ma.masked_array([0, 1, 2], mask=[False, False, True]),
    np.ma.masked_array([0, 1, 2], mask=[False, True, False]),
    Named("/a", 1),
    Named("/a", 2),
    torch.arange(3),
    torch.arange(3).float(),
    torch.arange(3).bfloat16(),
    torch.arange(6).reshape(2, 3),
    torch.tensor(3.0),
    torch.tensor([1 + 2j]),
    torch.tensor([True]),
    torch.empty(0),
    torch.empty(0, 3),
    torch.eye(2).to_sparse(),
    torch.float32,
    torch.device("cpu"),
]


def test_different_values_have_different_hashes():
    hashes = {index: hash_of(value) for index, value in enumerate(DIFFERENT)}
    assert None not in hashes.values(), [DIFFERENT[i] for i, found in hashes.items() if found is None]
    assert len(set(hashes.values())) == len(DIFFERENT)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({"a": 1, "b": 2}, {"b": 2, "a": 1}, id="dict-order"),
        pytest.param(
            {f"k{i}": i for i in range(5000)}, {f"k{i}": i for i in range(4999, -1, -1)}, id="large"
        ),
        pytest.param({"x", "y", "z"}, {"z", "x", "y"}, id="set-order"),
        pytest.param(["ab" * 2] * 2, ["abab", "".join(["a", "b"] * 2)], id="shared-or-not"),
        pytest.param([["a" + "b"] * 5000], [[str(b"ab", "ascii")] * 5000], id="interned-or-not"),
        pytest.param(
            np.arange(12).reshape(3, 4).T, np.ascontiguousarray(np.arange(12).reshape(3, 4).T), id="view"
        ),
        pytest.param(
            torch.arange(12).reshape(3, 4).t(), torch.arange(12).reshape(3, 4).t().clone(), id="stride"
        ),
        pytest.param(torch.arange(10)[:3], torch.arange(3), id="part-of-a-storage"),
        pytest.param(Config(0.1, frozenset("abc")), Config(0.1, frozenset("cba")), id="dataclass"),
        pytest.param(Path("/a"), PurePosixPath("/a"), id="path"),
        pytest.param((lambda x: x + 1), (lambda x: x + 1), id="same-code-elsewhere"),
    ],
)
def test_equal_values_have_equal_hashes(one, other):
    assert hash_of(one) == hash_of(other) is not None


def test_model_is_hashed_by_its_class_and_its_weights():
    torch.manual_seed(0)
    one = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    torch.manual_seed(0)
    same = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    assert hash_of(one) == hash_of(same) is not None
    with torch.no_grad():
        next(same.parameters())[0, 0] += 1e-6
    assert hash_of(one) != hash_of(same)


@pytest.mark.parametrize("place", [0, 12345, (1 << 20) - 1], ids=["first", "inside", "last"])
def test_one_changed_number_in_a_large_array_is_seen(place):
    array = np.zeros(1 << 20, np.float32)
    before = hash_of(array)
    array[place] = np.nextafter(np.float32(0), np.float32(1))
    assert hash_of(array) != before


def test_cycle_has_a_hash():
    def ring(size: int) -> list[Any]:
        first: list[Any] = []
        last = first
        for _ in range(size):
            last.append([])
            last = last[0]
        last.append(first)
        return first

    assert hash_of(ring(1)) == hash_of(ring(1)) != hash_of(ring(2))


@pytest.mark.timeout(30)
def test_value_that_is_shared_many_times_is_looked_at_once():
    value: Any = object
    for _ in range(200):
        value = [value, value]
    assert hash_of(value) is not None


@pytest.mark.timeout(60)
def test_many_ways_through_a_cycle_have_no_hash_instead_of_no_end():
    first: list[Any] = []
    value = first
    for _ in range(100):
        value = [value, value]
    first.append(value)
    assert hash_of(first) is None


def test_object_in_a_cycle_has_one_hash_whatever_was_seen_before_it():
    one, other = SimpleNamespace(name="one"), SimpleNamespace(name="other")
    one.peer, other.peer = other, one
    assert hash_of({"a": one, "b": other}) == hash_of({"b": other, "a": one}) is not None


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(threading.Lock(), id="lock"),
        pytest.param((i for i in range(3)), id="generator"),
        pytest.param([1, {"a": memoryview(b"x")}], id="inside"),
        pytest.param({}.keys(), id="keys"),
    ],
)
def test_value_that_pickles_nowhere_has_no_hash(value):
    assert hash_of(value) is None


def test_object_whose_pickling_fails_has_no_hash():
    class Hostile:
        def __reduce_ex__(self, protocol):
            raise OSError("no")

    assert hash_of(Hostile()) is None


def test_very_deep_value_has_no_hash_instead_of_an_error():
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    assert hash_of(value) is None


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(plain)
def test_plain_data_has_a_hash_that_a_copy_shares(value):
    import copy

    assert hash_of(value) == hash_of(copy.deepcopy(value)) is not None


def test_hash_is_the_same_in_every_process(run_script: ScriptRunner):
    text = """
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
import numpy as np, torch
from prefect_torch_elastic.fingerprint import hash_arguments, hash_closure, hash_source
@dataclass
class Config:
    names: set
def train(x): return x + 1
values = [{"b", "a", "c"}, {"x": 1, "y": {"z", "w"}}, Config({"q", "r"}), defaultdict(list, {"a": [1]}),
          np.arange(3), torch.ones(2), frozenset(range(100)), train, lambda: {"s", "t"}, Path("."),
          torch.nn.Linear]
print(hash_arguments({"values": values}), hash_source(None, train))
"""
    found = {run_script(text, env={"PYTHONHASHSEED": seed}).stdout for seed in ("1", "2", "3")}
    assert len(found) == 1
    assert "None" not in found.pop()


def test_large_plain_data_and_tensors_are_hashed_quickly():
    start = time.process_time()  # not the clock on the wall: other tests run beside this one
    hash_of(list(range(1_000_000)))
    hash_of(torch.zeros(64 << 20, dtype=torch.uint8))
    assert time.process_time() - start < 4.0  # 0.1 s; one by one it would be 10 s


# ---------------------------------------------------------------- functions


def test_function_is_hashed_by_its_source_where_there_is_one():
    def train():
        return 1

    assert hash_source("def train(): return 1", train) != hash_source("def train(): return 2", train)
    assert hash_source(None, train) == hash_source(None, train)


def test_function_without_source_is_hashed_by_its_code():
    functions: dict[str, Any] = {}
    for name, body in [("one", "return 1"), ("same", "return 1"), ("other", "return 2")]:
        scope: dict[str, Any] = {}
        exec(f"def train():\n    {body}", scope)
        functions[name] = scope["train"]
    hashes = {name: hash_source(None, function) for name, function in functions.items()}
    assert hashes["one"] == hashes["same"] != hashes["other"]


def make(value: Any) -> Any:
    def train():
        return value

    return train


def test_closure_is_hashed_by_its_values():
    assert hash_closure(make(1)) == hash_closure(make(1)) != hash_closure(make(2))
    assert hash_closure(make(Config(0.1))) == hash_closure(make(Config(0.1))) != hash_closure(make(Config(1)))
    assert hash_closure(make(make(1))) == hash_closure(make(make(1))) != hash_closure(make(make(2)))
    assert hash_closure(make) is not None


def test_closure_over_what_has_no_hash_has_none():
    assert hash_closure(make(threading.Lock())) is None


def test_function_that_closes_over_itself_has_a_hash():
    def train(depth: int) -> Any:
        return train(depth - 1) if depth else None

    assert hash_closure(train) is not None
