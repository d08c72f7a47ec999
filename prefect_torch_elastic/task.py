"""`elastic_task` and `ElasticTask`: a Prefect task whose body runs in a gang."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar, Unpack, cast, overload

from prefect.tasks import Task

from prefect_torch_elastic.dispatch.order import CallKind
from prefect_torch_elastic.launched import Infrastructure, LaunchedTask, RunKey
from prefect_torch_elastic.options import check_function, check_infrastructure, split_options
from prefect_torch_elastic.spec import build_spec, merge_fields

if TYPE_CHECKING:
    from prefect.tasks import TaskOptions

    from prefect_torch_elastic.spec import SpecOptions

    class ElasticOptions(SpecOptions, TaskOptions, total=False):
        """All options that `elastic_task` takes by name: fields of the gang and options of the task."""


P = ParamSpec("P")
R = TypeVar("R")


class ElasticTask(LaunchedTask[P, R]):
    """A task whose body runs in a gang; made by `elastic_task`."""

    kind: ClassVar[CallKind] = CallKind.GANG
    decorator: ClassVar[str] = "elastic_task"


@overload
def elastic_task(infrastructure: Callable[P, R], /) -> ElasticTask[P, R]: ...


@overload
def elastic_task(
    infrastructure: Infrastructure = None,
    *,
    run_key: RunKey = None,
    **options: Unpack[ElasticOptions],
) -> _Decorator: ...


def elastic_task(infrastructure: Any = None, *, run_key: RunKey = None, **options: Any) -> Any:
    """Make a Prefect task whose body runs as a gang of TorchElastic ranks.

    Args:
        infrastructure: A `TorchElastic` block, the name of a saved one (`"torch-elastic/h200-x4"`, looked up
            when the task runs), or None.
        run_key: One name for the run over all its retries and flow runs: a text, a template over the
            parameters (`"pretrain-{size}"`), or a callable that gets the parameters. Without it, each call
            in a flow run is a run of its own, found again when the flow run is retried or restarted.
        options: Fields of `TorchElastic`, which win over the block's, and options of `prefect.task`.

    Returns:
        A decorator for a plain or async function, or for a Prefect task, whose options it keeps.

    Raises:
        SpecError: If a value is not accepted; it names the field, the value and what is accepted.
        TypeError: If the thing under the decorator cannot run in a gang.

    Example:
        ```python
        from prefect import flow
        from prefect_torch_elastic import elastic_task, get_context

        @elastic_task(nproc_per_node=2, retries=1)
        def train(steps: int) -> int:
            return get_context().world_size * steps

        @flow
        def main() -> int:
            return train(10)
        ```
    """
    is_function = callable(infrastructure) or isinstance(infrastructure, staticmethod | classmethod)
    if is_function and run_key is None and not options:  # `@elastic_task` without parentheses
        return _Decorator(None, None, {})(cast("Any", infrastructure))
    return _Decorator(cast("Infrastructure", infrastructure), run_key, options)


class _Decorator:
    def __init__(self, infrastructure: Infrastructure, run_key: RunKey, options: Mapping[str, Any]) -> None:
        check_infrastructure(infrastructure)
        self._infrastructure, self._run_key = infrastructure, run_key
        self._fields, self._task_options = split_options(options)
        if not isinstance(infrastructure, str):
            build_spec(merge_fields(infrastructure.to_fields() if infrastructure else {}, self._fields))

    def __call__(self, fn: Callable[P, R] | Task[P, R]) -> ElasticTask[P, R]:
        if isinstance(fn, ElasticTask):
            elastic = cast("ElasticTask[P, R]", fn)
            return elastic.with_options(
                infrastructure=self._infrastructure,
                run_key=self._run_key,
                **self._fields,
                **self._task_options,
            )
        check_function(fn, decorator="elastic_task")
        if isinstance(fn, Task):
            task = cast("Task[P, R]", fn)
            return ElasticTask[P, R].from_task(
                task,
                task.fn,
                infrastructure=self._infrastructure,
                fields=self._fields,
                run_key=self._run_key,
                options=self._task_options,
            )
        return ElasticTask(
            fn,
            infrastructure=self._infrastructure,
            fields=self._fields,
            run_key=self._run_key,
            **self._task_options,
        )
