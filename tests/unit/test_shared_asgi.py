"""The ASGI toolkit: request ids, bodies with limits and deadlines, responses and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from headgate.shared.asgi import (
    BodyTimeoutError,
    BodyTooLargeError,
    ClientDisconnectedError,
    Message,
    Response,
    declared_length,
    discard_body,
    headers_of,
    read_body,
    request_id,
)
from inference.errors import InvalidRequestError, QueueFull

SILENT = object()
"""Stands for a message that does not arrive."""


class Client:
    """Sends the given messages and records the response."""

    def __init__(self, *messages: Any) -> None:
        self._messages = list(messages)
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        message = self._messages.pop(0)
        if message is SILENT:
            await asyncio.Event().wait()
        if isinstance(message, bytes):
            return {"type": "http.request", "body": message, "more_body": bool(self._messages)}
        return dict(message)

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def unread(self) -> int:
        return len(self._messages)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])


DISCONNECT = {"type": "http.disconnect"}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (b"req-1", True),
        (b"x" * 128, True),
        (b"a/b", False),
        (b"", False),
        (b"a b", False),
        (b".a", False),
        (b"a\n", False),
        (b"x" * 129, False),
    ],
)
def test_valid_request_id_is_kept_and_an_invalid_one_is_replaced(given: bytes, kept: bool) -> None:
    scope = {"headers": [(b"x-request-id", given)]}
    assert (request_id(scope) == given.decode()) is kept
    assert request_id(scope) == request_id(scope)


def test_last_of_repeated_headers_is_kept() -> None:
    assert headers_of({"headers": [(b"a", b"1"), (b"b", b" x "), (b"a", b"2")]}) == {"a": "2", "b": "x"}


@pytest.mark.parametrize(("value", "length"), [("12", 12), ("", None), ("-1", None), ("1" * 16, None), ("²", None)])
def test_declared_length_is_none_unless_the_header_is_a_plain_number(value: str, length: int | None) -> None:
    assert declared_length({"content-length": value}) == length


async def test_body_within_the_limit_is_read_in_pieces() -> None:
    client = Client(b"ab", b"cd")
    assert await read_body(client.receive, {}, 4, 1.0) == [b"ab", b"cd"]


async def test_body_over_the_limit_is_rejected_when_declared_and_when_received() -> None:
    client = Client(b"abcde")
    with pytest.raises(BodyTooLargeError):
        await read_body(client.receive, {"content-length": "5"}, 4, 1.0)
    assert client.unread == 1
    with pytest.raises(BodyTooLargeError):
        await read_body(client.receive, {}, 4, 1.0)


@pytest.mark.parametrize(("total", "silence", "silent"), [(0.02, 5.0, False), (5.0, 0.02, True)])
async def test_body_that_does_not_arrive_in_time_is_rejected(total: float, silence: float, silent: bool) -> None:
    client = Client(b"ab", SILENT)
    with pytest.raises(BodyTimeoutError) as caught:
        await read_body(client.receive, {}, 4, total, silence)
    assert caught.value.silent is silent


async def test_disconnect_while_the_body_is_read_raises_an_error() -> None:
    with pytest.raises(ClientDisconnectedError):
        await read_body(Client(b"ab", DISCONNECT).receive, {}, 4, 1.0)


async def test_discarding_a_body_ends_at_each_limit() -> None:
    for messages, unread in (((b"ab", b"cd"), 0), ((b"abcd", b"ef", b"gh"), 2), ((DISCONNECT, b"x"), 1)):
        client = Client(*messages)
        await discard_body(client.receive, 4, 1.0)
        assert client.unread == unread
    await asyncio.wait_for(discard_body(Client(SILENT, b"x").receive, 4, 0.01), 5)


async def test_error_before_the_response_starts_is_sent_with_its_status_and_headers() -> None:
    client = Client()
    await Response(client.send, "req-1").fail(QueueFull("full", retry_after=1.2))
    assert client.sent[0]["status"] == 429
    assert client.headers[b"retry-after"] == b"2"
    assert client.headers[b"x-request-id"] == b"req-1"
    assert client.headers[b"content-length"] == str(len(client.body)).encode()
    assert b"x-should-retry" not in client.headers
    assert orjson.loads(client.body)["error"]["message"] == "full"


async def test_error_that_a_retry_cannot_solve_forbids_a_retry_in_its_headers() -> None:
    client = Client()
    await Response(client.send, "").fail(InvalidRequestError("wrong"))
    assert client.headers[b"x-should-retry"] == b"false"
    assert b"x-request-id" not in client.headers


async def test_error_after_the_response_started_is_the_last_frame() -> None:
    client = Client()
    response = Response(client.send, "req-1")
    await response.begin_stream()
    await response.begin_stream()
    await response.fail(InvalidRequestError("wrong"))
    await response.fail(InvalidRequestError("again"))
    assert client.body.startswith(b"data: {")
    assert client.body.endswith(b"}\n\n")
    assert b"again" not in client.body
    assert [message["type"] for message in client.sent].count("http.response.start") == 1
    assert client.sent[-1]["more_body"] is False


async def test_rejected_body_is_discarded_and_the_connection_closed() -> None:
    client = Client(b"ab", b"cd")
    await Response(client.send, "req-1").refuse_body(InvalidRequestError("too large"), client.receive)
    assert client.headers[b"connection"] == b"close"
    assert client.unread == 0
    assert client.sent[-1]["more_body"] is False


async def test_response_without_a_wire_takes_no_pieces() -> None:
    response = Response(Client().send, "req-1")
    await response.begin_stream()
    assert not response.takes_pieces
