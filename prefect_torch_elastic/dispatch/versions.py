"""What driver and node must have in common: the versions of Python and of the packages that pickles need."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

import prefect_torch_elastic

# With the number of parts of a version that have to agree, and whether nothing runs when they do not.
_COMPARED: dict[str, tuple[int, bool]] = {
    "python": (2, True),  # bytecode of functions that travel by value
    "prefect_torch_elastic": (3, True),  # an order has all fields of a `Spec`, which any release may change
    "cloudpickle": (1, True),
    "numpy": (1, True),  # 2 moved the modules that pickled arrays name
    "prefect": (2, False),
    "torch": (2, False),
}
_REQUIRED = frozenset({"python", "prefect_torch_elastic", "cloudpickle"})
_RELEASE = re.compile(r"\d+(?:\.\d+)*")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One package whose versions do not fit together.

    Attributes:
        package: Its import name, or `python`.
        driver: The driver's version, empty if it has none.
        node: The version where the call is to run, empty if it has none.
        fatal: Whether the call cannot run at all; else only what needs the package may fail.
    """

    package: str
    driver: str
    node: str
    fatal: bool

    @property
    def is_missing(self) -> bool:
        """Whether the node has no such package, which is fine for a call that does not need it."""
        return not self.node


def collect_versions() -> dict[str, str]:
    """Return the versions of this process by import name, those that are installed; nothing is imported."""
    versions = {
        "python": platform.python_version(),
        "prefect_torch_elastic": prefect_torch_elastic.__version__,
    }
    for package in _COMPARED.keys() - versions.keys():
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # the driver needs no torch, a step without arrays no numpy
    return versions


def compare_versions(driver: Mapping[str, str], node: Mapping[str, str]) -> list[Difference]:
    """Return what does not fit together, the fatal first. Pure.

    Args:
        driver: From `collect_versions` where the call was pickled.
        node: The same where it is to be loaded.
    """
    found = [_compare(package, driver.get(package, ""), node.get(package, "")) for package in _COMPARED]
    return sorted((one for one in found if one is not None), key=lambda one: not one.fatal)


def render_differences(differences: Sequence[Difference]) -> str:
    """Return the differences as text, with both sides and what to install where; empty if there are none."""
    if not differences:
        return ""
    lines = [
        f"- `{one.package}`: {one.driver or 'not installed'} on the driver, "
        f"{one.node or 'not installed'} in the work pool"
        for one in differences
    ]
    return "\n".join(["driver and work pool differ:", *lines, *_render_cures(differences)])


def _render_cures(differences: Sequence[Difference]) -> list[str]:
    cures = [
        f"Use Python {_minor(one.driver)} in the work pool too (the environment that its worker was "
        f"started in, or its image), or run the flow with Python {_minor(one.node)}."
        for one in differences
        if one.package == "python" and one.driver and one.node
    ]
    packages = [one for one in differences if one.package != "python"]
    if wanted := " ".join(_requirement(one.package, one.driver) for one in packages if one.driver):
        cures.append(f"Where the work pool runs its jobs: `pip install {wanted}`")
    if wanted := " ".join(_requirement(one.package, one.node) for one in packages if not one.driver):
        cures.append(f"Where the flow runs: `pip install {wanted}`")
    return cures


def _requirement(package: str, version: str) -> str:
    """Return a requirement for a shell; what follows `+` says which CPU or GPU, and each side has its own."""
    return f"'{package.replace('_', '-')}=={version.partition('+')[0]}'"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _compare(package: str, driver: str, node: str) -> Difference | None:
    parts, fatal = _COMPARED[package]
    if not driver or not node:
        if package in _REQUIRED:
            return Difference(package=package, driver=driver, node=node, fatal=True)
        return Difference(package=package, driver=driver, node=node, fatal=False) if driver else None
    if _release(driver, parts) == _release(node, parts):
        return None
    return Difference(package=package, driver=driver, node=node, fatal=fatal)


def _release(version: str, parts: int) -> tuple[int, ...] | str:
    """Return the first numbers of a version; `2.13.0+cpu` and `2.13.1rc1` have the same two."""
    match = _RELEASE.match(version)
    if match is None:
        return version
    numbers = [int(number) for number in match.group().split(".")][:parts]
    return tuple(numbers + [0] * (parts - len(numbers)))
