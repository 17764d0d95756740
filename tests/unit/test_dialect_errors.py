"""Errors of cloud providers as UpstreamError: status, code, message without secrets."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.cloud_http import upstream_error
from gateway.providers.provider_errors import error_in, frame_error, retry_after_seconds, scrub, status_error
from tests.rigs.fake_provider import anthropic_wire, openai_wire

NOW = 1_700_000_000.0


def read(status: int, body: Any, headers: dict[str, str] | None = None, secrets: tuple[str, ...] = ()) -> UpstreamError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return status_error(status, headers or {}, raw, now=NOW, secrets=secrets)


def test_fields_of_an_openai_error_are_read() -> None:
    error = read(400, openai_wire.error("No.", type="invalid_request_error", param="n", code="bad_n"))
    found = (error.status, error.message, error.type, error.param, error.code)
    assert found == (400, "No.", "invalid_request_error", "n", "bad_n")


def test_error_of_anthropic_has_the_code_of_its_details() -> None:
    payload = anthropic_wire.error("rate_limit_error", "Slow down.")
    payload["error"]["details"] = {"error_code": "ramp_limit_exceeded"}
    error = read(429, payload)
    assert (error.type, error.code, error.message) == ("rate_limit_error", "ramp_limit_exceeded", "Slow down.")


def test_error_of_google_is_a_list_with_a_delay() -> None:
    error = read(429, openai_wire.google_error(429, "Quota.", reason="RATE_LIMIT_EXCEEDED", retry_delay=34.5))
    assert (error.type, error.code, error.retry_after) == ("RESOURCE_EXHAUSTED", "RATE_LIMIT_EXCEEDED", 34.5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html><h1>502 Bad Gateway</h1></html>", "without an explanation"),
        (b"upstream connect error", "upstream connect error"),
        (b"", "without an explanation"),
        (b"[]", "[]"),
        (b'{"error": "model is loading"}', "model is loading"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"message": "nope"}', "nope"),
        (b'{"error": {"message": 5}}', "without an explanation"),
        (b"\xff\xfe", "\ufffd"),
    ],
)
def test_error_message_is_read_from_each_kind_of_body(body: bytes, message: str) -> None:
    assert message in read(502, body).message


@pytest.mark.parametrize(
    "payload",
    [
        openai_wire.CONTEXT,
        openai_wire.GOOGLE_CONTEXT,
        anthropic_wire.CONTEXT,
        anthropic_wire.error(
            "invalid_request_error", "input length and `max_tokens` exceed context limit: 190000 + 32000 > 200000"
        ),
    ],
    ids=["openai", "google", "anthropic", "max_tokens"],
)
def test_context_limit_has_one_code(payload: Any) -> None:
    assert read(400, payload).code == "context_length_exceeded"


def test_unrecognized_argument_is_an_unsupported_parameter() -> None:
    """OpenAI sends this message without its code for unsupported parameters."""
    error = read(400, openai_wire.error("Unrecognized request argument supplied: reasoning_effort"))
    assert (error.code, error.param) == ("unsupported_parameter", "reasoning_effort")


def test_blocked_content_has_the_codes_of_its_provider() -> None:
    assert read(400, openai_wire.CONTENT_POLICY).code == "content_policy_violation"
    assert read(400, anthropic_wire.CONTENT_POLICY).code == "content_filter"
    assert read(400, openai_wire.google_error(400, "Blocked: PROHIBITED_CONTENT")).code == "content_filter"


def test_invalid_keys_and_empty_accounts_have_a_status_of_their_own() -> None:
    assert read(400, openai_wire.GOOGLE_BAD_KEY).status == 401
    broke = anthropic_wire.error("invalid_request_error", "Your credit balance is too low to access the API.")
    assert read(400, broke).status == 402
    empty = openai_wire.NO_QUOTA["error"]["message"]
    for payload in (openai_wire.NO_QUOTA, openai_wire.error(empty, type="insufficient_quota")):
        assert read(429, payload).status == 402
        assert frame_error(payload["error"]).status == 402
        assert read(429, payload, {"retry-after": "7"}).status == 429, "the account refills"
    assert read(429, openai_wire.google_error(429, empty)).status == 429, "Google means the quota of a minute"


@pytest.mark.parametrize("status", [413, 429])
def test_request_larger_than_the_rate_limit_is_request_too_large(status: int) -> None:
    text = openai_wire.TOO_LARGE["error"]["message"]
    error = read(status, openai_wire.TOO_LARGE)
    assert (error.status, error.code, error.message) == (413, "request_too_large", text)
    busy = text.replace("Request too large", "Rate limit reached")
    assert read(429, openai_wire.error(busy, type="tokens", code="rate_limit_exceeded")).status == 429


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
        ({"retry-after": "Tue, 14 Nov 2023 22:13:50 GMT"}, 30.0),
        ({"retry-after": "Tue, 14 Nov 2023 22:00:00 GMT"}, 0.0),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "whenever"}, None),
        ({"retry-after": ""}, None),
    ],
)
def test_retry_after_is_read_in_each_format(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_seconds(headers, NOW) == seconds


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"type": "overloaded_error", "message": "x"}, 529),
        ({"type": "server_error", "message": "x"}, 500),
        ({"code": "rate_limit_exceeded", "type": "tokens", "message": "x"}, 429),
        ({"code": 503, "status": "UNAVAILABLE", "message": "x"}, 503),
        ({"code": 7, "status": "PERMISSION_DENIED", "message": "x"}, 403),
        ({"type": "tomorrow", "message": "x"}, None),
        ({}, None),
    ],
)
def test_status_of_an_error_frame_follows_from_its_type_or_code(error: dict[str, Any], status: int | None) -> None:
    read = frame_error(error)
    assert (read.kind, read.status) == (UpstreamKind.ERROR_FRAME, status)


@pytest.mark.parametrize("key", ["x", "none", "EMPTY", "context", "tokens"])
def test_short_keys_are_not_removed_from_messages(key: str) -> None:
    """They are placeholders and may be parts of words."""
    text = f"This model's maximum context length is 10 tokens, not {key}"
    error = read(400, {"error": {"message": text, "code": "context_length_exceeded"}}, secrets=(key,))
    assert (error.message, error.code) == (text, "context_length_exceeded")


def test_keys_are_removed_as_whole_words_only() -> None:
    text = "maximums-10, mymaximum1, maximum12, x-maximum1 and `maximum1`."
    assert scrub(text, ("maximum1",)) == "maximums-10, mymaximum1, maximum12, x-[key] and `[key]`."


def test_chunk_is_no_error() -> None:
    for chunk in ({"choices": []}, {"choices": [], "error": None, "message": "x"}, {"id": "x"}, [], None, 5):
        assert error_in(chunk) is None


def test_keys_are_removed_from_messages() -> None:
    text = "Incorrect API key provided: s3cret-key and sk-proj-*****abcd."
    error = read(401, openai_wire.error(text), secrets=("s3cret-key",))
    assert error.message == "Incorrect API key provided: [key] and [key]"
    assert scrub("key AIzaSyA-1234567_x in use") == "key [key] in use"
    assert scrub("Bearer s3cret-key, key=s3cret-key&x", ("s3cret-key",)) == "Bearer [key], key=[key]&x"
    assert scrub("text", ("",)) == "text"
    assert len(scrub("x" * 10**6)) <= 2000


KEY = ConnectionKey("h", 443, True, True, None, None, None)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (aiohttp.ClientConnectorError(KEY, ConnectionRefusedError()), UpstreamKind.CONNECT),
        (aiohttp.ClientProxyConnectionError(KEY, OSError("no")), UpstreamKind.CONNECT),
        (aiohttp.ConnectionTimeoutError("slow"), UpstreamKind.CONNECT),
        (aiohttp.InvalidURL("http://"), UpstreamKind.CONNECT),
        (aiohttp.SocketTimeoutError("slow"), UpstreamKind.TIMEOUT),
        (aiohttp.ClientOSError("reset"), UpstreamKind.READ),
        (ConnectionResetError("reset"), UpstreamKind.READ),
        (aiohttp.ServerDisconnectedError(), UpstreamKind.READ),
        (aiohttp.ClientPayloadError("cut"), UpstreamKind.READ),
        (ValueError("Newline in a header"), UpstreamKind.CONNECT),
        (RuntimeError("defect"), UpstreamKind.READ),
    ],
)
def test_exceptions_of_a_call_have_a_kind(raised: Exception, kind: UpstreamKind) -> None:
    error = upstream_error(raised, "api.example.com")
    assert error.kind is kind
    assert "api.example.com" in error.message
