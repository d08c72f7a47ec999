"""What a tensor is made of: the name of its dtype, its bytes, and whether it can be saved at all."""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any, cast

import torch
from torch import Tensor

from prefect_torch_elastic.errors import CheckpointError


def name_dtype(dtype: torch.dtype) -> str:
    """Return `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name that `name_dtype` gave.

    Raises:
        CheckpointError: If this torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"The checkpoint has a tensor of dtype `{name}`, which torch {torch.__version__} does not know. "
            "Load it with the version of torch that wrote it, or a newer one."
        )
    return dtype


def is_dtensor(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor; `torch.distributed.tensor` is not imported to find that out."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return cast("Any", tensor).to_local() if is_dtensor(tensor) else tensor


def check_tensor(name: str, tensor: Tensor) -> Tensor:
    """Return `tensor` without its graph, as something whose memory is its value.

    Raises:
        CheckpointError: If it has no memory of its own that could be saved.
    """
    plain = tensor.detach()
    if problem := _find_problem(plain):
        raise CheckpointError(f"`{name}` cannot be saved: {problem}")
    if type(plain) is Tensor and (plain.is_conj() or plain.is_neg()):
        return plain.resolve_conj().resolve_neg()  # the bytes of these two are not their value: a copy
    return plain


def _find_problem(tensor: Tensor) -> str:
    if type(tensor) is not Tensor and is_dtensor(tensor):
        if any(placement.is_partial() for placement in cast("Any", tensor).placements):
            return "it is a DTensor of partial sums. Call `redistribute` first."
        return _find_problem(local_part(tensor))
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        return f"it is a {kind} tensor. Save its parts, such as `indices()` and `values()`."
    if tensor.is_meta:
        return "it is on the `meta` device and has no values. Materialise it with `to_empty(device=...)`."
    if tensor.is_quantized:
        return f"its dtype `{tensor.dtype}` is quantized. Save `int_repr()` and its scales."
    if type(tensor) is not Tensor and hasattr(type(tensor), "__tensor_flatten__"):
        return f"it is a `{type(tensor).__name__}`, which wraps other tensors. Save those."
    return ""


def is_fillable(tensor: Tensor) -> bool:
    """Whether bytes can be read straight into the memory of `tensor`."""
    local = local_part(tensor)
    return local.is_contiguous() and not local.is_conj() and not local.is_neg() and not local.is_inference()


def find_memory(tensor: Tensor) -> tuple[int, int, int] | None:
    """Return which memory a tensor is in, and where it begins and ends there; None without any."""
    local = local_part(tensor)
    place = local.untyped_storage().data_ptr() if local.numel() else 0
    start = int(local.storage_offset()) * local.element_size()
    return (place, start, start + int(local.nbytes)) if place else None


def make_empty(dtype: torch.dtype, shape: tuple[int, ...], *, like: Tensor | None = None) -> Tensor:
    """Return a contiguous tensor without values, on the device of `like` and spread over ranks like it."""
    if like is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if is_dtensor(like) and tuple(like.shape) == shape:
        return torch.empty_like(like.detach(), dtype=dtype, memory_format=torch.contiguous_format)
    return torch.empty(shape, dtype=dtype, device=like.device)


def read_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a small tensor; a copy."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b""


def parse_tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor that `read_bytes` took apart.

    Raises:
        CheckpointError: If there are not as many bytes as the shape needs.
    """
    if min(shape, default=0) < 0 or len(data) != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"A tensor of shape {list(shape)} and `{dtype}` has {len(data)} bytes.")
    tensor = torch.empty(shape, dtype=dtype, device="cpu")  # whatever the default device is
    ctypes.memmove(tensor.data_ptr(), data, len(data))
    return tensor
