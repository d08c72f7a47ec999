"""What a label selector or a field selector in a query matches."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.simulators.kubernetes.refusals import BadRequestError

Obj = dict[str, Any]
Matcher = Callable[[Obj], bool]

_SET = re.compile(r"(?P<key>[^\s!=,()]+)\s+(?P<operator>in|notin)\s+\((?P<values>[^)]*)\)")
_EQUALITY = re.compile(r"(?P<key>[^\s!=,()]+)\s*(?P<operator>==|=|!=)\s*(?P<value>[^\s,()]*)")
_EXISTENCE = re.compile(r"(?P<absent>!?)\s*(?P<key>[^\s!=,()]+)")


def parse_label_selector(text: str) -> list[tuple[str, str, frozenset[str]]]:
    """Return the requirements of a selector: key, operator (`in`, `notin`, `exists`, `absent`) and values."""
    requirements: list[tuple[str, str, frozenset[str]]] = []
    for part in re.split(r",(?![^(]*\))", text):
        words = part.strip()
        if not words:
            continue
        if found := _SET.fullmatch(words):
            values = frozenset(value.strip() for value in found["values"].split(","))
            requirements.append((found["key"], found["operator"], values))
        elif found := _EQUALITY.fullmatch(words):
            operator = "notin" if found["operator"] == "!=" else "in"
            requirements.append((found["key"], operator, frozenset([found["value"]])))
        elif found := _EXISTENCE.fullmatch(words):
            requirements.append((found["key"], "absent" if found["absent"] else "exists", frozenset()))
        else:
            raise BadRequestError(f"unable to parse requirement: found '{words}', expected: an operator")
    return requirements


def match_labels(labels: dict[str, str], requirements: list[tuple[str, str, frozenset[str]]]) -> bool:
    """Return whether labels meet all requirements (a missing label meets `notin` and `absent`)."""
    for key, operator, values in requirements:
        value = labels.get(key)
        match operator:
            case "in":
                holds = value in values
            case "notin":
                holds = value not in values
            case "exists":
                holds = value is not None
            case _:
                holds = value is None
        if not holds:
            return False
    return True


def select_exact_labels(requirements: list[tuple[str, str, frozenset[str]]]) -> dict[str, str]:
    """Return the requirements that an index can answer: one value of one label."""
    return {key: next(iter(values)) for key, operator, values in requirements if _is_exact(operator, values)}


def _is_exact(operator: str, values: frozenset[str]) -> bool:
    return operator == "in" and len(values) == 1


_FIELDS: dict[str, tuple[str, ...]] = {
    "metadata.name": ("metadata", "name"),
    "metadata.namespace": ("metadata", "namespace"),
    "status.phase": ("status", "phase"),
    "spec.nodeName": ("spec", "nodeName"),
    "spec.restartPolicy": ("spec", "restartPolicy"),
    "involvedObject.name": ("involvedObject", "name"),
    "involvedObject.kind": ("involvedObject", "kind"),
    "involvedObject.uid": ("involvedObject", "uid"),
    "reason": ("reason",),
    "type": ("type",),
}
_FIELDS_OF_EVERY_KIND = ("metadata.name", "metadata.namespace")


def make_matcher(labels: str, fields: str, *, is_custom: bool) -> Matcher | None:
    """Return the test of both selectors, or None when everything matches."""
    requirements = parse_label_selector(labels)
    wanted: list[tuple[tuple[str, ...], bool, str]] = []
    for part in filter(None, (part.strip() for part in fields.split(","))):
        found = _EQUALITY.fullmatch(part)
        known = _FIELDS_OF_EVERY_KIND if is_custom else _FIELDS
        if not found or found["key"] not in known:
            raise BadRequestError(f"field label not supported: {found['key'] if found else part}")
        wanted.append((_FIELDS[found["key"]], found["operator"] != "!=", found["value"]))
    if not requirements and not wanted:
        return None

    def matches(obj: Obj) -> bool:
        if not match_labels(obj["metadata"].get("labels") or {}, requirements):
            return False
        return all((_read(obj, path) == value) is equal for path, equal, value in wanted)

    return matches


def _read(obj: Any, path: tuple[str, ...]) -> str:
    for name in path:
        obj = (obj or {}).get(name)
    return obj or ""
