"""How arguments look to people: short, without secrets, and without ever failing a call."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, cast

from pydantic import BaseModel

from prefect_torch_elastic.spec_values import hide_secrets

MAX_CHARACTERS = 200
_MAX_ITEMS = 8
_MAX_DEPTH = 4
_MAX_BYTES = 32
_MASK = "'********'"
_MAX_NUMBER = 2**53  # a browser shows others wrong
_QUOTED = re.compile(r"(['\"])([^\\]*)\1")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+(?=>)")  # says nothing, and differs each time

# By name too, because a plain text says nothing about itself.
_SECRET_NAME = re.compile(
    r"(?:.*_)?(password|passwd|passphrase|secret|token|credentials?|(api|access|private|secret)_?key)", re.I
)
_URL_WITH_SECRET = re.compile(r"\w[\w+.-]*://\S*[@?]\S*")  # user and password, or a token among the options


def short_reprs(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return each argument as JSON shows it, or as a text of at most 200 characters; it never raises.

    An array or tensor is its kind, shape and type: `Tensor[3, 4] float32`. Secrets of Prefect and pydantic
    stay masked, and so do texts under a name such as `password` or `api_key`, and passwords in URLs.
    """
    return {name: _show(name, value) for name, value in arguments.items()}


def _show(name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool) or (type(value) is int and abs(value) < _MAX_NUMBER):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    text = _cut(_render_named(name, value, _MAX_DEPTH))
    if isinstance(value, str) and (match := _QUOTED.fullmatch(text)):
        return match[2]  # the quotes of JSON are enough
    return text


def _render_named(name: object, value: Any, depth: int) -> str:
    if isinstance(value, str | bytes) and isinstance(name, str) and _SECRET_NAME.fullmatch(name):
        return _MASK
    return _render(value, depth)


def _render(value: Any, depth: int) -> str:
    """Return the text of a value, looking at no more of it than can be shown."""
    try:
        return _render_known(value, depth)
    except Exception:  # noqa: BLE001 (a `__repr__` or a property of the user's object; it is only shown)
        return f"<{type(value).__name__}>"


def _render_known(value: Any, depth: int) -> str:
    if isinstance(value, str):
        return _render_text(value)
    if isinstance(value, bytes | bytearray):
        return repr(value) if len(value) <= _MAX_BYTES else f"{type(value).__name__}[{len(value)}]"
    if shape := _render_shape(value):
        return shape
    if depth == 0:
        return "..."
    if _looks_like(value, dict):
        items = cast("dict[Any, Any]", value).items()
        parts = (f"{_render(k, depth - 1)}: {_render_named(k, v, depth - 1)}" for k, v in items)
        return "{" + _join(parts, len(items)) + "}"
    for kind, (opening, closing) in _BRACKETS.items():
        if _looks_like(value, kind):
            parts = (_render(item, depth - 1) for item in cast("Iterable[Any]", value))
            comma = "," if kind is tuple and len(value) == 1 else ""
            return opening + _join(parts, len(value)) + comma + closing
    if (fields := _list_fields(value)) is not None:
        parts = (f"{name}={_render_named(name, item, depth - 1)}" for name, item in fields)
        return f"{type(value).__name__}({_join(parts, len(fields))})"
    return _ADDRESS.sub("", repr(value))


_BRACKETS: Mapping[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
}


def _looks_like(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind that we show ourselves; a class with a text of its own is not."""
    return isinstance(value, kind) and type(value).__repr__ is kind.__repr__


def _render_text(value: str) -> str:
    text = value[: MAX_CHARACTERS + 1]
    return repr(hide_secrets(text) if _URL_WITH_SECRET.fullmatch(text) else text)


def _render_shape(value: Any) -> str:
    """Return kind, shape and type of an array, tensor or table; empty for anything else."""
    shape = getattr(value, "shape", None)
    if isinstance(value, type) or not isinstance(shape, tuple):
        return ""
    sizes = cast("tuple[Any, ...]", shape)
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    if not sizes and not hasattr(value, "requires_grad"):  # a number of numpy
        return ""
    return f"{type(value).__name__}[{', '.join(str(size) for size in sizes)}] {dtype}".strip()


def _list_fields(value: Any) -> list[tuple[str | None, Any]] | None:
    """Return what a dataclass or a model of pydantic would show of itself; None for anything else."""
    if isinstance(value, BaseModel):
        return list(value.__repr_args__()) if type(value).__repr__ is BaseModel.__repr__ else None
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return None
    if not hasattr(type(value).__repr__, "__wrapped__"):  # written by hand: `dataclass` guards its own
        return None
    return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.repr]


def _join(parts: Iterable[str], number: int) -> str:
    shown = list(islice(parts, _MAX_ITEMS))
    if number > len(shown):
        shown.append(f"... {number} in all")
    return ", ".join(shown)


def _cut(text: str) -> str:
    """Return the text on one line, in characters that every database takes, and not too long."""
    line = re.sub(r"\s*[\r\n]\s*", " ", text[: 4 * MAX_CHARACTERS])
    line = "".join(c if c.isprintable() else " " for c in line)
    return line if len(line) <= MAX_CHARACTERS else line[: MAX_CHARACTERS - 3] + "..."
