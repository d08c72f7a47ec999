"""`elastic_task` and `ElasticTask`: a Prefect task whose body runs in a gang.

Prefect's engine calls `.fn`; that is the one thing we replace, so retries, caching, timeouts, results,
hooks, `submit` and `map` stay Prefect's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeAlias, TypeVar, Unpack, cast, overload

from prefect.context import TaskRunContext
from prefect.tasks import MaterializingTask, Task

from prefect_torch_elastic import compat, context
from prefect_torch_elastic.caching import choose_cache_policy, source_without_decorators
from prefect_torch_elastic.errors import (
    ElasticError,
    GangFailed,
    MissingExtraError,
    SpecError,
    TransferError,
)
from prefect_torch_elastic.spec import FIELD_NAMES, Spec, build_spec, merge_fields

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State, TaskRun
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
        task: Task[P, R],
        *,
        infrastructure: Infrastructure,
        fields: Mapping[str, object],
        run_key: RunKey,
    ) -> ElasticTask[P, R]:
        """Return a copy of a plain task, with all of its options, that runs in a gang."""
        new = cls.__new__(cls)
        new.__dict__.update(task.__dict__)
        new.bind(task.fn, infrastructure=infrastructure, fields=fields, run_key=run_key)
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
        self.retry_condition_fn = _RetryCondition.around(self.retry_condition_fn)

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
        condition = task_options.get("retry_condition_fn") or _RetryCondition.inside(self.retry_condition_fn)
        plain: Any = super()
        base: Task[P, R] = plain.with_options(**{**task_options, "retry_condition_fn": condition})
        base.fn, base.task_key = self.user_fn, self.task_key
        return type(self).from_task(
            base,
            infrastructure=infrastructure if infrastructure is not None else self.infrastructure,
            fields=merge_fields(self.fields, fields),
            run_key=run_key if run_key is not None else self.run_key,
        )

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
    if not _is_infrastructure(infrastructure):
        if callable(infrastructure) and run_key is None and not options:
            return _Decorator(None, None, {})(infrastructure)
        raise SpecError(
            f"`infrastructure={infrastructure!r}` is not accepted. Pass a `TorchElastic` block or the name "
            'of a saved one, such as "torch-elastic/h200-x4".'
        )
    return _Decorator(infrastructure, run_key, options)


def _is_infrastructure(value: object) -> bool:
    if value is None or isinstance(value, str):
        return True
    # Imported here: a block class costs 20 ms to make, and many programs never see one.
    from prefect_torch_elastic.block import TorchElastic

    return isinstance(value, TorchElastic)


class _Decorator:
    def __init__(self, infrastructure: Infrastructure, run_key: RunKey, options: Mapping[str, Any]) -> None:
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
            _check_function(task.fn)
            if isinstance(task, MaterializingTask):
                raise TypeError(
                    f"`{task.name}` is an asset task (`@materialize`), which `@elastic_task` cannot wrap. "
                    "Materialize the asset in a task of its own, from the elastic task's result."
                )
            options: dict[str, Any] = self._task_options
            base = task.with_options(**options) if options else task
            return ElasticTask[P, R].from_task(
                base, infrastructure=self._infrastructure, fields=self._fields, run_key=self._run_key
            )
        _check_function(fn)
        return ElasticTask(
            fn,
            infrastructure=self._infrastructure,
            fields=self._fields,
            run_key=self._run_key,
            **self._task_options,
        )


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


TASK_OPTIONS = frozenset(inspect.signature(cast("Any", Task).__init__).parameters) - {"self", "fn"}


def _unknown_option(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, [*FIELD_NAMES, *TASK_OPTIONS], n=1)
    hint = f"Did you mean `{close[0]}`?" if close else "See the fields of `TorchElastic` and `prefect.task`."
    return f"`{name}` is neither a field of `TorchElastic` nor an option of `prefect.task`. {hint}"


def _check_function(fn: Any) -> None:
    from prefect.flows import Flow

    if isinstance(fn, Flow):
        raise TypeError(
            f"`@elastic_task` stands above `@flow` on `{fn.name}`. A flow cannot run in a gang: "
            "put `@elastic_task` on the function that trains, and call it in the flow."
        )
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
    if run is None or run.task.fn is not launch:
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
    try:
        return cast(TorchElastic, TorchElastic.load(document))
    except ValueError as error:
        raise SpecError(
            f"`infrastructure={name!r}`: there is no such block. Save one with "
            f'`TorchElastic(...).save("{document}")`, or pass the block itself.'
        ) from error


class _RetryCondition(Generic[P, R]):
    """Prefect's retry condition with ours in front: what cannot succeed is not retried."""

    def __init__(self, condition: Callable[..., Any] | None) -> None:
        self.condition = condition

    @classmethod
    def around(cls, condition: Callable[..., Any] | None) -> Callable[..., Any]:
        return condition if isinstance(condition, cls) else cls(condition)

    @classmethod
    def inside(cls, condition: Callable[..., Any] | None) -> Callable[..., Any] | None:
        return cast("Any", condition).condition if isinstance(condition, cls) else condition

    def __call__(self, task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> Any:
        error = state.data
        if isinstance(error, TransferError | SpecError | MissingExtraError):
            return False
        if isinstance(error, GangFailed) and error.diagnosis is not None and error.diagnosis.non_retryable:
            return False
        return True if self.condition is None else self.condition(task, task_run, state)
