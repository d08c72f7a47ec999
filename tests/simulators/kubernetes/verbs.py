"""What each verb of the API does with the storage: read, admit, write, and answer as a real server."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from tests.simulators.kubernetes import admission, podverbs
from tests.simulators.kubernetes.causes import Cause, refuse_invalid
from tests.simulators.kubernetes.objects import Obj, copy_object, set_identity
from tests.simulators.kubernetes.patches import APPLY, apply_patch
from tests.simulators.kubernetes.refusals import (
    AlreadyExistsError,
    BadRequestError,
    ConflictError,
    MethodNotAllowedError,
    NotFoundError,
)
from tests.simulators.kubernetes.routes import Route
from tests.simulators.kubernetes.selectors import (
    make_matcher,
    parse_label_selector,
    select_exact_labels,
)
from tests.simulators.kubernetes.storage import Storage, make_not_found

_PATCH_TRIES = 20


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What goes back."""

    body: bytes
    status: int = 200
    media_type: str = "application/json"


@dataclass(frozen=True, kw_only=True)
class Body:
    """What came with a request."""

    content: bytes = b""
    media_type: str = ""

    def read(self) -> Obj:
        """Return the object that was sent.

        Raises:
            BadRequestError: If it is not a JSON object.
        """
        try:
            found = json.loads(self.content)
        except ValueError as error:
            raise BadRequestError(f"the object provided is unrecognized: {error}") from error
        if not isinstance(found, dict):
            raise BadRequestError("the object provided is unrecognized (must be of type Object)")
        return found


def answer(storage: Storage, route: Route, body: Body) -> Answer:
    """Do what a request asks (all but watches)."""
    if route.subresource in ("log", "eviction", "binding") and route.resource.plural == "pods":
        return _answer_pod_verb(storage, route, body)
    if route.subresource not in ("", "status") or (route.subresource and not route.resource.has_status):
        raise NotFoundError("the server could not find the requested resource")
    match route.verb:
        case "get":
            return _reply(storage, _require(storage, route))
        case "list":
            return _list(storage, route)
        case "create":
            return _create(storage, route, body.read())
        case "update":
            return _update(storage, route, body.read())
        case "patch":
            return _patch(storage, route, body)
        case "delete":
            return _delete(storage, route, json.loads(body.content or b"{}"))
        case "deletecollection":
            return _delete_collection(storage, route, json.loads(body.content or b"{}"))
        case _:
            raise MethodNotAllowedError("the server does not allow this method on the requested resource")


def select(storage: Storage, route: Route) -> tuple[list[Obj], int]:
    """Return the objects that a list or a watch asks for, and the version that this is true of."""
    labels, fields = route.query.get("labelSelector", ""), route.query.get("fieldSelector", "")
    matches = make_matcher(labels, fields, is_custom=route.resource.is_custom)
    requirements = parse_label_selector(labels)
    exact = select_exact_labels(requirements)
    found, version = storage.snapshot(route.resource.plural, route.namespace or None, exact)
    if len(exact) == len(requirements) and not fields:
        return found, version
    return [obj for obj in found if matches is None or matches(obj)], version


def _require(storage: Storage, route: Route) -> Obj:
    found = storage.get(route.resource.plural, route.namespace, route.name)
    if found is None:
        raise make_not_found(route.resource.plural, route.name)
    return found


def _reply(storage: Storage, obj: Obj, *, status: int = 200) -> Answer:
    if "resourceVersion" not in obj["metadata"]:
        return Answer(body=json.dumps(obj).encode(), status=status)
    return Answer(body=storage.encode(obj), status=status)


def _list(storage: Storage, route: Route) -> Answer:
    found, version = select(storage, route)
    limit, start = int(route.query.get("limit") or 0), 0
    if token := route.query.get("continue"):
        version, start = json.loads(base64.urlsafe_b64decode(token))
    page = found[start : start + limit] if limit else found[start:]
    metadata: Obj = {"resourceVersion": str(version)}
    if (left := len(found) - start - len(page)) > 0:
        following = json.dumps([version, start + len(page)]).encode()
        metadata["continue"] = base64.urlsafe_b64encode(following).decode()
        metadata["remainingItemCount"] = left
    resource = route.resource
    head = {"apiVersion": resource.api_version, "kind": f"{resource.kind}List", "metadata": metadata}
    # Items of the built-in kinds come without their kind, those of custom resources with it.
    named = f'"apiVersion":"{resource.api_version}","kind":"{resource.kind}",'.encode()
    skipped = 0 if resource.is_custom else len(named)
    items = b",".join(b"{" + storage.encode(obj)[1 + skipped :] for obj in page)
    return Answer(body=json.dumps(head).encode()[:-1] + b',"items":[' + items + b"]}")


def _create(storage: Storage, route: Route, obj: Obj) -> Answer:
    resource = route.resource
    metadata = obj.setdefault("metadata", {})
    if resource.namespaced:
        if metadata.get("namespace", route.namespace) != route.namespace:
            raise BadRequestError(
                f"the namespace of the provided object does not match the namespace sent on the request: "
                f"{metadata['namespace']} != {route.namespace}"
            )
        if storage.get("namespaces", "", route.namespace) is None:
            raise make_not_found("namespaces", route.namespace)
        metadata["namespace"] = route.namespace
    if resource.has_status and resource.plural not in ("namespaces", "nodes"):
        obj.pop("status", None)
    set_identity(obj, resource, now=storage.clock())
    admission.admit_create(storage, resource, obj, strict=route.query.get("fieldValidation") == "Strict")
    if resource.plural == "pods":
        obj["status"] = {"phase": "Pending", "qosClass": "Burstable"}
    if route.is_dry_run:
        if storage.get(resource.plural, route.namespace, metadata["name"]) is not None:
            raise AlreadyExistsError(f'{resource.full_name} "{metadata["name"]}" already exists')
        return _reply(storage, obj, status=201)
    return _reply(storage, storage.create(resource.plural, obj), status=201)


def _update(storage: Storage, route: Route, obj: Obj) -> Answer:
    old = _require(storage, route)
    metadata = obj.setdefault("metadata", {})
    if metadata.get("name") != route.name:
        raise BadRequestError(
            f"the name of the object ({metadata.get('name', '')}) does not match the name on the URL "
            f"({route.name})"
        )
    if route.resource.is_custom and not metadata.get("resourceVersion"):
        raise refuse_invalid(
            route.resource,
            route.name,
            [Cause(field="metadata.resourceVersion", value=0, text="must be specified for an update")],
        )
    return _reply(storage, _store_update(storage, route, obj, old))


def _store_update(storage: Storage, route: Route, new: Obj, old: Obj) -> Obj:
    resource = route.resource
    if resource.namespaced:
        new["metadata"]["namespace"] = route.namespace
    new.setdefault("apiVersion", resource.api_version)
    new.setdefault("kind", resource.kind)
    strict = route.query.get("fieldValidation") == "Strict"
    if route.subresource == "":
        admission.admit_update(storage, resource, new, old, strict=strict)
    if route.is_dry_run:
        return new
    return storage.update(resource.plural, new, subresource=route.subresource)


def _patch(storage: Storage, route: Route, body: Body) -> Answer:
    resource = route.resource
    if body.media_type.startswith(APPLY) and not storage.get(resource.plural, route.namespace, route.name):
        return _create(storage, route, yaml.safe_load(body.content))
    for _ in range(_PATCH_TRIES):
        old = _require(storage, route)
        new = apply_patch(old, body.content, media_type=body.media_type, resource=resource)
        asked = new.setdefault("metadata", {}).get("resourceVersion")
        try:
            return _reply(storage, _store_update(storage, route, copy_object(new), old))
        except ConflictError:
            # As on a real server: who named no version gets the patch applied to the newer object.
            if asked != old["metadata"]["resourceVersion"]:
                raise
    raise ConflictError(f'Operation cannot be fulfilled on {resource.full_name} "{route.name}": too busy')


def _delete(storage: Storage, route: Route, options: Obj) -> Answer:
    old = _require(storage, route)
    if route.is_dry_run or options.get("dryRun"):
        return _reply(storage, old)
    gone = storage.delete(
        route.resource.plural, route.namespace, route.name, **_read_delete_options(route, options)
    )
    stays = storage.get(route.resource.plural, route.namespace, route.name) is gone
    if stays or route.resource.plural == "pods":
        return _reply(storage, gone)
    details = {
        "name": route.name,
        **({"group": route.resource.group} if route.resource.group else {}),
        "kind": route.resource.plural,
        "uid": old["metadata"]["uid"],
    }
    return _succeed(details)


def _delete_collection(storage: Storage, route: Route, options: Obj) -> Answer:
    found, _ = select(storage, route)
    for obj in found:
        metadata = obj["metadata"]
        try:
            storage.delete(
                route.resource.plural,
                metadata.get("namespace", ""),
                metadata["name"],
                **_read_delete_options(route, options),
            )
        except NotFoundError:
            continue
    return _succeed({})


def _succeed(details: Obj, *, status: int = 200) -> Answer:
    said: Obj = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    if details:
        said["details"] = details
    return Answer(body=json.dumps(said).encode(), status=status)


def _read_delete_options(route: Route, options: Mapping[str, Any]) -> dict[str, Any]:
    grace = options.get("gracePeriodSeconds", route.query.get("gracePeriodSeconds"))
    # A Job that is deleted without a word leaves its pods alone: batch/v1 keeps its first versions' default.
    default = "Orphan" if route.resource.plural == "jobs" else "Background"
    preconditions = options.get("preconditions") or {}
    return {
        "propagation": options.get("propagationPolicy") or route.query.get("propagationPolicy") or default,
        "grace_seconds": None if grace is None else int(grace),
        "uid": preconditions.get("uid"),
        "version": preconditions.get("resourceVersion"),
    }


def _answer_pod_verb(storage: Storage, route: Route, body: Body) -> Answer:
    pod = _require(storage, route)
    match route.subresource, route.verb:
        case "log", "get":
            return Answer(body=podverbs.read_log(pod, route.query), media_type="text/plain")
        case "eviction", "create":
            options = body.read().get("deleteOptions") or {}
            if not (route.is_dry_run or options.get("dryRun")):
                podverbs.evict(storage, pod, grace_seconds=options.get("gracePeriodSeconds"))
        case "binding", "create":
            podverbs.bind(storage, pod, node=body.read()["target"]["name"])
        case _:
            raise MethodNotAllowedError("the server does not allow this method on the requested resource")
    return _succeed({}, status=201)
