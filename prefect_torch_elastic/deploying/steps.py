"""Which steps a flow's code names: the elastic tasks and pool tasks that it may call."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias, cast

from prefect.flows import Flow
from prefect.tasks import Task

from prefect_torch_elastic.dispatch.order import CallKind
from prefect_torch_elastic.launched import LaunchedTask
from prefect_torch_elastic.spec import Spec

# Enough for a table of steps; a global list of a million numbers is data.
MOST_ITEMS = 1000

_OURS = frozenset({"prefect", "prefect_torch_elastic"})
_INSTALLED = ("/site-packages/", "/dist-packages/")
_NAMING = frozenset({*dis.hasname, *dis.hasfree})
_MAKING = frozenset({"MAKE_CELL", "LOAD_CLOSURE"})  # they pass a variable on, sorted by name
# A value that code names, and the attribute names that the same code mentions.
_Named: TypeAlias = tuple[object, frozenset[str]]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a flow.

    Attributes:
        name: Of the task.
        work_pool: Where its body runs; None is the machine of the flow.
        kind: A gang, or one process.
        task: The task itself.
        spec: What it asks for, with the values of its block.
    """

    name: str
    work_pool: str | None
    kind: CallKind
    task: LaunchedTask[Any, Any]
    spec: Spec


def find_steps(flow: Flow[Any, Any]) -> list[Step]:
    """Return the elastic tasks and pool tasks that a flow's code names, in the order of its code.

    It reads the code and runs none of it. It follows global names, closures and defaults of the flow, and of
    the functions, tasks and subflows named there; attributes of modules, classes and objects; items of
    lists and dicts. What exists only while the flow runs cannot be seen: `train.with_options(work_pool="x")`
    in a flow's body, `getattr` with a computed name, a module that only an import in the body loads. Name
    such pools in `deploy(..., pools={"x": "process"})`.

    Args:
        flow: The flow, which is not run.

    Raises:
        SpecError: If a step names a block that cannot be loaded.
    """
    home = _package_of(flow.fn)
    seen: dict[Any, object] = {}  # it keeps what it has seen alive, so that no id is used twice
    steps: list[Step] = []
    todo: list[_Named] = [(flow, frozenset())]
    while todo:
        value, names = todo.pop()
        followed = isinstance(value, FunctionType) or _is_prefect(value)
        key = (id(value), None if followed else names)
        if key in seen:
            continue
        seen[key] = value
        if step := _describe_step(value):
            steps.append(step)
        todo += reversed(list(_list_named(value, names, home)))
    return steps


def _is_prefect(value: object) -> bool:
    return isinstance(value, Task | Flow)


def _describe_step(value: Any) -> Step | None:
    if not isinstance(value, LaunchedTask):
        return None
    task = cast("LaunchedTask[Any, Any]", value)
    spec = task.resolve_spec()
    return Step(name=task.name, work_pool=spec.work_pool or None, kind=task.kind, task=task, spec=spec)


def _list_named(value: object, names: frozenset[str], home: str) -> Iterable[_Named]:
    """Return what a value leads to, in the order of its code."""
    match value:
        case Task() | Flow():
            task: Any = cast("object", value)
            return [(inspect.unwrap(getattr(task, "user_fn", None) or task.fn), names)]
        case FunctionType():
            return _list_of_function(value) if _is_followed(value, home) else []
        case MethodType() | staticmethod() | classmethod():
            return [(cast("Any", value).__func__, names)]
        case functools.partial():
            held = [value.func, *value.args, *value.keywords.values()]
        case property():
            held = [value.fget]
        case ModuleType():
            held = [vars(value)[name] for name in vars(value) if name in names]
        case type():
            held = [vars(value)[name] for name in vars(value) if name in names or name == "__init__"]
            held += value.__bases__
        case dict():
            held = itertools.islice(cast("dict[object, object]", value).values(), MOST_ITEMS)
        case list() | tuple() | set() | frozenset():
            held = itertools.islice(cast("Iterable[object]", value), MOST_ITEMS)
        case _:
            held = [type(value), *(item for name, item in _attributes(value).items() if name in names)]
    return [(item, names) for item in held]


def _list_of_function(function: FunctionType) -> Iterator[_Named]:
    order = list(dict.fromkeys(_list_names(function.__code__)))
    names = frozenset(order)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name in order:
        if name in cells:
            yield from ((content, names) for content in _contents(cells[name]))
        elif name in function.__globals__:
            yield function.__globals__[name], names
        elif name in sys.modules:  # imported in the body
            yield sys.modules[name], names
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield default, names


def _list_names(code: CodeType) -> Iterator[str]:
    """Return the names that code mentions, in its order, with those of functions inside it."""
    for one in dis.get_instructions(code):
        if isinstance(one.argval, CodeType):
            yield from _list_names(one.argval)
        elif one.opcode in _NAMING and one.opname not in _MAKING:
            yield one.argval


def _contents(cell: Any) -> list[object]:
    try:
        return [cell.cell_contents]
    except ValueError:  # a variable that has no value yet
        return []


def _attributes(value: object) -> dict[str, object]:
    return getattr(value, "__dict__", None) or {}


def _is_followed(function: FunctionType, home: str) -> bool:
    """Return whether steps may be named in a function: it is no library's, or of the flow's own package."""
    package = _package_of(function)
    if package == home:
        return True
    if package in _OURS or package in sys.stdlib_module_names:
        return False
    return not any(folder in function.__code__.co_filename for folder in _INSTALLED)


def _package_of(function: Any) -> str:
    return str(function.__module__).partition(".")[0]
