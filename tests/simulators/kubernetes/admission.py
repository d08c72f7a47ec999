"""What stands between a request and the storage: strict reading, defaults, rules of the kind, webhooks."""

from __future__ import annotations

import re
from typing import Any

from tests.simulators.kubernetes import jobsetrules, podrules
from tests.simulators.kubernetes.causes import SUBDOMAIN, SUBDOMAIN_RULE, Cause, refuse_invalid
from tests.simulators.kubernetes.fields import Problem, name_type
from tests.simulators.kubernetes.objects import Resource
from tests.simulators.kubernetes.refusals import BadRequestError
from tests.simulators.kubernetes.schemas import read_object
from tests.simulators.kubernetes.storage import Storage

Obj = dict[str, Any]

_LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_LABEL_RULE = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must "
    "start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used "
    "for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)


def admit_create(storage: Storage, resource: Resource, obj: Obj, *, strict: bool) -> None:
    """Complete a new object in place, or refuse it.

    Raises:
        ApiError: In the words of whoever refuses it.
    """
    if not obj["metadata"].get("name"):
        cause = Cause(
            field="metadata.name",
            text="name or generateName is required",
            word="Required value",
            reason="FieldValueRequired",
        )
        raise refuse_invalid(resource, "", [cause])
    if obj["kind"] != resource.kind or obj["apiVersion"] != resource.api_version:
        raise BadRequestError(
            f"the API version in the data ({obj['apiVersion']}, Kind={obj['kind']}) does not match the "
            f"expected API version ({resource.api_version}, Kind={resource.kind})"
        )
    _check_shape(resource, obj, strict=strict)
    if resource.plural == "jobsets":
        jobsetrules.set_defaults(obj)
    elif resource.plural in ("jobs", "pods"):
        podrules.set_defaults(resource, obj)
    _check_metadata(resource, obj)
    if resource.plural == "jobsets":
        jobsetrules.check_new(resource, obj)
    elif resource.plural in ("jobs", "pods"):
        podrules.check_new(storage, resource, obj)


def admit_update(storage: Storage, resource: Resource, new: Obj, old: Obj, *, strict: bool) -> None:
    """Refuse a change that the kind does not allow.

    Raises:
        ApiError: In the words of whoever refuses it.
    """
    _check_shape(resource, new, strict=strict)
    if resource.plural == "jobsets":
        jobsetrules.set_defaults(new, is_new=False)
    _check_metadata(resource, new)
    if resource.plural == "jobsets":
        jobsetrules.check_change(resource, new, old)


def _check_shape(resource: Resource, obj: Obj, *, strict: bool) -> None:
    problems = read_object(obj, prune=True)
    unknown = [problem for problem in problems if problem.kind == "unknown"]
    wrong = [problem for problem in problems if problem.kind != "unknown"]
    cannot = f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: '
    if unknown and strict:
        listed = ", ".join(str(problem) for problem in unknown)
        raise BadRequestError(f"{cannot}strict decoding error: {listed}")
    if any(problem.kind == "quantity" for problem in wrong):
        rule = "'^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
        raise BadRequestError(f"{cannot}quantities must match the regular expression {rule}")
    typed = [problem for problem in wrong if problem.kind == "type"]
    if typed and not resource.is_custom:
        first = typed[0]
        path = re.sub(r"\[\d+\]", "", first.path)
        raise BadRequestError(
            f"{cannot}json: cannot unmarshal {_name_in_go(first.value)} into Go struct field {path} of type "
            f"{first.expected}"
        )
    if wrong:
        raise refuse_invalid(resource, obj["metadata"]["name"], [_make_cause(problem) for problem in wrong])


def _make_cause(problem: Problem) -> Cause:
    if problem.kind == "required":
        return Cause(field=problem.path, text="", word="Required value", reason="FieldValueRequired")
    found = name_type(problem.value)
    return Cause(
        field=problem.path,
        value=found,
        text=f'{problem.path} in body must be of type {problem.expected}: "{found}"',
        reason="FieldValueTypeInvalid",
    )


def _name_in_go(value: Any) -> str:
    found = name_type(value)
    return {"integer": "number", "boolean": "bool"}.get(found, found)


def _check_metadata(resource: Resource, obj: Obj) -> None:
    metadata = obj["metadata"]
    name = metadata["name"]
    causes: list[Cause] = []
    if not SUBDOMAIN.fullmatch(name):
        causes.append(Cause(field="metadata.name", value=name, text=SUBDOMAIN_RULE))
    elif len(name) > 253:
        causes.append(Cause(field="metadata.name", value=name, text="must be no more than 253 bytes"))
    for value in (metadata.get("labels") or {}).values():
        if len(value) > 63:
            text = "must be no more than 63 bytes"
            causes.append(Cause(field="metadata.labels", value=value, text=text))
        elif not _LABEL_VALUE.fullmatch(value):
            causes.append(Cause(field="metadata.labels", value=value, text=_LABEL_RULE))
    if causes:
        raise refuse_invalid(resource, name, causes)
