"""A small language for the shape of objects, and what strict reading finds in one that has another shape.

`fields("name! replicas# suspend? args* labels% limits= port| extra~", template=POD)`: a plain word is a
string, `#` an integer, `?` a boolean, `*` a list of strings, `%` a map of strings, `=` a map of quantities,
`|` an integer or a string, `~` anything; `!` at the end says required. Keywords are nested shapes, in a list
`[SHAPE]` for lists of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_SIGILS = {
    "#": "integer",
    "?": "boolean",
    "*": "strings",
    "%": "map of strings",
    "=": "map of quantities",
    "|": "integer or string",
    "~": "anything",
}
_QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(([KMGTPE]i)|[numkMGTPE]|([eE][+-]?\d+))?")


@dataclass(frozen=True)
class Fields:
    """The shape of an object: its fields, each with a type's name, a shape, or a list of one shape."""

    types: dict[str, str | Fields | list[Fields]]
    required: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One place where an object is not what its kind says."""

    path: str
    kind: str
    """`unknown`, `required`, `type` or `quantity`."""
    expected: str = ""
    value: Any = None

    def __str__(self) -> str:
        match self.kind:
            case "unknown":
                return f'unknown field "{self.path}"'
            case "required":
                return f"{self.path}: Required value"
            case "quantity":
                return f'{self.path}: Invalid value: "{self.value}": quantities must match the pattern'
            case _:
                found = name_type(self.value)
                return (
                    f'{self.path}: Invalid value: "{found}": {self.path} in body must be of type '
                    f'{self.expected}: "{found}"'
                )


def fields(words: str, **nested: Fields | list[Fields]) -> Fields:
    """Return the shape that `words` and `nested` describe (the language is in this file's first lines)."""
    types: dict[str, str | Fields | list[Fields]] = {}
    required: list[str] = []
    for word in words.split():
        name = word.rstrip("!")
        sigil = name[-1] if name[-1] in _SIGILS else ""
        name = name.removesuffix(sigil)
        types[name] = _SIGILS.get(sigil, "string")
        if word.endswith("!"):
            required.append(name)
    types.update(nested)
    return Fields(types, tuple(required))


def name_type(value: Any) -> str:
    """Return the name of a JSON type, as the messages of a real server have it."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def find_shape_problems(
    value: Any, shape: Fields, path: str = "", *, prune: bool = False
) -> Iterator[Problem]:
    """Yield what is wrong with an object; with `prune`, unknown fields are also taken out of it."""
    if not isinstance(value, dict):
        yield Problem(path=path, kind="type", expected="object", value=value)
        return
    for name in list(value):
        here = f"{path}.{name}" if path else name
        expected = shape.types.get(name)
        if expected is None:
            if prune:
                del value[name]
            yield Problem(path=here, kind="unknown")
        elif value[name] is None:
            continue  # as if it were not there
        elif isinstance(expected, Fields):
            yield from find_shape_problems(value[name], expected, here, prune=prune)
        elif isinstance(expected, list):
            yield from _find_in_list(value[name], expected[0], here, prune=prune)
        else:
            yield from _find_in_leaf(value[name], expected, here)
    for name in shape.required:
        if value.get(name) is None:
            yield Problem(path=f"{path}.{name}" if path else name, kind="required")


def _find_in_list(value: Any, shape: Fields, path: str, *, prune: bool) -> Iterator[Problem]:
    if not isinstance(value, list):
        yield Problem(path=path, kind="type", expected="array", value=value)
        return
    for index, item in enumerate(value):
        yield from find_shape_problems(item, shape, f"{path}[{index}]", prune=prune)


def _find_in_leaf(value: Any, expected: str, path: str) -> Iterator[Problem]:
    match expected:
        case "anything":
            return
        case "strings":
            if not isinstance(value, list):
                yield Problem(path=path, kind="type", expected="array", value=value)
                return
            for index, item in enumerate(value):
                yield from _find_in_leaf(item, "string", f"{path}[{index}]")
        case "map of strings" | "map of quantities":
            if not isinstance(value, dict):
                yield Problem(path=path, kind="type", expected="object", value=value)
                return
            inner = "string" if expected == "map of strings" else "quantity"
            for name, item in value.items():
                yield from _find_in_leaf(item, inner, f"{path}.{name}")
        case "integer or string":
            if name_type(value) not in ("integer", "string"):
                yield Problem(path=path, kind="type", expected="integer or string", value=value)
        case "quantity":
            if name_type(value) not in ("integer", "number", "string"):
                yield Problem(path=path, kind="type", expected="string", value=value)
            elif not _QUANTITY.fullmatch(str(value)):
                yield Problem(path=path, kind="quantity", value=value)
        case _:
            if name_type(value) != expected:
                yield Problem(path=path, kind="type", expected=expected, value=value)


def spell(value: Any) -> str:
    """Return a value as Go's messages quote it."""
    return json.dumps(value, separators=(",", ":"))
