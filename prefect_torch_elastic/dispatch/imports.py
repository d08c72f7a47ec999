"""What a piece of Python imports, by its compiled code: also inside functions, and under conditions."""

from __future__ import annotations

import dis
import functools
from collections.abc import Generator, Iterable
from importlib.machinery import SourceFileLoader
from importlib.util import resolve_name
from pathlib import Path
from types import CodeType
from typing import Any

_IMPORT_NAME = dis.opmap["IMPORT_NAME"]
_IMPORT_FUNCTIONS = frozenset({"import_module", "__import__"})
_Import = tuple[int, str, tuple[str, ...]]  # 2, "a", ("b",): `from ..a import b`


def list_file_imports(path: Path, *, package: str) -> list[str]:
    """Return the names that a source file imports, none if it is not valid Python.

    Args:
        path: The file. The byte code that an import has left is used, and none is written.
        package: What its relative imports start from, "" if it has none.
    """
    status = path.stat()
    return _resolve(_read(str(path), status.st_mtime_ns, status.st_size), package)


def list_code_imports(code: CodeType, *, package: str) -> list[str]:
    """Return the names that compiled code imports: `a`, and `a.b` for `from a import b`, a module or not."""
    return _resolve(_list(code), package)


def list_names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes that the code and the functions inside use."""
    inner = (list_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


class _SourceReader(SourceFileLoader):
    """Compiles a file as an import does, or takes what an import has left; leaves nothing itself."""

    def set_data(self, path: Any, data: Any, **_: Any) -> None: ...  # pyright: ignore[reportIncompatibleMethodOverride]


@functools.lru_cache(maxsize=4096)
def _read(path: str, _modified_ns: int, _size: int) -> tuple[_Import, ...]:
    try:
        code = _SourceReader("", path).get_code("")
    except (SyntaxError, ValueError):  # whoever imports it is told; the other files of its package are fine
        return ()
    return tuple(_list(code)) if code else ()


def _list(code: CodeType) -> Generator[_Import, None, None]:
    if _IMPORT_NAME in code.co_code[::2]:
        before: list[Any] = []  # what the last two instructions load: the level and the names
        for instruction in dis.get_instructions(code):
            if instruction.opcode == _IMPORT_NAME:
                level, names = before
                yield level, str(instruction.argval), tuple(names or ())
            elif instruction.opname != "EXTENDED_ARG":
                before = [*before[-1:], instruction.argval]
    if not _IMPORT_FUNCTIONS.isdisjoint(code.co_names):  # `import_module("mine.models")`
        yield from ((0, text, ()) for text in code.co_consts if _is_module_name(text))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list(constant)


def _resolve(imports: Iterable[_Import], package: str) -> list[str]:
    found: list[str] = []
    for level, name, names in imports:
        try:
            module = resolve_name("." * level + name, package) if level else name
        except ImportError:  # it reaches out of its package, and would fail on this side too
            continue
        found += [module, *(f"{module}.{one}" for one in names)]
    return found


def _is_module_name(value: object) -> bool:
    return isinstance(value, str) and all(part.isidentifier() for part in value.split("."))
