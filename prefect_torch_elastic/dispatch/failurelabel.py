"""What the worker of a cluster saw fail of a gang, as a label of the child run that its driver reads (pure).

A pod that was killed can leave no ending in the store; its worker sees how it went.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prefect_torch_elastic.evidence import Category
from prefect_torch_elastic.jsonfields import (
    Check,
    check_fields,
    check_optional,
    check_text,
    check_whole_number,
    short,
)
from prefect_torch_elastic.kubernetes import podends, podwaits
from prefect_torch_elastic.kubernetes.podfailures import (
    DEADLINE,
    DISRUPTED,
    EVICTED,
    NOT_ADMITTED,
    PodFailure,
)

FAILURE_LABEL = "torch-elastic.failure"

# What only Kubernetes has a word for. A pod that did what it was told to has not failed.
_CATEGORIES: Mapping[str, Category] = {
    **{str(category): category for category in Category},
    EVICTED: Category.NODE_LOST,
    DISRUPTED: Category.NODE_LOST,
    DEADLINE: Category.TIMED_OUT,
    NOT_ADMITTED: Category.SETUP_FAILED,
    podends.NOT_STARTED: Category.SETUP_FAILED,
    podends.REFUSED: Category.SETUP_FAILED,
    podends.LEADER_UNREACHABLE: Category.NODE_LOST,
    podwaits.IMAGE_PULL: Category.SETUP_FAILED,
    podwaits.CONTAINER_CONFIG: Category.SETUP_FAILED,
    podwaits.UNSCHEDULABLE: Category.SETUP_FAILED,
}


@dataclass(frozen=True, kw_only=True)
class SeenFailure:
    """What ended a gang, as its worker saw it.

    Attributes:
        category: The kind of failure.
        attempt: Which attempt of the JobSet failed so, from 1.
        pod: Name of the pod, empty if the matter is not that of one pod.
        node: Its index in the gang, None if unknown.
    """

    category: Category
    attempt: int
    pod: str = ""
    node: int | None = None


def name_failure(failure: PodFailure, *, attempt: int) -> SeenFailure | None:
    """Return a pod's failure by the names that drivers know; None for a pod that was only told to stop."""
    category = _CATEGORIES.get(failure.category)
    if category is None:
        return None
    return SeenFailure(category=category, attempt=attempt, pod=failure.pod, node=failure.node)


def render_failure_label(failure: SeenFailure) -> dict[str, Any]:
    """Return the label, to be added to those that the run has."""
    return {FAILURE_LABEL: json.dumps(asdict(failure))}


def parse_failure_label(labels: Mapping[str, Any] | None) -> SeenFailure | None:
    """Return what the labels of a run say; None if it is nothing that can be understood."""
    try:
        body = json.loads(str((labels or {}).get(FAILURE_LABEL, "")))
        return SeenFailure(**check_fields(FAILURE_LABEL, body, _FIELDS))
    except (ValueError, RecursionError):  # anybody may set labels
        return None


def _check_category(name: str, value: object) -> Category:
    if value not in list(Category):
        raise ValueError(f"`{name}` is {short(value)}, which is no category")
    return Category(str(value))


_FIELDS: dict[str, Check] = {
    "category": _check_category,
    "attempt": check_whole_number,
    "pod": check_text,
    "node": check_optional(check_whole_number),
}
