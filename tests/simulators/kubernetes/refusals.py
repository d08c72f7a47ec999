"""How the API refuses a request: one exception per reason, with the `Status` object of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Obj = dict[str, Any]


class ApiError(Exception):
    """A request that the API refuses, in the words of a real API server."""

    status = 500
    reason = "InternalError"

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        reason: str | None = None,
        details: Obj | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status if status is not None else type(self).status
        self.reason = reason if reason is not None else type(self).reason
        self.details = details
        self.retry_after_seconds = retry_after_seconds

    def as_status(self) -> Obj:
        """Return the `Status` object of the answer."""
        details = {"details": self.details} if self.details else {}
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            **details,
            "code": self.status,
        }


class BadRequestError(ApiError):
    """The request cannot be read."""

    status, reason = 400, "BadRequest"


class ForbiddenError(ApiError):
    """Whoever asks may not, or an admission plug-in says no."""

    status, reason = 403, "Forbidden"


class NotFoundError(ApiError):
    """There is no such object, or no such kind."""

    status, reason = 404, "NotFound"


class MethodNotAllowedError(ApiError):
    """The resource does not know this verb."""

    status, reason = 405, "MethodNotAllowed"


class AlreadyExistsError(ApiError):
    """The name is taken."""

    status, reason = 409, "AlreadyExists"


class ConflictError(ApiError):
    """Somebody else was faster, or the object is not the one that was meant."""

    status, reason = 409, "Conflict"


class GoneError(ApiError):
    """The history that was asked for is no longer kept."""

    status, reason = 410, "Expired"


class UnsupportedMediaTypeError(ApiError):
    """A patch of a type that the resource does not take."""

    status, reason = 415, "UnsupportedMediaType"


class InvalidError(ApiError):
    """The object breaks rules of its kind; `causes` says which field and why."""

    status, reason = 422, "Invalid"

    def __init__(self, message: str, *, causes: Sequence[Obj] = (), details: Obj | None = None) -> None:
        merged = {**(details or {}), **({"causes": list(causes)} if causes else {})}
        super().__init__(message, details=merged or None)
