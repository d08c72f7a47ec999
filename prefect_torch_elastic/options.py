"""What `elastic_task` takes: which options go to the gang and which to the task, and what it can decorate."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import copy
from typing import Any, cast

from prefect.tasks import MaterializingTask, Task

from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.spec import FIELD_NAMES

TASK_OPTIONS = frozenset(inspect.signature(cast("Any", Task).__init__).parameters) - {"self", "fn"}

# Options of a task that `Task.with_options` does not take, and where the task keeps them.
_LATE_OPTIONS = {"version": "version", "on_rollback": "on_rollback_hooks", "on_commit": "on_commit_hooks"}


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of the gang and the options of the task.

    Raises:
        SpecError: If a name is neither.
    """
    fields = {name: value for name, value in options.items() if name in FIELD_NAMES}
    task_options = {name: value for name, value in options.items() if name not in FIELD_NAMES}
    for name in task_options:
        if name not in TASK_OPTIONS:
            raise SpecError(_unknown_option(name))
    return fields, task_options


def _unknown_option(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, [*FIELD_NAMES, *TASK_OPTIONS], n=1)
    hint = f"Did you mean `{close[0]}`?" if close else "See the fields of `TorchElastic` and `prefect.task`."
    return f"`{name}` is neither a field of `TorchElastic` nor an option of `prefect.task`. {hint}"


def check_function(fn: Any) -> None:
    """Refuse what cannot run in a gang, with the right order of decorators.

    Raises:
        TypeError: If `fn` is a flow, a class, a generator, an asset task, or a static or class method.
    """
    from prefect.flows import Flow

    if isinstance(fn, Flow):
        raise TypeError(
            f"`@elastic_task` stands above `@flow` on `{fn.name}`. A flow cannot run in a gang: "
            "put `@elastic_task` on the function that trains, and call it in the flow."
        )
    if isinstance(fn, MaterializingTask):
        raise TypeError(
            f"`{fn.name}` is an asset task (`@materialize`), which `@elastic_task` cannot wrap. "
            "Materialize the asset in a task of its own, from the elastic task's result."
        )
    if isinstance(fn, Task):
        fn = cast("Task[Any, Any]", fn).fn
    if isinstance(fn, type):
        raise TypeError(
            f"`@elastic_task` needs a function, got the class `{fn.__name__}`. Put it on a function."
        )
    if isinstance(fn, staticmethod | classmethod):
        kind = "staticmethod" if isinstance(fn, staticmethod) else "classmethod"
        raise TypeError(f"`@elastic_task` stands above `@{kind}`. Put `@{kind}` on top.")
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(
            f"`@elastic_task` needs a function that returns, got the generator `{fn.__name__}`. "
            "Return a value (rank 0's is the result), and report progress with `get_context().report(...)`."
        )
    if not callable(fn):
        raise TypeError(f"`@elastic_task` needs a function, got `{fn!r}`. Put it on a function.")


def check_infrastructure(value: object) -> None:
    """Refuse what is neither a block nor the name of one.

    Raises:
        SpecError: It names the value and what is accepted.
    """
    if value is None or isinstance(value, str):
        return
    # Imported here: a block class costs 20 ms to make, and many programs never see one.
    from prefect_torch_elastic.block import TorchElastic

    if not isinstance(value, TorchElastic):
        raise SpecError(
            f"`infrastructure={value!r}` is not accepted. Pass a `TorchElastic` block or the name of a saved "
            'one, such as "torch-elastic/h200-x4".'
        )


def copy_task(task: Task[Any, Any], options: Mapping[str, Any]) -> Task[Any, Any]:
    """Return a plain copy of a task with other options; `Task.with_options` knows only some of them."""
    late = {name: value for name, value in options.items() if name in _LATE_OPTIONS}
    known: dict[str, Any] = {name: value for name, value in options.items() if name not in late}
    new = Task[Any, Any].with_options(task, **known)
    for name, attribute in _LATE_OPTIONS.items():
        setattr(new, attribute, copy(late.get(name, getattr(task, attribute))))
    new.task_key = task.task_key
    return new
