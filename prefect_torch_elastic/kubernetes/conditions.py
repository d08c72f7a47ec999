"""How objects of a cluster are read: field by field, whatever is missing or has another type (pure).

A watch may hand out an object that a controller has not filled in yet, and the next version of a controller
one that is shaped otherwise. Neither may end the watcher, so every field has a value for "not there".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from prefect_torch_elastic.kubernetes.naming import INDEX_LABEL

Object = Mapping[str, Any]
_NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A condition of an object.

    Attributes:
        is_true: Whether it holds.
        is_false: Whether it is there and does not hold.
        reason: A word for machines, empty if there is none.
        message: A sentence of the controller, empty if there is none.
        since: When it last changed between the two, if that is known.
    """

    is_true: bool = False
    is_false: bool = False
    reason: str = ""
    message: str = ""
    since: datetime | None = None


ABSENT = Condition()


def read_condition(thing: Object | None, type: str) -> Condition:
    """Return the condition of that type, `ABSENT` if the object has none."""
    for item in objects(thing, "status", "conditions"):
        if text(item, "type") == type:
            return Condition(
                is_true=text(item, "status") == "True",
                is_false=text(item, "status") == "False",
                reason=text(item, "reason"),
                message=text(item, "message"),
                since=moment(item, "lastTransitionTime"),
            )
    return ABSENT


def field(thing: Object | None, *path: str) -> Any:
    """Return what is at the path, None if nothing is."""
    value: Any = thing
    for name in path:
        value = cast("Object", value).get(name) if isinstance(value, Mapping) else None
    return value


def mapping(thing: Object | None, *path: str) -> Object:
    """Return the mapping at the path, an empty one if there is none."""
    value = field(thing, *path)
    return cast("Object", value) if isinstance(value, Mapping) else _NOTHING


def objects(thing: Object | None, *path: str) -> list[Object]:
    """Return the mappings in the list at the path."""
    value = field(thing, *path)
    if isinstance(value, str) or not isinstance(value, Sequence):
        return []
    return [cast("Object", item) for item in cast("Sequence[object]", value) if isinstance(item, Mapping)]


def text(thing: Object | None, *path: str) -> str:
    """Return the text at the path, empty if there is none."""
    value = field(thing, *path)
    return value if isinstance(value, str) else ""


def texts(thing: Object | None, *path: str) -> list[str]:
    """Return the texts in the list at the path."""
    value = field(thing, *path)
    return (
        [item for item in cast("list[object]", value) if isinstance(item, str)]
        if isinstance(value, list)
        else []
    )


def number(thing: Object | None, *path: str) -> int:
    """Return the whole number at the path, 0 if there is none."""
    value = field(thing, *path)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def moment(thing: Object | None, *path: str) -> datetime | None:
    """Return the time at the path, None if there is none; one without a zone is UTC."""
    try:
        value = datetime.fromisoformat(text(thing, *path))
    except ValueError:
        return None
    return value if value.tzinfo else value.replace(tzinfo=UTC)


def index_of(pod: Object) -> int | None:
    """Return which node of the gang a pod is, None if it does not say."""
    index = text(pod, "metadata", "labels", INDEX_LABEL) or text(pod, "metadata", "annotations", INDEX_LABEL)
    return int(index) if index.isascii() and index.isdigit() else None
