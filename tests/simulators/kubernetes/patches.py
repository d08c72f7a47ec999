"""What a patch makes of an object: merge, JSON, strategic merge, and server-side apply as a merge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import yaml

from tests.simulators.kubernetes.objects import Resource, copy_object
from tests.simulators.kubernetes.refusals import BadRequestError, InvalidError, UnsupportedMediaTypeError

Obj = dict[str, Any]

MERGE = "application/merge-patch+json"
JSON = "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"

# The key by which a strategic merge knows two items for the same, by the name of the list.
_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "conditions": "type",
    "ownerReferences": "uid",
    "imagePullSecrets": "name",
    "topologySpreadConstraints": "topologyKey",
}
_LISTS_OF_WORDS = ("finalizers",)


def apply_patch(obj: Obj, body: bytes, *, media_type: str, resource: Resource) -> Obj:
    """Return the patched copy of an object.

    Raises:
        UnsupportedMediaTypeError: For strategic merge patches of custom resources, and unknown types.
    """
    media_type = media_type.partition(";")[0].strip()
    if media_type == STRATEGIC and resource.is_custom:
        media_type = ""
    try:
        patch: Any = yaml.safe_load(body) if media_type == APPLY else json.loads(body)
    except ValueError as error:
        raise BadRequestError(f"error decoding patch: {error}") from error
    match media_type:
        case "application/merge-patch+json" | "application/apply-patch+yaml":
            if not isinstance(patch, dict):
                raise BadRequestError("error decoding patch: json: cannot unmarshal array into Go value")
            return merge(obj, patch)
        case "application/strategic-merge-patch+json":
            return merge(obj, patch, strategic=True)
        case "application/json-patch+json":
            changed = copy_object(obj)
            for operation in patch:
                _apply_operation(changed, operation)
            return changed
        case _:
            raise UnsupportedMediaTypeError(
                "the body of the request was in an unknown format - accepted media types include: "
                f"{JSON}, {MERGE}, {APPLY}" + ("" if resource.is_custom else f", {STRATEGIC}")
            )


def merge(obj: Any, patch: Any, *, strategic: bool = False) -> Any:
    """Return `obj` with a merge patch applied (RFC 7386): None removes, objects merge, all else replaces."""
    if not isinstance(patch, dict):
        return patch
    merged: Obj = dict(obj) if isinstance(obj, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif strategic and isinstance(value, list) and name in _MERGE_KEYS:
            merged[name] = _merge_lists(merged.get(name) or [], value, key=_MERGE_KEYS[name])
        elif strategic and isinstance(value, list) and name in _LISTS_OF_WORDS:
            merged[name] = list(dict.fromkeys([*(merged.get(name) or []), *value]))
        elif strategic and name.startswith("$deleteFromPrimitiveList/"):
            target = name.partition("/")[2]
            merged[target] = [word for word in merged.get(target) or [] if word not in value]
        elif not name.startswith("$"):
            merged[name] = merge(merged.get(name), value, strategic=strategic)
    return merged


def _merge_lists(old: Sequence[Obj], patch: Sequence[Obj], *, key: str) -> list[Obj]:
    merged = {item.get(key): item for item in old}
    for item in patch:
        if item.get("$patch") == "delete":
            merged.pop(item.get(key), None)
        else:
            merged[item.get(key)] = merge(merged.get(item.get(key)), item, strategic=True)
    return list(merged.values())


def _apply_operation(obj: Obj, operation: Obj) -> None:
    names = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    try:
        parent: Any = obj
        for name in names[:-1]:
            parent = parent[int(name)] if isinstance(parent, list) else parent[name]
        last = names[-1]
        match operation["op"], parent:
            case "test", list():
                holds = parent[int(last)] == operation["value"]
            case "test", _:
                holds = parent[last] == operation["value"]
            case "add", list():
                holds = True
                parent.insert(len(parent) if last == "-" else int(last), operation["value"])
            case "remove", list():
                holds = True
                del parent[int(last)]
            case "remove", _:
                holds = True
                del parent[last]
            case _, list():
                holds = True
                parent[int(last)] = operation["value"]
            case _:
                holds = True
                parent[last] = operation["value"]
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise InvalidError(
            f"the server rejected our request due to an error in our request: {error}"
        ) from error
    if not holds:
        raise InvalidError("the server rejected our request due to an error in our request: test failed")
