"""Every error the gateway raises, with what a client may be told; decides no policy.

GatewayError
├── RequestError         the caller's fault: bad input, unknown model, wrong key        (never a breaker's business)
│   └── PassedOnError    a tier's own 4xx, in its own words
├── RefusedError         ours: queue full, no tier available, shutting down
└── UpstreamError        a provider's: what one attempt met, before classification by core.outcome
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from inference.protocol import CODES, Code, error_body


class GatewayError(Exception):
    """Base; `code`, `status`, `retryable` and `retry_after` (seconds) say what the client gets.

    `should_retry` is False where the code is retryable but this request's budget is spent.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        details: Mapping[str, Any] | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.details = details
        self.should_retry = self.retryable if should_retry is None else should_retry

    @property
    def status(self) -> int:
        """The HTTP status of the code."""
        return CODES[self.code].status

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return CODES[self.code].retryable

    def body(self) -> dict[str, Any]:
        """The OpenAI error envelope."""
        return error_body(self.code, self.message, param=self.param, details=self.details)


class RequestError(GatewayError):
    """The request itself cannot be served, now or later; 4xx with `param` where one is to blame."""


class RefusedError(GatewayError):
    """The request is fine and we cannot serve it now; carries a true `retry_after` when one is known."""


class UpstreamKind(StrEnum):
    """What went wrong on the way to or from a provider."""

    CONNECT = "connect"
    """no connection was made: refused, DNS, TLS, connect timeout"""
    READ = "read"
    """the connection broke or the stream ended before its finish"""
    TIMEOUT = "timeout"
    """silence past a deadline of ours"""
    STATUS = "status"
    """an HTTP error status with whatever body came"""
    MALFORMED = "malformed"
    """bytes that are not what the dialect promises"""
    ERROR_FRAME = "error_frame"
    """an error inside a stream that had opened with 200"""
    EMPTY = "empty"
    """the stream ended with no content and no finish reason"""


class PassedOnError(RequestError):
    """What a tier said about the caller's own mistake; status, code, type, param and message are the tier's."""

    def __init__(self, said: UpstreamError, status: int, param: str | None) -> None:
        super().__init__(Code.INVALID_REQUEST, said.message, param=param, details=said.details)
        self._status = status
        self.upstream_code = said.code or Code.INVALID_REQUEST
        self._type = said.type or "invalid_request_error"

    @property
    def status(self) -> int:
        """The tier's status."""
        return self._status

    def body(self) -> dict[str, Any]:
        """The OpenAI error envelope in the tier's words."""
        return error_body(self.upstream_code, self.message, param=self.param, type=self._type, details=self.details)


@dataclass(eq=False)
class UpstreamError(Exception):
    """One attempt failed. `status` is the HTTP status (or the one of the error frame's code) when there is one;
    `code`, `type`, `param` and `message` are the provider's own words; `retry_after` is in seconds.
    """

    kind: UpstreamKind
    message: str
    status: int | None = None
    code: str | None = None
    type: str | None = None
    param: str | None = None
    retry_after: float | None = None
    details: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return f"{self.kind}{f' {self.status}' if self.status else ''}: {self.message}"
