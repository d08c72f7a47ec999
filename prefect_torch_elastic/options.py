"""What the decorators take: options of the place, options of the task, and what can be decorated."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from copy import copy
from typing import Any, cast

from prefect.tasks import MaterializingTask, Task

from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.spec import FIELD_NAMES

TASK_OPTIONS = frozenset(inspect.signature(cast("Any", Task).__init__).parameters) - {"self", "fn"}

# Options of a task that `Task.with_options` does not take, and where the task keeps them.
_LATE_OPTIONS = {"version": "version", "on_rollback": "on_rollback_hooks", "on_commit": "on_commit_hooks"}


def split_options(
    options: Mapping[str, Any], *, known: Collection[str] = FIELD_NAMES, decorator: str = "elastic_task"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that say where and how the body runs, and those of the Prefect task.

    Args:
        options: By name.
        known: The names of the first kind, all fields of `TorchElastic`.
        decorator: Where they were given, for messages.

    Raises:
        SpecError: If a name is neither.
    """
    fields = {name: value for name, value in options.items() if name in known}
    task_options = {name: value for name, value in options.items() if name not in known}
    for name in task_options:
        if name not in TASK_OPTIONS:
            raise SpecError(_refuse_option(name, known, decorator))
    return fields, task_options


def _refuse_option(name: str, known: Collection[str], decorator: str) -> str:
    import difflib

    if name in FIELD_NAMES:
        return (
            f"`{name}` is an option of gangs, and `@{decorator}` runs one process. Its own options are "
            f"{', '.join(f'`{option}`' for option in known)}; `@elastic_task` runs gangs."
        )
    close = difflib.get_close_matches(name, [*known, *TASK_OPTIONS], n=1)
    hint = f"Did you mean `{close[0]}`?" if close else "See the fields of `TorchElastic` and `prefect.task`."
    return f"`{name}` is neither a field of `TorchElastic` nor an option of `prefect.task`. {hint}"


def check_function(fn: Any, *, decorator: str) -> None:
    """Refuse what cannot run elsewhere, with the right order of decorators.

    Raises:
        TypeError: If `fn` is a flow, a class, a generator, an asset task, or a static or class method.
    """
    from prefect.flows import Flow

    if isinstance(fn, Flow):
        raise TypeError(
            f"`@{decorator}` stands above `@flow` on `{fn.name}`. A flow is no task: "
            f"put `@{decorator}` on the function that does the work, and call it in the flow."
        )
    if isinstance(fn, MaterializingTask):
        raise TypeError(
            f"`{fn.name}` is an asset task (`@materialize`), which `@{decorator}` cannot wrap. "
            "Materialize the asset in a task of its own, from this task's result."
        )
    if isinstance(fn, Task):
        fn = cast("Task[Any, Any]", fn).fn
    if isinstance(fn, type):
        raise TypeError(
            f"`@{decorator}` needs a function, got the class `{fn.__name__}`. Put it on a function."
        )
    if isinstance(fn, staticmethod | classmethod):
        kind = "staticmethod" if isinstance(fn, staticmethod) else "classmethod"
        raise TypeError(f"`@{decorator}` stands above `@{kind}`. Put `@{kind}` on top.")
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(
            f"`@{decorator}` needs a function that returns, got the generator `{fn.__name__}`. "
            "Return a value (of a gang, rank 0's is the result), and report progress with "
            "`get_context().report(...)`."
        )
    if not callable(fn):
        raise TypeError(f"`@{decorator}` needs a function, got `{fn!r}`. Put it on a function.")


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
