"""How a request reaches an API server, simulated or real: raw objects over HTTP, as the kubeconfig says.

The kubelet and the tests use it. It knows nothing of the product's own client, so that neither hides the
other's mistakes.
"""

from __future__ import annotations

import base64
import json
import ssl
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import urllib3
import yaml

from tests.simulators.kubernetes.objects import RESOURCES, Obj, copy_object

_TIMEOUT = urllib3.Timeout(connect=5.0, read=30.0)
_WATCH_SECONDS = 300
# A connection that breaks, and a server (or a webhook of it) that is not ready: that passes. Writes may be
# sent twice, and whoever sends them lives with a 409.
_RETRIES = urllib3.Retry(
    total=None,
    connect=3,
    read=3,
    other=0,
    redirect=0,
    status=6,
    status_forcelist=(429, 500, 502, 503, 504),
    allowed_methods=None,
    backoff_factor=0.1,
    raise_on_status=False,
)
_MERGE_PATCH = "application/merge-patch+json"
_TRIES = 20


class RestError(Exception):
    """An answer that is not a success: its HTTP status and its `Status` object."""

    def __init__(self, verb: str, path: str, status: int, body: Obj) -> None:
        super().__init__(f"{verb} {path}: {status} {body.get('message', body)}")
        self.status = status
        self.body = body


class Watch:
    """Events of one kind, as they come: type and object."""

    def __init__(self, response: urllib3.BaseHTTPResponse) -> None:
        self._response = response

    def __iter__(self) -> Iterator[tuple[str, Obj]]:
        buffer = b""
        try:
            for chunk in self._response.stream(65536):
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    yield event["type"], event["object"]
        finally:
            self._response.close()

    def close(self) -> None:
        """End the iteration in another thread."""
        with suppress(OSError, ValueError, RuntimeError):
            self._response.shutdown()


class RestClient:
    """One API server; safe for threads."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, **tls: Any) -> None:
        self.url = url.rstrip("/")
        self._headers = dict(headers or {})
        self._pool = urllib3.PoolManager(maxsize=32, retries=_RETRIES, timeout=_TIMEOUT, **tls)

    @classmethod
    def connect(cls, kubeconfig: Path) -> RestClient:
        """Return a client for the current context of a kubeconfig."""
        config = yaml.safe_load(kubeconfig.read_text())
        context = _named(config["contexts"], config["current-context"])["context"]
        cluster = _named(config["clusters"], context["cluster"])["cluster"]
        user = _named(config.get("users") or [], context.get("user")).get("user") or {}
        if {"exec", "auth-provider"} & user.keys():
            raise ValueError(f"`{kubeconfig}` logs in by a program; give it a token or a client certificate.")
        token = user.get("token") or (_read(user, "tokenFile", kubeconfig) or b"").decode().strip()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        tls: dict[str, Any] = {}
        if cluster["server"].startswith("https:"):
            tls["ssl_context"] = _trust(cluster, user, kubeconfig)
            if name := cluster.get("tls-server-name"):
                tls |= {"server_hostname": name, "assert_hostname": name}
        return cls(cluster["server"], headers=headers, **tls)

    def close(self) -> None:
        """Close the idle connections."""
        self._pool.clear()

    def create(
        self, plural: str, body: Obj, *, namespace: str = "", name: str = "", subresource: str = ""
    ) -> Obj:
        """POST an object, or with `name` and `subresource` a binding or an eviction."""
        path = _path(plural, namespace, name, subresource)
        if not subresource:
            resource = RESOURCES[plural]
            body = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        return self.request("POST", path, body)

    def get(self, plural: str, name: str, *, namespace: str = "") -> Obj | None:
        """Return an object, None when there is none."""
        try:
            return self.request("GET", _path(plural, namespace, name))
        except RestError as error:
            if error.status == 404:
                return None
            raise

    def list(self, plural: str, *, namespace: str = "", labels: str = "", fields: str = "") -> list[Obj]:
        """Return the objects of a kind, in all namespaces when none is named."""
        return self.list_at(plural, namespace=namespace, labels=labels, fields=fields)[0]

    def list_at(
        self, plural: str, *, namespace: str = "", labels: str = "", fields: str = ""
    ) -> tuple[list[Obj], str]:
        """Return the objects of a kind and the `resourceVersion` that a watch goes on from."""
        query = {"labelSelector": labels, "fieldSelector": fields}
        answer = self.request("GET", _path(plural, namespace), query=query)
        # Go writes no items as null.
        return answer["items"] or [], answer["metadata"]["resourceVersion"]

    def watch(self, plural: str, *, namespace: str = "", resource_version: str) -> Watch:
        """Return the events from a version on, until the server ends the watch or the connection breaks."""
        query = {"watch": "1", "resourceVersion": resource_version, "timeoutSeconds": str(_WATCH_SECONDS)}
        return Watch(self._send("GET", _path(plural, namespace), query=query, stream=True))

    def patch(self, plural: str, name: str, body: Obj, *, namespace: str = "", subresource: str = "") -> Obj:
        """Merge `body` into an object (JSON merge patch: a list replaces a list)."""
        path = _path(plural, namespace, name, subresource)
        return self.request("PATCH", path, body, content_type=_MERGE_PATCH)

    def change(
        self,
        plural: str,
        name: str,
        change: Callable[[Obj], None],
        *,
        namespace: str = "",
        subresource: str = "",
        uid: str = "",
    ) -> Obj | None:
        """Read, change and write until nobody interferes; None when the object is gone, or is not `uid`."""
        for _ in range(_TRIES):
            found = self.get(plural, name, namespace=namespace)
            if found is None or uid not in ("", found["metadata"]["uid"]):
                return None
            new = copy_object(found)
            change(new)
            with suppress(_ConflictError):
                return self._replace(_path(plural, namespace, name, subresource), new)
        raise RuntimeError(f"`{plural}/{name}` was changed by somebody else {_TRIES} times in a row.")

    def delete(
        self,
        plural: str,
        name: str,
        *,
        namespace: str = "",
        uid: str = "",
        grace_seconds: int | None = None,
        propagation: str = "Background",
    ) -> None:
        """Delete an object; one that is gone, or is another than `uid`, is fine."""
        options: Obj = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": propagation}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        try:
            self.request("DELETE", _path(plural, namespace, name), options)
        except RestError as error:
            if error.status not in (404, 409):
                raise

    def request(
        self,
        verb: str,
        path: str,
        body: Obj | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Obj:
        """Send a request to any path and return the answer.

        Raises:
            RestError: If the answer is not a success.
        """
        response = self._send(verb, path, body, query=query, content_type=content_type)
        return json.loads(response.data)

    def _replace(self, path: str, new: Obj) -> Obj | None:
        try:
            return self.request("PUT", path, new)
        except RestError as error:
            if error.status == 404:
                return None
            if error.status == 409:
                raise _ConflictError from error
            raise

    def _send(
        self,
        verb: str,
        path: str,
        body: Obj | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        stream: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        response = self._pool.request(
            verb,
            self.url + path,
            body=None if body is None else json.dumps(body).encode(),
            fields={name: value for name, value in query.items() if value} if query else None,
            headers={**self._headers, "Content-Type": content_type, "Accept": "application/json"},
            preload_content=not stream,
            timeout=urllib3.Timeout(connect=5.0, read=_WATCH_SECONDS + 30) if stream else _TIMEOUT,
        )
        if response.status < 300:
            return response
        text = response.data
        try:
            answer = json.loads(text)
        except ValueError:
            answer = {"message": text.decode(errors="replace")}
        raise RestError(verb, path, response.status, answer)


class _ConflictError(Exception):
    """Somebody else wrote first."""


def _path(plural: str, namespace: str, name: str = "", subresource: str = "") -> str:
    resource = RESOURCES[plural]
    parts = ["apis", resource.group, resource.version] if resource.group else ["api", resource.version]
    if namespace and resource.namespaced:
        parts += ["namespaces", namespace]
    return "/" + "/".join(filter(None, [*parts, plural, name, subresource]))


def _named(entries: list[Obj], name: str | None) -> Obj:
    return next((entry for entry in entries if entry["name"] == name), {})


def _trust(cluster: Obj, user: Obj, kubeconfig: Path) -> ssl.SSLContext:
    """Return whom to believe, and who we are, as a kubeconfig names or holds it."""
    authority = _read(cluster, "certificate-authority", kubeconfig)
    context = ssl.create_default_context(cadata=authority.decode() if authority else None)
    # Python 3.13 wants extensions that a certificate which an API server makes for itself may lack.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    certificate, key = (_read(user, name, kubeconfig) for name in ("client-certificate", "client-key"))
    if certificate and key:
        with tempfile.NamedTemporaryFile(prefix="client-", suffix=".pem") as file:
            file.write(certificate + b"\n" + key)
            file.flush()
            context.load_cert_chain(file.name)
    return context


def _read(section: Obj, name: str, kubeconfig: Path) -> bytes | None:
    """Return what a kubeconfig holds, or the content of the file that it names."""
    if text := section.get(f"{name}-data"):
        return base64.b64decode(text)
    return (kubeconfig.parent / section[name]).read_bytes() if section.get(name) else None
