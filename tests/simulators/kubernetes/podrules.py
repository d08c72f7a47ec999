"""What the API server says of a new Job or Pod: rules of pod templates that a JobSet is not held to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.simulators.kubernetes.causes import Cause, refuse_invalid
from tests.simulators.kubernetes.objects import Resource
from tests.simulators.kubernetes.refusals import ForbiddenError
from tests.simulators.kubernetes.storage import Storage

Obj = dict[str, Any]

_ENV_NAME = re.compile(r"[ -<>-~]+")
_EVERY_FIELD = re.compile(
    r"metadata\.(name|namespace|uid)|metadata\.(labels|annotations)\['[^']+'\]|spec\.(nodeName|serviceAccountName)"
    r"|status\.(hostIPs?|podIPs?)"
)
_UNITS = {
    "m": 1e-3,
    "": 1.0,
    **{unit: 1000.0 ** (power + 1) for power, unit in enumerate("kMGTPE")},
    **{f"{unit}i": 1024.0 ** (power + 1) for power, unit in enumerate("KMGTPE")},
}
_QUANTITY = re.compile(r"(?P<number>[+-]?[\d.]+([eE][+-]?\d+)?)(?P<unit>m|[kMGTPE]|[KMGTPE]i)?")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def parse_quantity(value: str | float) -> float:
    """Return a quantity as a number: cores, bytes, devices."""
    found = _QUANTITY.fullmatch(str(value))
    if found is None:
        raise ValueError(f"`{value}` is no quantity")
    return float(found["number"]) * _UNITS[found["unit"] or ""]


def set_defaults(resource: Resource, obj: Obj) -> None:
    """Fill in, in place, the defaults that clients and controllers rely on."""
    spec = obj.setdefault("spec", {})
    if resource.plural == "jobs":
        spec.setdefault("completionMode", "NonIndexed")
        spec.setdefault("suspend", False)
        spec.setdefault("backoffLimit", 6)
        spec.setdefault("parallelism", 1)
        if spec["completionMode"] == "NonIndexed":
            spec.setdefault("completions", 1)
        spec.setdefault(
            "podReplacementPolicy", "Failed" if "podFailurePolicy" in spec else "TerminatingOrFailed"
        )
    pod = spec["template"].setdefault("spec", {}) if resource.plural == "jobs" else spec
    pod.setdefault("restartPolicy", "Always")
    pod.setdefault("dnsPolicy", "ClusterFirst")
    pod.setdefault("terminationGracePeriodSeconds", 30)
    pod.setdefault("schedulerName", "default-scheduler")
    for container in pod.get("containers") or []:
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")


def check_new(storage: Storage, resource: Resource, obj: Obj) -> None:
    """Refuse a new Job or Pod that breaks a rule.

    Raises:
        InvalidError: With 422.
        ForbiddenError: With 403: a pod with a service account or priority class that is not there.
    """
    is_job = resource.plural == "jobs"
    where = "spec.template.spec" if is_job else "spec"
    pod = obj["spec"]["template"]["spec"] if is_job else obj["spec"]
    causes = [*(_find_in_job(obj["spec"]) if is_job else ()), *_find_in_pod(pod, where)]
    if causes:
        raise refuse_invalid(resource, obj["metadata"]["name"], causes)
    if not is_job:
        _check_references(storage, obj)


def _check_references(storage: Storage, obj: Obj) -> None:
    name, namespace = obj["metadata"]["name"], obj["metadata"]["namespace"]
    priority = obj["spec"].get("priorityClassName")
    if priority and not storage.get("priorityclasses", "", priority):
        raise ForbiddenError(f'pods "{name}" is forbidden: no PriorityClass with name {priority} was found')
    account = obj["spec"].get("serviceAccountName")
    if account not in (None, "", "default") and not storage.get("serviceaccounts", namespace, account):
        raise ForbiddenError(
            f'pods "{name}" is forbidden: error looking up service account {namespace}/{account}: '
            f'serviceaccount "{account}" not found'
        )


def _find_in_job(spec: Obj) -> Iterator[Cause]:
    pod = spec["template"]["spec"]
    if spec["completionMode"] == "Indexed" and spec.get("completions") is None:
        yield _require("spec.completions", "when completion mode is Indexed")
    if pod["restartPolicy"] not in ("Never", "OnFailure"):
        yield _unsupported("spec.template.spec.restartPolicy", pod["restartPolicy"], ("OnFailure", "Never"))
    if "podFailurePolicy" not in spec:
        return
    if pod["restartPolicy"] != "Never":
        text = 'only "Never" is supported when podFailurePolicy is specified'
        yield Cause(field="spec.template.spec.restartPolicy", value=pod["restartPolicy"], text=text)
    names = {container["name"] for container in pod.get("containers") or []}
    for index, rule in enumerate(spec["podFailurePolicy"].get("rules") or []):
        codes = rule.get("onExitCodes")
        if codes is None:
            continue
        field = f"spec.podFailurePolicy.rules[{index}].onExitCodes"
        if codes.get("containerName") not in (None, *names):
            text = "must be one of the container or initContainer names in the pod template"
            yield Cause(field=f"{field}.containerName", value=codes["containerName"], text=text)
        values = codes.get("values") or []
        if codes["operator"] == "In" and 0 in values:
            text = "must not be 0 for the In operator"
            yield Cause(field=f"{field}.values[{values.index(0)}]", value=0, text=text)
        if values != sorted(values):
            yield Cause(field=f"{field}.values", value=values, text="must be ordered")


def _find_in_pod(pod: Obj, where: str) -> Iterator[Cause]:
    if not pod.get("containers"):
        yield _require(f"{where}.containers", "")
    volumes = {volume["name"] for volume in pod.get("volumes") or []}
    seen: set[str] = set()
    for index, container in enumerate(pod.get("containers") or []):
        field = f"{where}.containers[{index}]"
        if container["name"] in seen:
            yield _duplicate(f"{field}.name", container["name"])
        seen.add(container["name"])
        yield from _find_in_container(container, field, volumes)
    for index, toleration in enumerate(pod.get("tolerations") or []):
        if toleration.get("effect") not in (None, "", *_EFFECTS):
            yield _unsupported(f"{where}.tolerations[{index}].effect", toleration["effect"], _EFFECTS)


def _find_in_container(container: Obj, field: str, volumes: set[str]) -> Iterator[Cause]:
    if not container.get("image"):
        yield _require(f"{field}.image", "")
    for index, variable in enumerate(container.get("env") or []):
        here = f"{field}.env[{index}]"
        if not _ENV_NAME.fullmatch(variable["name"]):
            text = "a valid environment variable name must consist only of printable ASCII characters"
            yield Cause(field=f"{here}.name", value=variable["name"], text=text)
        path = ((variable.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath")
        if path is not None and not _EVERY_FIELD.fullmatch(path):
            text = "error converting fieldPath: field label not supported"
            yield Cause(field=f"{here}.valueFrom.fieldRef.fieldPath", value=path, text=text)
    paths: set[str] = set()
    for index, mount in enumerate(container.get("volumeMounts") or []):
        here = f"{field}.volumeMounts[{index}]"
        if mount["name"] not in volumes:
            yield Cause(
                field=f"{here}.name",
                value=mount["name"],
                text="",
                word="Not found",
                reason="FieldValueNotFound",
            )
        if mount["mountPath"] in paths:
            yield Cause(field=f"{here}.mountPath", value=mount["mountPath"], text="must be unique")
        paths.add(mount["mountPath"])
    for index, port in enumerate(container.get("ports") or []):
        if not 1 <= port["containerPort"] <= 65535:
            text = "must be between 1 and 65535, inclusive"
            yield Cause(field=f"{field}.ports[{index}].containerPort", value=port["containerPort"], text=text)
    yield from _find_in_resources(container.get("resources") or {}, f"{field}.resources")


def _find_in_resources(resources: Obj, field: str) -> Iterator[Cause]:
    requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
    for kind, values in (("limits", limits), ("requests", requests)):
        for name, value in values.items():
            if "/" in name and parse_quantity(value) != int(parse_quantity(value)):
                yield Cause(field=f"{field}.{kind}[{name}]", value=value, text="must be an integer")
    for name, value in requests.items():
        if "/" in name and name not in limits:
            yield _require(f"{field}.limits", "Limit must be set for non overcommitable resources")
        elif "/" in name and parse_quantity(value) != parse_quantity(limits[name]):
            text = f"must be equal to {name} limit of {limits[name]}"
            yield Cause(field=f"{field}.requests", value=str(value), text=text)
        elif name in limits and parse_quantity(value) > parse_quantity(limits[name]):
            text = f"must be less than or equal to {name} limit of {limits[name]}"
            yield Cause(field=f"{field}.requests", value=str(value), text=text)


def _require(field: str, text: str) -> Cause:
    return Cause(field=field, text=text, word="Required value", reason="FieldValueRequired")


def _duplicate(field: str, value: str) -> Cause:
    return Cause(field=field, value=value, text="", word="Duplicate value", reason="FieldValueDuplicate")


def _unsupported(field: str, value: str, known: tuple[str, ...]) -> Cause:
    text = "supported values: " + ", ".join(f'"{word}"' for word in known)
    return Cause(
        field=field, value=value, text=text, word="Unsupported value", reason="FieldValueNotSupported"
    )
