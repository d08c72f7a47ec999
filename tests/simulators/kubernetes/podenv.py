"""What a container is given when it starts (environment, command), and the message that it leaves behind."""

from __future__ import annotations

import base64
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.simulators.kubernetes.objects import Obj
from tests.simulators.kubernetes.podstatus import Place

_ROOT = Path(__file__).resolve().parents[3]
_CODE = (str(_ROOT / "tests" / "simulators" / "dns"), str(_ROOT))
_INHERITED = (
    "ELASTIC_TEST_MARK",
    "DO_NOT_TRACK",
    "LD_LIBRARY_PATH",
)  # of the tests, and what Python may need

_MESSAGE_BYTES, _MESSAGE_FROM_LOG_BYTES = 4096, 2048

FindSecret = Callable[[str], Obj | None]

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_.-][\w.-]*)\)")
_INDEXED = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")


class ConfigError(Exception):
    """The container cannot be made: CreateContainerConfigError, with the kubelet's words."""


def build_environment(
    pod: Obj, container: Obj, place: Place, *, base: Mapping[str, str], find_secret: FindSecret
) -> dict[str, str]:
    """Return what the container's process gets: `base`, then envFrom, then env, later ones win.

    Raises:
        ConfigError: If a Secret or one of its keys is missing.
    """
    environment = dict(base)
    for source in container.get("envFrom") or ():
        environment |= _read_source(pod, source, find_secret)
    for entry in container.get("env") or ():
        value = _read_entry(pod, entry, place, find_secret)
        if value is not None:
            environment[entry["name"]] = expand(value, environment) if "value" in entry else value
    return environment


def build_command(container: Obj, environment: Mapping[str, str]) -> list[str]:
    """Return command and arguments with `$(NAME)` filled in.

    Raises:
        ConfigError: If there is no command: an image that would bring one does not exist here.
    """
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    if not container.get("command"):
        raise ConfigError(f"container `{container['name']}` names no command, and there is no image")
    return [expand(word, environment) for word in words]


def expand(text: str, environment: Mapping[str, str]) -> str:
    """Fill in `$(NAME)`; `$$` is a dollar, and an unknown name stays as it is."""

    def replace(match: re.Match[str]) -> str:
        if match[1] is None:
            return "$"
        return environment.get(match[1], match[0])

    return _REFERENCE.sub(replace, text)


def base_environment(pod: Obj, *, folder: Path, names: Path) -> dict[str, str]:
    """Return what a container has without asking; nothing else of the test's environment gets in."""
    return {
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]),
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "LANG": "C.UTF-8",
        "HOSTNAME": pod["spec"].get("hostname") or pod["metadata"]["name"],
        "SIMULATED_DNS": str(names),
        "SIMULATED_NAMESPACE": pod["metadata"]["namespace"],
        **{name: os.environ[name] for name in _INHERITED if name in os.environ},
    }


def finish_environment(environment: Mapping[str, str], container: Obj, message: Path) -> dict[str, str]:
    """Put our code in front of Python's path, and the pod's own file where the termination message goes.

    A real kubelet mounts that file at a path which all pods of a machine would share here.
    """
    path = container.get("terminationMessagePath") or "/dev/termination-log"
    code = os.pathsep.join(filter(None, [*_CODE, environment.get("PYTHONPATH")]))
    moved = {name: str(message) if value == path else value for name, value in environment.items()}
    return {**moved, "PYTHONPATH": code}


def read_message(container: Obj, file: Path, log: Path, code: int) -> str:
    """Return the termination message; with a fallback to the log, where a failed container wrote none."""
    text = file.read_bytes()[:_MESSAGE_BYTES]
    if not text and code and container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
        text = log.read_bytes()[-_MESSAGE_FROM_LOG_BYTES:]
    return text.decode(errors="replace")


def read_field(pod: Obj, path: str, place: Place) -> str:
    """Return a field of the downward API.

    Raises:
        ConfigError: If there is no such field.
    """
    metadata, spec = pod["metadata"], pod["spec"]
    if found := _INDEXED.fullmatch(path):
        return (metadata.get(found[1]) or {}).get(found[2], "")
    match path:
        case "metadata.name" | "metadata.namespace" | "metadata.uid":
            return metadata[path.removeprefix("metadata.")]
        case "status.podIP" | "status.podIPs":
            return place.pod_ip
        case "status.hostIP":
            return place.host_ip
        case "spec.nodeName":
            return place.node
        case "spec.serviceAccountName":
            return spec.get("serviceAccountName", "default")
        case _:
            raise ConfigError(f"unsupported fieldPath: {path}")


def _read_entry(pod: Obj, entry: Obj, place: Place, find_secret: FindSecret) -> str | None:
    match entry.get("valueFrom"):
        case None:
            return entry.get("value") or ""
        case {"fieldRef": {"fieldPath": str(path)}}:
            return read_field(pod, path, place)
        case {"secretKeyRef": {"name": str(name), "key": str(key)} as source}:
            values = _read_secret(pod, name, find_secret, optional=source.get("optional", False))
            if key not in values and not source.get("optional", False):
                where = f"{pod['metadata']['namespace']}/{name}"
                raise ConfigError(f"couldn't find key {key} in Secret {where}")
            return values.get(key)
        case unknown:
            raise ConfigError(f"unsupported valueFrom of `{entry['name']}`: {unknown}")


def _read_source(pod: Obj, source: Obj, find_secret: FindSecret) -> dict[str, str]:
    match source:
        case {"secretRef": {"name": str(name)} as reference}:
            values = _read_secret(pod, name, find_secret, optional=reference.get("optional", False))
            prefix = source.get("prefix") or ""
            return {prefix + key: value for key, value in values.items()}
        case _:
            raise ConfigError(f"unsupported envFrom: {source}")


def _read_secret(pod: Obj, name: str, find_secret: FindSecret, *, optional: bool) -> dict[str, str]:
    secret = find_secret(name)
    if secret is None:
        if optional:
            return {}
        raise ConfigError(f'secret "{name}" not found')
    coded, plain = secret.get("data") or {}, secret.get("stringData") or {}  # a server may keep it as sent
    return {**{key: base64.b64decode(value).decode() for key, value in coded.items()}, **plain}
