"""The errors of the worker and their messages to clients.

WorkerError              fails one request: an OpenAI error envelope, or an error frame in a stream that has started
├── BadRequestError      the request is wrong; 4xx with `param`
│   └── ConstraintError  the answer can no longer be constrained to its form
└── UnloadedError        the worker ends; the model can be requested again
GoneError                the client disconnected
LoadError                the model cannot be loaded: becomes a `failed` message on the link, then the process ends
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inference.errors import InferenceError
from inference.protocol import Code, ExitCause


class WorkerError(InferenceError):
    """One request cannot be answered; `retry_after` is in seconds, None where unknown."""

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message, code=code, param=param, retry_after=retry_after, details=details)


class BadRequestError(WorkerError):
    """The request is wrong; a retry cannot succeed."""

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
    """A running answer can no longer be constrained: a limit was reached, or parameters exclude every allowed token."""

    RULED_OUT = (
        "other parameters exclude every token that the required format allows next; remove logit_bias and ignore_eos"
    )


class UnloadedError(WorkerError):
    """The model was unloaded or replaced. The code `shutting_down` is reserved for the service."""

    def __init__(self) -> None:
        super().__init__(Code.MODEL_LOADING, "this model was unloaded or replaced; retry the request", retry_after=1.0)


class GoneError(Exception):
    """The client disconnected."""


class LoadError(Exception):
    """The model cannot be loaded; `cause` classifies it for the authority."""

    def __init__(self, cause: ExitCause, message: str) -> None:
        super().__init__(message)
        self.cause = cause
        self.message = message
