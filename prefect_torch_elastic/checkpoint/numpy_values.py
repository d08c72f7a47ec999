"""What numpy has, as JSON: scalars, arrays, dtypes and random generators; never an array of objects."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from prefect_torch_elastic.checkpoint.values import (
    INLINE_LIMIT,
    TAG,
    Decoder,
    Encoder,
    Json,
    decode_bytes,
)
from prefect_torch_elastic.errors import CheckpointError

_SMALL = 4096  # bytes; a larger array goes where the tensors go
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_TENSOR_KINDS = "biufc"  # bool, int, uint, float, complex


def encode(encoder: Encoder, name: str, value: Any) -> Json:
    """Return the JSON of a value of numpy, None if it is none."""
    if isinstance(value, np.generic):
        return {TAG: "numpy.scalar", "v": _encode_array(encoder, name, np.asarray(cast("Any", value)))}
    if type(value) is np.ndarray:
        array = cast("np.ndarray[Any, Any]", value)
        if encoder.keep and array.nbytes > _SMALL and (tensor := _view_as_tensor(array)) is not None:
            encoder.keep(name, tensor)
            return {TAG: "numpy.tensor", "n": name}
        return {TAG: "numpy.array", "v": _encode_array(encoder, name, array)}
    if isinstance(value, np.dtype):
        return {TAG: "numpy.dtype", "v": _encode_array(encoder, name, np.empty(0, cast("Any", value)))}
    if isinstance(value, np.random.Generator):
        return {TAG: "numpy.generator", "v": _encode_bits(encoder, name, value.bit_generator)}
    if isinstance(value, np.random.RandomState):
        state = cast("Any", value).get_state(legacy=False)
        return {TAG: "numpy.randomstate", "v": encoder.encode(name, state)}
    return None


def _view_as_tensor(array: np.ndarray[Any, Any]) -> Any:
    import torch

    usual = array.dtype.isnative and array.dtype.kind in _TENSOR_KINDS and array.dtype.itemsize <= 16
    if not usual or not array.flags.c_contiguous or not array.flags.writeable:
        return None
    try:
        return cast("Any", torch).from_numpy(array)
    except TypeError:  # a dtype that only numpy has
        return None


def _encode_array(encoder: Encoder, name: str, array: np.ndarray[Any, Any]) -> str:
    if array.nbytes > INLINE_LIMIT:  # said before it is copied
        encoder.refuse_bytes(name, array.nbytes)
    stream = io.BytesIO()
    try:
        np.lib.format.write_array(stream, array, allow_pickle=False)
    except ValueError as error:
        raise CheckpointError(
            f"`{name}` cannot be saved: it is an array of `{array.dtype}`, which holds Python objects. "
            "Save a list."
        ) from error
    return encoder.encode_bytes(name, stream.getvalue())


def _decode_array(_: Decoder, json: Json) -> np.ndarray[Any, Any]:
    stream = io.BytesIO(decode_bytes(json["v"]))
    return np.lib.format.read_array(stream, allow_pickle=False)


def _decode_tensor(decoder: Decoder, json: Json) -> np.ndarray[Any, Any]:
    if decoder.fetch is None:
        raise CheckpointError(f"The checkpoint names the array `{json['n']}` where it cannot be read.")
    return decoder.fetch(json["n"]).cpu().numpy()


def _encode_bits(encoder: Encoder, name: str, bits: Any) -> Json:
    if type(bits).__name__ not in _BIT_GENERATORS:
        raise CheckpointError(
            f"`{name}` cannot be saved: its bit generator is a `{type(bits).__name__}`. Use one of "
            f"{', '.join(_BIT_GENERATORS)}."
        )
    return encoder.encode(name, bits.state)


def _decode_generator(decoder: Decoder, json: Json) -> np.random.Generator:
    state = decoder.decode(json["v"])
    if state["bit_generator"] not in _BIT_GENERATORS:
        raise CheckpointError(
            f"The checkpoint has a bit generator `{state['bit_generator']}`, which is unknown."
        )
    bits = getattr(np.random, state["bit_generator"])()
    bits.state = state
    return np.random.Generator(bits)


def _decode_random_state(decoder: Decoder, json: Json) -> np.random.RandomState:
    generator = np.random.RandomState()
    generator.set_state(decoder.decode(json["v"]))
    return generator


DECODERS: dict[str, Callable[[Decoder, Json], Any]] = {
    "numpy.scalar": lambda decoder, json: _decode_array(decoder, json)[()],
    "numpy.array": _decode_array,
    "numpy.tensor": _decode_tensor,
    "numpy.dtype": lambda decoder, json: _decode_array(decoder, json).dtype,
    "numpy.generator": _decode_generator,
    "numpy.randomstate": _decode_random_state,
}
