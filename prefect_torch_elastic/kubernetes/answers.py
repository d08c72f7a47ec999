"""What an error of the Kubernetes API means: what was not done, may it pass, and what helps (pure)."""

from __future__ import annotations

import json
import re
from typing import Any

from prefect_torch_elastic.errors import ElasticError
from prefect_torch_elastic.kubernetes.resources import PRODUCTS, Resource

_SAID_CHARACTERS = 600
_AGAIN_STATUS = {0, 408, 425, 429}
_FOR_GOOD_STATUS = {501, 505}
_READS = {"get", "list", "watch"}  # webhooks and quotas have no say in them
_USER = re.compile(r'User "([^"]+)" cannot')
_WEBHOOK = re.compile(r'admission webhook "[^"]+" denied the request: ')
_UNKNOWN_FIELD = re.compile(r'unknown field "([^"]+)"')
_CURES = {  # what the API's sentence holds -> what helps; the first that fits
    "exceeded quota": "Ask for less, end what else runs in the namespace, or have its ResourceQuota raised.",
    "violates PodSecurity": (
        "Ask for a namespace with another Pod Security level, or leave out of `pod_template` what it forbids."
    ),
    "is being terminated": "Name another namespace, or wait until it is gone and create it again.",
    "error looking up service account": "Name a service account of that namespace in `service_account`.",
    "failed calling webhook": (
        "The controller behind that webhook does not run: see `kubectl get pods -n jobset-system` "
        "and `kubectl get pods -n kueue-system`."
    ),
}
INSTALL = {
    "JobSet": "Install JobSet 0.10 or newer: https://jobset.sigs.k8s.io/docs/installation/",
    "Kueue": (
        "Install Kueue 0.12 or newer: https://kueue.sigs.k8s.io/docs/installation/ or leave out `queue`."
    ),
}


class ClusterError(ElasticError):
    """The Kubernetes API refused a request, or did not answer it.

    Attributes:
        status: HTTP status; 0 if there was no answer.
        reason: The API's own word, such as `AlreadyExists`; empty if it gave none.
        said: What the API or the network said, in one line.
        verb: `create`, `get`, `list`, `watch`, `delete` or `patch`.
        kind: Kind of the objects, such as `JobSet`; empty if the request was about none.
        namespace: Where; empty for objects of the whole cluster.
        name: Of the object; empty for many.
        user: Whom the API took us for, if it said so.
        may_pass: Whether the same request may succeed later.
        not_installed: Whether the API has no such kind.
        retry_after: Seconds that the API asks to wait, None if it does not say.
        cure: What helps, in sentences.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        reason: str = "",
        said: str = "",
        verb: str = "",
        kind: str = "",
        namespace: str = "",
        name: str = "",
        user: str = "",
        may_pass: bool = False,
        not_installed: bool = False,
        retry_after: float | None = None,
        cure: str = "",
    ) -> None:
        super().__init__(f"{message.rstrip('.')}. {cure}".strip())
        self.status, self.reason, self.said = status, reason, said
        self.verb, self.kind, self.namespace, self.name = verb, kind, namespace, name
        self.user, self.may_pass, self.not_installed = user, may_pass, not_installed
        self.retry_after, self.cure = retry_after, cure

    @property
    def exists(self) -> bool:
        """Whether an object of that name is there already."""
        return self.status == 409 and self.reason == "AlreadyExists"

    @property
    def forbidden(self) -> bool:
        """Whether no role allows it; a refusal by a webhook or a quota is not meant."""
        return self.status == 403 and (bool(self.user) or self.verb in _READS)

    @property
    def expired(self) -> bool:
        """Whether the resource version is too old to go on from: list again."""
        return self.status == 410


def read_answer(
    status: int,
    body: bytes | str,
    *,
    verb: str,
    resource: Resource | None = None,
    namespace: str = "",
    name: str = "",
    retry_after: str = "",
) -> ClusterError:
    """Return what an answer of the API that is no success means.

    Args:
        status: HTTP status, or the `code` in an `ERROR` event of a watch.
        body: As it came: a `Status` object in JSON, or plain text.
        verb: What was to be done.
        resource: With which objects; None if the request was about none.
        namespace: Where.
        name: With which object.
        retry_after: The header of that name.
    """
    found = _parse_status(body)
    details: dict[str, Any] = found.get("details") or {}
    said = _shorten(str(found.get("message") or _decode(body)))
    reason = str(found.get("reason") or "")
    facts: dict[str, Any] = {
        "status": status,
        "reason": reason,
        "said": said,
        "verb": verb,
        "kind": resource.kind if resource else "",
        "namespace": namespace,
        "name": name,
        "user": match[1] if (match := _USER.search(said)) else "",
        "may_pass": _may_pass(status, reason),
        # The group or the version is missing: such an answer names no object.
        "not_installed": status == 404 and resource is not None and not details.get("name"),
        "retry_after": float(retry_after) if retry_after.isdigit() else details.get("retryAfterSeconds"),
    }
    return _explain(resource, facts, details)


def _explain(resource: Resource | None, facts: dict[str, Any], details: dict[str, Any]) -> ClusterError:
    """Return an error with the sentence that its facts mean."""
    verb, namespace, user = facts["verb"], facts["namespace"], facts["user"]
    what = f"cannot {verb} {_name(resource, namespace, facts['name'])}"
    if resource and facts["not_installed"]:
        return _refuse_missing(resource, what, facts)
    if resource and user:
        cure = (
            f"Give it a role that allows `{verb}` of `{resource.qualified}`, see `docs/kubernetes/rbac.yaml`."
        )
        all_of_them = f"cannot {verb} {_name(resource, namespace, '')}"  # a role is about the kind
        return ClusterError(f"{all_of_them} as {user}: no role allows it", cure=cure, **facts)
    cure = _find_cure(facts["status"], facts["said"], details)
    return ClusterError(f"{what}: {_summarize(facts['status'], facts['said'])}", cure=cure, **facts)


def read_silence(
    error: Exception, *, verb: str, resource: Resource | None = None, namespace: str = "", name: str = ""
) -> ClusterError:
    """Return what an error of the network means, or a `ValueError` about an answer that cannot be read."""
    said = _shorten(f"{type(error).__name__}: {error}")
    what = (
        "its answer cannot be read" if isinstance(error, ValueError) else "the Kubernetes API did not answer"
    )
    return ClusterError(
        f"cannot {verb} {_name(resource, namespace, name)}: {what} ({said})",
        said=said,
        verb=verb,
        kind=resource.kind if resource else "",
        namespace=namespace,
        name=name,
        may_pass=True,
        cure="Check the `server` of the kubeconfig, and what stands between it and this machine.",
    )


def _refuse_missing(resource: Resource, what: str, facts: dict[str, Any]) -> ClusterError:
    product = PRODUCTS.get(resource.group)
    if product is None:
        return ClusterError(
            f"{what}: the API has no `{resource.api_version}`",
            cure="Check that the kubeconfig names a Kubernetes API, of 1.30 or newer.",
            **facts,
        )
    return ClusterError(
        f"{product} is not installed in this cluster ({what}: no `{resource.api_version}`)",
        cure=INSTALL[product],
        **facts,
    )


def _summarize(status: int, said: str) -> str:
    if status == 401:
        return "the API does not accept our credentials"
    said = _WEBHOOK.sub("", said) if _WEBHOOK.match(said) else said
    return said or f"the API answered with status {status}"


def _find_cure(status: int, said: str, details: dict[str, Any]) -> str:
    for words, cure in _CURES.items():
        if words in said:
            return cure
    if match := _UNKNOWN_FIELD.search(said):
        return (
            f"This cluster does not know the field `{match[1]}`: "
            "update JobSet (0.10 or newer is needed), or leave the field out of the overlay."
        )
    if status == 401:
        return "Renew the token of the kubeconfig, or the credentials block."
    if status == 404 and details.get("kind") == "namespaces":
        return f"Create it with `kubectl create namespace {details.get('name')}`, or name another one."
    if status == 409 and "already exists" in said:
        return "Delete it, or choose another name."
    return ""


def _may_pass(status: int, reason: str) -> bool:
    if status == 409:  # two wrote at once, or a quota was being counted; `AlreadyExists` stays
        return reason == "Conflict"
    return status in _AGAIN_STATUS or (status >= 500 and status not in _FOR_GOOD_STATUS)


def _name(resource: Resource | None, namespace: str, name: str) -> str:
    if resource is None:
        return "the Kubernetes API" if not name else f"`{name}`"
    place = f" in '{namespace}'" if namespace and resource.namespaced else ""
    return f"{resource.qualified}{f' `{name}`' if name else ''}{place}"


def _parse_status(body: bytes | str) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) and value.get("kind") == "Status" else {}  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]


def _decode(body: bytes | str) -> str:
    return body.decode("utf-8", "replace") if isinstance(body, bytes) else body


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SAID_CHARACTERS else f"{line[: _SAID_CHARACTERS - 4]} ..."
