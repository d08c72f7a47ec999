"""Values beyond the plain ones, as JSON: classes by name, and what the standard library has.

A class is looked up among the modules that are loaded and never imported, and instances are made without
running its code: a checkpoint from elsewhere can choose values, not actions.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import random
import sys
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, TypeAlias, cast

from prefect_torch_elastic.checkpoint.values import ACCEPTED, TAG, Decoder, Encoder, Json, decode_bytes
from prefect_torch_elastic.errors import CheckpointError

_Encode: TypeAlias = "Callable[[Encoder, str, Any], Json]"
_Decode: TypeAlias = "Callable[[Decoder, Json], Any]"

_FRAMEWORKS = {  # loaded where their values are: the rest works without them
    "torch": "prefect_torch_elastic.checkpoint.torch_values",
    "numpy": "prefect_torch_elastic.checkpoint.numpy_values",
}
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (bool, int, float, str, bytes, list, dict, set, tuple)
}


def encode(encoder: Encoder, name: str, value: Any) -> Json:
    """Return the JSON of a value that is not plain.

    Raises:
        CheckpointError: If nothing here knows its type; it says which types are known.
    """
    kind = type(cast("object", value))
    if known := _ENCODERS.get(kind):
        return known(encoder, name, value)
    if issubclass(kind, enum.Flag):  # several at once have no name
        return {TAG: "flag", "c": _name_class(name, kind), "v": value.value}
    if issubclass(kind, enum.Enum):
        return {TAG: "enum", "c": _name_class(name, kind), "v": value.name}
    if isinstance(value, pathlib.Path):
        return {TAG: "path", "v": encoder.encode(name, str(value))}
    for module, room in _FRAMEWORKS.items():
        if module in sys.modules and (json := import_module(room).encode(encoder, name, value)) is not None:
            return json
    if tuple in kind.__mro__ and hasattr(kind, "_fields"):
        return {TAG: "namedtuple", "c": _name_class(name, kind), "v": encoder.encode_items(name, value)}
    if is_dataclass(kind):
        state = {
            field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)
        }
        state |= getattr(value, "__dict__", {})
        unset = [field.name for field in fields(value) if field.name not in state]
        pairs = encoder.encode_pairs(name, state)
        return {TAG: "dataclass", "c": _name_class(name, kind), "v": pairs, "unset": unset}
    raise CheckpointError(
        f"`{name}` cannot be saved: it is a `{kind.__module__}.{kind.__qualname__}`. "
        f"Accepted are {ACCEPTED}. Save its parts, or give its class these two methods."
    )


def decode(decoder: Decoder, tag: str, json: Json) -> Any:
    """Return the value of JSON that is not plain.

    Raises:
        CheckpointError: If the tag is unknown.
    """
    framework, _, _ = str(tag).partition(".")
    decoders = import_module(_FRAMEWORKS[framework]).DECODERS if framework in _FRAMEWORKS else _DECODERS
    known = decoders.get(tag)
    if known is None:
        raise CheckpointError(
            f"The checkpoint has a value of the kind `{tag}`, which this version of prefect-torch-elastic "
            "does not know. Load it with the version that wrote it, or a newer one."
        )
    return known(decoder, json)


# ---------------------------------------------------------------- classes by name


def _name_class(name: str, kind: type) -> list[str]:
    if _find_class(kind.__module__, kind.__qualname__) is not kind:
        raise CheckpointError(
            f"`{name}` cannot be saved: its class `{kind.__qualname__}` cannot be found under that name in "
            f"`{kind.__module__}`. Define it at the top of a module, or save `dataclasses.asdict(value)`, "
            "`value._asdict()` or the enum's value."
        )
    return [kind.__module__, kind.__qualname__]


def _find_class(module: str, qualified_name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in qualified_name.split("."):
        found = getattr(found, part, None)
    return found


def _load_class(json: Json, base: type) -> Any:
    module, qualified_name = json["c"]
    found = _find_class(module, qualified_name)
    if not isinstance(found, type):
        raise CheckpointError(
            f"The checkpoint has a value of the class `{module}.{qualified_name}`, which is not there now. "
            f"Import `{module}` before loading."
        )
    if not issubclass(found, base):
        raise CheckpointError(
            f"`{module}.{qualified_name}` is not the kind of class that the checkpoint expects."
        )
    return found


def _decode_enum(_: Decoder, json: Json) -> Any:
    return _load_class(json, enum.Enum).__members__[json["v"]]


def _decode_flag(_: Decoder, json: Json) -> Any:
    return _load_class(json, enum.Flag)(json["v"])


def _decode_named_tuple(decoder: Decoder, json: Json) -> Any:
    kind = _load_class(json, tuple)
    items = decoder.decode_items(json)
    if len(getattr(kind, "_fields", ())) != len(items):
        raise CheckpointError(
            f"`{kind.__qualname__}` has other fields than the {len(items)} in the checkpoint."
        )
    return cast("Any", tuple).__new__(kind, items)


def _decode_dataclass(decoder: Decoder, json: Json) -> Any:
    kind = _load_class(json, object)
    state = dict(decoder.decode_pairs(json))
    names = {field.name for field in fields(kind)} - set(json.get("unset", []))
    if unknown := [name for name in names if name not in state] + [
        name for name in state if name[:2] == "__"
    ]:
        raise CheckpointError(
            f"`{kind.__qualname__}` does not fit the checkpoint: `{unknown[0]}` is not there. Give the field "
            "back its name, or load the other entries only."
        )
    value = object.__new__(kind)
    for name, item in state.items():
        object.__setattr__(value, name, item)
    return value


# ---------------------------------------------------------------- the standard library


def _encode_namespace(encoder: Encoder, name: str, value: Any) -> Json:
    return {TAG: "namespace", "v": encoder.encode_pairs(name, value.__dict__)}


def _encode_default_dict(encoder: Encoder, name: str, value: defaultdict[Any, Any]) -> Json:
    factory = value.default_factory
    factory_name = "" if factory is None else getattr(factory, "__name__", "")
    if factory is not None and _FACTORIES.get(factory_name) is not factory:
        raise CheckpointError(
            f"`{name}` cannot be saved: its `default_factory` is {factory!r}. Use one of "
            f"{', '.join(_FACTORIES)}, or save `dict(value)`."
        )
    return {TAG: "defaultdict", "f": factory_name, "v": encoder.encode_pairs(name, value)}


def _decode_default_dict(decoder: Decoder, json: Json) -> Any:
    factory = _FACTORIES[json["f"]] if json["f"] else None
    return defaultdict(factory, decoder.decode_pairs(json))


def _encode_time(name: str, value: Any) -> Json:
    zone = value.tzinfo
    if zone is not None and not isinstance(zone, (datetime.timezone, zoneinfo.ZoneInfo)):
        raise CheckpointError(
            f"`{name}` cannot be saved: its time zone is a `{type(zone).__name__}`. Use `zoneinfo.ZoneInfo`."
        )
    key = zone.key if isinstance(zone, zoneinfo.ZoneInfo) else None
    text = (value.replace(tzinfo=None) if key else value).isoformat()
    return {TAG: type(value).__name__, "v": text, "zone": key, "fold": value.fold}


def _decode_time(kind: Any, json: Json) -> Any:
    value = kind.fromisoformat(json["v"]).replace(fold=json["fold"])
    return value.replace(tzinfo=zoneinfo.ZoneInfo(json["zone"])) if json["zone"] else value


def _encode_random(encoder: Encoder, name: str, value: random.Random) -> Json:
    return {TAG: "random", "v": encoder.encode(name, value.getstate())}


def _decode_random(decoder: Decoder, json: Json) -> random.Random:
    generator = random.Random()
    generator.setstate(decoder.decode(json["v"]))
    return generator


def _encode_pairs_as(tag: str) -> _Encode:
    def encode_them(encoder: Encoder, name: str, value: Any) -> Json:
        return {TAG: tag, "v": encoder.encode_pairs(name, value)}

    return encode_them


_ENCODERS: dict[type, _Encode] = {
    argparse.Namespace: _encode_namespace,
    OrderedDict: _encode_pairs_as("ordereddict"),
    Counter: _encode_pairs_as("counter"),
    defaultdict: _encode_default_dict,
    deque: lambda encoder, name, value: {
        TAG: "deque",
        "most": value.maxlen,
        "v": encoder.encode_items(name, value),
    },
    range: lambda _, __, value: {TAG: "range", "v": [value.start, value.stop, value.step]},
    io.BytesIO: lambda encoder, name, value: {
        TAG: "bytesio",
        "v": encoder.encode_bytes(name, value.getvalue()),
    },
    datetime.datetime: lambda _, name, value: _encode_time(name, value),
    datetime.time: lambda _, name, value: _encode_time(name, value),
    datetime.date: lambda _, __, value: {TAG: "date", "v": value.isoformat()},
    datetime.timedelta: lambda _, __, value: {
        TAG: "timedelta",
        "v": [value.days, value.seconds, value.microseconds],
    },
    decimal.Decimal: lambda _, __, value: {TAG: "decimal", "v": str(value)},
    fractions.Fraction: lambda _, __, value: {TAG: "fraction", "v": str(value)},
    uuid.UUID: lambda _, __, value: {TAG: "uuid", "v": str(value)},
    random.Random: _encode_random,
}

_DECODERS: dict[str, _Decode] = {
    "enum": _decode_enum,
    "flag": _decode_flag,
    "namedtuple": _decode_named_tuple,
    "dataclass": _decode_dataclass,
    "path": lambda decoder, json: pathlib.Path(decoder.decode(json["v"])),
    "namespace": lambda decoder, json: argparse.Namespace(**dict(decoder.decode_pairs(json))),
    "ordereddict": lambda decoder, json: OrderedDict(decoder.decode_pairs(json)),
    "counter": lambda decoder, json: Counter(dict(decoder.decode_pairs(json))),
    "defaultdict": _decode_default_dict,
    "deque": lambda decoder, json: deque(decoder.decode_items(json), json["most"]),
    "range": lambda _, json: range(*json["v"]),
    "bytesio": lambda _, json: io.BytesIO(decode_bytes(json["v"])),
    "datetime": lambda _, json: _decode_time(datetime.datetime, json),
    "time": lambda _, json: _decode_time(datetime.time, json),
    "date": lambda _, json: datetime.date.fromisoformat(json["v"]),
    "timedelta": lambda _, json: datetime.timedelta(*json["v"]),
    "decimal": lambda _, json: decimal.Decimal(json["v"]),
    "fraction": lambda _, json: fractions.Fraction(json["v"]),
    "uuid": lambda _, json: uuid.UUID(json["v"]),
    "random": _decode_random,
}
