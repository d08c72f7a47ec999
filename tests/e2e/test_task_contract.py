"""`elastic_task` is a Prefect task like any other: how it is called, cached, wrapped, refused and copied."""

from __future__ import annotations

import importlib.util
import logging
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
from prefect import flow, task
from prefect.cache_policies import INPUTS, NO_CACHE, TASK_SOURCE
from prefect.task_runners import ThreadPoolTaskRunner

from prefect_torch_elastic import (
    ElasticTask,
    GangFailed,
    SpecError,
    TorchElastic,
    elastic_task,
    get_context,
)

if TYPE_CHECKING:
    from tests.e2e.conftest import LiveFlow

Note = Callable[..., None]


def make_train(**options: Any) -> ElasticTask[[int], int]:
    """Return a task whose body travels by value: the ranks need not import this file."""

    @elastic_task(nproc_per_node=2, **options)
    def train(x: int) -> int:
        return x * get_context().world_size

    return train


# ---------------------------------------------------------------- how it is called


def test_task_runs_in_threads_of_sync_flows_c012(
    prefect_server: str, caplog: pytest.LogCaptureFixture, no_leftovers: None
):
    train = make_train()

    @flow(task_runner=ThreadPoolTaskRunner(max_workers=2))  # pyright: ignore[reportArgumentType,reportCallIssue]
    def main() -> Any:
        direct = train(1)
        submitted = train.submit(2)
        mapped = train.map([3, 4])
        return direct, submitted.result(), mapped.result()

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with caplog.at_level(logging.WARNING):
        assert main() == (2, 4, [6, 8])
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_task_runs_in_async_flows_c012_c017(prefect_server: str, no_leftovers: None):
    train = make_train()

    @elastic_task(nproc_per_node=2)
    async def train_async(x: int) -> int:
        import asyncio

        await asyncio.sleep(0)
        return x * get_context().world_size

    @flow(task_runner=ThreadPoolTaskRunner(max_workers=2))  # pyright: ignore[reportArgumentType,reportCallIssue]
    async def main() -> Any:
        direct = train(1)
        awaited = await train_async(2)
        submitted = train_async.submit(3)
        plain = train.submit(4)
        mapped = train_async.map([5, 6])
        return direct, awaited, submitted.result(), plain.result(), mapped.result()

    assert await main() == (2, 4, 6, 8, [10, 12])


def test_async_task_fails_as_a_sync_one_does_c017(in_flow: LiveFlow):
    import asyncio

    @elastic_task(nproc_per_node=2, max_restarts=0)
    async def train() -> None:
        raise ValueError("from a coroutine")

    state = in_flow(lambda: asyncio.run(train(return_state=True)))  # pyright: ignore
    assert "ValueError: from a coroutine" in state.message.splitlines()[0]


def test_body_may_set_signal_handlers_c012(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=2)
    def train() -> bool:
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return threading.current_thread() is threading.main_thread()

    assert in_flow(train)


def test_task_runs_without_a_flow(prefect_server: str, no_leftovers: None):
    assert make_train()(5) == 10


def test_task_called_inside_a_rank_is_refused_and_its_body_is_not(in_flow: LiveFlow):
    inner = make_train()

    @elastic_task(nproc_per_node=2, max_restarts=0)
    def train(as_task: bool) -> int:
        return inner(4) if as_task else inner.fn(4)

    assert in_flow(lambda: train(False)) == 8  # in the rank's own gang
    error = in_flow(lambda: train(True, return_state=True)).result(raise_on_failure=False)
    assert isinstance(error, GangFailed)
    assert error.exc_type == "ElasticError"
    assert "a gang cannot start a gang" in str(error).splitlines()[0]


def test_fn_runs_the_body_here_with_a_context_of_one_rank():
    @elastic_task(nproc_per_node=4)
    def train() -> Any:
        context = get_context()
        context.report({"loss": 1.0}, step=1)
        with context.phase("evaluate"):
            pass
        return context.rank, context.world_size, context.nnodes, context.restart_count, context.attempt

    assert train.fn() == (0, 1, 1, 0, 1)


async def test_fn_of_an_async_task_is_awaitable():
    @elastic_task(nproc_per_node=4)
    async def train(x: int) -> int:
        return x

    assert await train.fn(3) == 3


def test_parameters_are_bound_like_those_of_a_task(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=2)
    def train(a: int, *rest: int, b: int = 2, **others: int) -> Any:
        return a, rest, b, others

    assert in_flow(lambda: train(1, 3, 4, b=5, c=6)) == (1, (3, 4), 5, {"c": 6})
    assert in_flow(lambda: train(a=1)) == (1, (), 2, {})


def test_results_of_other_tasks_are_resolved(in_flow: LiveFlow):
    @task
    def prepare() -> int:
        return 21

    train = make_train()

    def job() -> Any:
        future = prepare.submit()
        return train(future), train.submit(future).result(), train(1, wait_for=[future])  # pyright: ignore

    assert in_flow(job) == (42, 42, 2)


def test_hooks_run_names_and_tags_are_those_of_a_task(in_flow: LiveFlow):
    seen: list[str] = []

    @elastic_task(
        nproc_per_node=1,
        max_restarts=0,
        name="pretrain",
        tags=["gpu"],
        task_run_name="pretrain-{size}",
        on_completion=[lambda task, run, state: seen.append(f"completed {run.name}")],
        on_failure=[lambda task, run, state: seen.append(f"failed {run.name}")],
    )
    def train(size: str) -> None:
        if size == "bad":
            raise ValueError

    in_flow(lambda: train("7b"))
    in_flow(lambda: train("bad", return_state=True))
    assert seen == ["completed pretrain-7b", "failed pretrain-bad"]
    assert (train.name, train.tags) == ("pretrain", {"gpu"})


@pytest.mark.parametrize(
    ("run_key", "words"),
    [("{size}", "`{steps}`"), ("{0}", "`{steps}`"), (" ", "empty")],
    ids=["unknown", "position", "empty"],
)
def test_run_key_that_cannot_be_made_is_refused_when_the_task_runs(
    in_flow: LiveFlow, run_key: str, words: str
):
    @elastic_task(nproc_per_node=1, retries=2, run_key=run_key)
    def train(steps: int) -> None: ...

    error = in_flow(lambda: train(3, return_state=True)).result(raise_on_failure=False)
    assert isinstance(error, SpecError)
    assert f"`run_key={run_key!r}`" in str(error)
    assert words in str(error)


def test_run_key_may_be_a_template_or_a_callable(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=1, run_key=lambda steps, **_: f"run/{steps}")
    def train(steps: int, lr: float = 0.5) -> str:
        return get_context().run_key

    assert in_flow(lambda: train(3)) == "run/3"
    assert in_flow(lambda: train.with_options(run_key="of {steps} at {lr}")(3)) == "of 3 at 0.5"


def test_task_runs_inside_another_task(in_flow: LiveFlow):
    train = make_train()

    @task
    def outer() -> int:
        return train(3)

    assert in_flow(outer) == 6


# ---------------------------------------------------------------- with_options, wrapping, pickling


def test_with_options_keeps_the_class_the_function_and_the_rest():
    def body(x: int) -> int:
        return x

    train = elastic_task(TorchElastic(nnodes=2, queue="gpu"), nproc_per_node=2, retries=3, run_key="k")(body)
    other = train.with_options(nnodes=1, retries=0, name="other")
    assert type(other) is ElasticTask
    assert other.user_fn is body
    assert (other.retries, other.name, other.run_key) == (0, "other", "k")
    spec = other.resolve_spec()
    assert (spec.nnodes, spec.nproc_per_node, spec.queue) == (1, 2, "gpu")
    assert other.task_key == train.task_key
    assert (train.retries, train.name, train.resolve_spec().nnodes) == (3, "body", 2)
    again = other.with_options(max_restarts=5)
    assert (again.resolve_spec().nnodes, again.resolve_spec().max_restarts, again.name) == (1, 5, "other")


def test_with_options_runs_with_them(in_flow: LiveFlow):
    train = make_train()
    assert in_flow(lambda: train.with_options(nproc_per_node=3)(1)) == 3
    assert (
        in_flow(lambda: train.with_options(infrastructure=TorchElastic(nnodes=2), nproc_per_node=1)(1)) == 2
    )


def test_retry_condition_survives_with_options():
    def never(task: Any, run: Any, state: Any) -> bool:
        return False

    train = make_train(retry_condition_fn=never)
    for copy in (train, train.with_options(retries=2), train.with_options(nnodes=1).with_options(name="x")):
        condition: Any = copy.retry_condition_fn
        assert condition.condition is never


def test_saved_block_is_looked_up_when_the_task_runs(in_flow: LiveFlow):
    @elastic_task("torch-elastic/two-ranks", max_restarts=0)
    def train() -> int:
        return get_context().world_size

    state = in_flow(lambda: train(return_state=True))
    assert isinstance(state.result(raise_on_failure=False), SpecError)
    assert "two-ranks" in state.message
    TorchElastic(nproc_per_node=2).save("two-ranks")  # pyright: ignore[reportUnusedCoroutine]
    assert in_flow(train) == 2
    assert in_flow(train.with_options(nproc_per_node=3)) == 3


def test_wrapped_task_keeps_its_options(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=2)
    @task(retries=2, name="pretrain", tags=["a"], cache_policy=INPUTS, persist_result=True, version="7")
    def train(x: int) -> int:
        return x * get_context().world_size

    assert type(train) is ElasticTask
    assert (train.retries, train.name, train.tags, train.version) == (2, "pretrain", {"a"}, "7")
    assert train.persist_result is True
    first = in_flow(lambda: train(31, return_state=True))
    second = in_flow(lambda: train(31, return_state=True))
    assert (first.result(), second.result(), second.name) == (62, 62, "Cached")
    overridden = elastic_task(nproc_per_node=2, retries=5)(task(retries=2, tags=["a"])(lambda: 1))
    assert (overridden.retries, overridden.tags) == (5, {"a"})


def test_decorator_without_parentheses_makes_a_task(in_flow: LiveFlow):
    @elastic_task
    def train() -> int:
        """Train."""
        return get_context().world_size

    assert type(train) is ElasticTask
    assert (train.name, train.description) == ("train", "Train.")
    assert in_flow(train) >= 1


def test_task_survives_pickling(in_flow: LiveFlow):
    train = make_train(retries=1, name="pickled")
    copy = cloudpickle.loads(cloudpickle.dumps(train))
    assert type(copy) is ElasticTask
    assert (copy.name, copy.retries, copy.resolve_spec().nproc_per_node) == ("pickled", 1, 2)
    assert in_flow(lambda: copy(2)) == 4
    assert copy.fn(2) == 2
    assert in_flow(lambda: copy.with_options(nproc_per_node=1)(2)) == 2


# ---------------------------------------------------------------- refused when the decorator runs

NNODES_REFUSED = ["4:2", 0, -1, "0:2", "1:2:3", "2:", "two", True, "1-2", 1.5, ""]


@pytest.mark.parametrize("nnodes", NNODES_REFUSED, ids=repr)
def test_wrong_nnodes_is_refused_by_the_decorator_and_by_with_options_c023(nnodes: Any):
    with pytest.raises(SpecError) as refused:
        elastic_task(nnodes=nnodes)
    for part in ("`nnodes=", repr(nnodes), "MIN:MAX"):
        assert part in str(refused.value)
    assert isinstance(refused.value, ValueError)
    with pytest.raises(SpecError, match="nnodes"):
        make_train().with_options(nnodes=nnodes)


@pytest.mark.parametrize("nnodes", [" 1:2 ", 2, "2", "3:3"], ids=repr)
def test_right_nnodes_is_accepted_by_the_decorator_c023(nnodes: Any):
    assert elastic_task(nnodes=nnodes)(lambda: 1).resolve_spec().max_nodes in (2, 3)


def test_unknown_option_is_refused_with_the_nearest_name():
    with pytest.raises(SpecError, match=r"`nprocs_per_node`.*Did you mean `nproc_per_node`"):
        elastic_task(nprocs_per_node=2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(SpecError, match="`retrys`"):
        make_train().with_options(retrys=2)
    with pytest.raises(SpecError, match="infrastructure"):
        elastic_task(2)  # pyright: ignore[reportArgumentType,reportCallIssue]


def test_task_above_elastic_task_is_refused():
    train = make_train()
    with pytest.raises(TypeError, match=r"`@task` stands above `@elastic_task` on `train`.*on top"):
        task(train)
    with pytest.raises(TypeError, match="`@elastic_task`"):
        task(retries=2)(train)


def test_elastic_task_above_what_cannot_run_in_a_gang_is_refused_c017():
    def plain() -> None: ...

    def generator() -> Any:
        yield 1

    async def async_generator() -> Any:
        yield 1

    class Model:
        pass

    decorate: Any = elastic_task(nproc_per_node=2)
    refused = [
        (flow(plain), "`@flow`"),
        (generator, "generator `generator`"),
        (async_generator, "generator `async_generator`"),
        (task(generator), "generator `generator`"),
        (Model, "class `Model`"),
        (staticmethod(plain), "`@staticmethod`"),
        (classmethod(plain), "`@classmethod`"),  # pyright: ignore[reportArgumentType]
    ]
    for thing, words in refused:
        with pytest.raises(TypeError, match=words):
            decorate(thing)
    with pytest.raises(TypeError, match="function"):
        decorate(7)


def test_method_of_an_object_runs_in_a_gang(in_flow: LiveFlow):
    class Trainer:
        scale = 3

        @elastic_task(nproc_per_node=2)
        def fit(self, x: int) -> int:
            return x * self.scale * get_context().world_size

    assert in_flow(lambda: Trainer().fit(2)) == 12  # pyright: ignore[reportCallIssue]


# ---------------------------------------------------------------- caching

SOURCE = """
from prefect.cache_policies import INPUTS, TASK_SOURCE
from prefect_torch_elastic import elastic_task, get_context

@elastic_task({options}, cache_policy=INPUTS + TASK_SOURCE, persist_result=True)
def train(x):
    return {expression}
"""


def load_task(path: Path, *, options: str, expression: str) -> Any:
    """Write a module and load it, as a person does who edits a file and runs it again."""
    import linecache

    path.write_text(SOURCE.format(options=options, expression=expression))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    importlib.invalidate_caches()
    linecache.clearcache()
    spec.loader.exec_module(module)
    return module.train


def test_cached_result_outlives_edits_of_the_infrastructure_and_not_of_the_function(
    in_flow: LiveFlow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "edited_7f3a.py"

    def run(options: str, expression: str) -> tuple[Any, str]:
        train = load_task(path, options=options, expression=expression)
        state = in_flow(lambda: train(5, return_state=True))
        return state.result(), state.name

    assert run("nproc_per_node=2", "x * get_context().world_size") == (10, "Completed")
    assert run("nproc_per_node=2", "x * get_context().world_size") == (10, "Cached")
    assert run("nproc_per_node=3, max_restarts=4", "x * get_context().world_size") == (10, "Cached")
    assert run("nproc_per_node=3", "x + get_context().world_size") == (8, "Completed")
    assert run("nproc_per_node=2", "x * get_context().world_size") == (10, "Cached")
    sys.modules.pop(path.stem)


def test_with_options_keeps_the_cached_result_too(in_flow: LiveFlow):
    train = make_train(cache_policy=INPUTS + TASK_SOURCE, persist_result=True)
    assert in_flow(lambda: train(77)) == 154
    state = in_flow(lambda: train.with_options(nproc_per_node=3)(77, return_state=True))  # pyright: ignore
    assert (state.result(), state.name) == (154, "Cached")


def test_cache_hit_starts_nothing(in_flow: LiveFlow, note: Note, notes: Path):
    @elastic_task(nproc_per_node=1, cache_policy=INPUTS, persist_result=True)
    def train(x: int) -> int:
        note()
        return x

    in_flow(lambda: train(1))
    in_flow(lambda: train(1))
    assert notes.read_text().count("\n") == 1


def test_nothing_is_cached_unless_asked_for(in_flow: LiveFlow, note: Note, notes: Path):
    @elastic_task(nproc_per_node=1)
    def train(x: int) -> int:
        note()
        return x

    assert train.cache_policy == NO_CACHE
    in_flow(lambda: (train(1), train(1)))
    assert notes.read_text().count("\n") == 2
