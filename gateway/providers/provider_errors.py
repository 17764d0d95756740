"""Converts error bodies and headers of clouds into UpstreamError, without secrets.

Messages and codes of the providers are kept, with five exceptions: a prompt that is too long for the model becomes
`context_length_exceeded`, a request above the account's limit per minute or day `request_too_large`, blocked content
`content_filter`, an unknown parameter without a code `unsupported_parameter`, and errors of the account (invalid key,
no credit) get the status 401 or 402.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

import orjson

from gateway.apis.messages.messages_errors import STATUS_OF_TYPE
from gateway.breaker.outcome import REQUEST_TOO_LARGE
from gateway.errors import UpstreamError, UpstreamKind
from inference.protocol import Code

MAX_MESSAGE_CHARS = 2000

MIN_SECRET_CHARS = 8


_TOO_LONG = re.compile(
    r"prompt is too long|exceeds? (the )?context (limit|window|length)|maximum context length"
    r"|input token count .{0,40}exceeds the maximum",
    re.IGNORECASE,
)
_TOO_LARGE = re.compile(r"^Request too large for .*\b(tokens|requests) per (min|minute|day)\b", re.DOTALL)
_UNRECOGNIZED = re.compile(r"Unrecognized request arguments? supplied: (\w+)")
"""OpenAI's message for an unknown parameter of some models, which comes without a code."""
_BLOCKED = re.compile(r"blocked by content filtering|content (management )?policy|PROHIBITED_CONTENT", re.IGNORECASE)
_BAD_KEY = re.compile(r"API_KEY_INVALID|API key not valid|API key expired", re.IGNORECASE)
_NO_CREDIT = re.compile(r"credit balance is too low", re.IGNORECASE)
_NO_QUOTA = "insufficient_quota"
"""OpenAI's code, with a 429, for an account without credit. Others send it with a Retry-After for rate limits."""
_KEY_LIKE = re.compile(r"\b(sk-|AIza)[\w*.-]{6,}")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)s")
_NAME = re.compile(r"[\w.:/-]{1,64}")
_PARAM = re.compile(r"[\w.:/\[\]-]{1,128}")


def scrub(text: str, secrets: Sequence[str] = ()) -> str:
    """The first MAX_MESSAGE_CHARS of `text`, without the given secrets and anything that looks like an API key.

    A secret is removed where it is not part of a longer word. Secrets shorter than MIN_SECRET_CHARS are ignored: they
    are placeholders for servers without keys and may occur in ordinary text.
    """
    for secret in secrets:
        if len(secret) >= MIN_SECRET_CHARS:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(secret)}(?![A-Za-z0-9])", "[key]", text)
    return _KEY_LIKE.sub("[key]", text)[:MAX_MESSAGE_CHARS]


def retry_after_seconds(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds to wait, from `retry-after-ms` or `retry-after` (seconds or an HTTP date); None without a usable one.

    `headers` has lower-case names; `now` is seconds since the epoch.
    """
    if (milliseconds := _number(headers.get("retry-after-ms"))) is not None:
        return milliseconds / 1000
    value = headers.get("retry-after")
    if value is None or (seconds := _number(value)) is not None:
        return None if value is None else seconds
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now)
    except (ValueError, OverflowError):
        return None


def _number(text: str | None) -> float | None:
    try:
        number = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def status_error(
    status: int, headers: Mapping[str, str], body: bytes, *, now: float, secrets: Sequence[str] = ()
) -> UpstreamError:
    """The UpstreamError for an HTTP error status; the body may have any envelope, or not be JSON."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        parsed = None
    error = error_in(parsed)
    if error is None:
        text = body.decode("utf-8", "replace").strip()
        plain = "" if text.startswith("<") else text[:200]  # an HTML page of a proxy does not help a client
        error = {"message": plain or f"the provider answered {status} without an explanation"}
    wait = retry_after_seconds(headers, now)
    return _build(UpstreamKind.STATUS, error, status, wait, secrets)


def frame_error(error: Mapping[str, Any], *, secrets: Sequence[str] = ()) -> UpstreamError:
    """The UpstreamError for an error object inside a stream."""
    return _build(UpstreamKind.ERROR_FRAME, error, None, None, secrets)


def error_in(parsed: Any) -> Mapping[str, Any] | None:
    """The error object in a parsed body or chunk with any known envelope; None if there is none.

    OpenAI and Anthropic: `{"error": {...}}`. Google: the same, or a list of one. Others: `{"error": "text"}`,
    `{"detail": "text"}` or `{"message": "text"}`.
    """
    if isinstance(parsed, list) and len(parsed) == 1:
        parsed = parsed[0]
    if not isinstance(parsed, Mapping):
        return None
    error = parsed.get("error")
    if isinstance(error, Mapping) and error:
        return error
    if "choices" in parsed and not error:
        return None
    for text in (error, parsed.get("detail"), parsed.get("message")):
        if isinstance(text, str) and text:
            return {"message": text}
    return {"message": "the provider reported an error without an explanation"} if error else None


def _build(
    kind: UpstreamKind, error: Mapping[str, Any], status: int | None, wait: float | None, secrets: Sequence[str]
) -> UpstreamError:
    message = _string(error.get("message")) or "the provider reported an error without an explanation"
    code, type = _string(error.get("code")), _string(error.get("type"))
    if type is None:
        type = _string(error.get("status"))
    details = error.get("details")
    reasons = _reasons(details)
    code = code or next(iter(reasons), None)
    if status is None:
        status = _status_of(error, code, type)
    param = _string(error.get("param"))
    if wait is None:
        wait = _retry_info(details)
    if status is not None and 400 <= status < 500:
        text = " ".join((message, *reasons))
        if code != Code.CONTEXT_LENGTH_EXCEEDED and status in (400, 413) and _TOO_LONG.search(text):
            code = Code.CONTEXT_LENGTH_EXCEEDED
        elif code != "content_policy_violation" and status == 400 and _BLOCKED.search(text):
            code = "content_filter"
        elif status in (413, 429) and _TOO_LARGE.search(message):
            status, code = 413, REQUEST_TOO_LARGE
        elif code is None and status == 400 and (unknown := _UNRECOGNIZED.search(message)):
            code, param = Code.UNSUPPORTED_PARAMETER, unknown[1]
        elif _BAD_KEY.search(text):
            status = 401
        elif (_NO_QUOTA in (code, type) and wait is None) or _NO_CREDIT.search(message):
            status = 402
    return UpstreamError(
        kind,
        scrub(message, secrets),
        status=status,
        code=_named(_NAME, code, secrets),
        type=_named(_NAME, type, secrets),
        param=_named(_PARAM, param, secrets),
        retry_after=wait,
    )


def _named(form: re.Pattern[str], value: str | None, secrets: Sequence[str]) -> str | None:
    """`value` if it has the form of a name and contains no secret, else None."""
    return value if value is not None and form.fullmatch(value) and scrub(value, secrets) == value else None


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _status_of(error: Mapping[str, Any], code: str | None, type: str | None) -> int | None:
    number = error.get("code")
    if isinstance(number, int) and not isinstance(number, bool) and 400 <= number < 600:
        return number
    for word in (code, type):
        if word is not None and word in STATUS_OF_TYPE:
            return STATUS_OF_TYPE[word]
    return None


def _reasons(details: Any) -> list[str]:
    """Machine-readable causes: Anthropic's `details.error_code`, Google's `details[].reason`."""
    items = details if isinstance(details, list) else [details]
    values = [item.get(key) for item in items if isinstance(item, Mapping) for key in ("error_code", "reason")]
    return [reason for reason in values if isinstance(reason, str)]


def _retry_info(details: Any) -> float | None:
    """Google's `RetryInfo.retryDelay`, in seconds."""
    for item in details if isinstance(details, list) else ():
        if isinstance(item, Mapping) and isinstance(delay := item.get("retryDelay"), str):
            match = _DURATION.fullmatch(delay)
            return float(match[1]) if match else None
    return None
