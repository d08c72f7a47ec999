"""The random state of a rank: python's, numpy's and torch's, saved and put back exactly."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from typing import Any, cast

import torch

from prefect_torch_elastic.checkpoint.values import Json, decode_value, encode_value
from prefect_torch_elastic.errors import CheckpointError

RANDOM = "__random__"


def encode_random_state() -> Json:
    """Return the random state of this process as JSON, with the seed that torch began with."""
    state: dict[str, Any] = {
        "seed": torch.initial_seed(),
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
    }
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = numpy.random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return encode_value(RANDOM, state)


def prepare_random_state(json: Json) -> Callable[[], list[str]]:
    """Check a saved random state on generators of its own, and return what puts it in place.

    Raises:
        CheckpointError: If a generator refuses it.
    """
    state = decode_value(json)
    numpy = _load_numpy() if "numpy" in state else None
    try:
        random.Random().setstate(state["python"])
        torch.Generator().set_state(state["torch"])
        if numpy is not None:
            numpy.random.RandomState().set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.Generator("cuda").set_state(state["cuda"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"The random state of the checkpoint was refused: {error}. Load it with the versions of Python, "
            "torch and numpy that wrote it."
        ) from error
    return lambda: _restore(state, numpy)


def _restore(state: dict[str, Any], numpy: Any) -> list[str]:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    said: list[str] = []
    if numpy is not None:
        numpy.random.set_state(state["numpy"])
    elif "numpy" in state:
        said.append("The checkpoint has numpy's random state, and there is no numpy here: it was left out.")
    if torch.cuda.is_available():
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])
        else:
            said.append("The checkpoint has no CUDA random state: the one of this process goes on.")
    elif "cuda" in state:
        said.append("The checkpoint has CUDA random state, and there is no CUDA here: it was left out.")
    return said


def seed_new_rank(json: Json, *, seed: int, rank: int, step: int) -> list[str]:
    """Seed all generators of a rank that the checkpoint does not know, the same at each try.

    Args:
        json: The random state of saved rank 0, for its seed.
        seed: The run's.
        rank: The new rank.
        step: The checkpoint's.
    """
    words = f"{decode_value(json)['seed']} {seed} {rank} {step}"
    drawn = int.from_bytes(hashlib.sha256(words.encode()).digest()[:8])
    random.seed(drawn)
    cast("Any", torch).manual_seed(drawn)  # CUDA too
    if (numpy := _load_numpy()) is not None:
        numpy.random.seed(drawn % 2**32)
    return [f"Rank {rank} is new: its random state was made from the seed of the checkpoint."]


def _load_numpy() -> Any:
    try:
        import numpy as np
    except ModuleNotFoundError:
        return None
    return np
