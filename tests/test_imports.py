"""What an import costs, in fresh interpreters: the driver pays for Prefect only, a rank for torch only."""

from __future__ import annotations

import importlib.util
import json

import pytest

MOST_NEW_MODULES = 20

LOADED = """
import json, sys
{statement}
print(json.dumps([name for name in {modules!r} if name in sys.modules]))
"""

NEW_MODULES = """
import sys
import prefect.tasks, prefect.context
before = set(sys.modules)
from prefect_torch_elastic import elastic_task
print(*sorted(set(sys.modules) - before))
"""

WITHOUT_TORCH = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "kubernetes", "obstore"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, Blocker())
"""


def loaded_after(run_script, statement: str, modules: list[str]) -> list[str]:
    """Return those of the modules that a fresh interpreter has loaded after the statement."""
    result = run_script(LOADED.format(statement=statement, modules=modules))
    assert result.rc == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_package_import_loads_no_framework(run_script):
    heavy = ["torch", "prefect", "cloudpickle", "numpy", "pydantic"]
    assert loaded_after(run_script, "import prefect_torch_elastic", heavy) == []


@pytest.mark.parametrize("name", ["elastic_task", "TorchElastic"])
def test_driver_import_loads_no_torch(run_script, name):
    assert loaded_after(run_script, f"from prefect_torch_elastic import {name}", ["torch", "numpy"]) == []


def test_elastic_task_import_loads_nothing_but_our_own_over_prefect(run_script):
    result = run_script(NEW_MODULES)
    assert result.rc == 0, result.stderr
    new = result.stdout.split()
    assert [name for name in new if not name.startswith("prefect_torch_elastic")] == []
    assert len(new) <= MOST_NEW_MODULES, "what only a run needs is imported when it runs"


def test_verify_import_loads_no_torch(run_script):
    assert (
        loaded_after(run_script, "import prefect_torch_elastic.checkpoint.verify", ["torch", "numpy"]) == []
    )


@pytest.mark.parametrize(
    "room", ["context", "node", "node.agent", "node.rank", "node.forkserver", "node.zygote"]
)
def test_node_import_loads_no_prefect(run_script, room):
    module = f"prefect_torch_elastic.{room}"
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"There is no room `{module}`.")
    assert loaded_after(run_script, f"import {module}", ["prefect", "kubernetes"]) == []


def test_public_names_resolve(run_script):
    result = run_script(
        "import prefect_torch_elastic as package\n"
        "names = package.__all__\n"
        "assert len(names) == len(set(names)), names\n"
        "missing = [name for name in names if not hasattr(package, name)]\n"
        "hidden = sorted(set(names) - set(dir(package)))\n"
        "print(len(names), 'missing:', missing, 'hidden:', hidden)\n"
    )
    assert result.rc == 0, result.stderr
    assert "missing: [] hidden: []" in result.stdout


def test_unknown_public_name_is_an_attribute_error(run_script):
    result = run_script("import prefect_torch_elastic\nprefect_torch_elastic.no_such_name\n")
    assert result.rc == 1
    assert "AttributeError" in result.stderr
    assert "no_such_name" in result.stderr


@pytest.mark.parametrize("module", ["prefect_torch_elastic.collection", "prefect_torch_elastic.task"])
def test_driver_import_works_without_any_extra(run_script, module):
    result = run_script(WITHOUT_TORCH + f"import {module}\n")
    assert result.rc == 0, result.stderr


def test_collection_is_prefects_entry_point(run_script):
    result = run_script(
        "from importlib.metadata import entry_points\n"
        "points = [p.value for p in entry_points(group='prefect.collections')]\n"
        "print('prefect_torch_elastic.collection' in points)\n"
    )
    assert result.stdout.strip() == "True", result.stderr
