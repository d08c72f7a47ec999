"""Which verb, kind, namespace and name a request means."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.simulators.kubernetes.objects import RESOURCES, Resource

_VERBS_OF_COLLECTION = {"GET": "list", "POST": "create", "DELETE": "deletecollection"}
_VERBS_OF_OBJECT = {"GET": "get", "PUT": "update", "PATCH": "patch", "DELETE": "delete", "POST": "create"}
_BY_API: dict[tuple[str, str, str], Resource] = {
    (resource.group, resource.version, resource.plural): resource for resource in RESOURCES.values()
}


@dataclass(frozen=True, kw_only=True)
class Route:
    """A request for objects of one kind; `namespace` is "" for all of them."""

    verb: str
    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    query: dict[str, str] = field(default_factory=dict)

    @property
    def what(self) -> str:
        """The plural with the subresource, as rights spell it: `pods/log`."""
        return f"{self.resource.plural}/{self.subresource}" if self.subresource else self.resource.plural

    @property
    def is_dry_run(self) -> bool:
        """Whether nothing may be stored."""
        return self.query.get("dryRun") == "All"


def split_target(target: str) -> tuple[list[str], dict[str, str]]:
    """Return the parts of a request's path, and its query."""
    url = urlsplit(target)
    parts = [unquote(part) for part in url.path.split("/") if part]
    return parts, dict(parse_qsl(url.query, keep_blank_values=True))


def find_route(method: str, parts: list[str], query: dict[str, str]) -> Route | None:
    """Return what a path means, or None when it is no path of a kind that is served."""
    match parts:
        case ["api", version, *rest]:
            group = ""
        case ["apis", group, version, *rest]:
            pass
        case _:
            return None
    namespace = ""
    if len(rest) >= 3 and rest[0] == "namespaces" and (group, version, rest[2]) in _BY_API:
        namespace, rest = rest[1], rest[2:]
    if not rest or len(rest) > 3:
        return None
    resource = _BY_API.get((group, version, rest[0]))
    if resource is None or (namespace and not resource.namespaced):
        return None
    name, subresource = [*rest[1:], "", ""][:2]
    verb = (_VERBS_OF_OBJECT if name else _VERBS_OF_COLLECTION).get(method, "")
    if verb == "list" and query.get("watch") in ("true", "1", "True"):
        verb = "watch"
    return Route(
        verb=verb, resource=resource, namespace=namespace, name=name, subresource=subresource, query=query
    )
