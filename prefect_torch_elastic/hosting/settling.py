"""What a function returned, made fit to leave its process: results in place of futures, failures raised."""

from __future__ import annotations

from types import GeneratorType
from typing import Any

from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture


def settle(value: Any) -> Any:
    """Return what can leave the process in place of what a function returned.

    Futures become their results, alone or in a list, tuple or dict; a generator becomes a list. A State that
    is not completed, alone or in a list or tuple, is raised, as Prefect does at the end of a flow.
    """
    kind: Any = value.__class__
    if _is(value, PrefectFuture):
        return value.result()
    if _is(value, GeneratorType):
        return list(value)
    if _is(value, State):
        _raise_failure(value)
    elif _is(value, list) or kind is tuple:  # Prefect's list of futures is a list of its own kind
        if any(_is(one, PrefectFuture, State) for one in value):
            settled = [settle(one) for one in value]
            return tuple(settled) if kind is tuple else settled
    elif kind is dict and any(_is(one, PrefectFuture) for one in value.values()):
        return {key: settle(one) for key, one in value.items()}
    return value


def _is(value: Any, *kinds: Any) -> bool:
    """Do what `isinstance` does, for values whose type stays unknown."""
    return isinstance(value, kinds)


def _raise_failure(state: Any) -> None:
    if not state.is_completed():
        state.result(_sync=True)
        raise RuntimeError(f"the function returned a State that is not final: `{state.name}`")
