"""How Python objects travel: one signed file, written once and shared by all ranks that read it.

Layout: magic, HMAC-SHA256 over the rest, then `(offset, length)` of the pickle and of each buffer, then the
bytes, each part 64-byte aligned. Tensors and arrays are buffers (pickle protocol 5): a reader maps the file
copy-on-write, so eight ranks that get a 1 GB tensor share one gigabyte of page cache until they write to it.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import mmap
import os
import pickle
import pickletools
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from prefect_torch_elastic.compat import untyped_storage
from prefect_torch_elastic.errors import TransferError

_MAGIC = b"PTEPARC1"
_ALIGN = 64
_HEAD = struct.Struct("!8s32sI")  # magic, mac, number of parts
_PART = struct.Struct("!QQ")  # offset, length
_SHOWN = 80


def write_parcel(path: Path, value: object, *, key: bytes) -> int:
    """Write `value` to `path` in one atomic step and return the size in bytes.

    Args:
        path: The file; its folder exists.
        value: Anything that cloudpickle carries.
        key: Secret of the run; `read_parcel` refuses a file that was not written with it.

    Raises:
        TransferError: If `value` cannot be pickled.
    """
    return _write(path, *_pickle(value), key=key)


def write_call(path: Path, call: tuple[Any, ...], *, key: bytes) -> tuple[int, list[str]]:
    """Write a function with its arguments, and return the size and the modules that the pickle names.

    A node imports them once, ahead of its ranks. Standard library, torch and this package are left out.

    Raises:
        TransferError: If something in `call` cannot be pickled.
    """
    head, buffers = _pickle(call)
    return _write(path, head, buffers, key=key), list_modules(head)


def list_modules(data: bytes) -> list[str]:
    """Return the modules that a pickle imports when it is loaded, without those that every node has."""
    strings: list[str | None] = []
    memo: list[str | None] = []
    found: dict[str, None] = {}
    last: str | None = None
    after_subimport = False
    for opcode, argument, _ in pickletools.genops(data):
        match opcode.name:
            case "SHORT_BINUNICODE" | "BINUNICODE":
                last = cast(str, argument)
                strings.append(last)
                if after_subimport:
                    found[last] = None
                after_subimport = False
            case "MEMOIZE":
                memo.append(last)
            case "BINGET" | "LONG_BINGET":
                last = memo[cast(int, argument)] if cast(int, argument) < len(memo) else None
                strings.append(last)
                if after_subimport and last:
                    found[last] = None
                after_subimport = False
            case "STACK_GLOBAL":
                module, name = strings[-2:]
                after_subimport = name == "subimport"
                found[module or ""] = None
                last = None
            case _:
                last = None
    return [module for module in found if module in sys.modules and not _everywhere(module)]


def _everywhere(module: str) -> bool:
    root = module.partition(".")[0]
    return root in sys.stdlib_module_names or root in {"torch", "numpy", "cloudpickle", "prefect_torch_elastic"}


def _pickle(value: object) -> tuple[bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    return _dumps(value, buffers.append), buffers


def _write(path: Path, head: bytes, buffers: Sequence[pickle.PickleBuffer], *, key: bytes) -> int:
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    table, offset = b"", _align(_HEAD.size + _PART.size * len(parts))
    for part in parts:
        table += _PART.pack(offset, part.nbytes)
        offset = _align(offset + part.nbytes)
    mac = hmac.new(key, table, hashlib.sha256)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(_HEAD.pack(_MAGIC, bytes(32), len(parts)) + table)
        for part in parts:
            file.write(bytes(_align(file.tell()) - file.tell()))
            file.write(part)
            mac.update(part)
        size = file.tell()
        file.seek(0)
        file.write(_HEAD.pack(_MAGIC, mac.digest(), len(parts)))
    temporary.replace(path)
    return size


def verify_parcel(path: Path, *, key: bytes) -> None:
    """Check that `path` is whole and was written with `key`.

    Raises:
        TransferError: If it was not; nothing was unpickled.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        mac, table, parts = _parse(memoryview(view), path)
        check = hmac.new(key, table, hashlib.sha256)
        for part in parts:
            check.update(part)
        released = hmac.compare_digest(mac, check.digest())
        for part in parts:
            part.release()
        table.release()
    if not released:
        raise TransferError(
            f"`{path}` was not written by this run, or it is damaged: its signature does not match. "
            "It was not loaded. Run the task again; if it repeats, check who else writes to this folder."
        )


def read_parcel(path: Path, *, key: bytes | None) -> Any:
    """Return the object in `path`; its tensors and arrays stay in the mapped file until they are written to.

    Args:
        path: A file of `write_parcel`.
        key: Secret of the run, or None when this process's own agent has verified the file already.

    Raises:
        TransferError: If the signature does not match.
    """
    if key is not None:
        verify_parcel(path, key=key)
    with path.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    _, _, parts = _parse(view, path)
    return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301  (verified above or by the agent)


def name_what_cannot_travel(function: Callable[..., Any], arguments: Mapping[str, Any]) -> TransferError:
    """Return an error that names the argument, or the variable of the function, that cannot be pickled."""
    for name, value in arguments.items():
        if problem := _problem(value):
            return TransferError(
                f"argument `{name}` ({_type_name(value)}) cannot be sent to the ranks: {problem}. "
                "Pass plain data, a path or a URL, and open it inside the function."
            )
    for name, value in _outer_variables(function).items():
        if problem := _problem(value):
            return TransferError(
                f"variable `{name}` ({_type_name(value)}), which `{function.__name__}` uses, cannot be sent "
                f"to the ranks: {problem}. Create it inside the function, or pass plain data."
            )
    return TransferError(
        f"`{function.__name__}` cannot be sent to the ranks: {_problem((function, dict(arguments)))}."
    )


def find_cuda_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of arguments that are CUDA tensors or modules; they travel as CPU tensors."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    found: list[str] = []
    for name, value in arguments.items():
        tensors: Sequence[Any] = ()
        if isinstance(value, torch.Tensor):
            tensors = [value]
        elif isinstance(value, torch.nn.Module):
            tensors = [*value.parameters(), *value.buffers()]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            found.append(name)
    return found


def _dumps(value: object, keep: Callable[[pickle.PickleBuffer], Any]) -> bytes:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            torch = sys.modules.get("torch")
            if torch is not None:
                if isinstance(obj, torch.Tensor) and obj.device.type == "cuda":
                    return obj.cpu().__reduce_ex__(5)
                if type(obj) is torch.UntypedStorage and obj.device.type == "cpu":
                    return _storage_from, (pickle.PickleBuffer(_bytes_of(obj)),)
                if type(obj) is torch.TypedStorage:
                    return _typed_storage_from, (untyped_storage(obj), obj.dtype)
            return super().reducer_override(obj)

    stream = io.BytesIO()
    with _modules_by_value(value):
        try:
            Pickler(stream, protocol=5, buffer_callback=keep).dump(value)
        except TransferError:
            raise
        except Exception as error:
            raise TransferError(_one_line(error)) from error
    return stream.getvalue()


def _bytes_of(storage: Any) -> Any:
    """A zero-copy view; the storage outlives it because the pickler holds the storage while it dumps."""
    import ctypes

    return (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr()) if storage.nbytes() else b""


def _storage_from(buffer: Any) -> Any:
    import torch

    if not len(buffer):
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _typed_storage_from(untyped: Any, dtype: Any) -> Any:
    import torch

    return torch.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


class _modules_by_value:  # noqa: N801  (a context manager, read as a verb phrase)
    """Let modules that only this process can import travel inside the pickle.

    Prefect loads a flow file under a name of its own (`__prefect_loader_…__`) that no other process finds;
    a notebook's helper may be `exec`ed. cloudpickle would refer to them by name.
    """

    def __init__(self, value: object) -> None:
        function = value[0] if isinstance(value, tuple) and value else value  # pyright: ignore[reportUnknownVariableType]
        self._module = sys.modules.get(getattr(cast(Any, function), "__module__", None) or "")

    def __enter__(self) -> None:
        import cloudpickle

        module = self._module
        self._registered = module is not None and module.__name__ != "__main__" and not _importable(module)
        if self._registered:
            cloudpickle.register_pickle_by_value(module)

    def __exit__(self, *_: object) -> None:
        import cloudpickle

        if self._registered:
            cloudpickle.unregister_pickle_by_value(self._module)


def _importable(module: Any) -> bool:
    from importlib.machinery import PathFinder

    root = module.__name__.partition(".")[0]
    if root in sys.builtin_module_names or root in sys.stdlib_module_names:
        return True
    return PathFinder.find_spec(root, [entry or os.getcwd() for entry in sys.path]) is not None


def _parse(view: memoryview, path: Path) -> tuple[bytes, memoryview, list[memoryview]]:
    try:
        magic, mac, count = _HEAD.unpack_from(view)
        if magic != _MAGIC:
            raise ValueError("not a parcel")
        table = view[_HEAD.size : _HEAD.size + _PART.size * count]
        spans = list(_PART.iter_unpack(table))
        if any(offset + length > view.nbytes for offset, length in spans):
            raise ValueError("cut short")
    except (struct.error, ValueError) as error:
        raise TransferError(f"`{path}` cannot be read: {error}. It was not loaded.") from error
    return mac, table, [view[offset : offset + length] for offset, length in spans]


def _align(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _problem(value: object) -> str:
    try:
        _dumps(value, lambda _: None)
    except TransferError as error:
        return str(error)
    return ""


def _outer_variables(function: Callable[..., Any]) -> dict[str, Any]:
    import inspect

    try:
        found = inspect.getclosurevars(function)
    except (TypeError, ValueError):
        return {}
    return {**found.nonlocals, **found.globals}


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
