"""Values of JSON from a store: each has a type, numbers have signs, parts of keys hold no odd characters.

Pure. A check takes the name of a field and its value, and returns the value or raises a ValueError that says
what it is and what it should be.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar, cast

E = TypeVar("E", bound=StrEnum)
Check: TypeAlias = Callable[[str, object], Any]
"""Takes a field's name and its JSON value; returns the value, or raises a ValueError that says why not."""

_WORD = re.compile(r"[0-9A-Za-z-]{1,64}")
_PART_KEY = re.compile(r"calls/[0-9A-Za-z-]{1,64}/[0-9A-Za-z-]{1,64}")


def check_fields(name: str, body: object, checks: Mapping[str, Check]) -> dict[str, Any]:
    """Return the values of a JSON object that has exactly the fields of `checks`.

    Args:
        name: What the object is, for messages: its fields are named `NAME.FIELD`.
        body: What JSON gave.
        checks: By field, in the order in which they are looked at.

    Raises:
        ValueError: If a field is missing, unknown or not accepted; it says which.
    """
    fields = check_mapping(name, body)
    if missing := [field for field in checks if field not in fields]:
        raise ValueError(f"`{name}.{missing[0]}` is missing")
    if unknown := sorted(fields.keys() - checks.keys()):
        raise ValueError(f"`{name}` has the unknown field {short(unknown[0])}")
    return {field: check(f"{name}.{field}", fields[field]) for field, check in checks.items()}


def check_text(name: str, value: object) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise ValueError(f"`{name}` is {short(value)}, not a text")
    return value


def check_word(name: str, value: object) -> str:
    """Return a text that may be part of a key."""
    if not isinstance(value, str) or not _WORD.fullmatch(value):
        raise ValueError(f"`{name}` is {short(value)}, not 1 to 64 letters, digits and dashes")
    return value


def check_whole_number(name: str, value: object) -> int:
    """Return a number that counts something."""
    if type(value) is not int or not 0 <= value < 1 << 63:  # not `isinstance`: true is an int
        raise ValueError(f"`{name}` is {short(value)}, not a whole number from 0")
    return value


def check_number(name: str, value: object) -> float:
    """Return a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"`{name}` is {short(value)}, not a number")
    return float(value)


def check_flag(name: str, value: object) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` is {short(value)}, not true or false")
    return value


def check_mapping(name: str, value: object) -> dict[str, Any]:
    """Return an object of any values."""
    if not isinstance(value, dict):
        raise ValueError(f"`{name}` is {short(value)}, not an object")
    return cast("dict[str, Any]", value)


def check_list(name: str, value: object) -> list[Any]:
    """Return a list of any values."""
    if not isinstance(value, list):
        raise ValueError(f"`{name}` is {short(value)}, not a list")
    return cast("list[Any]", value)


def check_texts(name: str, value: object) -> list[str]:
    """Return a list of texts."""
    items = check_list(name, value)
    return [check_text(f"{name}[{place}]", item) for place, item in enumerate(items)]


def check_text_mapping(name: str, value: object) -> dict[str, str]:
    """Return an object of texts."""
    return {field: check_text(f"{name}.{field}", item) for field, item in check_mapping(name, value).items()}


def check_one_of(kind: type[E]) -> Callable[[str, object], E]:
    """Return a check that takes the words of an enumeration."""

    def check(name: str, value: object) -> E:
        if not isinstance(value, str) or value not in list(kind):
            raise ValueError(f"`{name}` is {short(value)}, not one of {', '.join(kind)}")
        return kind(value)

    return check


def check_optional(check: Check) -> Check:
    """Return a check that also takes null."""
    return lambda name, value: None if value is None else check(name, value)


def short(value: object) -> str:
    """Return a value as messages show it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def check_part_key(name: str, value: object) -> str:
    """Return the key of an object of a call, below the run folder."""
    if not isinstance(value, str) or not _PART_KEY.fullmatch(value):
        raise ValueError(f"`{name}` is {short(value)}, not `calls/CALL/NAME`")
    return value


def refuse_constant(name: str) -> float:
    """Refuse NaN and infinity, which Python's JSON takes; for `json.loads(parse_constant=...)`."""
    raise ValueError(f"`{name}` is not JSON")
