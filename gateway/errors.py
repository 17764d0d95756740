"""All errors of the gateway.

GatewayError
├── RequestError         the client's fault: bad input, unknown model, wrong key
│   └── PassedOnError    a provider's own 4xx
└── RefusedError         the gateway cannot serve now: queue full, no tier available, shutting down

UpstreamError            an error of one attempt at a provider; `gateway.breaker.outcome` classifies it
StoreLostError           the store that gateways share does not answer; the caller continues with its local state
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from inference.protocol import CODES, Code, error_body


class GatewayError(Exception):
    """Base of errors that a client gets, with `code`, `status`, `retryable` and `retry_after` (seconds).

    `retryable`: whether a retry may help. The default depends on the code.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        details: Mapping[str, Any] | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.details = details
        self.retryable = CODES[code].retryable if retryable is None else retryable

    @property
    def status(self) -> int:
        """The HTTP status of the code."""
        return CODES[self.code].status

    def body(self) -> dict[str, Any]:
        """The OpenAI error envelope."""
        return error_body(self.code, self.message, param=self.param, details=self.details)


class RequestError(GatewayError):
    """The request cannot be served, now or later: 4xx, with the `param` at fault where there is one."""


class RefusedError(GatewayError):
    """The request is valid and cannot be served now; has `retry_after` when it is known."""


class UpstreamKind(StrEnum):
    """The kind of a failure at a provider."""

    CONNECT = "connect"
    """no connection was made: refused, DNS, TLS, connect timeout"""
    READ = "read"
    """the connection broke or the stream ended before its finish"""
    TIMEOUT = "timeout"
    """silence until a deadline"""
    STATUS = "status"
    """an HTTP error status"""
    MALFORMED = "malformed"
    """a response that is not valid in the provider's API"""
    ERROR_FRAME = "error_frame"
    """an error inside a stream that had opened with 200"""
    EMPTY = "empty"
    """the stream ended with no content and no finish reason"""


class PassedOnError(RequestError):
    """A provider's error about the request; status, code, type, param and message are the provider's.

    The message about a prompt that is too long also has the code, because LangChain looks for it in the text.
    """

    def __init__(self, error: UpstreamError, status: int, param: str | None) -> None:
        message = error.message
        if error.code == Code.CONTEXT_LENGTH_EXCEEDED and error.code not in message:
            message = f"{message} ({error.code}: the request exceeds the context window)"
        super().__init__(Code.INVALID_REQUEST, message, param=param, details=error.details)
        self._status = status
        self.upstream_code = error.code or Code.INVALID_REQUEST
        self._type = error.type or "invalid_request_error"

    @property
    def status(self) -> int:
        """The provider's status."""
        return self._status

    def body(self) -> dict[str, Any]:
        """The OpenAI error envelope with the provider's error."""
        return error_body(self.upstream_code, self.message, param=self.param, type=self._type, details=self.details)


@dataclass(eq=False)
class UpstreamError(Exception):
    """One attempt failed. `status` is the HTTP status (or the one of the error frame's code) when there is one;
    `code`, `type`, `param` and `message` are the provider's; `retry_after` is in seconds.
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


class StoreLostError(Exception):
    """The store that gateways share did not answer. No client gets this error."""
