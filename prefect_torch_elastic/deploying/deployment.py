"""The deployment itself: which fields `deploy` sets, and an update of those that differ, and of no others."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.flows import Flow
from prefect.utilities.schema_tools import ValidationError, validate
from pydantic import TypeAdapter

from prefect_torch_elastic.deploying.report import Change, Outcome
from prefect_torch_elastic.deploying.source import Source
from prefect_torch_elastic.errors import SpecError

_JSON = TypeAdapter(dict[str, Any])
_BLOCKS_BY_REFERENCE = {"serialize_blocks_as_references": True}
# Their values may be secret, or long.
_NAMES_ONLY = frozenset({"job_variables", "parameter_openapi_schema"})
_ORDERLESS = frozenset({"tags"})
_MISSING = object()
_REFUSED = frozenset({400, 409, 422})  # what the API answers to values that it does not accept


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The deployment that is asked for.

    Attributes:
        flow_name: Of its flow.
        name: Its own.
        fields: Of Prefect's `DeploymentUpdate`, as JSON; one that is not here stays as it is.
    """

    flow_name: str
    name: str
    fields: dict[str, Any]

    @property
    def full_name(self) -> str:
        return f"{self.flow_name}/{self.name}"


def describe_deployment(
    flow: Flow[Any, Any],
    source: Source,
    *,
    name: str,
    work_pool: str,
    parameters: Mapping[str, Any] | None,
    job_variables: Mapping[str, Any] | None,
    tags: Sequence[str] | None,
) -> Wanted:
    """Return the deployment that is asked for.

    Raises:
        SpecError: If a name has a slash, the flow has no such parameter, or a value cannot be JSON.
    """
    for what, text in (("the flow's name", flow.name), ("`name`", name), ("`work_pool`", work_pool)):
        if not text or "/" in text or "%" in text:
            raise SpecError(f"{what} is {text!r}. Give a name without `/` and `%`.")
    step = "prefect.deployments.steps.set_working_directory"
    fields: dict[str, Any] = {
        "version": flow.version,
        "description": flow.description or "",  # Prefect would show None as the text `None`
        "entrypoint": source.entrypoint,
        "pull_steps": [{step: {"directory": str(source.folder)}}],
        "parameter_openapi_schema": flow.parameters.model_dump(mode="json", exclude_unset=True),
        "work_pool_name": work_pool,
    }
    if parameters is not None:
        fields["parameters"] = _serialize_parameters(flow, parameters, fields["parameter_openapi_schema"])
    if job_variables is not None:
        fields["job_variables"] = _serialize_job_variables(job_variables)
    if tags is not None:
        fields["tags"] = list(tags)
    return Wanted(flow_name=flow.name, name=name, fields=fields)


def _serialize_parameters(
    flow: Flow[Any, Any], parameters: Mapping[str, Any], schema: dict[str, Any]
) -> dict[str, Any]:
    known = flow.parameters.properties
    if unknown := [key for key in parameters if key not in known]:
        takes = ", ".join(f"`{key}`" for key in known) or "none"
        raise SpecError(f"`parameters`: the flow `{flow.name}` has no `{unknown[0]}`. It takes: {takes}.")
    try:
        values = _JSON.dump_python(dict(parameters), mode="json", context=_BLOCKS_BY_REFERENCE)
    except ValueError as error:
        raise SpecError(f"`parameters` of `{flow.name}` cannot be stored as JSON: {error}") from error
    try:  # as the API does, and before anything is made
        validate(values, schema, raise_on_error=True, ignore_required=True)
    except ValidationError as error:
        raise SpecError(f"`parameters` do not fit the flow `{flow.name}`: {error}") from error
    return values


def _serialize_job_variables(job_variables: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(dict(job_variables)))
    except (TypeError, ValueError) as error:
        raise SpecError(f"`job_variables` cannot be stored as JSON: {error}") from error


def apply_deployment(client: SyncPrefectClient, wanted: Wanted) -> tuple[DeploymentResponse, Change]:
    """Make the deployment, or update the fields that differ.

    Raises:
        SpecError: If the API does not accept a value; it says which.
    """
    thing = f"deployment `{wanted.full_name}`"
    try:
        deployment = client.read_deployment_by_name(wanted.full_name)
    except ObjectNotFound:
        return _create(client, wanted), Change(
            thing=thing,
            outcome=Outcome.CREATED,
            details=tuple(_describe_new(wanted.fields)),
        )
    differing = {
        name: value
        for name, value in wanted.fields.items()
        if not _is_equal(name, getattr(deployment, name), value)
    }
    if not differing:
        return deployment, Change(thing=thing, outcome=Outcome.UNCHANGED)
    with _Refusals(wanted):
        client.update_deployment(deployment.id, DeploymentUpdate(**differing))
    details = tuple(
        line
        for name, value in differing.items()
        for line in _describe_difference(name, getattr(deployment, name), value)
    )
    return client.read_deployment(deployment.id), Change(
        thing=thing, outcome=Outcome.CHANGED, details=details
    )


def _create(client: SyncPrefectClient, wanted: Wanted) -> DeploymentResponse:
    with _Refusals(wanted):
        flow_id = client.create_flow_from_name(wanted.flow_name)
        deployment_id = client.create_deployment(
            flow_id, wanted.name, enforce_parameter_schema=True, **wanted.fields
        )
    return client.read_deployment(deployment_id)


class _Refusals:
    """Turns the API's refusal of a value into a `SpecError`."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, PrefectHTTPStatusError) and error.response.status_code in _REFUSED:
            raise SpecError(
                f"Prefect does not accept the deployment `{self._wanted.full_name}`: {_read_detail(error)}"
            ) from error


def _read_detail(error: PrefectHTTPStatusError) -> str:
    try:
        body = error.response.json()
    except ValueError:
        return error.response.text
    problems = body.get("exception_detail")
    if isinstance(problems, list):  # each repeats the whole request, which may hold secrets
        return "; ".join(str(problem.get("msg")) for problem in problems)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType, reportUnknownMemberType]
    return str(body.get("detail") or problems or body)


def _is_equal(name: str, old: object, new: object) -> bool:
    if name in _ORDERLESS:
        return set(_as_list(old)) == set(_as_list(new))
    return old == new


def _as_list(value: Any) -> list[Any]:
    return list(value or [])


def _describe_new(fields: Mapping[str, Any]) -> Iterator[str]:
    folder = next(iter(fields["pull_steps"][0].values()))["directory"]
    yield f"`{fields['entrypoint']}` in `{folder}`, in pool `{fields['work_pool_name']}`"


def _describe_difference(name: str, old: Any, new: Any) -> Iterator[str]:
    if name in _NAMES_ONLY or not isinstance(new, dict):
        changed = "" if name in _NAMES_ONLY else f": {_short(old)} -> {_short(new)}"
        yield f"{name}{changed}"
        return
    before: dict[str, Any] = old or {}
    after: dict[str, Any] = new  # pyright: ignore[reportUnknownVariableType]
    for key in {**before, **after}:
        a, b = before.get(key, _MISSING), after.get(key, _MISSING)
        if a != b:
            yield f"{name}.{key}: {_short(a)} -> {_short(b)}"


def _short(value: object) -> str:
    return "not set" if value is _MISSING else reprlib.repr(value)
