"""What each pod of a gang is: its container, its resources, its memory to share, its variables (pure)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from prefect_torch_elastic import pod
from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.kubernetes import naming
from prefect_torch_elastic.kubernetes.accelerators import find_accelerator
from prefect_torch_elastic.kubernetes.overlay import SHARED_MEMORY_PATH, SHARED_MEMORY_VOLUME
from prefect_torch_elastic.kubernetes.request import GangRequest
from prefect_torch_elastic.spec_values import parse_gpu

# After `grace_seconds` the program in the pod kills its ranks; then it reports, uploads logs and ends.
MARGIN_SECONDS = 30

_MIB = 2**20
_MOST_SHARED_MEMORY = 64 * 1024 * _MIB
# Without a limit of memory: nothing is reserved, and a data loader that runs wild gets "no space left" before
# it takes the machine's memory from others.
_SHARED_MEMORY = "8Gi"
_DECIMAL = {letter: 1000**power for power, letter in enumerate("kMGT", 1)}
_BINARY = {f"{letter}i": 1024**power for power, letter in enumerate("KMGT", 1)}
_BYTES = _DECIMAL | _BINARY
_MOUNT_FIELDS = ("name", "mountPath", "subPath", "readOnly")
_SIZE = re.compile(r"([0-9.]+)([A-Za-z]+)")


def render_pod_spec(request: GangRequest) -> dict[str, Any]:
    """Return the spec of a gang's pods, before the user's template is laid over it.

    Raises:
        SpecError: If a value cannot be kept; it says which.
    """
    volumes, mounts = _render_volumes(request)
    resource, count, selector, tolerations = _render_accelerator(request)
    container: dict[str, Any] = {
        "name": naming.CONTAINER,
        "image": request.image,
        # Words, not a line for a shell: Python is the process that gets SIGTERM.
        "command": [_literal(word) for word in request.command],
        "env": _render_environment(request),
        "ports": [{"containerPort": naming.RENDEZVOUS_PORT, "name": "rdzv"}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "resources": _render_resources(request, {resource: str(count)} if count else {}),
        "volumeMounts": mounts,
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",  # else JobSet makes it OnFailure, and pods vanish with their logs
        "terminationGracePeriodSeconds": math.ceil(request.grace_seconds) + MARGIN_SECONDS,
        "serviceAccountName": request.service_account,
        "automountServiceAccountToken": False,  # a gang asks the cluster nothing
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "nodeSelector": {**selector, **request.node_selector},
        "tolerations": tolerations,
        "containers": [_without_empty(container)],
        "volumes": volumes,
    }
    return _without_empty(spec)


def parse_size(text: str) -> int:
    """Return an amount of memory that `spec_values.parse_memory` accepts, in bytes."""
    match = _SIZE.fullmatch(text)
    assert match is not None, text
    return int(float(match[1]) * _BYTES[match[2]])


def _render_environment(request: GangRequest) -> list[dict[str, Any]]:
    naming.check_variables("env", request.env)
    naming.check_variables("secret_env", request.secret_env)
    own = {
        pod.CONTRACT_VARIABLE: pod.CONTRACT,
        pod.NNODES_VARIABLE: str(request.nnodes),
        pod.LEADER_VARIABLE: naming.name_leader(request.name),
        pod.GANG_VARIABLE: request.name,
        pod.GRACE_VARIABLE: f"{request.grace_seconds:g}",
        pod.TERMINATION_LOG_VARIABLE: naming.TERMINATION_LOG,
        # Else a node that joins survivors of a rendezvous never learns where its store is.
        naming.SHARED_STORE_VARIABLE: "1",
    }
    fields = {
        pod.ATTEMPT_VARIABLE: f"metadata.labels['{naming.ATTEMPT_LABEL}']",
        pod.POD_VARIABLE: "metadata.name",
        pod.POD_UID_VARIABLE: "metadata.uid",
        pod.POD_IP_VARIABLE: "status.podIP",
        pod.NODE_NAME_VARIABLE: "spec.nodeName",
    }
    secrets = {name: (request.credentials_secret, name) for name in request.credential_names}
    for name, place in request.secret_env.items():
        secret, _, key = place.partition("/")
        secrets[name] = (secret, key)
    return [
        *({"name": name, "value": value} for name, value in own.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        *(
            {"name": name, "value": _literal(value)}
            for name, value in request.env.items()
            if name not in secrets
        ),
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
            for name, (secret, key) in secrets.items()
        ),
    ]


def _literal(text: str) -> str:
    """Return text that Kubernetes hands on as it is: in it `$(NAME)` is a variable, and `$$` a dollar."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def _render_resources(request: GangRequest, accelerators: Mapping[str, str]) -> dict[str, Any]:
    limits = {"memory": request.memory, "ephemeral-storage": request.ephemeral_storage, **accelerators}
    # No limit of CPU: a rank that waits for its turn makes all others wait.
    requests = {"cpu": request.cpu, **limits}
    return _without_empty({"requests": _without_empty(requests), "limits": _without_empty(limits)})


def _render_accelerator(
    request: GangRequest,
) -> tuple[str, int, dict[str, str], list[dict[str, Any]]]:
    """Return what the pod takes of which resource, and which machines it may go to for it."""
    tolerations = [dict(one) for one in request.tolerations]
    name, count = (None, 0) if request.gpu is None else parse_gpu(request.gpu)
    accelerator = find_accelerator(name, request.accelerators)
    if not count:
        return accelerator.resource, 0, {}, tolerations
    # Clouds taint machines with accelerators by the name of the resource.
    taint = {"key": accelerator.resource, "operator": "Exists", "effect": "NoSchedule"}
    wanted: list[dict[str, Any]] = []
    for one in (taint, *accelerator.tolerations, *tolerations):
        if one not in wanted:
            wanted.append(one)
    return accelerator.resource, count, accelerator.node_selector, wanted


def _render_volumes(request: GangRequest) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volumes of the pod, and where they are mounted; a mount of the user at /dev/shm wins."""
    wanted = list(request.volumes)
    size = _decide_shared_memory(request)
    if size != "0" and SHARED_MEMORY_PATH not in (_path(one) for one in wanted):
        memory = {"emptyDir": {"medium": "Memory", "sizeLimit": size}}
        wanted.append({"name": SHARED_MEMORY_VOLUME, "mountPath": SHARED_MEMORY_PATH, **memory})
    volumes: dict[str, dict[str, Any]] = {}
    mounts: dict[str, dict[str, Any]] = {}
    for one in wanted:
        mount = {key: one[key] for key in _MOUNT_FIELDS if key in one}
        volume = {key: value for key, value in one.items() if key == "name" or key not in mount}
        name, path = str(one["name"]), _path(one)
        if volumes.setdefault(name, volume) != volume:
            raise SpecError(f"`volumes` has two volumes of the name `{name}`. Rename one.")
        if mounts.setdefault(path, mount) is not mount:
            raise SpecError(f"`volumes` has two volumes at `{path}`. Mount one somewhere else.")
    return list(volumes.values()), list(mounts.values())


def _path(volume: Mapping[str, Any]) -> str:
    return str(volume["mountPath"]).rstrip("/")


def _decide_shared_memory(request: GangRequest) -> str:
    """Return the size of `/dev/shm`; what is in it counts as memory of the container."""
    if request.shm_size is not None:
        return request.shm_size
    if not request.memory:
        return _SHARED_MEMORY
    mebibytes = max(1, min(parse_size(request.memory) // 2, _MOST_SHARED_MEMORY) // _MIB)
    return f"{mebibytes // 1024}Gi" if mebibytes % 1024 == 0 else f"{mebibytes}Mi"


def _without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value not in (None, "", {}, [])}
