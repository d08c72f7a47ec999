"""Which modules travel with a call: found in real projects, by a script that runs there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import textwrap
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from prefect_torch_elastic.dispatch.local_modules import list_local_modules

LIST = """
if __name__ == "__main__":
    import json
    from prefect_torch_elastic.dispatch.local_modules import list_local_modules
    told = []
    found = list_local_modules(work, warn=told.append)
    print(json.dumps([{name: str(path) for name, path in found.items()}, told]))
"""
COMPILED = next(suffix for suffix in EXTENSION_SUFFIXES if suffix != ".so")


def write_tree(folder: Path, tree: dict[str, str]) -> None:
    for name, text in tree.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def run(folder: Path, *command: str, path: str = "") -> tuple[dict[str, str], list[str]]:
    """Run the driver and return what it printed: modules with files relative to `folder`, and warnings."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, told = json.loads(done.stdout)
    return {name: os.path.relpath(file, folder) for name, file in found.items()}, told


def list_modules(
    folder: Path, script: str, tree: dict[str, str] | None = None, *, path: str = ""
) -> list[str]:
    """Return the modules of `work` in a script that runs as `__main__`."""
    write_tree(folder, {**(tree or {}), "main.py": textwrap.dedent(script) + LIST})
    return list(run(folder, "main.py", path=path)[0])


# ---------------------------------------------------------------- import statements


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param("import mine.deep.a", id="dotted"),
        pytest.param("import mine as other", id="renamed"),
        pytest.param("from mine.deep import a", id="from-package"),
        pytest.param("from mine.deep.a import VALUE", id="from-module"),
        pytest.param("from mine import *", id="star"),
        pytest.param("import os, mine", id="several"),
        pytest.param("try:\n    import missing_one\nexcept ImportError:\n    import mine", id="fallback"),
        pytest.param("import sys\nif sys.platform == 'plan9':\n    import mine", id="platform"),
        pytest.param("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import mine", id="for-types"),
        pytest.param("class A:\n    import mine", id="in-a-class"),
        pytest.param("def other():\n    import mine", id="in-another-function"),
        pytest.param("import importlib\nimportlib.import_module('mine.deep.a')", id="by-literal-name"),
    ],
)
def test_module_is_found_by_any_import_of_the_script(tmp_path, statement):
    script = f"{statement}\ndef work():\n    return 1\n"
    tree = {"mine/__init__.py": "", "mine/deep/__init__.py": "", "mine/deep/a.py": "VALUE = 1"}
    assert list_modules(tmp_path, script, tree) == ["mine", "mine.deep", "mine.deep.a"]


def test_module_that_the_function_imports_when_it_runs_is_found(tmp_path):
    script = """
    def work():
        def inner():
            import lazy
            return lazy
        return inner
    """
    assert list_modules(tmp_path, script, {"lazy.py": ""}) == ["lazy"]


def test_module_that_only_another_module_imports_is_found(tmp_path):
    tree = {"one.py": "def f():\n    import two", "two.py": "import three", "three.py": "", "unused.py": ""}
    script = "import one\ndef work(): ..."
    assert list_modules(tmp_path, script, tree) == ["one", "three", "two"]


def test_circular_imports_come_to_an_end(tmp_path):
    tree = {"left.py": "import right", "right.py": "import left\nimport main"}
    assert list_modules(tmp_path, "def work():\n    import left", tree) == ["left", "main", "right"]


def test_function_without_local_modules_needs_none(tmp_path):
    script = "import json, prefect_torch_elastic.errors, cloudpickle\ndef work(): ..."
    assert list_modules(tmp_path, script, {"unused.py": ""}) == []


def test_import_with_more_names_than_one_byte_counts_is_found(tmp_path):
    many = "".join(f"name{number} = {number}\n" for number in range(300))
    script = f"{many}{many.replace('name', 'other')}from mine import thing\ndef work(): ..."
    assert list_modules(tmp_path, script, {"mine.py": "thing = 1"}) == ["mine"]


# ---------------------------------------------------------------- packages


def test_package_comes_whole_without_what_is_no_part_of_it(tmp_path):
    tree = {
        "mine/__init__.py": "",
        "mine/registry.py": "import plugin_host",
        "mine/no_init/plugin.py": "",
        "mine/steps/0001-init.py": "",
        "mine/a.b.py": "",
        "mine/.c.py": "",
        "mine/data.json": "{}",
        "mine/__pycache__/old.py": "",
        "mine/.hidden/secret.py": "",
        "mine/venv/pyvenv.cfg": "",
        "mine/venv/lib.py": "",
        "plugin_host.py": "",
    }
    assert list_modules(tmp_path, "import mine\ndef work(): ...", tree) == [
        "mine",
        "mine.no_init.plugin",
        "mine.registry",
        "mine.steps.0001-init",
        "plugin_host",
    ]


def test_folder_without_init_is_found_as_a_package(tmp_path):
    tree = {"helpers/io.py": "", "helpers/deep/more.py": "", "data/image.png": ""}
    script = "from helpers.io import *\ntry:\n    import data\nexcept ImportError: ...\ndef work(): ..."
    assert list_modules(tmp_path, script, tree) == ["helpers.deep.more", "helpers.io"]


def test_package_that_runs_as_a_module_is_found_by_its_relative_imports(tmp_path):
    tree = {
        "mine/__init__.py": "",
        "mine/job.py": "from . import steps\ndef work():\n    from .deep import net" + LIST,
        "mine/steps.py": "x = 1",
        "mine/deep/__init__.py": "",
        "mine/deep/net.py": "from ..steps import x",
    }
    write_tree(tmp_path, tree)
    found, _ = run(tmp_path, "-m", "mine.job")
    assert list(found) == ["mine", "mine.deep", "mine.deep.net", "mine.job", "mine.steps"]


def test_relative_import_beyond_the_package_is_passed_over(tmp_path):
    tree = {"mine/__init__.py": "", "mine/broken.py": "from ... import nothing"}
    assert list_modules(tmp_path, "import mine\ndef work(): ...", tree) == ["mine", "mine.broken"]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("def (:", id="syntax"),
        pytest.param("x = '\0'", id="null-byte"),
        pytest.param("# coding: none-such\n", id="encoding"),
    ],
)
def test_file_that_is_no_python_travels_with_its_package(tmp_path, text):
    tree = {"mine/__init__.py": "", "mine/template.py": text}
    assert list_modules(tmp_path, "import mine\ndef work(): ...", tree) == ["mine", "mine.template"]


def test_looking_leaves_no_byte_code_behind(tmp_path):
    list_modules(tmp_path, "def work():\n    import mine", {"mine/__init__.py": "", "mine/other.py": ""})
    assert not list(tmp_path.rglob("*.pyc"))


def test_package_with_compiled_modules_is_left_out_with_a_warning(tmp_path):
    tree = {
        "fast/__init__.py": "import only_for_fast",
        f"fast/kernel{COMPILED}": "",
        "only_for_fast.py": "",
        "main.py": "def work():\n    import fast" + LIST,
    }
    write_tree(tmp_path, tree)
    found, told = run(tmp_path, "main.py")
    assert (found, len(told)) == ({}, 1)
    assert "`fast` does not travel" in told[0]
    assert f"kernel{COMPILED}" in told[0]


def test_package_with_compiled_modules_travels_when_these_are_included(tmp_path):
    kernel = tmp_path / f"fast/kernel{COMPILED}"
    script = "def work():\n    import fast" + LIST.replace(
        "(work,", f"(work, files=[__import__('pathlib').Path({str(kernel)!r})],"
    )
    write_tree(tmp_path, {"fast/__init__.py": "", str(kernel): "", "main.py": script})
    assert run(tmp_path, "main.py") == ({"fast": "fast/__init__.py"}, [])


# ---------------------------------------------------------------- where modules are


def test_editable_install_counts_as_local(tmp_path):
    write_tree(tmp_path / "elsewhere/src", {"shared/__init__.py": "", "shared/a.py": ""})
    script = f"import site\nsite.addsitedir({str(tmp_path / 'pth')!r})\nimport shared\ndef work(): ..."
    tree = {"pth/shared.pth": str(tmp_path / "elsewhere/src")}
    assert list_modules(tmp_path, script, tree) == ["shared", "shared.a"]


def test_editable_install_by_a_finder_counts_as_local(tmp_path):
    write_tree(tmp_path / "elsewhere", {"code/__init__.py": "", "code/a.py": ""})
    script = f"""
    import sys
    from importlib.util import spec_from_file_location
    class Finder:  # as setuptools installs
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            file = {str(tmp_path / "elsewhere/code/__init__.py")!r}
            return spec_from_file_location(name, file) if name == "mapped" else None
    sys.meta_path.append(Finder)
    def work():
        import mapped
    """
    assert list_modules(tmp_path, script) == ["mapped", "mapped.a"]


@pytest.mark.parametrize("folder", ["lib/site-packages", "lib/dist-packages", "target"])
def test_installed_package_does_not_travel(tmp_path, folder):
    tree = {f"{folder}/theirs/__init__.py": "", f"{folder}/theirs-1.0.dist-info/RECORD": "", "mine.py": ""}
    script = "import theirs, mine\ndef work(): ..."
    assert list_modules(tmp_path, script, tree, path=folder) == ["mine"]


def test_local_part_of_an_installed_namespace_travels(tmp_path):
    tree = {"lib/site-packages/company/base.py": "", "company/mine.py": "from company import base"}
    script = "from company import mine\ndef work(): ..."
    assert list_modules(tmp_path, script, tree, path="lib/site-packages") == ["company.mine"]


def test_standard_library_does_not_travel_even_if_it_is_not_loaded_yet(tmp_path):
    assert list_modules(tmp_path, "def work():\n    import wave, xml.dom, _elementtree, curses") == []
    assert not Path(sysconfig.get_path("stdlib")).is_relative_to(tmp_path)


def test_local_module_that_shadows_the_standard_library_travels(tmp_path):
    tree = {"wave.py": "LOCAL = 1", "json.py": "LOCAL = 1"}
    script = """
    import sys
    here = sys.path.pop(0)
    import json  # loaded already, and not the local one
    sys.path.insert(0, here)
    def work():
        import wave, json
    """
    assert list_modules(tmp_path, script, tree) == ["wave"]


def test_name_that_is_loaded_already_means_what_is_loaded(tmp_path):
    tree = {"first/same.py": "", "second/same.py": ""}
    script = """
    import sys
    sys.path.insert(0, "first")
    import same
    sys.path[0] = "second"
    def work():
        import same
    """
    write_tree(tmp_path, {**tree, "main.py": textwrap.dedent(script) + LIST})
    assert run(tmp_path, "main.py")[0] == {"same": "first/same.py"}


def test_links_are_followed_once(tmp_path):
    write_tree(tmp_path, {"real/pack/__init__.py": "", "real/one.py": ""})
    project = tmp_path / "project"
    project.mkdir()
    (project / "pack").symlink_to(tmp_path / "real/pack")
    (project / "one.py").symlink_to(tmp_path / "real/one.py")
    (tmp_path / "real/pack/again").symlink_to(tmp_path / "real/pack")
    (tmp_path / "real/pack/broken.py").symlink_to(tmp_path / "nowhere.py")
    assert list_modules(project, "import pack, one\ndef work(): ...") == ["one", "pack"]


# ---------------------------------------------------------------- functions


def test_function_typed_into_an_interpreter_is_found_by_what_it_uses(tmp_path):
    tree = {f"{name}.py": "class A: ...\nVALUE = A()\ndef f(): ..." for name in "abcdefgh"} | {
        "unused.py": ""
    }
    script = """
    import a, unused
    from b import f
    from c import A
    from d import VALUE
    import h
    class Base(h.A):
        def step(self):
            import e
    def other():
        import f
        return Base
    def outer():
        import g
        def work():
            return a, f, A, VALUE, other, g
        return work
    work = outer()
    """
    write_tree(tmp_path, tree)
    found, _ = run(tmp_path, "-c", textwrap.dedent(script) + LIST)
    assert list(found) == list("abcdefgh")


def test_function_of_a_local_module_takes_its_module_along(tmp_path):
    tree = {"mine/__init__.py": "", "mine/job.py": "import helper\ndef work(): ...", "helper.py": ""}
    script = "from mine.job import work"
    assert list_modules(tmp_path, script, tree) == ["helper", "mine", "mine.job"]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param("from mine import work", id="function"),
        pytest.param("import functools, mine\nwork = functools.partial(mine.work, 1)", id="partial"),
        pytest.param("import mine\nwork = mine.Thing().method", id="method"),
        pytest.param("import mine\nwork = mine.Thing()", id="callable-object"),
        pytest.param("import mine\nwork = mine.Thing", id="class"),
        pytest.param("from mine import traced\n@traced\ndef work(): ...", id="decorated"),
    ],
)
def test_whatever_can_be_called_takes_its_module_along(tmp_path, make):
    mine = """
    import functools
    def work(*_): ...
    class Thing:
        def method(self): ...
        def __call__(self): ...
    def traced(f):
        @functools.wraps(f)
        def wrapper():
            import helper
            return f()
        return wrapper
    """
    write_tree(tmp_path, {"mine.py": mine, "helper.py": ""})
    found, _ = run(tmp_path, "-c", make + LIST)
    assert list(found) == ["helper", "mine"]


def test_decorated_function_is_seen_through_its_wrapper(tmp_path):
    script = """
    import functools
    def traced(f):
        @functools.wraps(f)
        def wrapper():
            return f()
        return wrapper
    @traced
    def work():
        import lazy
    """
    write_tree(tmp_path, {"lazy.py": ""})
    found, _ = run(tmp_path, "-c", textwrap.dedent(script) + LIST)
    assert list(found) == ["lazy"]


def test_modules_of_the_arguments_are_found_by_the_names_that_are_given(tmp_path, monkeypatch):
    write_tree(tmp_path, {"settings_of_mine.py": "import wave"})
    monkeypatch.syspath_prepend(tmp_path)
    names = ["settings_of_mine.deep", "json", "no_such_module", "__main__", ""]
    found = list_local_modules(print, modules=names)
    assert found == {"settings_of_mine": tmp_path / "settings_of_mine.py"}


def test_module_that_was_made_by_hand_has_no_file(tmp_path):
    script = """
    import sys, types
    sys.modules["byhand"] = types.ModuleType("byhand")
    import byhand
    def work(): ...
    """
    assert list_modules(tmp_path, script) == []


# ---------------------------------------------------------------- files that Prefect loads

LOADER = """
import sys
sys.path.remove(sys.path[0])
{busy}
from prefect.utilities.importtools import load_script_as_module
work = load_script_as_module({file!r}).work
"""


def test_flow_file_that_prefect_loads_under_its_own_name_travels(tmp_path):
    write_tree(
        tmp_path, {"flows/job.py": "import helper\ndef work(): ...", "flows/helper.py": "", "x.py": ""}
    )
    driver = LOADER.format(busy="", file=str(tmp_path / "flows/job.py"))
    assert run(tmp_path, "-c", driver + LIST)[0] == {"helper": "flows/helper.py", "job": "flows/job.py"}


def test_flow_file_that_prefect_loads_under_a_made_up_name_stays_and_its_modules_travel(tmp_path):
    write_tree(
        tmp_path, {"flows/job.py": "def work():\n    import helper", "flows/helper.py": "", "x.py": ""}
    )
    driver = LOADER.format(busy="sys.modules['job'] = sys", file=str(tmp_path / "flows/job.py"))
    assert run(tmp_path, "-c", driver + LIST)[0] == {"helper": "flows/helper.py"}


def test_relative_imports_of_a_flow_file_that_prefect_loads_are_followed(tmp_path):
    tree = {
        "flows/job.py": "from .near import x\ndef work():\n    from . import pack",
        "flows/near.py": "from . import other\nx = 1",
        "flows/other.py": "",
        "flows/pack/__init__.py": "from .inside import y",
        "flows/pack/inside.py": "from ..last import z\ny = 1",
        "flows/last.py": "z = 1",
        "flows/unused.py": "",
    }
    write_tree(tmp_path, tree)
    found, _ = run(tmp_path, "-c", LOADER.format(busy="", file=str(tmp_path / "flows/job.py")) + LIST)
    names = ["job", "job.last", "job.near", "job.other", "job.pack", "job.pack.inside"]
    assert list(found) == names
