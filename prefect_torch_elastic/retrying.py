"""What Prefect's task retries may repeat: everything but failures that would only come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from prefect_torch_elastic.errors import GangFailed, MissingExtraError, SpecError, TransferError

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State, TaskRun
    from prefect.tasks import Task


class RetryCondition:
    """Prefect's retry condition with ours in front: what cannot succeed is not retried."""

    def __init__(self, condition: Callable[..., Any] | None) -> None:
        self.condition = condition

    @classmethod
    def around(cls, condition: Callable[..., Any] | None) -> Callable[..., Any]:
        """Return ours around a condition of the user, or around none."""
        return condition if isinstance(condition, cls) else cls(condition)

    @classmethod
    def inside(cls, condition: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """Return the user's own condition."""
        return cast("Any", condition).condition if isinstance(condition, cls) else condition

    def __call__(self, task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> Any:
        error = state.data
        if isinstance(error, TransferError | SpecError | MissingExtraError):
            return False
        if isinstance(error, GangFailed) and error.diagnosis is not None and error.diagnosis.non_retryable:
            return False
        return True if self.condition is None else self.condition(task, task_run, state)
