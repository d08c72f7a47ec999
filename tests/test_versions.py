"""Versions on both sides: what keeps a call from running, what is only said, and what is fine."""

from __future__ import annotations

import sys
import textwrap
from importlib import metadata

import pytest

import prefect_torch_elastic
from prefect_torch_elastic.dispatch.versions import (
    Difference,
    collect_versions,
    compare_versions,
    render_differences,
)

HERE = {
    "python": "3.11.7",
    "prefect_torch_elastic": "0.1.0",
    "prefect": "3.9.1",
    "cloudpickle": "3.1.3",
    "torch": "2.13.0",
    "numpy": "2.4.6",
}


def there(**versions: str) -> dict[str, str]:
    """Return the versions of the other side; "" is not installed."""
    return {name: version for name, version in {**HERE, **versions}.items() if version}


def test_versions_of_this_process_are_collected():
    versions = collect_versions()
    assert versions["python"].split(".")[:2] == [str(part) for part in sys.version_info[:2]]
    assert versions["prefect_torch_elastic"] == prefect_torch_elastic.__version__
    assert versions["prefect"] == metadata.version("prefect")
    assert all(versions.values())


def test_package_that_is_not_installed_has_no_version(monkeypatch):
    def version(package: str) -> str:
        if package == "torch":
            raise metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(metadata, "version", version)
    assert collect_versions().keys() == HERE.keys() - {"torch"}


def test_collecting_versions_imports_none_of_the_packages(run_script):
    script = """
        import sys
        from prefect_torch_elastic.dispatch.versions import collect_versions
        assert "torch" in collect_versions()
        print([name for name in ("torch", "numpy", "cloudpickle", "prefect") if name in sys.modules])
    """
    assert run_script(textwrap.dedent(script)).stdout.strip() == "[]"


@pytest.mark.parametrize(
    "node",
    [
        pytest.param(HERE, id="same"),
        pytest.param(there(python="3.11.14"), id="patch-of-python"),
        pytest.param(there(prefect_torch_elastic="0.1.0+local"), id="build-of-this-package"),
        pytest.param(there(prefect="3.9.4"), id="patch-of-prefect"),
        pytest.param(there(cloudpickle="3.0.0"), id="minor-of-cloudpickle"),
        pytest.param(there(numpy="2.1.0"), id="minor-of-numpy"),
        pytest.param(there(torch="2.13.1+cu126"), id="torch-for-a-gpu"),
        pytest.param(there(torch="2.13"), id="short-version"),
        pytest.param({**HERE, "pandas": "9"}, id="package-that-is-not-compared"),
    ],
)
def test_versions_that_fit_together_make_no_difference(node):
    assert compare_versions(HERE, node) == []
    assert compare_versions(node, HERE) == []


@pytest.mark.parametrize(
    ("package", "version"),
    [
        pytest.param("python", "3.12.0", id="newer-python"),
        pytest.param("python", "3.10.4", id="older-python"),
        pytest.param("python", "3.110.7", id="python-that-begins-alike"),
        pytest.param("prefect_torch_elastic", "0.1.7", id="patch-of-this-package"),
        pytest.param("prefect_torch_elastic", "0.2.0", id="minor-of-this-package"),
        pytest.param("prefect_torch_elastic", "1.1.0", id="major-of-this-package"),
        pytest.param("cloudpickle", "4.0.0", id="major-of-cloudpickle"),
        pytest.param("cloudpickle", "", id="no-cloudpickle"),
        pytest.param("numpy", "1.26.4", id="major-of-numpy"),
        pytest.param("python", "unknown", id="no-number"),
    ],
)
def test_version_that_pickles_do_not_survive_is_fatal(package, version):
    (one,) = compare_versions(HERE, there(**{package: version}))
    assert one == Difference(package=package, driver=HERE[package], node=version, fatal=True)


@pytest.mark.parametrize(("package", "version"), [("torch", "2.14.0"), ("prefect", "3.10.0")])
def test_other_minor_version_is_a_difference_that_is_not_fatal(package, version):
    (one,) = compare_versions(HERE, there(**{package: version}))
    assert (one.package, one.fatal, one.is_missing) == (package, False, False)


@pytest.mark.parametrize("package", ["torch", "numpy"])
def test_package_that_only_the_driver_has_is_missing_and_not_fatal(package):
    (one,) = compare_versions(HERE, there(**{package: ""}))
    assert (one.package, one.fatal, one.is_missing) == (package, False, True)


@pytest.mark.parametrize("package", ["torch", "numpy"])
def test_driver_without_a_package_of_the_node_is_fine(package):
    assert compare_versions(there(**{package: ""}), HERE) == []


def test_fatal_differences_come_first():
    found = compare_versions(HERE, there(torch="2.14.0", prefect="3.10.0", numpy="1.26.4"))
    assert [one.package for one in found] == ["numpy", "prefect", "torch"]


# ---------------------------------------------------------------- the text


def test_no_difference_is_no_text():
    assert render_differences([]) == ""


def test_text_names_both_sides_and_what_to_install_where():
    node = there(python="3.12.1", numpy="1.26.4", cloudpickle="")
    text = render_differences(compare_versions({**HERE, "torch": "2.13.0+cpu"}, {**node, "torch": "2.14.0"}))
    assert text.splitlines() == [
        "driver and work pool differ:",
        "- `python`: 3.11.7 on the driver, 3.12.1 in the work pool",
        "- `cloudpickle`: 3.1.3 on the driver, not installed in the work pool",
        "- `numpy`: 2.4.6 on the driver, 1.26.4 in the work pool",
        "- `torch`: 2.13.0+cpu on the driver, 2.14.0 in the work pool",
        "Use Python 3.11 in the work pool too (the environment that its worker was started in, or its "
        "image), or run the flow with Python 3.12.",
        "Where the work pool runs its jobs: "
        "`pip install 'cloudpickle==3.1.3' 'numpy==2.4.6' 'torch==2.13.0'`",
    ]


def test_package_that_only_the_driver_lacks_is_installed_there():
    text = render_differences(compare_versions(there(cloudpickle=""), HERE))
    assert text.endswith("Where the flow runs: `pip install 'cloudpickle==3.1.3'`")


def test_this_package_is_installed_by_the_name_that_the_index_knows():
    text = render_differences(compare_versions(HERE, there(prefect_torch_elastic="0.2.0")))
    assert "`pip install 'prefect-torch-elastic==0.1.0'`" in text
