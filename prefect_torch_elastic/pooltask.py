"""`pool_task` and `PoolTask`: a Prefect task whose body runs as one process in another work pool."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypedDict, TypeVar, Unpack, cast

from prefect.tasks import Task

from prefect_torch_elastic.dispatch.order import CallKind
from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.launched import LaunchedTask, RunKey
from prefect_torch_elastic.options import check_function, split_options
from prefect_torch_elastic.spec import build_spec

P = ParamSpec("P")
R = TypeVar("R")


class PoolFields(TypedDict, total=False):
    """The fields of `TorchElastic` that mean something for one process."""

    work_pool: str | None
    job_variables: dict[str, Any]
    include_files: list[str]
    env: dict[str, str]
    image: str | None
    store: str | None
    store_credentials: Any
    grace_seconds: float
    inadmissible_grace_seconds: float | None


if TYPE_CHECKING:
    from prefect.tasks import TaskOptions

    class PoolOptions(PoolFields, TaskOptions, total=False):
        """All options that `pool_task` takes by name, and options of the task."""


class PoolTask(LaunchedTask[P, R]):
    """A task whose body runs in a work pool; made by `pool_task`."""

    kind: ClassVar[CallKind] = CallKind.BODY
    decorator: ClassVar[str] = "pool_task"
    known_fields: ClassVar[Collection[str]] = tuple(PoolFields.__annotations__)

    def runs_here(self) -> bool:
        """Without a pool, `with_options(work_pool=None)`, this is a task like any other."""
        return self.fields.get("work_pool") is None


def pool_task(*, run_key: RunKey = None, **options: Unpack[PoolOptions]) -> _Decorator:
    """Make a Prefect task whose body runs in another work pool, as one process with Prefect's engine.

    The task waits in the flow; the body is a flow run of its own in the pool, nested under the task. Its
    cache is decided in the flow, so a hit starts nothing.

    Args:
        run_key: See `elastic_task`.
        options: `work_pool` (its name), `job_variables` (of the pool's job template), `include_files` (files
            beside the function's file that travel along), `env`, `image`, `store`, `store_credentials`,
            `grace_seconds`, `inadmissible_grace_seconds`, and options of `prefect.task`.

    Returns:
        A decorator for a plain or async function, or for a Prefect task, whose options it keeps.

    Raises:
        SpecError: If a value is not accepted; it names the field, the value and what is accepted.
        TypeError: If the thing under the decorator cannot run in a pool.

    Example:
        ```python
        from prefect import flow
        from prefect_torch_elastic import pool_task

        @pool_task(work_pool="data", retries=1)
        def tokenize(corpus: str) -> str: ...

        @flow
        def main() -> str:
            return tokenize("s3://bucket/corpus")
        ```
    """
    return _Decorator(run_key, cast("Mapping[str, Any]", options))


class _Decorator:
    def __init__(self, run_key: RunKey, options: Mapping[str, Any]) -> None:
        self._run_key = run_key
        self._fields, self._task_options = split_options(
            options, known=PoolTask.known_fields, decorator=PoolTask.decorator
        )
        if "work_pool" not in self._fields:
            raise SpecError(
                '`@pool_task` needs `work_pool=`, such as `@pool_task(work_pool="data")`. '
                "Use `@task` for a task that runs in the flow."
            )
        build_spec(self._fields)

    def __call__(self, fn: Callable[P, R] | Task[P, R]) -> PoolTask[P, R]:
        check_function(fn, decorator=PoolTask.decorator)
        if isinstance(fn, LaunchedTask):
            name = cast("LaunchedTask[P, R]", fn).decorator
            raise TypeError(f"`@pool_task` stands above `@{name}`. Use one of them.")
        if isinstance(fn, Task):
            task = cast("Task[P, R]", fn)
            return PoolTask[P, R].from_task(
                task,
                task.fn,
                infrastructure=None,
                fields=self._fields,
                run_key=self._run_key,
                options=self._task_options,
            )
        return PoolTask(fn, fields=self._fields, run_key=self._run_key, **self._task_options)
