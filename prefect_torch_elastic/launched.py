"""`LaunchedTask`: a Prefect task whose body runs somewhere else than in the flow's process.

Prefect's engine calls `.fn`; that is the one thing we replace, so retries, caching, timeouts, results,
hooks, `submit` and `map` stay Prefect's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, Self, TypeAlias, TypeVar, cast

from prefect.client.schemas.objects import State
from prefect.context import TaskRunContext
from prefect.tasks import Task

from prefect_torch_elastic import compat, context
from prefect_torch_elastic.caching import choose_cache_policy, source_without_decorators
from prefect_torch_elastic.dispatch.order import CallKind
from prefect_torch_elastic.errors import ElasticError, SpecError
from prefect_torch_elastic.options import check_infrastructure, copy_task, split_options
from prefect_torch_elastic.retrying import RetryCondition
from prefect_torch_elastic.spec import FIELD_NAMES, Spec, build_spec, merge_fields

if TYPE_CHECKING:
    from prefect_torch_elastic.block import TorchElastic

P = ParamSpec("P")
R = TypeVar("R")

RunKey: TypeAlias = str | Callable[..., str] | None
Infrastructure: TypeAlias = "TorchElastic | str | None"


class LaunchedTask(Task[P, R]):
    """A task whose body runs in a gang or in another work pool.

    Attributes:
        user_fn: The function itself.
        infrastructure: A block, the name of a saved one, or None.
        fields: Fields of `TorchElastic` that were set on the task; they win over the block's.
        run_key: Name of the run over retries and flow runs, or what makes it; None for one name per call.
    """

    kind: ClassVar[CallKind]
    decorator: ClassVar[str]
    known_fields: ClassVar[Collection[str]] = FIELD_NAMES

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
    ) -> Self:
        """Return a copy of a task that runs `fn` elsewhere; `options` replace options of the task."""
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
        """Make this task, whose Prefect half is complete, run `fn` elsewhere."""
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
    ) -> Self:
        """Return a copy with other options of the task and of where it runs, by one set of names.

        Args:
            infrastructure: A block, or the name of a saved one, instead of the task's own.
            run_key: See the decorator.
            options: Fields of `TorchElastic` and options of `prefect.task`. `work_pool=None` runs it here.
        """
        fields, task_options = split_options(options, known=self.known_fields, decorator=self.decorator)
        own_condition = RetryCondition.inside(self.retry_condition_fn)
        new = self.from_task(
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
        """Return what the task asks for: call over decorator over block.

        Raises:
            SpecError: If a value is not accepted, or the named block cannot be loaded.
        """
        return build_spec(self.set_fields())

    def set_fields(self) -> dict[str, object]:
        """Return the fields that somebody set, those of the block included."""
        block = self.infrastructure
        if isinstance(block, str):
            block = _load_block(block)
        return merge_fields(block.to_fields() if block else {}, self.fields)

    def runs_here(self) -> bool:
        """Whether the body runs in the flow's own process after all."""
        return False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = TaskRunContext.get()
        if run is not None and cast("object", run.task.fn) is self:
            raise TypeError(self._wrong_order())
        call: Any = super().__call__
        outcome = call(*args, **kwargs)
        return_state = bool(kwargs.get("return_state"))
        if inspect.iscoroutine(outcome):
            return _raise_stop_async(outcome, return_state=return_state)
        return _raise_stop(outcome, return_state=return_state)

    if not TYPE_CHECKING:  # its types stay Prefect's

        def map(self, *args: Any, **kwargs: Any) -> Any:
            from prefect_torch_elastic.runkey import mapping

            with mapping():
                return super().map(*args, **kwargs)

    @property
    def __code__(self) -> Any:
        """Asked for by Prefect when it makes a task of a function; this object is a task already."""
        if compat.is_called_by_prefect_task():
            raise TypeError(self._wrong_order())
        raise AttributeError("__code__")

    def _wrong_order(self) -> str:
        ours = f"`@{self.decorator}(...)`"
        return (
            f"`@task` stands above `@{self.decorator}` on `{self.name}`. "
            f"Put {ours} on top: {ours} above `@task(...)` above `def`."
        )


def _raise_stop(outcome: object, *, return_state: bool) -> Any:
    """Return what Prefect returns to the flow, unless the task was stopped: a state is not the task's value.

    Raises:
        CancelledRun: If the task was cancelled, as `submit(...).result()` raises it; unless the flow has
            asked for the state.
        BaseException: What ends a flow run that was cancelled.
    """
    if isinstance(outcome, State) and outcome.is_cancelled():
        data: Any = cast("Any", outcome).data
        error = getattr(data, "result", data)  # the engine wraps it, even when it is not persisted
        if isinstance(error, BaseException) and not (return_state and isinstance(error, Exception)):
            raise error
    return cast("Any", outcome)


async def _raise_stop_async(coming: Coroutine[Any, Any, Any], *, return_state: bool) -> Any:
    return _raise_stop(await coming, return_state=return_state)


def _make_launch(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return what Prefect's engine calls: the launch in the task's own run, the plain body anywhere else."""
    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def launch_async(*args: Any, **kwargs: Any) -> Any:
            run = _own_run(launch_async)
            if run is None:
                with context.own_checkpoints():
                    return await fn(*args, **kwargs)
            from prefect_torch_elastic import launch as launching

            return await launching.launch_async(run, fn, args, kwargs)

        return launch_async

    @functools.wraps(fn)
    def launch(*args: Any, **kwargs: Any) -> Any:
        run = _own_run(launch)
        if run is None:
            with context.own_checkpoints():
                return fn(*args, **kwargs)
        from prefect_torch_elastic import launch as launching

        return launching.launch(run, fn, args, kwargs)

    return launch


def _own_run(launch: Callable[..., Any]) -> TaskRunContext | None:
    run = TaskRunContext.get()
    if run is None or run.task.fn is not launch or not isinstance(run.task, LaunchedTask):
        return None
    if run.task.runs_here():
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
