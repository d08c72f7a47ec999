"""How the Kubernetes API is reached: the client library's credentials and TLS, under plain requests.

Only the library's configuration and its pool of connections are used: these are the same in its releases
31 to 37, which its models and generated methods are not.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlencode

from prefect_torch_elastic.errors import MissingExtraError
from prefect_torch_elastic.kubernetes.answers import ClusterError, read_answer, read_silence
from prefect_torch_elastic.kubernetes.resources import Resource

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

CONNECT_SECONDS = 10.0
READ_SECONDS = 35.0  # the API gives a webhook at most 30 s
_METHODS = {"create": "POST", "delete": "DELETE", "patch": "PATCH"}
_IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
# A peer that vanished without a word is found after 60 s, also by a watch that has nothing to say.
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One question to the API, and in which words its failure is told.

    Attributes:
        verb: As roles call it: `create`, `get`, `list`, `watch`, `delete`, `patch`.
        path: With the subresource, without the query.
        resource: Which objects; None for questions about the API or about us.
        body: JSON to send.
    """

    verb: str
    path: str
    resource: Resource | None = None
    namespace: str = ""
    name: str = ""
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    body: Mapping[str, Any] | None = None

    def refusal(self, status: int, body: bytes | str, *, retry_after: str = "") -> ClusterError:
        """Return what an answer to it that is no success means; arguments as of `read_answer`."""
        return read_answer(
            status,
            body,
            verb=self.verb,
            resource=self.resource,
            namespace=self.namespace,
            name=self.name,
            retry_after=retry_after,
        )

    def silence(self, error: Exception) -> ClusterError:
        """Return what it means that this came instead of an answer."""
        return read_silence(
            error, verb=self.verb, resource=self.resource, namespace=self.namespace, name=self.name
        )


class Connection:
    """Requests to one API; several threads may send at the same time."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load, self._lock = load, threading.Lock()
        self._configuration, self._pool = self._open_pool()
        self._renewals = 0

    def close(self) -> None:
        """Close the connections that are idle."""
        self._pool.clear()

    def fetch(self, request: Request) -> dict[str, Any]:
        """Return the JSON object that answers a request.

        Raises:
            ClusterError: If the API refuses it or does not answer.
        """
        text = _read(request, self.open(request)).decode("utf-8", "replace")
        try:
            value = json.loads(text)
        except ValueError as error:
            raise request.silence(error) from error
        if not isinstance(value, dict):
            raise request.silence(ValueError("the answer is no JSON object"))
        return cast(dict[str, Any], value)

    def open(self, request: Request, *, read_seconds: float = READ_SECONDS) -> BaseHTTPResponse:
        """Send a request, and return its answer unread; `read_seconds` bounds each silence."""
        renewals = self._renewals
        response = self._send(request, read_seconds)
        if response.status == 401:
            # A token that was valid when it was loaded: load it again, once, and ask again.
            response.close()
            self._renew(renewals)
            response = self._send(request, read_seconds)
        if response.status < 300:
            return response
        retry_after = response.headers.get("Retry-After", "")
        raise request.refusal(response.status, _read(request, response), retry_after=retry_after)

    def _send(self, request: Request, read_seconds: float) -> BaseHTTPResponse:
        import urllib3

        method = _METHODS.get(request.verb, "GET")
        content = "application/merge-patch+json" if method == "PATCH" else "application/json"
        with self._lock:
            configuration, pool = self._configuration, self._pool
            try:
                headers = _sign(configuration, content)
            except (load_kubernetes().config.ConfigException, OSError) as error:
                raise request.silence(error) from error
        url = configuration.host.rstrip("/") + request.path
        if request.query:
            url += f"?{urlencode(request.query)}"
        try:
            return pool.request(
                method,
                url,
                body=None if request.body is None else json.dumps(request.body),
                headers=headers,
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=read_seconds),
                retries=False,
                preload_content=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise request.silence(error) from error

    def _renew(self, seen: int) -> None:
        with self._lock:
            if self._renewals == seen:  # else another thread has just done it
                self._configuration, self._pool = self._open_pool()
                self._renewals += 1

    def _open_pool(self) -> tuple[Any, Any]:
        kubernetes = load_kubernetes()
        try:
            configuration = self._load()
        except (kubernetes.config.ConfigException, OSError, ValueError, TypeError) as error:
            raise ClusterError(
                f"no Kubernetes cluster is configured: {' '.join(str(error).split())}",
                cure="Name a kubeconfig and one of its contexts, or run in a pod with a service account.",
            ) from error
        pool = kubernetes.client.ApiClient(configuration).rest_client.pool_manager
        pool.connection_pool_kw["socket_options"] = _KEEP_ALIVE
        return configuration, pool


def load_configuration(
    kubeconfig: str | None, context: str | None, credentials: Mapping[str, Any] | None
) -> Any:
    """Return the client library's configuration, see `Cluster.connect`."""
    kubernetes = load_kubernetes()
    configuration = kubernetes.client.Configuration()
    config: Any = None
    if credentials is not None:
        config, context = credentials.get("config"), context or credentials.get("context_name")
        config = _parse(config) if isinstance(config, str) else config
    elif kubeconfig is not None and ("\n" in kubeconfig or kubeconfig.lstrip().startswith("{")):
        config = _parse(kubeconfig)
    if config is not None:
        kubernetes.config.load_kube_config_from_dict(
            config, context=context, client_configuration=configuration, persist_config=False
        )
        return configuration
    file = kubeconfig or os.environ.get("KUBECONFIG")
    if file is None and context is None and _IN_POD.is_file():
        kubernetes.config.load_incluster_config(client_configuration=configuration)
    else:
        file = None if file is None else os.path.expanduser(file)
        kubernetes.config.load_kube_config(
            config_file=file, context=context, client_configuration=configuration, persist_config=False
        )
    return configuration


def load_kubernetes() -> ModuleType:
    """Return the client library, with its modules `client` and `config`.

    Raises:
        MissingExtraError: If it is not installed.
    """
    try:
        import kubernetes
        import kubernetes.client  # pyright: ignore[reportUnusedImport]  (attributes of `kubernetes` from here on)
        import kubernetes.config  # pyright: ignore[reportUnusedImport]
    except ModuleNotFoundError as error:
        cure = "pip install 'prefect-torch-elastic[kubernetes]'"
        raise MissingExtraError(f"a Kubernetes cluster needs `kubernetes`. Run `{cure}`.") from error
    return kubernetes


def _parse(text: str) -> Any:
    import yaml  # the client library brings it

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"the kubeconfig is no YAML: {error}") from error


def _sign(configuration: Any, content_type: str) -> dict[str, str]:
    headers = {
        "Accept": "application/json, */*",  # logs are plain text
        "Content-Type": content_type,
        "User-Agent": "prefect-torch-elastic",
    }
    for setting in configuration.auth_settings().values():  # it renews a token that runs out
        if setting["in"] == "header":
            headers[setting["key"]] = setting["value"]
    return headers


def _read(request: Request, response: BaseHTTPResponse) -> bytes:
    import urllib3

    try:
        return response.read()
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise request.silence(error) from error
    finally:
        response.release_conn()
