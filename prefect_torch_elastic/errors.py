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


class StoreError(ElasticError):
    """The run folder cannot be read or written."""


class CheckpointError(ElasticError):
    """A checkpoint cannot be saved, or none of those that exist can be loaded."""


class NonRetryable(Exception):  # noqa: N818  (a verdict that user code raises, not an error of ours)
    """Raise it in a rank, or derive from it, to end restarts, attempts and task retries at once."""


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


class GangTimedOut(GangFailed):
    """The gang was stopped because it ran longer than `run_timeout_seconds`."""
