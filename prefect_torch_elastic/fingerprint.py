"""A hash of arguments that is equal in every process in which they are equal.

Pickles cannot say that: they depend on the order of sets and on which strings are the same object. This room
looks at what an object would tell a pickler, sorted, and at the bytes of tensors and arrays.
"""

from __future__ import annotations

import copyreg
import hashlib
import marshal
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, cast

from crc32c import crc32c

_SCALARS: frozenset[type] = frozenset({type(None), bool, int, float, complex, str, bytes})
_PATHS: frozenset[type] = frozenset(
    {PurePath, PurePosixPath, PureWindowsPath, Path, PosixPath, WindowsPath}
)  # a class of the user's own may have more than the path
_SHORT_BYTES = 40
_LARGE_SEQUENCE = 1000
_LARGE_BUFFER_BYTES = 1 << 20
_CHUNK_BYTES = 64 << 10
_MAX_CYCLIC = 100_000  # looks at objects with a way back to themselves: shared ones are looked at each time
_WITHOUT_REFERENCES = 2  # a version of marshal that writes equal values as equal bytes, shared or not


class _NotStable(Exception):  # noqa: N818  (a verdict, not an error)
    """The value has no hash that other processes would agree with."""


def hash_arguments(arguments: Mapping[str, Any]) -> str | None:
    """Return the hash of a call's parameters, None if one of them has none.

    Sets and dictionaries may come in any order; tensors and arrays count by type, shape and bytes, other
    objects by their class and by what they would pickle.
    """
    try:
        return _Walk().digest(dict(arguments)).hex()
    except Exception:  # noqa: BLE001  (`__reduce__` of user classes raises anything, and then there is no hash)
        return None


def hash_source(source: str | None, function: Callable[..., Any]) -> str:
    """Return the hash of a function's own code."""
    code: Any = getattr(function, "__code__", None)
    body = source if source is not None else _code_parts(code) if code else function.__qualname__
    return _Walk().digest(body).hex()


def hash_closure(function: Callable[..., Any]) -> str | None:
    """Return the hash of the values that a function closes over, None if one of them has none."""
    cells = getattr(function, "__closure__", None) or ()
    try:
        return _Walk().digest([cell.cell_contents for cell in cells]).hex()
    except Exception:  # noqa: BLE001  (as in `hash_arguments`, or a cell that is still empty)
        return None


class _Walk:
    """One look at a value and all that it refers to."""

    def __init__(self) -> None:
        self._open: list[int] = []  # objects that we are inside of: a cycle is its distance
        self._cycles = 0  # how often we came back to one of them
        self._cyclic = 0
        # The digests of objects without a cycle; the objects stay alive, so that no other one gets their id.
        self._finished: dict[int, tuple[Any, bytes]] = {}

    def digest(self, value: Any) -> bytes:
        """Return a few bytes that stand for `value`: a hash, or a short plain value itself."""
        if type(value) in _SCALARS:
            data = marshal.dumps(value, _WITHOUT_REFERENCES)
            return data if len(data) <= _SHORT_BYTES else _join("long", [data])
        if finished := self._finished.get(id(value)):
            return finished[1]
        if id(value) in self._open:
            self._cycles += 1
            return _join("cycle", [str(len(self._open) - self._open.index(id(value))).encode()])
        cycles = self._cycles
        self._open.append(id(value))
        try:
            digest = self._look(value)
        finally:
            self._open.pop()
        if self._cycles == cycles:
            self._finished[id(value)] = (value, digest)
        else:  # its digest depends on where we came from, so it is looked at again
            self._cyclic += 1
            if self._cyclic > _MAX_CYCLIC:
                raise _NotStable
        return digest

    def _look(self, value: Any) -> bytes:
        kind = cast("type[Any]", type(value))
        if kind in (list, tuple):
            return _join(kind.__name__, self._items(value))
        if kind is dict:
            return self._mapping(value)
        if kind in (set, frozenset):
            return _join("set", sorted(map(self.digest, value)))
        if kind in _PATHS:
            return _join("path", [str(value).encode()])
        if kind is bytearray:
            return _join("bytearray", [_hash_buffer(memoryview(value))])
        return self._look_at_object(value)

    def _items(self, value: list[Any] | tuple[Any, ...]) -> Iterable[bytes]:
        # A million numbers one by one would take seconds.
        if len(value) > _LARGE_SEQUENCE and set(map(type, value)) <= _SCALARS:
            return [_hash_buffer(memoryview(marshal.dumps(value, _WITHOUT_REFERENCES)))]
        return map(self.digest, value)

    def _mapping(self, value: dict[Any, Any]) -> bytes:
        if len(value) > _LARGE_SEQUENCE and set(map(type, value)) == {str}:
            keys = sorted(value)
            values = [value[key] for key in keys]
            return _join("dict", [_join("keys", self._items(keys)), _join("values", self._items(values))])
        pairs = [self.digest(key) + self.digest(item) for key, item in value.items()]
        return _join("dict", sorted(pairs))

    def _look_at_object(self, value: Any) -> bytes:
        match value:
            case type():
                return _join("class", [_name(value)])
            case ModuleType():
                return _join("module", [value.__name__.encode()])
            case Enum():
                return _join("enum", [_name(type(value)), value.name.encode()])
            case FunctionType():
                return _join("function", [_name(value), *map(self.digest, _function_parts(value))])
            case BuiltinFunctionType() if isinstance(value.__self__, ModuleType | None):
                return _join("builtin", [_name(value)])
            case _:
                return self._look_at_data(value)

    def _look_at_data(self, value: Any) -> bytes:
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        kind = cast("type[Any]", type(value))  # a subclass may have more than its numbers, such as a mask
        if numpy is not None and kind is numpy.ndarray and not value.dtype.hasobject:
            return _hash_array(numpy, value)
        if torch is not None and kind in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            return _hash_tensor(torch, value)
        return self._look_at_pickle(value)

    def _look_at_pickle(self, value: Any) -> bytes:
        reduce: Any = copyreg.dispatch_table.get(cast("Any", type(value)))
        reduced: Any = reduce(value) if reduce else value.__reduce_ex__(4)
        if isinstance(reduced, str):
            return _join("global", [_name(type(value)), reduced.encode()])
        rest: list[Any] = [*reduced, None, None, None, None]
        function, args, state, items, pairs = rest[:5]
        parts = [self.digest(function), self.digest(tuple(args)), self.digest(state)]
        parts.append(_join("items", map(self.digest, items or ())))
        entries = [self.digest(key) + self.digest(item) for key, item in pairs or ()]
        return _join("object", [_name(type(value)), *parts, *sorted(entries)])


def _join(kind: str, parts: Iterable[bytes]) -> bytes:
    """Hash parts of any length so that no two lists of parts are the same text.

    Marshal starts no value with a zero, so a hash is never a short plain value.
    """
    text = b"".join([b"%d:%b" % (len(part), part) for part in parts])
    return b"\0" + hashlib.sha256(b"%b %b" % (kind.encode(), text)).digest()


def _name(value: Any) -> bytes:
    return f"{value.__module__}.{value.__qualname__}".encode()


def _function_parts(function: FunctionType) -> list[Any]:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [*_code_parts(function.__code__), function.__defaults__, function.__kwdefaults__, cells]


def _code_parts(code: CodeType) -> list[Any]:
    """What the code does, without where it stands."""
    constants = [_code_parts(one) if isinstance(one, CodeType) else one for one in code.co_consts]
    return [code.co_code, code.co_names, code.co_varnames, constants]


def _hash_array(numpy: Any, array: Any) -> bytes:
    data = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8) if array.size else b""
    head = f"{array.dtype.descr}{array.shape}".encode()
    return _join("array", [_name(cast("Any", type(array))), head, _hash_buffer(memoryview(data))])


def _hash_tensor(torch: Any, tensor: Any) -> bytes:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy() if flat.numel() else b""
    head = f"{tensor.dtype}{tuple(tensor.shape)}{tensor.requires_grad}".encode()
    return _join("tensor", [_name(cast("Any", type(tensor))), head, _hash_buffer(memoryview(data))])


def _hash_buffer(data: memoryview) -> bytes:
    """Hash bytes; a large buffer through the checksums of its chunks, ten times as fast as SHA-256.

    A small change in a chunk always changes its checksum, and a large one changes many chunks.
    """
    data = data.cast("B")
    if data.nbytes <= _LARGE_BUFFER_BYTES:
        return hashlib.sha256(data).digest()
    chunks = range(0, data.nbytes, _CHUNK_BYTES)
    sums = b"".join(crc32c(data[start : start + _CHUNK_BYTES]).to_bytes(4, "big") for start in chunks)
    return _join("chunks", [data.nbytes.to_bytes(8, "big"), sums])
