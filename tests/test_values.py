"""Plain values as JSON: they come back equal and of the same type, and what cannot is refused by name."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import json
import math
import pathlib
import random
import typing
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_elastic.checkpoint.values import (
    INLINE_LIMIT,
    decode_value,
    encode_value,
    join_name,
    split_name,
)
from prefect_torch_elastic.errors import CheckpointError

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Option(enum.Flag):
    FAST = 1
    SAFE = 2


class Point(typing.NamedTuple):
    x: float
    y: float


@dataclasses.dataclass(frozen=True)
class Config:
    lr: float
    layers: list[int] = dataclasses.field(default_factory=list)
    colour: Colour = Colour.RED


@dataclasses.dataclass
class Timer:
    name: str
    started: float = dataclasses.field(init=False)


@dataclasses.dataclass
class Meter:
    total: float = 0.0

    def __post_init__(self):
        self.count = 0
        Meter.made += 1  # notices that its code ran

    made: typing.ClassVar[int] = 0


def through_json(value, **options):
    return decode_value(json.loads(json.dumps(encode_value("value", value), allow_nan=False)), **options)


def same(one, other):
    """Whether two values are equal in type and content, NaN included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or (one == other and math.copysign(1, one) == math.copysign(1, other))
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and as_bytes(one) == as_bytes(other)
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return bool(one == other)


def as_bytes(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary(max_size=40)
    | st.datetimes(timezones=st.none() | st.just(datetime.UTC) | st.just(zoneinfo.ZoneInfo("Europe/Berlin")))
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.uuids()
)
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.none()


def nest(children):
    return (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=4).map(tuple)
        | st.dictionaries(keys, children, max_size=4)
        | st.dictionaries(keys, children, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, children, max_size=4).map(lambda items: argparse.Namespace(sub=items))
        | st.lists(children, max_size=4).map(lambda items: deque(items, maxlen=9))
    )


@given(st.recursive(leaves, nest, max_leaves=12))
def test_value_comes_back_equal_and_of_the_same_type(value):
    back = through_json(value)
    if isinstance(value, argparse.Namespace):
        value, back = vars(value), vars(back)
    assert same(value, back) or value == back


@given(st.lists(st.text(), min_size=2, max_size=4), st.lists(st.text(), max_size=4))
def test_name_is_equal_only_for_equal_parts(one, other):
    def name_of(parts):
        name = ""
        for part in ("root", *parts):
            name = join_name(name, part)
        return name

    assert (name_of(one) == name_of(other)) == (one == other)
    if all(part.isprintable() for part in one):
        assert split_name(name_of(one)) == ["root", *one]


def test_name_tells_numbers_from_text():
    names = [join_name("a", key) for key in (0, "0", "#0", (0,), "(0,)", None, "None", "b/c", "b%2Fc")]
    assert len(set(names)) == len(names)
    assert names[0] == "a/#0"
    assert join_name("model", "layers.0.weight") == "model/layers.0.weight"


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(Colour.RED, id="enum"),
        pytest.param(Level.HIGH, id="int-enum"),
        pytest.param(Option.SAFE, id="flag"),
        pytest.param(Option.FAST | Option.SAFE, id="flags"),
        pytest.param(Option(0), id="no-flag"),
        pytest.param(Point(1.0, math.inf), id="named-tuple"),
        pytest.param(Config(1e-3, [1, 2]), id="dataclass"),
        pytest.param({"a": {1, 2}, "b": frozenset({"x"})}, id="sets"),
        pytest.param(Counter("hello"), id="counter"),
        pytest.param(defaultdict(list, {"a": [1]}), id="defaultdict"),
        pytest.param(defaultdict(None, {"a": 1}), id="defaultdict-without-factory"),
        pytest.param(range(3, 30, 4), id="range"),
        pytest.param(bytearray(b"ab"), id="bytearray"),
        pytest.param(pathlib.Path("/data/x"), id="path"),
        pytest.param(decimal.Decimal("1.10"), id="decimal"),
        pytest.param(fractions.Fraction(1, 3), id="fraction"),
        pytest.param(uuid.UUID(int=7), id="uuid"),
        pytest.param(10**30, id="large-int"),
        pytest.param("\ud800", id="lone-surrogate"),
        pytest.param(torch.Size([2, 3]), id="torch-size"),
        pytest.param(torch.bfloat16, id="torch-dtype"),
        pytest.param(torch.device("cuda", 1), id="torch-device"),
        pytest.param(np.float64(0.3), id="numpy-float"),
        pytest.param(np.bool_(True), id="numpy-bool"),
        pytest.param(np.datetime64("2026-01-01"), id="numpy-datetime"),
        pytest.param(np.arange(6, dtype=">i4").reshape(2, 3), id="numpy-array"),
        pytest.param(np.asfortranarray(np.ones((2, 3))), id="numpy-fortran"),
        pytest.param(np.array(["a", "bc"]), id="numpy-text"),
        pytest.param(np.zeros(2, dtype=[("a", "i4"), ("b", "f8", (2,))]), id="numpy-record"),
        pytest.param(np.dtype("float16"), id="numpy-dtype"),
        pytest.param(torch.tensor(3.5), id="number"),
        pytest.param(torch.tensor(float("nan")), id="number-nan"),
        pytest.param(torch.zeros(0, 4), id="no-elements"),
        pytest.param(torch.tensor([[True, False]]), id="bool"),
        pytest.param(torch.randn(3, dtype=torch.complex64), id="complex"),
        pytest.param(torch.randn(4).to(torch.float8_e4m3fn), id="float8"),
        pytest.param(torch.randn(2, 3).to(torch.bfloat16).t(), id="bfloat16-transposed"),
    ],
)
def test_special_value_comes_back(value):
    assert same(value, through_json(value))


def test_random_states_and_configs_come_back_c054():
    state = {
        "rng": np.random.get_state(),
        "best": np.float64(0.3),
        "cfg": argparse.Namespace(lr=1),
        "py": random.getstate(),
        "torch": torch.get_rng_state(),
    }
    back = through_json(state)
    assert same({**state, "cfg": 0}, {**back, "cfg": 0})
    assert back["cfg"] == argparse.Namespace(lr=1)
    np.random.RandomState().set_state(back["rng"])
    random.Random().setstate(back["py"])


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        pytest.param(lambda: np.random.default_rng(3), lambda g: g.random(), id="numpy-generator"),
        pytest.param(
            lambda: np.random.Generator(np.random.Philox(3)), lambda g: g.random(), id="numpy-philox"
        ),
        pytest.param(lambda: np.random.RandomState(3), lambda g: g.rand(), id="numpy-legacy"),
        pytest.param(lambda: random.Random(3), lambda g: g.random(), id="python"),
        pytest.param(
            lambda: torch.Generator().manual_seed(3),
            lambda g: torch.rand(1, generator=g).item(),
            id="torch",
        ),
    ],
)
def test_generator_goes_on_where_it_was(make, draw):
    generator = make()
    draw(generator)
    copy = through_json(generator)
    assert [draw(copy) for _ in range(3)] == [draw(generator) for _ in range(3)]


def test_dataclass_whose_field_is_not_set_yet_comes_back_so():
    found = through_json(Timer("epoch"))
    assert found.name == "epoch"
    assert not hasattr(found, "started")


def test_dataclass_comes_back_without_running_its_code():
    meter = Meter(2.0)
    meter.count = 5
    made = Meter.made
    back = through_json(meter)
    assert (back.total, back.count, Meter.made) == (2.0, 5, made)


def test_large_array_goes_where_the_tensors_go():
    kept = {}
    array = np.arange(2000.0)
    encoded = encode_value("replay", {"rewards": array}, keep=kept.__setitem__)
    assert list(kept) == ["replay/rewards"]
    assert kept["replay/rewards"].data_ptr() == array.ctypes.data
    assert (decode_value(encoded, fetch=kept.__getitem__)["rewards"] == array).all()


def test_tensors_are_handed_out_under_their_names():
    kept = {}
    value = {"a": [torch.ones(2), 1], 3: {"b.c": torch.zeros(1)}, "3": torch.ones(1), "step": torch.tensor(4)}
    encoded = encode_value("entry", value, keep=kept.__setitem__)
    assert list(kept) == ["entry/a/#0", "entry/#3/b.c", "entry/3"]
    back = decode_value(json.loads(json.dumps(encoded)), fetch=kept.__getitem__)
    assert back["a"][0] is kept["entry/a/#0"]
    assert same(back["step"], value["step"])


class Unknown: ...


def local_class():
    @dataclasses.dataclass
    class Local:
        x: int = 1

    return Local()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        pytest.param({"a": [0, {"fn": print}]}, ["`cfg/a/#1/fn`", "builtin_function"], id="function"),
        pytest.param({"u": Unknown()}, ["`cfg/u`", "Unknown", "Accepted are", "`state_dict`"], id="object"),
        pytest.param({"u": local_class()}, ["`cfg/u`", "Local", "dataclasses.asdict"], id="local-class"),
        pytest.param(np.array([object()]), ["`cfg`", "Python objects"], id="object-array"),
        pytest.param(defaultdict(lambda: 1), ["`cfg`", "default_factory"], id="default-factory"),
        pytest.param(torch.ones(2).to_sparse(), ["`cfg`", "sparse"], id="sparse"),
        pytest.param(torch.ones(2, device="meta"), ["`cfg`", "meta", "to_empty"], id="meta"),
        pytest.param({"t": torch.zeros(INLINE_LIMIT)}, ["`cfg/t`", str(INLINE_LIMIT)], id="large-tensor"),
        pytest.param({"b": bytes(INLINE_LIMIT + 1)}, ["`cfg/b`", str(INLINE_LIMIT)], id="large-bytes"),
        pytest.param({"b": io.StringIO()}, ["`cfg/b`", "StringIO"], id="stream"),
    ],
)
def test_value_that_cannot_be_saved_is_named(value, words):
    with pytest.raises(CheckpointError) as caught:
        encode_value("cfg", value)
    for word in words:
        assert word in str(caught.value)


def test_value_that_holds_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(CheckpointError, match="holds itself"):
        encode_value("loop", value)


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param({"t": "no such tag"}, id="unknown-tag"),
        pytest.param({"t": ["list"]}, id="tag-is-a-list"),
        pytest.param({"v": 1}, id="no-tag"),
        pytest.param({"t": "tuple"}, id="no-content"),
        pytest.param({"t": "dict", "v": [[{"t": "dict", "v": []}, 1]]}, id="key-cannot-be-one"),
        pytest.param({"t": "bytes", "v": "???"}, id="no-base64"),
        pytest.param({"t": "enum", "c": ["os", "system"], "v": "ls"}, id="function-as-class"),
        pytest.param({"t": "namedtuple", "c": ["subprocess", "Popen"], "v": ["ls"]}, id="class-with-effects"),
        pytest.param({"t": "dataclass", "c": ["builtins", "dict"], "v": []}, id="no-dataclass"),
        pytest.param({"t": "dataclass", "c": ["not.loaded", "Config"], "v": []}, id="module-not-loaded"),
        pytest.param({"t": "torch.number", "dtype": "load", "v": 1}, id="no-dtype"),
        pytest.param({"t": "torch.inline", "dtype": "int32", "shape": [2], "v": "AAAA"}, id="too-few-bytes"),
        pytest.param({"t": "torch.inline", "dtype": "float32", "shape": [-1], "v": ""}, id="negative-shape"),
        pytest.param({"t": "torch.tensor", "n": "x"}, id="tensor-without-a-reader"),
        pytest.param({"t": "numpy.array", "v": "AAAA"}, id="no-array"),
        pytest.param({"t": "numpy.generator", "v": {"t": "dict", "v": [["bit_generator", "os"]]}}, id="bits"),
    ],
)
def test_hostile_value_is_refused(hostile):
    with pytest.raises(CheckpointError):
        decode_value(hostile)


def test_dunder_attribute_of_a_dataclass_is_refused():
    encoded = encode_value("m", Meter())
    encoded["v"].append(["__class__", 1])
    with pytest.raises(CheckpointError, match="__class__"):
        decode_value(encoded)


def test_view_saves_its_own_bytes_only():
    base = torch.arange(500_000.0)  # 2 MB: more than may lie in a manifest
    assert same(through_json(base[10:14]), torch.tensor([10.0, 11.0, 12.0, 13.0]))
