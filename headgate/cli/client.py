"""Talks HTTP to a running service and turns its refusals into messages and exit codes; shows nothing itself.

HeadgateError
├── NotRunningError   nobody answers at the address
└── ApiError          an error status or an error frame, with the numbers the service gave
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from headgate.shared.errors import Exit, HeadgateError, NotRunningError

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0


class ApiError(HeadgateError):
    """A service said no. `code` is the error code, `details` the numbers behind it, `retry_after` seconds."""

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
    """What a refusal means for a script: does not fit, try later, or failed."""
    if code == "memory_limit_exceeded":
        return Exit.DOES_NOT_FIT
    if code in ("model_loading", "queue_full") or (status in (429, 503) and retry_after is not None):
        return Exit.TRY_LATER
    return Exit.FAILURE


@dataclass(frozen=True)
class Answer:
    """An open answer: `headers` in lower case, `lines` to iterate while it streams."""

    headers: Mapping[str, str]
    response: http.client.HTTPResponse

    @property
    def lines(self) -> Iterator[bytes]:
        """The body line by line as it arrives."""
        return iter(self.response.readline, b"")


@dataclass(frozen=True)
class Api:
    """One service: `name` and `hint` (how to start it) are for messages."""

    name: str
    url: str
    token: str | None
    hint: str

    def get(self, path: str) -> Any:
        """The JSON at `path`."""
        return self._json("GET", path, None, ANSWER_SECONDS)

    def post(self, path: str, body: Any = None, seconds: float = ANSWER_SECONDS) -> Any:
        """The JSON that answers a POST; `seconds` bounds every silence."""
        return self._json("POST", path, {} if body is None else body, seconds)

    def delete(self, path: str) -> Any:
        """The JSON that answers a DELETE."""
        return self._json("DELETE", path, None, ANSWER_SECONDS)

    def _json(self, method: str, path: str, body: Any, seconds: float) -> Any:
        with self.open(method, path, body, seconds) as answer:
            raw = answer.response.read()
        try:
            return json.loads(raw) if raw.strip() else None
        except ValueError as error:
            raise ApiError(
                f"the {self.name} at {self.url} answered something that is not JSON: {raw[:80]!r}"
            ) from error

    @contextlib.contextmanager
    def open(
        self, method: str, path: str, body: Any, seconds: float, more: Mapping[str, str] | None = None
    ) -> Iterator[Answer]:
        """An answer with a good status; closes the connection on leaving, also mid-stream. `more` are extra headers.

        Raises NotRunningError when nobody answers, ApiError for a refusal, a broken connection or silence.
        """
        if self.token and not (self.token.isascii() and self.token.isprintable()):
            raise HeadgateError(f"the key for the {self.name} has characters that no key has; see where it is set")
        connection = self._connect()
        try:
            if connection.sock is not None:
                connection.sock.settimeout(seconds)
            headers = {"Accept": "application/json, text/event-stream", **(more or {})}
            if self.token:
                headers["Authorization"] = f"Bearer {self.token}"
            payload = None
            if body is not None:
                payload = json.dumps(body).encode()
                headers["Content-Type"] = "application/json"
            prefix = urlsplit(self.url).path.rstrip("/")
            connection.request(method, prefix + path, payload, headers)
            response = connection.getresponse()
            said = {name.lower(): value for name, value in response.getheaders()}
            if response.status >= 400:
                raise refusal(response.status, said, response.read(1 << 20), f"{self.name} at {self.url}")
            yield Answer(said, response)
        except TimeoutError:
            raise ApiError(
                f"the {self.name} at {self.url} was silent for {seconds:g} s", status=504, retry_after=1.0
            ) from None
        except (http.client.HTTPException, ConnectionError) as error:
            raise ApiError(
                f"the connection to the {self.name} at {self.url} broke: {error or type(error).__name__}"
            ) from error
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        where = urlsplit(self.url)
        kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
        try:
            connection = kind(where.hostname or "127.0.0.1", where.port, timeout=CONNECT_SECONDS)
            connection.connect()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise NotRunningError(
                f"the {self.name} does not answer at {self.url} ({reason}); start it with `{self.hint}`"
            ) from None
        return connection


def refusal(status: int, headers: Mapping[str, str], raw: bytes, who: str) -> ApiError:
    """The ApiError for an error response; `who` names the service for answers that are not in the envelope."""
    retry_after = _seconds(headers.get("retry-after"))
    try:
        error = json.loads(raw)["error"]
        return from_envelope(error, status, retry_after)
    except (ValueError, KeyError, TypeError, AttributeError):
        text = raw[:200].decode("utf-8", "replace").strip()
        return ApiError(
            f"the {who} answered {status}{': ' + text if text else ''}", status=status, retry_after=retry_after
        )


def from_envelope(error: Mapping[str, Any], status: int | None, retry_after: float | None) -> ApiError:
    """The ApiError for the inside of `{"error": ...}`, from a response or from an error frame of a stream."""
    message = str(error["message"])
    if retry_after is not None:
        message += f" (try again in {retry_after:g} s)"
    return ApiError(
        message, status=status, code=error.get("code"), retry_after=retry_after, details=error.get("headgate")
    )


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else float(header)
    except ValueError:  # the date form: somebody else's service; the number would only be decoration
        return None


def segment(name: str) -> str:
    """A model or breaker name as part of a path; names may hold slashes."""
    return quote(name, safe="/")
