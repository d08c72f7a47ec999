"""`elastic_task` and `ElasticTask`: a Prefect task whose body runs in a gang.

Prefect's engine calls `.fn`; that is the one thing we replace, so retries, caching, timeouts, results,
hooks, `submit` and `map` stay Prefect's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, Unpack, cast, overload

from prefect.context import TaskRunContext
from prefect.tasks import Task

from prefect_torch_elastic import compat, context
from prefect_torch_elastic.caching import choose_cache_policy, source_without_decorators
from prefect_torch_elastic.errors import ElasticError, SpecError
from prefect_torch_elastic.options import check_function, check_infrastructure, copy_task, split_options
from prefect_torch_elastic.retrying import RetryCondition
from prefect_torch_elastic.spec import Spec, build_spec, merge_fields

if TYPE_CHECKING:
    from prefect.tasks import TaskOptions

    from prefect_torch_elastic.block import TorchElastic
    from prefect_torch_elastic.spec import SpecOptions

    class ElasticOptions(SpecOptions, TaskOptions, total=False):
        """All options that `elastic_task` takes by name: fields of the gang and options of the task."""


P = ParamSpec("P")
R = TypeVar("R")

RunKey = str | Callable[..., str] | None
Infrastructure: TypeAlias = "TorchElastic | str | None"
_RIGHT_ORDER = "Put `@elastic_task(...)` on top: `@elastic_task(...)` above `@task(...)` above `def`."


class ElasticTask(Task[P, R]):
    """A task whose body runs in a gang; made by `elastic_task`.

    Attributes:
        user_fn: The function itself.
        infrastructure: A block, the name of a saved one, or None.
        fields: Fields of `TorchElastic` that were set on the task; they win over the block's.
        run_key: Name of the run over retries and flow runs, or what makes it; None for one name per task run.
    """

    def __init__(
        self,
        fn: Callable[P, R],
        *,
        infrastructure: Infrastructure = None,
        fields: Mapping[str, object] | None = None,
        run_key: RunKey = None,
        **task_options: Any,
    ) -> None:
        super().__init__(fn=fn, **task_options)
        self.bind(fn, infrastructure=infrastructure, fields=fields or {}, run_key=run_key)

    @classmethod
    def from_task(
        cls,
        task: Task[Any, Any],
        fn: Callable[P, R],
        *,
        infrastructure: Infrastructure,
        fields: Mapping[str, object],
        run_key: RunKey,
        options: Mapping[str, Any],
    ) -> ElasticTask[P, R]:
        """Return a copy of a task that runs `fn` in a gang; `options` replace options of the task."""
        new = cls.__new__(cls)
        new.__dict__.update(copy_task(task, options).__dict__)
        new.bind(fn, infrastructure=infrastructure, fields=fields, run_key=run_key)
        return new

    def bind(
        self,
        fn: Callable[P, R],
        *,
        infrastructure: Infrastructure,
        fields: Mapping[str, object],
        run_key: RunKey,
    ) -> None:
        """Make this task, whose Prefect half is complete, run `fn` in a gang."""
        check_infrastructure(infrastructure)
        self.user_fn = fn
        self.infrastructure = infrastructure
        self.fields = dict(fields)
        self.run_key = run_key
        if not isinstance(infrastructure, str):
            self.resolve_spec()  # a wrong value is refused here, a saved block when the task runs
        launch = _make_launch(fn)
        compat.keep_task_source(launch, fn)
        self.fn = cast("Callable[P, R]", launch)
        self.source_code = source_without_decorators(fn) or self.source_code
        self.cache_policy = choose_cache_policy(self)
        self.retry_condition_fn = RetryCondition.around(self.retry_condition_fn)

    def with_options(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        *,
        infrastructure: Infrastructure = None,
        run_key: RunKey = None,
        **options: Any,
    ) -> ElasticTask[P, R]:
        """Return a copy with other options of the task and other fields of its gang, by one set of names.

        Args:
            infrastructure: A block, or the name of a saved one, instead of the task's own.
            run_key: See `elastic_task`.
            options: Fields of `TorchElastic` and options of `prefect.task`.
        """
        fields, task_options = split_options(options)
        own_condition = RetryCondition.inside(self.retry_condition_fn)
        new = type(self).from_task(
            self,
            self.user_fn,
            infrastructure=infrastructure if infrastructure is not None else self.infrastructure,
            fields=merge_fields(self.fields, fields),
            run_key=run_key if run_key is not None else self.run_key,
            options={"retry_condition_fn": own_condition, **task_options},
        )
        compat.keep_bound_instance(self.fn, new.fn)
        return new

    def resolve_spec(self) -> Spec:
        """Return the gang that the task asks for: call over decorator over block.

        Raises:
            SpecError: If a value is not accepted, or the named block cannot be loaded.
        """
        return build_spec(self.set_fields())

    def set_fields(self) -> dict[str, object]:
        """Return the fields that somebody set, those of the block included."""
        block = self.infrastructure
        if isinstance(block, str):
            block = _load_block(block)
        spec_fields = merge_fields(block.to_fields() if block else {}, self.fields)
        if pool := spec_fields.get("work_pool"):
            raise SpecError(
                f"`work_pool={pool!r}`: this version runs gangs on the machine of the flow only. "
                "Leave `work_pool` out."
            )
        return spec_fields

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = TaskRunContext.get()
        if run is not None and cast("object", run.task.fn) is self:
            raise TypeError(f"`@task` stands above `@elastic_task` on `{self.name}`. {_RIGHT_ORDER}")
        call: Any = super().__call__
        return call(*args, **kwargs)

    @property
    def __code__(self) -> Any:
        """Asked for by Prefect when it makes a task of a function; this object is a task already."""
        if compat.is_called_by_prefect_task():
            raise TypeError(f"`@task` stands above `@elastic_task` on `{self.name}`. {_RIGHT_ORDER}")
        raise AttributeError("__code__")


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
            parameters (`"pretrain-{size}"`), or a callable that gets the parameters. Without it, each task
            run is a run of its own.
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
        if isinstance(fn, Task):
            task = cast("Task[P, R]", fn)
            check_function(task)
            return ElasticTask[P, R].from_task(
                task,
                task.fn,
                infrastructure=self._infrastructure,
                fields=self._fields,
                run_key=self._run_key,
                options=self._task_options,
            )
        check_function(fn)
        return ElasticTask(
            fn,
            infrastructure=self._infrastructure,
            fields=self._fields,
            run_key=self._run_key,
            **self._task_options,
        )


def _make_launch(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return what Prefect's engine calls: the gang in the task's own run, the plain body anywhere else."""
    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def launch_async(*args: Any, **kwargs: Any) -> Any:
            run = _own_run(launch_async)
            if run is None:
                return await fn(*args, **kwargs)
            from prefect_torch_elastic.launch import launch_gang_async

            return await launch_gang_async(run, fn, args, kwargs)

        return launch_async

    @functools.wraps(fn)
    def launch(*args: Any, **kwargs: Any) -> Any:
        run = _own_run(launch)
        if run is None:
            return fn(*args, **kwargs)
        from prefect_torch_elastic.launch import launch_gang

        return launch_gang(run, fn, args, kwargs)

    return launch


def _own_run(launch: Callable[..., Any]) -> TaskRunContext | None:
    run = TaskRunContext.get()
    if run is None or run.task.fn is not launch or not isinstance(run.task, ElasticTask):
        return None
    if context.in_rank():
        raise ElasticError(
            f"`{run.task.name}` is an elastic task and was called inside a rank: a gang cannot start a gang. "
            f"Call `{run.task.name}.fn(...)` to run its body in this rank, or call the task in the flow."
        )
    return run


def _load_block(name: str) -> TorchElastic:
    from prefect_torch_elastic.block import TorchElastic

    document = name.removeprefix("torch-elastic/")
    load: Any = TorchElastic.load
    try:
        return load(document, _sync=True)  # also in an async task: the caller waits in a thread
    except ValueError as error:
        raise SpecError(
            f"`infrastructure={name!r}`: there is no such block. Save one with "
            f'`TorchElastic(...).save("{document}")`, or pass the block itself.'
        ) from error
    except RuntimeError as error:  # Prefect's word for a document that the block's class refuses
        raise SpecError(f"`infrastructure={name!r}` cannot be used: {error.__cause__ or error}") from error
