"""What torch has besides large tensors, as JSON: numbers, small tensors, shapes, dtypes, generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from prefect_torch_elastic.checkpoint.tensors import (
    check_tensor,
    is_dtensor,
    name_dtype,
    parse_dtype,
    parse_tensor,
    read_bytes,
)
from prefect_torch_elastic.checkpoint.values import (
    INLINE_LIMIT,
    TAG,
    Decoder,
    Encoder,
    Json,
    decode_bytes,
)
from prefect_torch_elastic.errors import CheckpointError

_NUMBERS = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)


def encode(encoder: Encoder, name: str, value: Any) -> Json:
    """Return the JSON of a value of torch, None if it is none."""
    if isinstance(value, Tensor):
        return _encode_tensor(encoder, name, value)
    if isinstance(value, torch.Size):
        return {TAG: "torch.size", "v": list(value)}
    if isinstance(value, torch.dtype):
        return {TAG: "torch.dtype", "v": name_dtype(value)}
    if isinstance(value, torch.device):
        return {TAG: "torch.device", "v": str(value)}
    if isinstance(value, torch.Generator):
        state = encoder.encode_bytes(name, read_bytes(value.get_state()))
        return {TAG: "torch.generator", "device": value.device.type, "v": state}
    return None


def _encode_tensor(encoder: Encoder, name: str, value: Tensor) -> Json:
    if is_number(value):
        # Most optimizers count their steps in such a tensor, one for each parameter.
        return {
            TAG: "torch.number",
            "dtype": name_dtype(value.dtype),
            "v": encoder.encode(name, value.item()),
        }
    tensor = check_tensor(name, value)
    if encoder.keep:
        encoder.keep(name, tensor)
        return {TAG: "torch.tensor", "n": name}
    if is_dtensor(tensor):
        raise CheckpointError(
            f"`{name}` cannot be saved: it is a DTensor in an entry of one rank. Save `to_local()`, or use "
            "an entry of all ranks."
        )
    if tensor.nbytes > INLINE_LIMIT:  # said before it is copied
        encoder.refuse_bytes(name, tensor.nbytes)
    data = encoder.encode_bytes(name, read_bytes(tensor))
    return {
        TAG: "torch.inline",
        "dtype": name_dtype(tensor.dtype),
        "shape": list(tensor.shape),
        "v": data,
    }


def is_number(tensor: Tensor) -> bool:
    """Whether a tensor is one number in host memory, which JSON holds exactly."""
    return (
        tensor.dim() == 0
        and tensor.device.type == "cpu"
        and tensor.dtype in _NUMBERS
        and type(tensor) is Tensor
    )


def _decode_tensor(decoder: Decoder, json: Json) -> Tensor:
    if decoder.fetch is None:
        raise CheckpointError(f"The checkpoint names the tensor `{json['n']}` where it cannot be read.")
    return decoder.fetch(json["n"])


def _decode_number(decoder: Decoder, json: Json) -> Tensor:
    return torch.tensor(decoder.decode(json["v"]), dtype=parse_dtype(json["dtype"]), device="cpu")


def _decode_inline(_: Decoder, json: Json) -> Tensor:
    return parse_tensor(decode_bytes(json["v"]), parse_dtype(json["dtype"]), tuple(json["shape"]))


def _decode_generator(_: Decoder, json: Json) -> torch.Generator:
    try:
        generator = torch.Generator(json["device"])
        data = decode_bytes(json["v"])
        generator.set_state(parse_tensor(data, torch.uint8, (len(data),)))
    except RuntimeError as error:
        raise CheckpointError(f"A `torch.Generator` of the checkpoint does not fit here: {error}") from error
    return generator


DECODERS: dict[str, Callable[[Decoder, Json], Any]] = {
    "torch.size": lambda _, json: torch.Size(json["v"]),
    "torch.dtype": lambda _, json: parse_dtype(json["v"]),
    "torch.device": lambda _, json: torch.device(json["v"]),
    "torch.generator": _decode_generator,
    "torch.number": _decode_number,
    "torch.tensor": _decode_tensor,
    "torch.inline": _decode_inline,
}
