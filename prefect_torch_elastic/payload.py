"""Function and arguments of a call, written as the one signed file that all its ranks read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from prefect_torch_elastic import parcel, pickles
from prefect_torch_elastic.errors import TransferError

LARGE_CALL_BYTES = 256 << 20


class Payload(Protocol):
    """What ranks are to run."""

    def write(self, path: Path, *, key: bytes) -> list[str]:
        """Write it for the ranks, and return the modules that they will import.

        Raises:
            TransferError: If something cannot be pickled; the error names it.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PythonPayload:
    """A function of this process and its arguments.

    Attributes:
        function: The user's function.
        args: Its positional arguments.
        kwargs: Its arguments by name.
        warn: A logger's method: for what travels otherwise than a user may think.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    warn: Callable[..., Any]

    def write(self, path: Path, *, key: bytes) -> list[str]:
        arguments = name_arguments(self.function, self.args, self.kwargs)
        if on_gpu := pickles.find_cuda_arguments(arguments):
            names = ", ".join(f"`{name}`" for name in on_gpu)
            self.warn("CUDA tensors in %s travel as CPU tensors; move them in the ranks.", names)
        try:
            content = (self.function, self.args, self.kwargs)
            size, modules = parcel.write_call(path, content, key=key)
        except TransferError as error:
            raise pickles.name_culprit(self.function, arguments) from error
        if size > LARGE_CALL_BYTES:
            self.warn(
                "The arguments are %.1f GiB, written to the run folder. Pass a path or a URL instead.",
                size / 2**30,
            )
        return modules


def name_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by parameter, defaults included."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
