"""Which run keys are in use at this moment: two calls under one key at once would train in one folder.

Only keys that somebody gave are looked at; those that are made of the call itself are different anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from prefect_torch_elastic.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class KeyUser:
    """Who uses a run key.

    Attributes:
        task_name: Name of the Prefect task.
        task_run_id: The task run, the same over its retries.
    """

    task_name: str
    task_run_id: str


# By store and key.
_keys_in_use: dict[tuple[str, str], KeyUser] = {}
_lock = threading.Lock()


@contextmanager
def use_key(
    run_key: str, user: KeyUser, *, store: str, mapped: dict[str, str] | None
) -> Generator[None, None, None]:
    """Let a task run use a key that somebody gave, until this is closed; it may open it again meanwhile.

    Args:
        run_key: The key.
        user: Who uses it.
        store: Where the folder of that key is.
        mapped: The task runs of the `map` that is being submitted by their keys, to which this one is added;
            None without a `map`.

    Raises:
        SpecError: If another task run uses the key, or another call of the same `map` has it.
    """
    if mapped is not None and mapped.setdefault(run_key, user.task_run_id) != user.task_run_id:
        raise SpecError(
            f"`run_key={run_key!r}` is the key of two calls of one `map` of `{user.task_name}`: they would "
            "train in one folder at once. Use a template over a parameter that differs, such as "
            '`run_key="train-{lr}"`.'
        )
    place = (store, run_key)
    with _lock:
        is_first = place not in _keys_in_use
        holder = _keys_in_use.setdefault(place, user)
    if holder.task_run_id != user.task_run_id:
        raise SpecError(
            f"`run_key={run_key!r}` of `{user.task_name}` is in use: `{holder.task_name}` (task run "
            f"{holder.task_run_id}) runs under it at this moment, and both would write to one folder. Call "
            "one after the other, or give each a key of its own, such as a template over a parameter that "
            'differs: `run_key="train-{lr}"`.'
        )
    try:
        yield
    finally:
        if is_first:
            with _lock:
                del _keys_in_use[place]
