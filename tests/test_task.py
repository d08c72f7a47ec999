"""`elastic_task` and `with_options`: what they keep, leave alone and refuse. No gang runs."""

from __future__ import annotations

from typing import Any

import pytest
from prefect import Task, flow, task

from prefect_torch_elastic import ElasticTask, SpecError, TorchElastic, elastic_task, get_context, launch


def hook(*_: object) -> None:
    pass


def other_hook(*_: object) -> None:
    pass


@elastic_task(nproc_per_node=2)
def train(x: int) -> int:
    return x * get_context().world_size


class Trainer:
    def __init__(self, scale: int) -> None:
        self.scale = scale

    @elastic_task(nproc_per_node=2)
    def fit(self, x: int) -> int:
        return x * self.scale


@pytest.fixture
def no_gang(monkeypatch):
    """Let a task run end where its gang would be formed; its result is the call."""

    def end(call: Any, _conclude: Any) -> Any:
        return call.spec.nnodes, call.payload.args, call.payload.kwargs

    monkeypatch.setattr(launch, "run_attempts", end)


# ---------------------------------------------------------------- with_options


def test_with_options_on_a_method_keeps_the_object():
    bound: Any = Trainer(3).fit
    changed = bound.with_options(nproc_per_node=1, retries=2)
    assert changed.fn.__prefect_self__.scale == 3
    assert (changed.fields["nproc_per_node"], changed.retries) == (1, 2)


def test_with_options_on_a_method_runs_on_its_own_object(prefect_server, no_gang):
    three, four = Trainer(3), Trainer(4)

    @flow
    def main() -> Any:
        first: Any = three.fit
        changed = first.with_options(nproc_per_node=1)
        second: Any = four.fit
        return [run(2)[1][0].scale for run in (changed, second)]

    assert main() == [3, 4]


LATE = {
    "version": ("2", lambda changed: changed.version == "2"),
    "on_commit": ([hook], lambda changed: changed.on_commit_hooks == [hook]),
    "on_rollback": ([hook], lambda changed: changed.on_rollback_hooks == [hook]),
    "on_completion": ([hook], lambda changed: changed.on_completion_hooks == [hook]),
    "on_failure": ([hook], lambda changed: changed.on_failure_hooks == [hook]),
    "tags": (["a"], lambda changed: changed.tags == {"a"}),
}


@pytest.mark.parametrize(("name", "value", "is_set"), [(k, *v) for k, v in LATE.items()], ids=list(LATE))
def test_option_of_the_task_is_taken_by_with_options_and_over_a_wrapped_task(name, value, is_set):
    assert is_set(train.with_options(**{name: value}))
    assert is_set(elastic_task(**{name: value})(task(train.user_fn)))
    assert is_set(elastic_task()(Task(train.user_fn, **{name: value})))
    assert is_set(elastic_task(**{name: value})(train.user_fn))
    assert not is_set(train)


def test_with_options_keeps_options_that_it_does_not_name():
    first = elastic_task(version="2", on_commit=[hook], on_rollback=[hook], tags=["a"])(train.user_fn)
    changed = first.with_options(nnodes=2)
    assert isinstance(changed, ElasticTask)
    assert (changed.version, changed.tags) == ("2", {"a"})
    assert (changed.on_commit_hooks, changed.on_rollback_hooks) == ([hook], [hook])
    assert changed.task_key == first.task_key


def test_what_is_added_to_the_elastic_task_does_not_change_the_wrapped_one():
    plain = Task(train.user_fn, tags=["a"], on_commit=[hook], on_completion=[hook])
    elastic = elastic_task(nproc_per_node=2)(plain)
    elastic.on_commit(other_hook)
    elastic.on_rollback(other_hook)
    elastic.on_completion(other_hook)
    elastic.on_failure(other_hook)
    elastic.tags.add("b")
    assert (plain.on_commit_hooks, plain.on_completion_hooks) == ([hook], [hook])
    assert (plain.on_rollback_hooks, plain.on_failure_hooks or []) == ([], [])
    assert plain.tags == {"a"}
    assert elastic.on_commit_hooks == [hook, other_hook]


def test_what_is_added_to_a_copy_does_not_change_the_first():
    first = elastic_task(tags=["a"], on_commit=[hook])(train.user_fn)
    changed = first.with_options(nnodes=2)
    changed.on_commit(other_hook)
    changed.tags.add("b")
    changed.fields["nnodes"] = 3
    assert (first.on_commit_hooks, first.tags, first.fields) == ([hook], {"a"}, {})


def test_task_of_another_name_is_made_from_a_wrapped_one():
    plain = Task(train.user_fn, name="plain", retries=2)
    elastic = elastic_task(name="elastic", retries=1)(plain)
    assert (elastic.name, elastic.retries, plain.name, plain.retries) == ("elastic", 1, "plain", 2)


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize("value", [5, {"nnodes": 2}, TorchElastic], ids=["number", "dict", "class"])
def test_infrastructure_that_is_no_block_is_refused_with_what_is_accepted(value):
    for make in (train.with_options, lambda infrastructure: elastic_task(infrastructure, retries=1)):
        with pytest.raises(SpecError) as refused:
            make(infrastructure=value)
        assert f"`infrastructure={value!r}` is not accepted" in str(refused.value)
        assert "the name of a saved one" in str(refused.value)


@pytest.mark.parametrize("kind", [classmethod, staticmethod])
@pytest.mark.parametrize("decorate", [elastic_task, elastic_task(retries=1)], ids=["bare", "called"])
def test_static_and_class_methods_below_are_refused_with_the_right_order(decorate, kind):
    with pytest.raises(TypeError, match=rf"Put `@{kind.__name__}` on top"):
        decorate(kind(train.user_fn))


@pytest.mark.parametrize("decorate", [elastic_task, elastic_task(retries=1)], ids=["bare", "called"])
def test_class_is_refused(decorate):
    with pytest.raises(TypeError, match="got the class `Trainer`"):
        decorate(Trainer)


# ---------------------------------------------------------------- under a server


def test_task_of_the_function_runs_the_body_here(prefect_server):
    plain = task(train.fn)
    assert not isinstance(plain, ElasticTask)

    @flow
    def main() -> Any:
        return plain(21)

    assert main() == 21


def test_saved_block_that_is_not_valid_any_more_is_refused_by_name(prefect_server):
    block = TorchElastic(nnodes=2)
    block.nnodes = "4:2"  # as an older version, or the UI, may have saved it
    block.save("not-valid", overwrite=True)
    changed = train.with_options(infrastructure="torch-elastic/not-valid")
    with pytest.raises(SpecError) as refused:
        changed.resolve_spec()
    assert "`infrastructure='torch-elastic/not-valid'` cannot be used: " in str(refused.value)
    assert "`nnodes='4:2'`" in str(refused.value)


def test_block_that_was_never_saved_is_refused_by_name(prefect_server):
    with pytest.raises(SpecError, match="there is no such block"):
        train.with_options(infrastructure="torch-elastic/never-saved").resolve_spec()


async def test_async_task_looks_its_saved_block_up_when_it_runs(prefect_server, no_gang):
    @elastic_task("torch-elastic/of-async", nproc_per_node=1)
    async def fit(x: int) -> int:
        return x

    @flow
    async def main() -> Any:
        return await fit(3)

    saving: Any = TorchElastic(nnodes=2).save("of-async", overwrite=True)
    await saving
    assert await main() == (2, (3,), {})
