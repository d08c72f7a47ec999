"""The exception tree: what can go wrong, with the facts that a program may ask for.

People read the message: its first line says what happened and to which rank or value, the lines after it
say what to do. Programs read the attributes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect_torch_elastic.evidence import Diagnosis


class ElasticError(Exception):
    """Base of every error that this package raises on purpose."""


class SpecError(ElasticError, ValueError):
    """A value that the gang cannot run with, refused before any process starts."""


class MissingExtraError(ElasticError, ImportError):
    """An optional dependency is not installed where it is needed; the message names the extra."""


class TransferError(ElasticError, TypeError):
    """A function, an argument or a result cannot travel between the flow and the ranks.

    Running the gang again cannot help, so it is never restarted and never retried.
    """


class NonRetryable(Exception):  # noqa: N818  (a verdict that user code raises, not an error of ours)
    """Raise it in a rank, or derive from it, to end restarts, attempts and task retries at once."""


class StoreError(ElasticError):
    """The run folder cannot be read or written."""


class ObjectMissing(StoreError):  # noqa: N818  (a fact about an object, which a reader may expect)
    """An object is not in the store."""


class CheckpointError(ElasticError):
    """A checkpoint cannot be saved, or none of those that exist can be loaded."""


class CheckpointMismatch(CheckpointError, NonRetryable):  # noqa: N818  (what it is; the base is an error)
    """A checkpoint is whole, but the model or optimizer that asks for it has other parameters."""


class Superseded(ElasticError, NonRetryable):  # noqa: N818  (a verdict on this gang)
    """A newer gang has taken the run over, or the call has its outcome: this one may write nothing more."""


class StopTraining(BaseException):
    """Leaves the training loop after a stop was asked for and carried out.

    `save_if_due` raises it; the rank's main understands it. It is no `Exception`, so a training loop that
    catches those lets it through.
    """


class GangFailed(ElasticError):  # noqa: N818  (a public name: the gang failed)
    """A gang ended without a result.

    `__cause__` is the rank's own exception where it could travel.

    Attributes:
        diagnosis: Everything that is known about the failure; None only when it was built by hand.
        rank: The rank that failed first, None when no single rank is to blame.
        node_rank: The node of that rank.
        exit_code: Its exit code, None when a signal ended it or when it was still running.
        signal: The number of the signal that ended it, None when it exited.
        exc_type: Name of the exception that it raised, such as `ValueError`.
        traceback: The remote traceback as text, empty when there is none.
        category: A stable name for the kind of failure, see `docs/failures.md`.
    """

    def __init__(self, message: str, diagnosis: Diagnosis | None = None) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.diagnosis)

    def __repr__(self) -> str:  # Prefect logs it, and the traceback with the whole message below it
        first = str(self).partition("\n")[0]
        return f"{type(self).__name__}({first!r})"

    @property
    def rank(self) -> int | None:
        return self.diagnosis.rank if self.diagnosis else None

    @property
    def node_rank(self) -> int | None:
        return self.diagnosis.node_rank if self.diagnosis else None

    @property
    def exit_code(self) -> int | None:
        return self.diagnosis.exit_code if self.diagnosis else None

    @property
    def signal(self) -> int | None:
        return self.diagnosis.signal if self.diagnosis else None

    @property
    def exc_type(self) -> str | None:
        return self.diagnosis.exc_type if self.diagnosis else None

    @property
    def traceback(self) -> str:
        return self.diagnosis.traceback if self.diagnosis else ""

    @property
    def category(self) -> str | None:
        return str(self.diagnosis.category) if self.diagnosis else None


class PoolRunFailed(ElasticError):  # noqa: N818  (a public name, as `GangFailed`)
    """The job of a work pool ended without a result, and left no exception that could be raised instead.

    Attributes:
        flow_run_id: The child flow run, whose page and log say more.
        work_pool: The pool.
        traceback: The remote traceback as text, empty when there is none.
    """

    def __init__(
        self, message: str, *, flow_run_id: str = "", work_pool: str = "", traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.flow_run_id, self.work_pool, self.traceback = flow_run_id, work_pool, traceback


class GangTimedOut(GangFailed):
    """The gang was stopped because it ran longer than `run_timeout_seconds`."""
