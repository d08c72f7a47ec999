"""Which steps a flow's code names, and where a worker finds the flow."""

from __future__ import annotations

import functools
import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
from prefect import flow, task
from prefect.flows import Flow

from prefect_torch_elastic import SpecError, TorchElastic, elastic_task
from prefect_torch_elastic.deploying import find_steps, load_flow
from prefect_torch_elastic.deploying.source import locate_flow
from tests.deployed import ONE_FLOW, step, writing


def pools_of(flow: Flow[Any, Any]) -> list[str | None]:
    return [one.work_pool for one in find_steps(flow)]


# ---------------------------------------------------------------- steps

global_step = step("global")
table = {"a": step("in-dict"), "b": [step("in-list")]}


def helper() -> None:
    global_step()
    other_helper()


def other_helper() -> None:
    helper()
    global_step()


class Recipe:
    STEP = step("on-class")

    def __init__(self) -> None:
        self.step = step("on-object")

    def run(self) -> None:
        self.step()

    @staticmethod
    def static() -> None:
        global_step()


def test_find_steps_sees_a_global_step():
    @flow
    def main() -> None:
        global_step()

    assert [(one.name, one.work_pool, one.task) for one in find_steps(main)] == [
        ("step", "global", global_step)
    ]


def test_find_steps_sees_a_closure_in_the_order_of_the_code():
    first, second = step("one"), step("two")

    @flow
    def main() -> None:
        first()
        second()

    assert pools_of(main) == ["one", "two"]


def test_find_steps_follows_helpers_without_loops_and_names_a_step_once():
    @flow
    def main() -> None:
        helper()
        global_step()

    assert pools_of(main) == ["global"]


def test_find_steps_follows_subflows_and_tasks():
    inner, deep = step("inner"), step("deep")

    @task
    def plain() -> None:
        deep()

    @flow
    def sub() -> None:
        inner()
        main()

    @flow
    def main() -> None:
        sub()
        plain()

    assert pools_of(main) == ["inner", "deep"]


def test_find_steps_follows_the_body_of_a_step():
    inner = step("inner")
    outer = step("outer", body=lambda: inner())

    @flow
    def main() -> None:
        outer()

    assert pools_of(main) == ["outer", "inner"]


def test_find_steps_looks_into_functions_inside_the_flow():
    inner = step("inner")

    @flow
    def main() -> list[Any]:
        def run(number: int) -> Any:
            return inner(number)

        return [run(i) for i in range(3)] + [(lambda: global_step())()]

    assert pools_of(main) == ["inner", "global"]


def test_find_steps_looks_into_dicts_lists_and_partials():
    bound = functools.partial(step("partial"), 1)

    @flow
    def main() -> None:
        bound()
        table["a"]()

    assert pools_of(main) == ["partial", "in-dict", "in-list"]


def test_find_steps_sees_defaults():
    default = step("default")

    def run(what: Any = default) -> None:
        what()

    @flow
    def main() -> None:
        run()

    assert pools_of(main) == ["default"]


def test_find_steps_sees_attributes_of_classes_and_objects_that_the_code_names():
    recipe = Recipe()

    @flow
    def main() -> None:
        recipe.run()
        recipe.STEP()
        recipe.step()
        Recipe.static()

    assert set(pools_of(main)) == {"on-class", "on-object", "global"}


def test_find_steps_sees_attributes_of_modules_that_the_code_names(monkeypatch):
    steps = ModuleType("some_steps")
    steps.used, steps.unused = step("used"), step("unused")  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "some_steps", steps)

    @flow
    def main() -> None:
        import some_steps  # pyright: ignore[reportMissingImports]

        some_steps.used()

    assert pools_of(main) == ["used"]


def test_find_steps_sees_async_flows():
    inner = step("inner")

    @flow
    async def main() -> None:
        inner()

    assert pools_of(main) == ["inner"]


def test_find_steps_says_none_for_a_step_that_stays():
    @elastic_task(nproc_per_node=1)
    def train() -> None: ...

    data = step(None, name="data")

    @flow
    def main() -> None:
        data()
        train()

    assert [(one.name, one.work_pool) for one in find_steps(main)] == [("data", None), ("train", None)]


def test_find_steps_sees_the_pool_of_a_gang_and_of_a_block():
    @elastic_task(work_pool="train")
    def train() -> None: ...

    @elastic_task(TorchElastic(work_pool="block"), nproc_per_node=1)
    def other() -> None: ...

    @flow
    def main() -> None:
        train.with_options(nproc_per_node=3)()
        other()

    assert pools_of(main) == ["train", "block"]


def test_find_steps_loads_a_saved_block(prefect_server):
    cast("Any", TorchElastic(work_pool="saved").save)("steps", _sync=True)

    @elastic_task("torch-elastic/steps")
    def train() -> None: ...

    @flow
    def main() -> None:
        train()

    assert pools_of(main) == ["saved"]


def test_find_steps_refuses_a_block_that_is_not_there(prefect_server):
    @elastic_task("torch-elastic/nowhere")
    def train() -> None: ...

    @flow
    def main() -> None:
        train()

    with pytest.raises(SpecError, match=r"nowhere.*there is no such block"):
        find_steps(main)


def test_find_steps_ignores_plain_tasks_and_libraries():
    @task
    def plain() -> str:
        return json.dumps(textwrap.dedent(""))

    @flow
    def main() -> str:
        return plain()

    assert find_steps(main) == []


def test_find_steps_survives_a_closure_without_a_value():
    @flow
    def main() -> None:
        later()

    assert find_steps(main) == []

    def later() -> None: ...


# ---------------------------------------------------------------- where the code is


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """`write(text)` makes a Python file."""
    with writing(tmp_path) as write:
        yield write


def test_load_flow_takes_the_one_flow_of_a_file(write):
    assert load_flow(str(write(ONE_FLOW))).name == "main"


@pytest.mark.parametrize("name", ["second", "the-other"])
def test_load_flow_takes_a_function_or_a_name_of_a_flow(write, name):
    file = write(
        """
        from prefect import flow
        @flow
        def first(): ...
        @flow(name="the-other")
        def second(): ...
        """
    )
    assert load_flow(f"{file}:{name}").fn.__name__ == "second"


@pytest.mark.parametrize(
    ("text", "suffix", "message"),
    [
        pytest.param("x = 1", "", "has no flow. Decorate a function", id="none"),
        pytest.param(
            "from prefect import flow\n@flow\ndef a(): ...\n@flow\ndef b(): ...",
            "",
            r"has 2 flows: `a`, `b`. Name one: `.*:a`",
            id="several",
        ),
        pytest.param(ONE_FLOW, ":other", "has no flow `other`; it has 1: `main`", id="misspelt"),
        pytest.param("raise KeyError('oh')", "", "cannot be loaded: KeyError: 'oh'", id="broken"),
    ],
)
def test_load_flow_refuses(write, text, suffix, message):
    with pytest.raises(SpecError, match=message):
        load_flow(f"{write(text)}{suffix}")


def test_load_flow_refuses_a_file_that_is_not_there():
    with pytest.raises(SpecError, match=r"there is no Python file `nowhere.py`"):
        load_flow("nowhere.py:main")


def test_source_is_the_file_in_its_folder(write):
    file = write(ONE_FLOW)
    source = locate_flow(load_flow(str(file)))
    assert (source.folder, source.entrypoint) == (file.parent, "deployed_flows.py:main")


def test_source_of_a_flow_in_a_package_is_its_module(write, tmp_path, monkeypatch):
    write("", "some_pipelines/__init__.py")
    write("from .main import nightly", "some_pipelines/jobs/__init__.py")
    write("from prefect import flow\n@flow\ndef nightly(): ...", "some_pipelines/jobs/main.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    from some_pipelines.jobs import nightly  # pyright: ignore[reportMissingImports]

    source = locate_flow(nightly)
    assert (source.folder, source.entrypoint) == (tmp_path, "some_pipelines.jobs.main.nightly")


LOCATE = """
from prefect import flow
from prefect_torch_elastic.deploying.source import locate_flow
@flow
def main(): ...
if __name__ == "__main__":
    source = locate_flow(main)
    print(source.folder, source.entrypoint)
"""


def test_source_of_a_script_is_its_file(run_script):
    result = run_script(LOCATE)
    folder, entrypoint = result.stdout.split()
    assert (Path(folder) / "script.py").read_text() == LOCATE
    assert entrypoint == "script.py:main"


def test_source_of_a_module_that_was_started_as_a_program_is_its_module(write, tmp_path, run_script):
    write(LOCATE, "some_jobs/nightly.py")
    start = "import runpy; runpy.run_module('some_jobs.nightly', run_name='__main__', alter_sys=True)"
    result = run_script(start, env={"PYTHONPATH": str(tmp_path)})
    assert result.stdout.split() == [str(tmp_path), "some_jobs.nightly.main"], result.stderr


def test_source_names_a_copy_by_its_own_name(write):
    file = write(ONE_FLOW + "\n    nightly = main.with_options(name='nightly', retries=3)\n")
    assert locate_flow(load_flow(f"{file}:nightly")).entrypoint == "deployed_flows.py:nightly"


def test_source_names_a_flow_of_a_factory_or_lambda(write):
    file = write(
        """
        from prefect import flow
        def make():
            @flow
            def inner(): ...
            return inner
        made = make()
        short = flow(lambda: 1, name="short")
        """
    )
    assert locate_flow(load_flow(f"{file}:made")).entrypoint == "deployed_flows.py:made"
    assert locate_flow(load_flow(f"{file}:short")).entrypoint == "deployed_flows.py:short"


def test_source_of_a_static_method_is_its_class(write):
    file = write(
        """
        from prefect import flow
        class Jobs:
            @flow
            @staticmethod
            def nightly(): ...
            @flow
            def bound(self): ...
        """
    )
    module = _load(file)
    assert locate_flow(module.Jobs.nightly).entrypoint == "deployed_flows.py:Jobs.nightly"
    with pytest.raises(SpecError, match=r"`Jobs.bound` needs an object of its class"):
        locate_flow(module.Jobs.bound)


def _load(file: Path) -> Any:
    from prefect.utilities.importtools import load_script_as_module

    return load_script_as_module(str(file))


def test_source_refuses_a_flow_inside_a_function():
    @flow
    def local() -> None: ...

    with pytest.raises(
        SpecError, match=r"`local` is made inside a function.*top level of `test_deploying_steps.py`"
    ):
        locate_flow(local)


def test_source_refuses_a_copy_that_nothing_names(write):
    copy = load_flow(str(write(ONE_FLOW))).with_options(retries=3)
    with pytest.raises(SpecError, match=r"is a copy.*would load `main` without the options"):
        locate_flow(copy)


def test_source_refuses_a_flow_of_a_notebook(monkeypatch):
    notebook = ModuleType("some_notebook")
    monkeypatch.setitem(sys.modules, "some_notebook", notebook)
    exec("from prefect import flow\n@flow\ndef cell(): ...", vars(notebook))
    with pytest.raises(SpecError, match=r"`cell` is not in a Python file.*notebook"):
        locate_flow(notebook.cell)
