"""Every error the worker raises and what the client may be told; decides no policy.

WorkerError              one request: becomes an OpenAI error envelope, or an error frame once a stream has begun
├── BadRequestError      the caller's fault; 4xx with `param`
│   └── ConstraintError  an answer that cannot be held to its form any longer
└── UnloadedError        this worker leaves; the model itself can be asked again, and so can all the others
GoneError                nobody: the client left
LoadError                the model: becomes a `failed` message on the link, then the process ends
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inference.protocol import CODES, RETRY_AFTER, Code, ExitCause, error_body


class WorkerError(Exception):
    """One request cannot be answered; `retry_after` is in seconds and only set when it is known."""

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.details = details

    @property
    def status(self) -> int:
        """The HTTP status of the code."""
        return CODES[self.code].status

    @property
    def retryable(self) -> bool:
        """Whether a retry can succeed."""
        return CODES[self.code].retryable

    def body(self) -> dict[str, Any]:
        """The OpenAI error envelope; the wait stands in it too, because an error frame has no headers."""
        details = dict(self.details or {})
        if self.retry_after is not None:
            details[RETRY_AFTER] = round(self.retry_after, 3)
        return error_body(self.code, self.message, param=self.param, details=details or None)


class BadRequestError(WorkerError):
    """The request itself is wrong; trying again cannot help."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        code: Code = Code.INVALID_REQUEST,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(code, message, param=param, details=details)


class ConstraintError(BadRequestError):
    """An answer under way cannot be held to the form that was asked for: its own limits, or parameters that exclude
    every token that may follow. Never the model's failure.
    """


class UnloadedError(WorkerError):
    """The model was unloaded or replaced. Never `shutting_down`: that word is the service's, about all its models."""

    def __init__(self) -> None:
        super().__init__(Code.MODEL_LOADING, "this model was unloaded or replaced; ask again", retry_after=1.0)


class GoneError(Exception):
    """The client left; there is nobody to answer."""


class LoadError(Exception):
    """The model cannot be loaded; `cause` tells the authority what to do about it."""

    def __init__(self, cause: ExitCause, message: str) -> None:
        super().__init__(message)
        self.cause = cause
        self.message = message
