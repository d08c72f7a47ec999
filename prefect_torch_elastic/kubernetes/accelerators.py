"""What `gpu="H200:8"` means in a cluster: a resource, labels of machines, tolerations (pure).

Clusters label their machines as they like, so the names are the administrator's: a variable of the work pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.spec_checks import (
    Check,
    any_text,
    list_of,
    mapping_of,
    plain_mapping,
    refusal,
)

_EXAMPLE = '{"H200": {"node_selector": {"nvidia.com/gpu.product": "NVIDIA-H200"}}}'


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One kind of accelerator of a cluster.

    Attributes:
        resource: What its device plugin counts.
        node_selector: Labels of the machines that have it.
        tolerations: Of their taints; the one with the resource's own name is tolerated anyway.
    """

    resource: str = "nvidia.com/gpu"
    node_selector: dict[str, str] = field(default_factory=dict[str, str])
    tolerations: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


ANY_GPU = Accelerator()  # `gpu=8`, without a name


def parse_accelerators(value: object) -> dict[str, Accelerator]:
    """Return the accelerators of a work pool by name.

    Args:
        value: A mapping from names to objects with some of the attributes of `Accelerator`; None is empty.

    Raises:
        SpecError: If it is something else.
    """
    if value is None:
        return {}
    found = mapping_of(any_text, _accelerator)("accelerators", value)
    return cast("dict[str, Accelerator]", found)


def find_accelerator(name: str | None, known: Mapping[str, Accelerator]) -> Accelerator:
    """Return the accelerator of that name; None is any GPU.

    Raises:
        SpecError: If there is none.
    """
    if name is None:
        return ANY_GPU
    if found := known.get(name):
        return found
    names = ", ".join(f"`{one}`" for one in sorted(known)) or "none"
    raise SpecError(
        f"Accelerator `{name}` is not known to the work pool; it knows {names}. Pass a number such as "
        f"`gpu=8` for any GPU, or name it in the pool's variable `accelerators`, such as `{_EXAMPLE}`."
    )


def _accelerator(name: str, value: object) -> object:
    if isinstance(value, Accelerator):
        return value
    fields = cast("dict[str, object]", plain_mapping(name, value))
    for key in fields:
        if key not in _CHECKS:
            known = ", ".join(f"`{one.name}`" for one in dataclasses.fields(Accelerator))
            raise refusal(f"{name}", value, f"some of {known}", why=f"it has no `{key}`")
    checked = {key: _CHECKS[key](f"{name}.{key}", item) for key, item in fields.items()}
    return Accelerator(**cast("dict[str, Any]", checked))


_CHECKS: dict[str, Check] = {
    "resource": any_text,
    "node_selector": mapping_of(any_text, any_text),
    "tolerations": list_of(plain_mapping),
}
