"""What a user may change in the pods of a gang: `pod_template`, laid over ours, and what it may not (pure).

It is Kubernetes' own patch in small: objects are joined, null removes, the items of some lists are found by
name, any other list is replaced. What the gang depends on is compared afterwards, so no way around is left.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.kubernetes.credentials import is_secret
from prefect_torch_elastic.kubernetes.naming import CONTAINER, OWN_LABELS, OWN_VARIABLES
from prefect_torch_elastic.spec_checks import refusal, shown

SHARED_MEMORY_VOLUME = "dshm"
SHARED_MEMORY_PATH = "/dev/shm"

_FIELD = "pod_template"
_JOINED_BY = {"containers": "name", "initContainers": "name"}
# An item is one thing: an `emptyDir` joined with a `hostPath` of the same name would be neither.
_REPLACED_BY = {
    "env": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
}
_APPENDED = frozenset({"tolerations", "envFrom"})


def apply_pod_template(base: dict[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pod template with the user's laid over it; neither argument is changed.

    Args:
        base: Ours, of `manifest.render_jobset`.
        overlay: The user's: `metadata` and `spec` as in a Kubernetes pod template.

    Raises:
        SpecError: If it has the wrong form, or changes what the gang depends on.
    """
    for key in overlay:
        if key not in ("metadata", "spec"):
            raise refusal(f"{_FIELD}.{key}", overlay[key], "`metadata` and `spec` of a pod template only")
    merged = cast("dict[str, Any]", _merge(_FIELD, "", copy.deepcopy(base), copy.deepcopy(dict(overlay))))
    _check_secrets(overlay)
    _check_pod(base, merged)
    _check_trainer(base, merged)
    _drop_unused_shared_memory(base["spec"], merged["spec"])
    return merged


def _merge(path: str, key: str, ours: Any, theirs: Any) -> Any:
    """Return the user's value joined with ours, where there is one; `key` is the name of the field."""
    if isinstance(ours, dict):
        if not isinstance(theirs, dict):
            raise refusal(path, theirs, "an object, as Kubernetes has it")
        return _merge_objects(path, cast("dict[str, Any]", ours), cast("dict[str, Any]", theirs))
    if isinstance(ours, list):
        if not isinstance(theirs, list):
            raise refusal(path, theirs, "a list, as Kubernetes has it")
        return _merge_lists(path, key, cast("list[Any]", ours), cast("list[Any]", theirs))
    return theirs


def _merge_objects(path: str, ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    merged = dict(ours)
    for key, value in theirs.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(f"{path}.{key}", key, ours.get(key), value)
    return merged


def _merge_lists(path: str, key: str, ours: list[Any], theirs: list[Any]) -> list[Any]:
    if key in _APPENDED:
        return [*ours, *(item for item in theirs if item not in ours)]
    if not (by := _JOINED_BY.get(key) or _REPLACED_BY.get(key)):
        return theirs
    merged = {_identify(path, by, item): item for item in ours}
    for item in theirs:
        name = _identify(path, by, item)
        joins = key in _JOINED_BY and name in merged
        merged[name] = _merge_objects(f"{path}[{name}]", merged[name], item) if joins else item
    return list(merged.values())


def _identify(path: str, by: str, item: Any) -> Any:
    name: Any = cast("dict[str, Any]", item).get(by) if isinstance(item, dict) else None
    if not name:
        raise refusal(path, cast("object", item), f"objects that have a `{by}` each")
    return name.rstrip("/") if by == "mountPath" else name


def _check_pod(base: dict[str, Any], merged: dict[str, Any]) -> None:
    for key in sorted(OWN_LABELS):
        kept, found = (one.get("metadata", {}).get("labels", {}).get(key) for one in (base, merged))
        if kept != found:
            raise _fixed(f"metadata.labels[{key!r}]", found, "the worker finds the pods of a run by it")
    ours, theirs = base["spec"], merged.get("spec", {})
    for key, why in (
        ("restartPolicy", "a container that is restarted would meet peers that are gone"),
        ("hostname", "nodes find each other by the host names that JobSet gives"),
        ("subdomain", "nodes find each other by the host names that JobSet gives"),
    ):
        if ours.get(key) != theirs.get(key):
            raise _fixed(f"spec.{key}", theirs.get(key), why)
    least, grace = ours["terminationGracePeriodSeconds"], theirs.get("terminationGracePeriodSeconds")
    if not isinstance(grace, int) or grace < least:
        raise SpecError(
            f"`{_FIELD}.spec.terminationGracePeriodSeconds={shown(grace)}` would kill the pods "
            f"before `grace_seconds` are over. Remove it, pass at least {least}, or fewer `grace_seconds`."
        )


def _check_trainer(base: dict[str, Any], merged: dict[str, Any]) -> None:
    found = {one["name"]: one for one in merged["spec"].get("containers", [])}
    if others := sorted(found.keys() - {CONTAINER}):
        raise SpecError(
            f"`{_FIELD}.spec.containers` has `{others[0]}` beside `{CONTAINER}`: a pod does not end before "
            f"each of its containers has. Put it into `initContainers` with `restartPolicy: Always`, which "
            f"makes it a sidecar, or name it `{CONTAINER}` to change ours."
        )
    path = f"spec.containers[{CONTAINER}]"
    ours, theirs = base["spec"]["containers"][0], found.get(CONTAINER)
    if theirs is None:
        raise _fixed("spec.containers", None, f"`{CONTAINER}` runs the nodes")
    for key, why in (
        ("command", "it runs the node; what your task does is in its function"),
        ("args", "it would follow the command of the node"),
        ("terminationMessagePath", "the worker reads there how a node ended"),
    ):
        if ours.get(key) != theirs.get(key):
            raise _fixed(f"{path}.{key}", theirs.get(key), why)
    kept, variables = (_variables(one) for one in (ours, theirs))
    for name in sorted(kept.keys() | variables.keys()):
        if kept.get(name) != variables.get(name):
            raise _fixed(
                f"{path}.env[{name}]", variables.get(name), "the pods of a gang find each other by it"
            )


def _check_secrets(overlay: Mapping[str, Any]) -> None:
    """Refuse passwords in the template: whoever may look at a JobSet or a pod would read them."""
    spec = cast("dict[str, Any]", overlay.get("spec") or {})
    for kind in ("containers", "initContainers"):
        for container in _list_objects(spec.get(kind)):
            for variable in _list_objects(container.get("env")):
                name, value = str(variable.get("name") or ""), str(variable.get("value") or "")
                if value and not value.startswith("$(") and is_secret(name, value):
                    place = f"spec.{kind}[{container.get('name')}].env[{name}]"
                    raise SpecError(
                        f"`{_FIELD}.{place}` looks like a secret, and manifests are no place for one. Take "
                        f"it from a Secret: `secret_env={{'{name}': 'SECRET/KEY'}}`; for another container "
                        f"than `{CONTAINER}` write `valueFrom.secretKeyRef` here."
                    )


def _list_objects(items: Any) -> list[dict[str, Any]]:
    """Return the objects of a list; what is none is for the API to refuse."""
    found = cast("list[Any]", items) if isinstance(items, list) else []
    return [cast("dict[str, Any]", item) for item in found if isinstance(item, dict)]


def _variables(container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the variables of a container that are not the user's to change."""
    return {one["name"]: one for one in container.get("env", []) if one["name"] in OWN_VARIABLES}


def _fixed(path: str, value: object, why: str) -> SpecError:
    change = "is removed" if value is None else f"is `{shown(value)}`"
    return SpecError(f"`{_FIELD}.{path}` {change}, which cannot be changed: {why}. Remove it.")


def _drop_unused_shared_memory(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Remove our memory for `/dev/shm` when the user mounted something else there."""
    had = [one for one in ours.get("volumes", []) if one["name"] == SHARED_MEMORY_VOLUME]
    containers = [*theirs.get("containers", []), *theirs.get("initContainers", [])]
    mounted = {mount["name"] for one in containers for mount in one.get("volumeMounts", [])}
    if had and SHARED_MEMORY_VOLUME not in mounted:
        theirs["volumes"] = [one for one in theirs["volumes"] if one not in had]
