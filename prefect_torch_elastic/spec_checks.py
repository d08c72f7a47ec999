"""The plain kinds of value that a field may have: numbers, flags, words, names, mappings, lists.

Pure. Each check takes a field name and a value and returns the value in its normal form, or raises a
`SpecError` that says the field, the value and what is accepted.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Mapping
from typing import cast

from prefect_torch_elastic.errors import SpecError

Check = Callable[[str, object], object]

_LONGEST_SHOWN = 80  # a message is one line in Prefect's UI; a whole pod template is not


def refusal(field: str, value: object, accepted: str, *, why: str = "") -> SpecError:
    """Return the error for a value that is not accepted: the field, the value, the reason, the cure."""
    reason = f": {why}" if why else ""
    return SpecError(f"`{field}={shown(value)}` is not accepted{reason}. Pass {accepted}.")


def shown(value: object) -> str:
    """Return `repr(value)`, cut so that it fits into one line of a message."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


def parse_whole(value: object) -> int | None:
    """Return a whole number as `int`, None for anything else; True and False are not numbers here."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    return int(value)


def parse_number(value: object) -> float | None:
    """Return a finite number, whole numbers as `int`, None for anything else."""
    if (whole := parse_whole(value)) is not None:
        return whole
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        return None
    return float(value)


def whole_number(*, minimum: int, example: int) -> Check:
    """Return the check for a whole number."""

    def check(name: str, value: object) -> object:
        number = parse_whole(value)
        if number is None or number < minimum:
            raise refusal(name, value, f"a whole number >= {minimum}, such as `{name}={example}`")
        return number

    return check


def positive_number(*, example: float, or_zero: bool = False) -> Check:
    """Return the check for a finite number above zero, or also zero."""
    limit = ">= 0" if or_zero else "> 0"

    def check(name: str, value: object) -> object:
        number = parse_number(value)
        if number is None or number < 0 or (number == 0 and not or_zero):
            raise refusal(name, value, f"a number {limit}, such as `{name}={example}`")
        return number

    return check


def flag(name: str, value: object) -> object:
    """Check for True or False; 1 and "yes" are neither."""
    if not isinstance(value, bool):
        raise refusal(name, value, "True or False")
    return value


def word(*words: str) -> Check:
    """Return the check for one of a closed set of words, whatever their case."""
    normal = {known.lower(): known for known in words}

    def check(name: str, value: object) -> object:
        found = normal.get(value.strip().lower()) if isinstance(value, str) else None
        if found is None:
            raise refusal(name, value, "one of " + ", ".join(f'"{known}"' for known in words))
        return found

    return check


def text(accepted: str, pattern: re.Pattern[str]) -> Check:
    """Return the check for text that a pattern matches as a whole, spaces around it removed."""

    def check(name: str, value: object) -> object:
        if not isinstance(value, str) or not pattern.fullmatch(value.strip()):
            raise refusal(name, value, accepted)
        return value.strip()

    return check


def optional(check: Check) -> Check:
    """Return the check that also lets None pass, which means that the field is not set."""

    def check_or_none(name: str, value: object) -> object:
        return None if value is None else check(name, value)

    return check_or_none


def mapping_of(check_key: Check, check_value: Check) -> Check:
    """Return the check for a mapping; an error names the key, as in `labels['team']`."""

    def check(name: str, value: object) -> object:
        if not isinstance(value, Mapping):
            raise refusal(name, value, "a dictionary")
        items = cast("Mapping[object, object]", value).items()
        return {check_key(f"{name} key", key): check_value(f"{name}[{key!r}]", item) for key, item in items}

    return check


def list_of(check_item: Check) -> Check:
    """Return the check for a list or tuple; an error names the place, as in `preload[0]`."""

    def check(name: str, value: object) -> object:
        if not isinstance(value, (list, tuple)):
            raise refusal(name, value, "a list")
        items = cast("list[object] | tuple[object, ...]", value)
        return [check_item(f"{name}[{place}]", item) for place, item in enumerate(items)]

    return check


def variable_value(name: str, value: object) -> object:
    """Check for the value of an environment variable; the message does not repeat it, it may be a secret."""
    if not isinstance(value, str):
        raise SpecError(f'`{name}` is of type `{type(value).__name__}`. Pass text, such as `"1"`.')
    return value


def plain_scalar(name: str, value: object) -> object:
    """Check for text, a number or a flag."""
    if isinstance(value, (str, bool)):
        return value
    if (number := parse_number(value)) is None:
        raise refusal(name, value, "text, a number, True or False")
    return number


def plain_data(name: str, value: object) -> object:
    """Check for data that JSON can carry, at any depth; an error names the path to the bad part."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return plain_mapping(name, cast("object", value))
    if isinstance(value, (list, tuple)):
        return _plain_list(name, cast("object", value))
    return plain_scalar(name, value)


def any_text(name: str, value: object) -> object:
    """Check for text of any form, the empty one too."""
    if not isinstance(value, str):
        raise refusal(name, value, "text")
    return value


_plain_mapping = mapping_of(any_text, plain_data)
_plain_list = list_of(plain_data)


def plain_mapping(name: str, value: object) -> object:
    """Check for an object as Kubernetes has it: text keys, values that JSON can carry."""
    return _plain_mapping(name, value)
