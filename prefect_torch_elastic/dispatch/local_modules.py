"""Which modules the other side of a call cannot import: the user's own source files.

Found by reading, not by running: the import statements of the function's file, those inside functions too,
lead to modules, and these to the next ones. A module is the user's own if it would be imported from a source
file that is neither of Python nor in a folder of installed packages; an editable install is.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import sysconfig
from collections.abc import Callable, Generator, Iterable
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

from prefect_torch_elastic.dispatch.imports import list_code_imports, list_file_imports, list_names

_log = logging.getLogger(__name__)
# Both sides have these, and compare their versions; a checkout of one of them stays where it is.
_EVERYWHERE = frozenset({"prefect_torch_elastic", "prefect", "cloudpickle", "torch", "numpy"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})
# Not `.so` alone: that may be any library. These are made for one version of Python and one kind of machine.
_COMPILED = tuple(suffix for suffix in EXTENSION_SUFFIXES if suffix != ".so")


def list_local_modules(
    function: Callable[..., Any],
    *,
    modules: Iterable[str] = (),
    files: Iterable[Path] = (),
    warn: Callable[[str], object] = _log.warning,
) -> dict[str, Path]:
    """Return the source files of the user's own modules that a call may import, by name of the module.

    A package comes whole, all its `.py` files, and so does a folder without `__init__.py` that is imported.
    The file of a script that runs as `__main__` is not among them, since its functions travel by value.

    Not found: modules whose name is put together when the program runs, those in zip files and those without
    source. A package with compiled modules is left out with a warning, unless `files` has them all.

    Args:
        function: The user's function.
        modules: Further names, such as the modules that the pickle of the call imports for its arguments.
        files: Files that travel anyway; the imports of those that are Python count as well.
        warn: Is told what has to be installed on the other side.
    """
    included = list(files)
    walk = _Walk(included, warn)
    walk.look_at(function, inside=True)
    walk.todo.extend(modules)
    for path in included:
        if path.suffix == ".py":
            walk.read(path, package="")
    return walk.finish()


def is_foreign_folder(folder: Path) -> bool:
    """Return whether a folder among the user's sources is none of them: hidden, a cache, an environment."""
    return (
        folder.name.startswith(".") or folder.name == "__pycache__" or folder.joinpath("pyvenv.cfg").exists()
    )


class _Walk:
    """From names to files to the names in these files, until there is nothing new."""

    def __init__(self, included: Iterable[Path], warn: Callable[[str], object]) -> None:
        self.todo: list[str] = []
        self._done: set[str] = set()
        self._roots: set[str] = set()
        self._found: dict[str, Path] = {}
        self._scripts: dict[str, ModuleSpec] = {}
        self._looked: dict[int, Any] = {}  # objects stay alive, so that no other one gets their id
        self._included = {path.resolve() for path in included}
        self._warn = warn

    def finish(self) -> dict[str, Path]:
        while self.todo:
            name = self.todo.pop()
            if name in self._done:
                continue
            self._done.add(name)
            root, _, rest = name.partition(".")
            if root not in self._roots:
                self._roots.add(root)
                self._add_root(root)
            if rest and root in self._scripts:
                self._add_child(self._scripts[root], f"{root}.{rest.partition('.')[0]}")
        return dict(sorted(self._found.items()))

    def look_at(self, value: Any, *, inside: bool = False) -> None:
        """Note the modules of an object, and those that its code uses: `inside`, or if it travels by value.

        Only this finds the modules of a function that was typed into an interpreter: it has no file.
        """
        if id(value) in self._looked:
            return
        self._looked[id(value)] = value
        match value:
            case ModuleType():
                self.todo.append(value.__name__)
            case FunctionType():
                self._look_at_function(value, inside=inside)
            case functools.partial():
                self.look_at(cast("Any", value).func, inside=inside)
            case MethodType() | staticmethod() | classmethod():
                self.look_at(cast("Any", value).__func__, inside=inside)
            case type():
                for kind in value.__mro__:
                    self._look_at_class(kind)
            case _:
                self.look_at(cast("Any", type(value)))
        wrapped = inspect.getattr_static(cast("Any", value), "__wrapped__", None)
        if wrapped is not None:  # by a decorator, or in a task
            self.look_at(wrapped, inside=inside)

    def _look_at_function(self, function: FunctionType, *, inside: bool) -> None:
        namespace = function.__globals__
        self.todo += [str(function.__module__), str(namespace.get("__name__"))]
        if not inside and not _is_by_value(function):
            return
        package = namespace.get("__package__") or ""
        self.todo += list_code_imports(function.__code__, package=package)
        file = namespace.get("__file__")
        if isinstance(file, str) and file.endswith(".py") and Path(file).is_file():
            self.read(Path(file), package=package)
        for name in list_names(function.__code__) & namespace.keys():
            self.look_at(namespace[name])
        for cell in function.__closure__ or ():
            try:
                self.look_at(cell.cell_contents)
            except ValueError:  # the variable has no value yet
                continue

    def _look_at_class(self, kind: type) -> None:
        self.todo.append(str(kind.__module__))
        if _is_by_value(kind):
            for member in list(vars(kind).values()):
                self.look_at(member)

    def read(self, path: Path, *, package: str) -> None:
        """Note what a source file imports."""
        self.todo += list_file_imports(path, package=package)

    def _add_root(self, root: str) -> None:
        if root in _EVERYWHERE:
            return
        try:
            spec = importlib.util.find_spec(root)  # of the loaded module if there is one; imports nothing
        except (ImportError, ValueError):  # a module that was made by hand says nothing about a file
            return
        if spec is not None:
            self._add_module(root, spec)

    def _add_child(self, script: ModuleSpec, name: str) -> None:
        spec = PathFinder.find_spec(name, script.submodule_search_locations)
        if spec is not None:
            self._add(script.name, Path(str(script.origin)))
            self._add_module(name, spec)

    def _add_module(self, name: str, spec: ModuleSpec) -> None:
        path = Path(spec.origin).absolute() if spec.has_location and spec.origin else None
        if path is None or path.name == "__init__.py":
            for folder in spec.submodule_search_locations or ():
                self._add_folder(name, Path(folder).absolute())
        elif _is_installed(path.parent):
            return
        elif path.name.endswith(_COMPILED) and path.resolve() not in self._included:
            self._leave_out(name, path)
        elif path.suffix == ".py" and path.is_file():
            # Prefect's loader gives the file of a flow a `__path__`, so that `from .other import x` works.
            if spec.submodule_search_locations and "." not in name:
                self._scripts[name] = spec
            if _is_made_up(name):
                self.read(path, package=name)
            else:
                self._add(name, path)

    def _add_folder(self, name: str, folder: Path) -> None:
        if not folder.is_dir() or _is_installed(folder.parent):
            return
        files = list(_list_sources(name, folder, ()))
        compiled = [path for _, path in files if path.suffix != ".py"]
        absent = [path for path in compiled if path.resolve() not in self._included]
        if absent:
            self._leave_out(name, absent[0])
            return
        for module, path in files:
            if path.suffix == ".py":
                self._add(module, path)

    def _add(self, name: str, path: Path) -> None:
        if name not in self._found:
            self._found[name] = path
            is_package = path.name == "__init__.py" or name in self._scripts
            self.read(path, package=name if is_package else name.rpartition(".")[0])

    def _leave_out(self, name: str, path: Path) -> None:
        self._warn(
            f"`{name}` does not travel to the work pool: it has a compiled module, `{path}`. Install "
            f"`{name}` where the pool runs, or list all its compiled modules in `include_files` if the "
            "machines there are of the same kind."
        )


def _is_by_value(value: Any) -> bool:
    return _is_made_up(str(value.__module__))


def _is_made_up(module: str) -> bool:
    """`__main__`, `__mp_main__`, `__prefect_loader_…__`: nobody imports these, what is in them is pickled."""
    return module.startswith("__") and "." not in module


def _is_installed(folder: Path) -> bool:
    """Whether the modules in a folder were put there by an installer, or belong to Python."""
    if not _INSTALLED.isdisjoint(folder.parts):
        return True
    if any(folder.is_relative_to(python) for python in _python_folders()):
        return True
    return next(folder.glob("*.dist-info"), None) is not None  # as `pip install --target` does


@functools.cache
def _python_folders() -> tuple[Path, ...]:
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    return (*folders, *(folder.resolve() for folder in folders))


def _list_sources(
    name: str, folder: Path, inside: tuple[Path, ...]
) -> Generator[tuple[str, Path], None, None]:
    """Yield the modules in a folder, compiled ones too, by the names that they are imported with."""
    real = folder.resolve()
    if real in inside:  # a link to a folder that it lies in
        return
    for path in sorted(folder.iterdir()):
        stem = path.name.partition(".")[0]  # any name: migrations such as `0001-init.py` are loaded by path
        if path.is_dir():
            if stem == path.name and not is_foreign_folder(path):
                yield from _list_sources(f"{name}.{stem}", path, (*inside, real))
        elif stem and path.is_file() and (path.name == f"{stem}.py" or path.name.endswith(_COMPILED)):
            yield name if path.name == "__init__.py" else f"{name}.{stem}", path
