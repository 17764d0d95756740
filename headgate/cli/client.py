"""HTTP client of the command line. Turns error responses into messages and exit codes.

HeadgateError
├── NotRunningError   no service answers at the address
└── ApiError          an error status, an error frame of a stream, a timeout, or a response that cannot be read
"""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from headgate.shared.errors import Exit, HeadgateError, NotRunningError
from headgate.shared.sse import SseFrame, SseSplitter

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0


class ApiError(HeadgateError):
    """An error response, or no usable response.

    `code` is `error.code` of the response, and `details` is `error.headgate`: the numbers in the message.
    `status` is the HTTP status, 504 for a timeout of this client, or None. `retry_after` is in seconds.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after
        self.details = details or {}
        self.exit_code = exit_code(status, code, retry_after)


def exit_code(status: int | None, code: str | None, retry_after: float | None) -> Exit:
    """The exit code for an error response."""
    if code == "memory_limit_exceeded":
        return Exit.DOES_NOT_FIT
    if code in ("model_loading", "queue_full") or (status in (429, 503) and retry_after is not None):
        return Exit.TRY_LATER
    return Exit.FAILURE


@dataclass(frozen=True)
class Answer:
    """An open response. Header names are in lower case."""

    headers: Mapping[str, str]
    response: http.client.HTTPResponse

    def frames(self) -> Iterator[SseFrame]:
        """The server-sent events of the body as they arrive."""
        splitter = SseSplitter()
        for line in iter(self.response.readline, b""):
            yield from splitter.feed(line)
        yield from splitter.end()


@dataclass(frozen=True)
class Api:
    """The API of one service. `name` and `hint` (the command that starts it) are for messages.

    `get`, `health`, `post` and `delete` return the parsed JSON of the response, None for an empty one, and raise the
    errors of `open`.
    """

    name: str
    url: str
    token: str | None
    hint: str
    tls: ssl.SSLContext | None = None
    """For https; None: the system's certificate authorities."""

    def get(self, path: str) -> Any:
        """The JSON response to GET `path`."""
        return self._json("GET", path, None, ANSWER_SECONDS)

    def health(self) -> Any:
        """The JSON response to GET `/health`, which has status 503 while something is wrong."""
        with self.open("GET", "/health", None, ANSWER_SECONDS, is_health=True) as answer:
            return self._decoded(answer.response.read())

    def post(self, path: str, body: Any = None, seconds: float = ANSWER_SECONDS) -> Any:
        """The JSON response to a POST. `seconds` is the timeout of each read."""
        return self._json("POST", path, {} if body is None else body, seconds)

    def delete(self, path: str) -> Any:
        """The JSON response to a DELETE."""
        return self._json("DELETE", path, None, ANSWER_SECONDS)

    def _json(self, method: str, path: str, body: Any, seconds: float) -> Any:
        with self.open(method, path, body, seconds) as answer:
            return self._decoded(answer.response.read())

    def _decoded(self, raw: bytes) -> Any:
        try:
            return json.loads(raw) if raw.strip() else None
        except ValueError as error:
            raise ApiError(
                f"the response of the {self.name} at {self.url} is not JSON: {raw[:80]!r}; check that this is the "
                f"address of the {self.name}"
            ) from error

    @contextlib.contextmanager
    def open(
        self,
        method: str,
        path: str,
        body: Any,
        seconds: float,
        extra_headers: Mapping[str, str] | None = None,
        *,
        is_health: bool = False,
    ) -> Iterator[Answer]:
        """A response with a status below 400, with `is_health` also 503.

        Leaving the block closes the connection, also in mid-stream.

        `seconds` is the timeout of each read. Raises NotRunningError when no service answers, ApiError for an error
        response, a broken connection or a timeout, HeadgateError for a key that a header cannot contain.
        """
        if self.token and not (self.token.isascii() and self.token.isprintable()):
            raise HeadgateError(f"the key for the {self.name} contains characters outside printable ASCII; correct it")
        connection = self._connect()
        try:
            if connection.sock is not None:
                connection.sock.settimeout(seconds)
            headers = {"Accept": "application/json, text/event-stream", **(extra_headers or {})}
            if self.token:
                headers["Authorization"] = f"Bearer {self.token}"
            payload = None
            if body is not None:
                payload = json.dumps(body).encode()
                headers["Content-Type"] = "application/json"
            prefix = urlsplit(self.url).path.rstrip("/")
            connection.request(method, prefix + path, payload, headers)
            response = connection.getresponse()
            received = {name.lower(): value for name, value in response.getheaders()}
            if response.status >= 400 and not (is_health and response.status == 503):
                raise error_of_response(response.status, received, response.read(1 << 20), f"{self.name} at {self.url}")
            yield Answer(received, response)
        except TimeoutError:
            raise ApiError(
                f"the {self.name} at {self.url} sent nothing for {seconds:g} s", status=504, retry_after=1.0
            ) from None
        except (http.client.HTTPException, ConnectionError, ssl.SSLError) as error:
            raise ApiError(
                f"the connection to the {self.name} at {self.url} broke: {error or type(error).__name__}"
            ) from error
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        address = urlsplit(self.url)
        host = address.hostname or "127.0.0.1"
        connection: http.client.HTTPConnection
        try:
            if address.scheme == "https":
                connection = http.client.HTTPSConnection(host, address.port, timeout=CONNECT_SECONDS, context=self.tls)
            else:
                connection = http.client.HTTPConnection(host, address.port, timeout=CONNECT_SECONDS)
            connection.connect()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise NotRunningError(
                f"the {self.name} does not answer at {self.url} ({reason}); start it with `{self.hint}`"
            ) from None
        return connection


def error_of_response(status: int, headers: Mapping[str, str], raw: bytes, service: str) -> ApiError:
    """The ApiError for an error response. `service` names the sender of a body without an error envelope."""
    retry_after = _seconds(headers.get("retry-after"))
    try:
        error = json.loads(raw)["error"]
        return from_envelope(error, status, retry_after)
    except (ValueError, KeyError, TypeError, AttributeError):
        text = raw[:200].decode("utf-8", "replace").strip()
        return ApiError(
            f"the {service} answered {status}{': ' + text if text else ''}", status=status, retry_after=retry_after
        )


def from_envelope(error: Mapping[str, Any], status: int | None, retry_after: float | None) -> ApiError:
    """The ApiError for the object in `{"error": ...}` of a response or a frame. Raises KeyError without a message."""
    message = str(error["message"])
    if retry_after is not None:
        message += f" (try again in {retry_after:g} s)"
    return ApiError(
        message, status=status, code=error.get("code"), retry_after=retry_after, details=error.get("headgate")
    )


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else float(header)
    except ValueError:  # the date form, which Headgate's services do not use
        return None


def segment(name: str) -> str:
    """The name of a model, device or breaker, percent-encoded for a URL path. Its slashes are not encoded."""
    return quote(name, safe="/")
