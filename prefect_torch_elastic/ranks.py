"""How many ranks a node starts, which GPUs they get, and the address where nodes meet.

Pure: numbers and text in, numbers and text out. What a node really has (GPUs, CPUs, devices that another gang
took) is counted elsewhere and passed in.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from prefect_torch_elastic.errors import SpecError

# Set on the node, or in `env`, by people who want several ranks on one GPU. NCCL refuses that; gloo does not.
ALLOW_SHARED_GPUS_VARIABLE = "PREFECT_INTEGRATIONS_TORCH_ELASTIC_ALLOW_SHARED_GPUS"

DEFAULT_RDZV_PORT = 29400  # torchrun's own


def decide_processes(
    nproc_per_node: int | str,
    *,
    gpu_count: int,
    cpu_count: int,
    visible_devices: str | None = None,
    allow_shared_gpus: bool = False,
) -> int:
    """Return the number of processes that one node starts.

    `auto` is one process for each GPU, or for each CPU on a node without GPUs, as torchrun has it.

    Args:
        nproc_per_node: A number, or `auto`, `gpu` or `cpu`.
        gpu_count: GPUs that the node's processes can see.
        cpu_count: CPUs of the node.
        visible_devices: What `CUDA_VISIBLE_DEVICES` says, for the message.
        allow_shared_gpus: Let several ranks use one GPU.

    Raises:
        SpecError: If `gpu` meets a node without GPUs, or if there are more processes than GPUs.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html
    """
    match nproc_per_node:
        case "auto":
            return gpu_count or cpu_count
        case "cpu":
            return cpu_count
        case "gpu":
            if gpu_count == 0:
                raise SpecError(
                    f'`nproc_per_node="gpu"` needs a GPU, and this node shows {_gpus(0, visible_devices)}. '
                    f'Pass "auto", "cpu" or a number, or run where there is one.'
                )
            return gpu_count
        case int() if nproc_per_node >= 1:
            if 0 < gpu_count < nproc_per_node and not allow_shared_gpus:
                raise SpecError(
                    f"asked for {nproc_per_node} processes, {_gpus(gpu_count, visible_devices)}. "
                    f"Pass `nproc_per_node={gpu_count}` or lower, or set `{ALLOW_SHARED_GPUS_VARIABLE}=1` "
                    f"to let ranks share a GPU."
                )
            return nproc_per_node
        case _:
            raise SpecError(
                f"`nproc_per_node={nproc_per_node!r}` is not accepted. "
                f'Pass a whole number >= 1, or "auto", "gpu" or "cpu".'
            )


def _gpus(count: int, visible_devices: str | None) -> str:
    devices = "" if visible_devices is None else f" ({visible_devices or 'CUDA_VISIBLE_DEVICES is empty'})"
    return f"{count} {'GPU' if count == 1 else 'GPUs'} visible{devices}"


def assign_gpus(visible: Sequence[str], *, taken: Iterable[str], wanted: int) -> tuple[str, ...]:
    """Return the GPUs that a gang gets: the first ones that no other gang of this node has.

    Args:
        visible: Ids of the GPUs that this node shows, as in `CUDA_VISIBLE_DEVICES`.
        taken: Ids that other gangs hold.
        wanted: GPUs that the gang needs.

    Raises:
        SpecError: If too few are free.
    """
    held = set(taken)
    free = [device for device in visible if device not in held]
    if len(free) < wanted:
        others = ",".join(device for device in visible if device in held) or "none"
        raise SpecError(
            f"asked for {wanted} GPUs, {len(free)} of {len(visible)} are free ({','.join(free) or 'none'}); "
            f"other gangs on this node hold {others}. Wait until they end, or lower `nproc_per_node`."
        )
    return tuple(free[:wanted])


def parse_endpoint(endpoint: str, *, default_port: int = DEFAULT_RDZV_PORT) -> tuple[str, int]:
    """Return host and port of an address such as `node-0:29400` or `[fd00::5]:29400`.

    Args:
        endpoint: The address; an IPv6 host stands in brackets. Port 0 is any free one.
        default_port: The port when the address has none.

    Raises:
        SpecError: If the host is empty, the port is not one, or an IPv6 address has no brackets.
    """
    text = endpoint.strip()
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        is_split = bool(closed) and _is_ipv6(host) and rest[:1] in ("", ":")
        separator, port = rest[:1], rest[1:]
    else:
        host, separator, port = text.rpartition(":") if ":" in text else (text, "", "")
        readings = [f"[{host}]:{port}"] if _is_ipv6(host) else []
        readings += [f"[{text}]"] if _is_ipv6(text) else []
        if readings:
            raise SpecError(
                f"`{endpoint}` is ambiguous: the last part of an IPv6 address looks like a port. "
                f"Put the address in brackets: {' or '.join(f'`{reading}`' for reading in readings)}."
            )
        is_split = bool(host) and not set(host) & set(":/[] ")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535
    if not is_split or (separator and not is_port):
        raise SpecError(
            f"`{endpoint}` is not an address. Pass `HOST`, `HOST:PORT` or `[IPV6]:PORT`, port 0 to 65535."
        )
    return host, int(port) if separator else default_port


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def render_endpoint(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 host in brackets; the inverse of `parse_endpoint`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
