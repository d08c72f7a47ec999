"""Who is where in a gang: ranks on nodes, ranks on GPUs, and the address where they meet.

Pure: numbers and text in, numbers and text out. What a node really has (GPUs, CPUs, devices that another gang
took) is counted elsewhere and passed in.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prefect_torch_elastic.errors import SpecError

# Set on the node, or in `env`, by people who want several ranks on one GPU. NCCL refuses that; gloo does not.
ALLOW_SHARED_GPUS_VARIABLE = "PREFECT_INTEGRATIONS_TORCH_ELASTIC_ALLOW_SHARED_GPUS"

DEFAULT_RDZV_PORT = 29400  # torchrun's own


@dataclass(frozen=True, kw_only=True)
class RankId:
    """One process of a gang.

    Attributes:
        rank: Its index in the gang, from 0.
        local_rank: Its index on its node, from 0.
        node_rank: The index of its node, from 0.
    """

    rank: int
    local_rank: int
    node_rank: int


def global_rank(node_rank: int, local_rank: int, *, nproc_per_node: int) -> int:
    """Return the rank of one process in the gang: node 0 first, then node 1, and so on.

    Args:
        node_rank: Index of the node, from 0.
        local_rank: Index of the process on its node, in [0, nproc_per_node).
        nproc_per_node: Processes on each node.

    Raises:
        SpecError: If `local_rank` is not on the node, or if there is no such node.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html
    """
    if not 0 <= local_rank < nproc_per_node:
        raise SpecError(
            f"`local_rank={local_rank}` is not on a node with `nproc_per_node={nproc_per_node}`. "
            f"Pass 0 to {nproc_per_node - 1}, or raise `nproc_per_node`."
        )
    if node_rank < 0:
        raise SpecError(f"`node_rank={node_rank}` is not a node. Nodes count from 0; node 0 is the leader.")
    return node_rank * nproc_per_node + local_rank


def locate_rank(rank: int, *, nproc_per_node: int) -> RankId:
    """Return where a rank lives; the inverse of `global_rank`.

    Raises:
        SpecError: If `rank` is negative.
    """
    if rank < 0:
        raise SpecError(f"`rank={rank}` is not a rank. Ranks count from 0.")
    node_rank, local_rank = divmod(rank, nproc_per_node)
    return RankId(rank=rank, local_rank=local_rank, node_rank=node_rank)


def node_layout(node_rank: int, *, nproc_per_node: int) -> tuple[RankId, ...]:
    """Return the ranks of one node, in the order of their local rank."""
    return tuple(
        RankId(
            rank=global_rank(node_rank, local_rank, nproc_per_node=nproc_per_node),
            local_rank=local_rank,
            node_rank=node_rank,
        )
        for local_rank in range(nproc_per_node)
    )


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
