"""Where the code of a flow lies, and how a worker finds the flow in it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from prefect.exceptions import ScriptError
from prefect.flows import Flow
from prefect.utilities.importtools import load_script_as_module

from prefect_torch_elastic.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a worker finds a flow.

    Attributes:
        folder: Its working directory, an absolute path.
        entrypoint: `FILE.py:NAME` in that folder, or `package.module.NAME` below it.
    """

    folder: Path
    entrypoint: str


def locate_flow(flow: Flow[Any, Any]) -> Source:
    """Return where a worker finds the flow.

    Raises:
        SpecError: If it is in no file, or no name at the top of its file refers to it.
    """
    module = sys.modules.get(flow.fn.__module__)
    path = getattr(module, "__file__", None)
    if module is None or path is None or not path.endswith(".py") or not os.path.isfile(path):
        raise SpecError(
            f"the flow `{flow.name}` is not in a Python file, so no worker could load it. Move it from the "
            "notebook or prompt into a file, import it from there, and deploy that."
        )
    file = Path(os.path.abspath(path))
    name = _find_name(flow, module, file)
    spec = module.__spec__
    # A script has no spec; one that was started by `python -m` has, and its imports may be relative.
    dotted = spec.name if module.__name__ == "__main__" and spec else module.__name__
    if root := _find_root(file, dotted):
        return Source(folder=root, entrypoint=f"{dotted}{':' if '.' in name else '.'}{name}")
    return Source(folder=file.parent, entrypoint=f"{file.name}:{name}")


def _find_name(flow: Flow[Any, Any], module: ModuleType, file: Path) -> str:
    names = [name for name, value in vars(module).items() if value is flow]
    if names:
        return flow.fn.__name__ if flow.fn.__name__ in names else names[0]
    qualified = flow.fn.__qualname__
    found = _follow(module, qualified)
    if not isinstance(found, Flow):
        cure = f"Write it at the top level of `{file.name}`, or assign it to a name there."
        raise SpecError(
            f"the flow `{flow.name}` is made inside a function or another object: no name at the top of "
            f"`{file}` refers to it, so no worker could load it. {cure}"
        )
    if "." not in qualified:  # a flow of a class is a copy each time it is looked up
        if found.fn is flow.fn:
            raise SpecError(
                f"the flow `{flow.name}` is a copy that no name at the top of `{file}` refers to: a worker "
                f"would load `{qualified}` without the options of the copy. Assign it to a name there."
            )
    elif not (flow.isstaticmethod or flow.isclassmethod):
        raise SpecError(
            f"the flow `{qualified}` needs an object of its class, which a worker does not have. Make it a "
            "static method, a class method or a plain function."
        )
    return qualified


def _follow(module: ModuleType, qualified: str) -> object:
    value: object = module
    for part in qualified.split("."):
        value = getattr(value, part, None)
    return value


def _find_root(file: Path, dotted: str) -> Path | None:
    """Return the folder from which `import dotted` finds the file, if the module is in a package."""
    parts = dotted.split(".")
    if file.name == "__init__.py":
        parts.append("__init__")
    if len(parts) == 1 or file.with_suffix("").parts[-len(parts) :] != tuple(parts):
        return None
    return file.parents[len(parts) - 1]


def load_flow(place: str) -> Flow[Any, Any]:
    """Return the flow that `FILE.py` or `FILE.py:FLOW` names, loaded as a worker loads it.

    Args:
        place: The file; and the flow's name or its function's, which one flow alone does not need.

    Raises:
        SpecError: If there is no such file or flow, the file cannot be loaded, or it has several flows.
    """
    path, _, name = place.rpartition(":") if ".py:" in place else (place, "", "")
    if not path.endswith(".py") or not os.path.isfile(path):
        raise SpecError(f"`{place}`: there is no Python file `{path}`. Write `FILE.py` or `FILE.py:FLOW`.")
    try:
        module = load_script_as_module(path)
    except ScriptError as error:
        cause = error.user_exc
        raise SpecError(
            f"`{path}` cannot be loaded: {type(cause).__name__}: {cause}. Run `python {path}` to see where."
        ) from cause
    values: dict[str, Any] = vars(module)
    flows: dict[str, Flow[Any, Any]] = {
        key: value for key, value in values.items() if isinstance(value, Flow)
    }
    return _choose_flow(flows, module, path, name)


def _choose_flow(
    flows: dict[str, Flow[Any, Any]], module: ModuleType, path: str, name: str
) -> Flow[Any, Any]:
    own = {key: value for key, value in flows.items() if value.fn.__module__ == module.__name__}
    if not name:
        if len({id(value) for value in own.values()}) == 1:
            return next(iter(own.values()))
        what = f"{len(own)} flows" if own else "no flow"
        cure = f"Name one: `{path}:{next(iter(own))}`." if own else "Decorate a function with `@flow`."
        raise SpecError(f"`{path}` has {what}{_list_names(own)}. {cure}")
    found = flows.get(name) or next((one for one in flows.values() if one.name == name), None)
    if found is None:
        raise SpecError(f"`{path}` has no flow `{name}`; it has {len(own) or 'none'}{_list_names(own)}.")
    return found


def _list_names(flows: dict[str, Flow[Any, Any]]) -> str:
    return f": {', '.join(f'`{name}`' for name in flows)}" if flows else ""
