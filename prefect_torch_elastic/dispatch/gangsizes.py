"""The size of a gang that our own worker starts: its order and its cluster hear the same."""

from __future__ import annotations

from typing import Any, assert_never

from prefect_torch_elastic.dispatch.order import CallKind
from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.spec import Spec, parse_nnodes

# The program in the pods reads these in the order, and the cluster in the job variables: they must agree.
SIZES = ("nnodes", "max_attempts", "grace_seconds")


def size_gang(spec: Spec, kind: CallKind) -> dict[str, Any]:
    """Return what the cluster must know as the order says it, whatever the form of the pool has."""
    match kind:
        case CallKind.GANG:
            nnodes, max_attempts = spec.max_nodes, spec.max_attempts
        case CallKind.BODY:  # it may have done half of its work: `retries` says whether it runs again
            nnodes, max_attempts = 1, 1
        case _:
            assert_never(kind)
    return dict(zip(SIZES, (nnodes, max_attempts, spec.grace_seconds), strict=True))


def check_fixed_size(nnodes: int | str, *, pool: str) -> None:
    """Refuse a range of nodes: our worker makes a gang of so many pods.

    Raises:
        SpecError: If it is one.
    """
    smallest, largest = parse_nnodes(nnodes)
    if smallest < largest:
        raise SpecError(
            f"`nnodes={nnodes!r}`: in work pools of type `torch-elastic`, such as `{pool}`, gangs that "
            f"shrink and grow are to come. Pass `nnodes={largest}` or `nnodes={smallest}`; in a pool of type "
            "`process` a range works already."
        )
