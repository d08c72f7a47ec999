"""What decides whether an elastic task's result is reused: its code without decorators, and its inputs."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from prefect.cache_policies import DEFAULT, NO_CACHE, CachePolicy
from prefect.tasks import Task
from prefect.utilities.annotations import NotSet

from prefect_torch_elastic import compat


def source_without_decorators(fn: Callable[..., Any]) -> str | None:
    """Return the code that a cached result depends on, None where it cannot be read.

    Editing the infrastructure in a decorator keeps cached results; editing the function does not.
    """
    try:
        source = textwrap.dedent(inspect.getsource(fn))
        definition = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    return "\n".join(source.splitlines()[definition.lineno - 1 :])


def choose_cache_policy(task: Task[Any, Any]) -> Any:
    """Return the policy that a task was given, with errors in words; without one, no caching of inputs.

    Hashing a model at each call costs more than it saves, so Prefect's default needs `persist_result=True`.
    """
    policy: Any = task.cache_policy
    if isinstance(policy, _NamedFailures) or policy is None or policy is NotSet or policy == NO_CACHE:
        return policy
    if policy is DEFAULT and compat.user_cache_policy(task) is NotSet:
        return _NamedFailures.around(DEFAULT, quiet=True) if task.persist_result else NO_CACHE
    return _NamedFailures.around(policy, quiet=False)


class _NamedFailures(CachePolicy):
    """A cache policy that names the argument it cannot hash, in one line, instead of a traceback."""

    def __init__(self, policy: CachePolicy, *, quiet: bool) -> None:
        super().__init__(
            key_storage=policy.key_storage,
            isolation_level=policy.isolation_level,
            lock_manager=policy.lock_manager,
        )
        self.policy, self.quiet = policy, quiet

    @classmethod
    def around(cls, policy: CachePolicy, *, quiet: bool) -> _NamedFailures:
        return cls(policy, quiet=quiet)

    def __sub__(self, other: str) -> _NamedFailures:
        return type(self)(self.policy - other, quiet=self.quiet)

    def __add__(self, other: CachePolicy) -> _NamedFailures:
        return type(self)(self.policy + other, quiet=self.quiet)

    def compute_key(self, task_ctx: Any, inputs: Any, flow_parameters: Any, **kwargs: Any) -> str | None:
        from prefect.exceptions import HashError

        try:
            return self.policy.compute_key(task_ctx, inputs, flow_parameters, **kwargs)
        except (HashError, ValueError) as error:
            if not self.quiet:
                from prefect.logging import get_run_logger

                get_run_logger().warning(_name_unhashable(inputs or {}, error))
            return None


def _name_unhashable(inputs: Mapping[str, Any], error: Exception) -> str:
    from prefect.utilities.hashing import hash_objects

    for name, value in inputs.items():
        try:
            hash_objects(value, raise_on_failure=True)
        except Exception:  # noqa: BLE001  (this one is the culprit)
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            return (
                f"argument `{name}` (`{kind}`) cannot be hashed, so this call is not cached. Pass a path or "
                f"plain data, or leave it out with `cache_policy=INPUTS - {name!r}`."
            )
    return f"no cache key for this call, so it is not cached: {str(error).splitlines()[0]}"
