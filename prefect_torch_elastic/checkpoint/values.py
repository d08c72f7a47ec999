"""Plain values as JSON and back, without pickle: what was saved can be read by any later version.

Numbers, strings, lists, None and booleans are themselves. Everything else is an object with its tag under
`t`, so a dictionary is `{"t": "dict", "v": [[key, value], ...]}`. Names are paths: parts joined by `/`.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

from prefect_torch_elastic.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

Json: TypeAlias = Any
Keep: TypeAlias = "Callable[[str, Tensor], None]"
Fetch: TypeAlias = "Callable[[str], Tensor]"

ENTRIES = "__entries__"  # in the values of a checkpoint: key of the state -> kind of its value
TAG = "t"
INLINE_LIMIT = 2**20  # bytes of one entry that may lie in the manifest itself
ACCEPTED = (
    "None, bool, int, float, complex, str, bytes, lists, tuples, dicts, sets, enums, dataclasses and named "
    "tuples of importable classes, paths, dates, numpy scalars, arrays and generators, tensors, and objects "
    "with `state_dict` and `load_state_dict`"
)
_DEEPEST = 100
_SAFE_INT = 2**63  # larger ones are text: other readers of JSON would round them


def join_name(parent: str, key: object) -> str:
    """Return the name of a part; equal only for equal parents and keys, whatever dots they have."""
    if type(key) is str and _is_text(key):
        part = key.replace("%", "%25").replace("/", "%2F")
        part = f"%23{part[1:]}" if part.startswith("#") else part
    else:
        part = "#" + ascii(key).replace("%", "%25").replace("/", "%2F")
    return f"{parent}/{part}" if parent else part


def split_name(name: str) -> list[str]:
    """Return the parts of a name; the inverse of `join_name` for keys that are text."""
    parts = (part.replace("%2F", "/") for part in name.split("/"))
    return [part.replace("%23", "#", 1).replace("%25", "%") for part in parts]


def encode_value(name: str, value: object, *, keep: Keep | None = None) -> Json:
    """Return `value` as JSON.

    Args:
        name: What an error calls it.
        value: Anything of the accepted types.
        keep: Gets each tensor that is not a single number on the CPU, under its own name; without it small
            tensors lie in the JSON too.

    Raises:
        CheckpointError: If a part of it has another type or too many bytes; it names the part.
    """
    return Encoder(name, keep).encode(name, value)


def decode_value(json: Json, *, fetch: Fetch | None = None) -> Any:
    """Return the value that `encode_value` took.

    Args:
        json: What it returned, after any journey.
        fetch: Returns the tensor that was handed to `keep` under this name.

    Raises:
        CheckpointError: If it is damaged, or needs a class that is not there.
    """
    with decoding():
        return Decoder(fetch).decode(json)


@contextmanager
def decoding() -> Generator[None, None, None]:
    """Turn what damaged JSON leads to into one error.

    Raises:
        CheckpointError: If the block meets something that no encoder wrote.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"A value of the checkpoint is damaged: {what}.") from error
    except RecursionError as error:
        raise CheckpointError("A value of the checkpoint is nested too deeply.") from error


def is_tagged(json: Json, tag: str) -> bool:
    """Whether JSON is an object with this tag."""
    return isinstance(json, dict) and cast("dict[str, Any]", json).get(TAG) == tag


class Encoder:
    """Turns one value into JSON.

    Attributes:
        entry: Name of the whole value.
        keep: Where tensors go.
    """

    def __init__(self, entry: str, keep: Keep | None) -> None:
        self.entry = entry
        self.keep = keep
        self._inline_bytes = 0
        self._depth = 0

    def encode(self, name: str, value: Any) -> Json:
        kind = type(cast("object", value))
        if value is None or kind is bool:
            return value
        if encoder := _ENCODERS.get(kind):
            self._depth += 1
            if self._depth > _DEEPEST:
                raise CheckpointError(f"`{name}` cannot be saved: it is nested too deeply, or holds itself.")
            json = encoder(self, name, value)
            self._depth -= 1
            return json
        # Imported late: it builds on this room.
        from prefect_torch_elastic.checkpoint import special_values

        return special_values.encode(self, name, value)

    def encode_bytes(self, name: str, data: bytes) -> str:
        self._inline_bytes += len(data)
        if self._inline_bytes > INLINE_LIMIT:
            self.refuse_bytes(name, self._inline_bytes)
        return base64.b64encode(data).decode()

    def refuse_bytes(self, name: str, size: int) -> NoReturn:
        raise CheckpointError(
            f"`{name}` cannot be saved: with it `{self.entry}` keeps {size} bytes beside its tensors, and "
            f"{INLINE_LIMIT} are allowed. Pass large data as tensors, in an entry that is the same on all "
            "ranks."
        )

    def encode_pairs(self, name: str, pairs: dict[Any, Any]) -> list[Json]:
        encode = self.encode
        return [
            [encode(f"{name} (key)", key), encode(join_name(name, key), item)] for key, item in pairs.items()
        ]

    def encode_items(self, name: str, items: Any) -> list[Json]:
        return [self.encode(join_name(name, index), item) for index, item in enumerate(items)]


class Decoder:
    """Turns JSON into the value; no class is imported and no code of a class runs."""

    def __init__(self, fetch: Fetch | None) -> None:
        self.fetch = fetch

    def decode(self, json: Json) -> Any:
        if json is None or isinstance(json, (bool, int, float, str)):
            return json
        if isinstance(json, list):
            return [self.decode(item) for item in cast("list[Json]", json)]
        tag = json[TAG]
        if decoder := _DECODERS.get(tag):
            return decoder(self, json)
        from prefect_torch_elastic.checkpoint import special_values

        return special_values.decode(self, tag, json)

    def decode_items(self, json: Json) -> list[Any]:
        return [self.decode(item) for item in json["v"]]

    def decode_pairs(self, json: Json) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(item)) for key, item in json["v"]]


def decode_bytes(text: str) -> bytes:
    """Return the bytes of `Encoder.encode_bytes`."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise CheckpointError(f"Bytes of the checkpoint are damaged: {error}.") from error


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def _encode_int(_: Encoder, __: str, value: int) -> Json:
    return value if -_SAFE_INT <= value < _SAFE_INT else {TAG: "int", "v": hex(value)}


def _encode_float(_: Encoder, __: str, value: float) -> Json:
    return value if math.isfinite(value) else {TAG: "float", "v": str(value)}


def _encode_str(encoder: Encoder, name: str, value: str) -> Json:
    if _is_text(value):
        return value
    return {TAG: "str", "v": encoder.encode_bytes(name, value.encode("utf-8", "surrogatepass"))}


def _encode_complex(encoder: Encoder, name: str, value: complex) -> Json:
    return {TAG: "complex", "v": [encoder.encode(name, value.real), encoder.encode(name, value.imag)]}


def _decode_dict(decoder: Decoder, json: Json) -> Any:
    return dict(decoder.decode_pairs(json))


_ENCODERS: dict[type, Callable[[Encoder, str, Any], Json]] = {
    int: _encode_int,
    float: _encode_float,
    complex: _encode_complex,
    str: _encode_str,
    bytes: lambda encoder, name, value: {TAG: "bytes", "v": encoder.encode_bytes(name, value)},
    bytearray: lambda encoder, name, value: {TAG: "bytearray", "v": encoder.encode_bytes(name, bytes(value))},
    list: lambda encoder, name, value: encoder.encode_items(name, value),
    tuple: lambda encoder, name, value: {TAG: "tuple", "v": encoder.encode_items(name, value)},
    set: lambda encoder, name, value: {TAG: "set", "v": encoder.encode_items(name, value)},
    frozenset: lambda encoder, name, value: {TAG: "frozenset", "v": encoder.encode_items(name, value)},
    dict: lambda encoder, name, value: {TAG: "dict", "v": encoder.encode_pairs(name, value)},
}

_DECODERS: dict[str, Callable[[Decoder, Json], Any]] = {
    "int": lambda _, json: int(json["v"], 16),
    "float": lambda _, json: float(json["v"]),
    "complex": lambda decoder, json: complex(*decoder.decode_items(json)),
    "str": lambda _, json: decode_bytes(json["v"]).decode("utf-8", "surrogatepass"),
    "bytes": lambda _, json: decode_bytes(json["v"]),
    "bytearray": lambda _, json: bytearray(decode_bytes(json["v"])),
    "tuple": lambda decoder, json: tuple(decoder.decode_items(json)),
    "set": lambda decoder, json: set(decoder.decode_items(json)),
    "frozenset": lambda decoder, json: frozenset(decoder.decode_items(json)),
    "dict": _decode_dict,
}
