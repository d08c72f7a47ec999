"""How the values with a grammar of their own are written: nodes, processes, GPUs, quantities, stores.

Pure: text in, a parsed value out, or a `SpecError` that says the field, the value and what is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.spec_checks import parse_number, parse_whole, plain_mapping, refusal

LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)
REMOTE_SCHEMES = ("s3", "gs", "az")

_COUNT = re.compile(r"[0-9]{1,6}")
_CPU = re.compile(r"([0-9]+(\.[0-9]+)?)m?")
_MEMORY = re.compile(r"([0-9]+(\.[0-9]+)?)(Ki|Mi|Gi|Ti|k|M|G|T)")
_GPU = re.compile(r"(?:([A-Za-z][-\w.]*):)?([0-9]{1,4})", re.ASCII)
_MORE_THAN_A_HOST = re.compile("[@:]")  # a user, a password, a port
_OPTIONS = re.compile("[?#]")  # a query such as the token of a SAS URL
_BLOCK_REFERENCE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?/[^/\s]+")

# The agent tells each rank who it is; a value of the user would send ranks to peers that do not exist.
_RESERVED_VARIABLE = re.compile(
    r"(LOCAL_|GROUP_|NODE_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|TORCHELASTIC_.*|PET_.*"
)


def parse_nnodes(value: object) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes that a gang may have.

    Args:
        value: `4`, `"4"` or a range such as `"2:4"`; spaces around the numbers do no harm.

    Raises:
        SpecError: If it is neither, or if the range is empty or starts below 1.
    """
    accepted = '`N` or `MIN:MAX` with 1 <= MIN <= MAX, such as `nnodes=4` or `nnodes="2:4"`'
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(":")]
        if len(parts) > 2 or not all(_COUNT.fullmatch(part) for part in parts):
            raise refusal("nnodes", value, accepted)
        smallest, largest = int(parts[0]), int(parts[-1])
    else:
        whole = parse_whole(value)
        if whole is None:
            raise refusal("nnodes", value, accepted)
        smallest = largest = whole
    if smallest < 1:
        raise refusal("nnodes", value, accepted, why="a gang has at least 1 node")
    if smallest > largest:
        raise refusal("nnodes", value, accepted, why=f"{smallest} is more than {largest}")
    return smallest, largest


def parse_nproc_per_node(value: object) -> int | str:
    """Return the number of processes on a node, or the word that the node itself will resolve.

    Raises:
        SpecError: If it is neither a whole number >= 1 nor `auto`, `gpu` or `cpu`.
    """
    if isinstance(value, str):
        word = value.strip().lower()
        if word in ("auto", "gpu", "cpu"):
            return word
        count = int(word) if _COUNT.fullmatch(word) else 0
    else:
        count = parse_whole(value) or 0
    if count < 1:
        raise refusal("nproc_per_node", value, 'a whole number >= 1, or "auto", "gpu" or "cpu"')
    return count


def parse_gpu(value: object) -> tuple[str | None, int]:
    """Return the accelerator, None for any, and the number of GPUs of one node.

    Args:
        value: `8`, `"8"` or `"H200:8"`; `0` asks for none.

    Raises:
        SpecError: If it is none of these.
    """
    text = value.strip() if isinstance(value, str) else str(parse_whole(value))
    match = _GPU.fullmatch(text)
    if match is None or (match[1] and int(match[2]) == 0):
        raise refusal("gpu", value, 'a number or `NAME:NUMBER`, such as `gpu=8` or `gpu="H200:8"`')
    return match[1], int(match[2])


def parse_topology(value: object) -> tuple[str, str | None]:
    """Return how close nodes are to be placed, and the node label that names the domain.

    Args:
        value: `LABEL` or `required:LABEL` (all nodes in one domain), `preferred:LABEL` (in as few domains as
            possible) or `unconstrained`.

    Raises:
        SpecError: If it is none of these.
    """
    text = value.strip() if isinstance(value, str) else ""
    if text == "unconstrained":
        return text, None
    mode, separator, label = text.rpartition(":")
    mode = mode if separator else "required"
    if mode in ("required", "preferred") and LABEL_KEY.fullmatch(label):
        return mode, label
    example = '`topology="preferred:cloud.provider.com/topology-rack"`'
    raise refusal("topology", value, f"`LABEL`, `preferred:LABEL` or `unconstrained`, such as {example}")


def parse_cpu(field: str, value: object) -> str:
    """Return a number of CPUs as Kubernetes writes it, such as `4`, `0.5` or `500m`."""
    number = parse_number(value)
    text = value.strip() if isinstance(value, str) else "" if number is None else f"{number:g}"
    match = _CPU.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise refusal(field, value, f'a number of CPUs, such as `{field}="4"` or `{field}="500m"`')
    return text


def parse_memory(field: str, value: object) -> str:
    """Return an amount of memory as Kubernetes writes it, with its unit: a bare `64` would be 64 bytes."""
    text = value.strip() if isinstance(value, str) else ""
    match = _MEMORY.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise refusal(field, value, f'a size with its unit, such as `{field}="64Gi"` or `{field}="512Mi"`')
    return text


def parse_shm_size(field: str, value: object) -> str:
    """Return the size of `/dev/shm`; `0` leaves the container its own 64 MB."""
    if value == "0" or parse_whole(value) == 0:
        return "0"
    return parse_memory(field, value)


def parse_start_method(field: str, value: object) -> str:
    """Return how ranks are started: `warm` from a fork server that has imported torch, or `spawn`."""
    if value == "fork":
        why = "a forked process cannot use a CUDA context that its parent opened"
        cure = '`start_method="warm"`, which is as quick: it forks from a process that never touches CUDA'
        raise refusal(field, value, cure, why=why)
    if value in ("warm", "spawn"):
        return str(value)
    raise refusal(field, value, '"warm" or "spawn"')


def parse_variable_name(field: str, value: object) -> str:
    """Return the name of an environment variable that a user may set in the ranks."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z_]\w*", value, re.ASCII):
        raise refusal(field, value, "a name of letters, digits and `_`, such as `HF_HOME`")
    if _RESERVED_VARIABLE.fullmatch(value):
        raise SpecError(
            f"`{value}` cannot be set in `{field.split()[0]}`: the agent sets it in each rank. "
            f"Remove it; `nnodes` and `nproc_per_node` decide how many ranks there are."
        )
    return value


def parse_store(field: str, value: object) -> str:
    """Return the address of the run folders: a directory or a URL without credentials.

    Raises:
        SpecError: If the scheme is unknown, if it is `memory://`, which other processes cannot see, or if the
            URL carries what may be a secret, which the message does not repeat.
    """
    accepted = "a directory, or a URL that starts with `file://`, `s3://`, `gs://` or `az://`"
    text = value.strip() if isinstance(value, str) else ""
    scheme, separator, rest = text.partition("://")
    if separator and (_MORE_THAN_A_HOST.search(rest.partition("/")[0]) or _OPTIONS.search(rest)):
        raise SpecError(
            f"`{field}='{scheme}://...'` carries more than a bucket and a prefix; the rest may be a secret, "
            "it is not shown. Leave keys, tokens and options out of the URL: pass "
            '`store_credentials="aws-credentials/training"`, or set the environment variables of the service.'
        )
    if separator and scheme == "memory":
        raise refusal(field, value, accepted, why="the ranks of a gang cannot see the memory of one process")
    known = scheme in ("file", *REMOTE_SCHEMES)
    if not text or (separator and not (known and rest.strip("/"))):
        raise refusal(field, value, accepted)
    return text


def hide_secrets(url: str) -> str:
    """Return a URL without what may be a secret in it: user, password and options; a directory as it is."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}://{_OPTIONS.split(rest)[0].rpartition('@')[2]}" if separator else url


def parse_block_reference(field: str, value: object) -> str:
    """Return `type-slug/document-name` of a saved Prefect block, given the block itself or its reference."""
    example = f'`{field}="aws-credentials/training"`'
    if slug := getattr(value, "get_block_type_slug", None):
        document = getattr(value, "_block_document_name", None)
        if not document:
            # The block is not shown: its fields are credentials.
            raise SpecError(
                f"`{field}` is a block of type `{slug()}` that was not saved: other machines cannot load it. "
                f"Save it with `.save(name)`, or pass a saved one by name, such as {example}."
            )
        return f"{slug()}/{document}"
    if not isinstance(value, str) or not _BLOCK_REFERENCE.fullmatch(value.strip()):
        raise SpecError(
            f"`{field}` is a `{type(value).__name__}` that names no block; it may be a secret, it is not "
            f"shown. Pass a saved block or its `TYPE/NAME`, such as {example}."
        )
    return value.strip()


def parse_volume(field: str, value: object) -> object:
    """Return one volume: a Kubernetes volume with its `name` and source, and where it is mounted."""
    volume = cast("Mapping[str, object]", plain_mapping(field, value))
    source = set(volume) - {"name", "mountPath", "subPath", "readOnly"}
    path = volume.get("mountPath")
    if not volume.get("name") or not isinstance(path, str) or not path.startswith("/") or not source:
        example = '{"name": "data", "mountPath": "/data", "persistentVolumeClaim": {"claimName": "data"}}'
        raise refusal(field, value, f"a name, an absolute `mountPath` and a source, such as `{example}`")
    return volume
