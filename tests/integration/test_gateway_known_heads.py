"""A connection that sends the same head again is served as one that sends it for the first time."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headgate.shared.heads import Head
from headgate.shared.wire import WiredHttp
from tests.rigs.fake_inference import FakeInference
from tests.rigs.gateway_rig import CONFIG, KEY, MESSAGES, Gateway

HOST = "host: localhost\r\n"
BEARER = f"authorization: Bearer {KEY}\r\n"
SHORT = json.dumps({"model": "demo", "messages": MESSAGES}).encode()
LONG = json.dumps({"model": "demo", "messages": MESSAGES, "user": "x" * 3000}).encode()
CHANGES = re.compile(
    r"(x-request-id|request-id|x-headgate-overhead-ms|date): .*|req_[0-9a-f]+|chatcmpl[-0-9a-z]*|\"created\":\d+"
)


class Line:
    """A connection that is kept."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __aenter__(self) -> Line:
        port = int(self._gateway.url.rpartition(":")[2])
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def ask(self, headers: str, body: bytes, path: str = "/v1/chat/completions") -> tuple[str, str]:
        """The head and the body of an answer."""
        self._writer.write(f"POST {path} HTTP/1.1\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(5):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
            found = re.search(r"content-length: (\d+)", head)
            assert found is not None
            return head, (await self._reader.readexactly(int(found[1]))).decode()


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, fake.url, CONFIG + "max_body: 4096\n") as gateway:
        yield gateway


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the bodies of requests whose head was known."""
    lengths: list[int] = []
    begin_again = WiredHttp._begin_again

    def counted(self: WiredHttp, head: Head, length: bytes, body: bytes) -> None:
        lengths.append(int(length))
        begin_again(self, head, length, body)

    monkeypatch.setattr(WiredHttp, "_begin_again", counted)
    return lengths


def _same(said: tuple[str, str]) -> tuple[str, ...]:
    """An answer without what differs between any two."""
    return tuple(CHANGES.sub("", part) for part in said)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (HOST + BEARER, 200),
        (HOST + f"x-api-key: {KEY}\r\nx-headgate-priority: low\r\nx-headgate-policy: local-only\r\n", 200),
        (HOST + BEARER + "x-headgate-priority: soon\r\n", 400),
        (HOST + BEARER + "content-encoding: identity\r\n", 200),
        (HOST + BEARER + "content-encoding: gzip\r\n", 415),
        (HOST + BEARER + "host: localhost\r\n", 400),
        ("host: evil.example\r\n" + BEARER, 403),
        (HOST + "authorization: Bearer wrong\r\n", 401),
        (HOST, 401),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/nothing"])
async def test_the_same_head_gets_the_same_answer(
    gateway: Gateway, known: list[int], headers: str, status: int, path: str
) -> None:
    """Whatever the length of the body is, and after one that was too long."""
    bodies = (SHORT, SHORT, LONG, b"x" * 5000, b"", b"{", SHORT)
    async with Line(gateway) as line:
        kept = [_same(await line.ask(headers, body, path)) for body in bodies]
    assert known or "host" in headers[len(HOST) :], "a head with a header too many is never known"
    known.clear()
    fresh = []
    for body in bodies:
        async with Line(gateway) as line:
            fresh.append(_same(await line.ask(headers, body, path)))
    assert kept == fresh and not known
    if path == "/v1/chat/completions":
        assert kept[0][0].startswith(f"HTTP/1.1 {status} ")


async def test_every_request_has_an_id_of_its_own_unless_it_brings_one(gateway: Gateway) -> None:
    async with Line(gateway) as line:
        own = [re.findall(r"x-request-id: (.*)\r", (await line.ask(HOST + BEARER, SHORT))[0]) for _ in range(3)]
        named = [(await line.ask(HOST + BEARER + "x-request-id: mine\r\n", SHORT))[0] for _ in range(3)]
    assert len({name for names in own for name in names}) == 3
    assert all("x-request-id: mine\r\n" in head for head in named)


async def test_a_key_that_a_reload_takes_away_opens_nothing_on_a_connection_that_it_opened(
    gateway: Gateway, known: list[int]
) -> None:
    async with Line(gateway) as line:
        for _ in range(3):
            assert (await line.ask(HOST + BEARER, SHORT))[0].startswith("HTTP/1.1 200 ")
        assert len(known) == 2
        gateway.environ["GATEWAY_API_KEY"] = "another"
        assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
        for _ in range(2):
            assert (await line.ask(HOST + BEARER, SHORT))[0].startswith("HTTP/1.1 401 ")
        assert len(known) == 4
        gateway.environ["GATEWAY_API_KEY"] = KEY
        await gateway.admin("POST", "/admin/reload")
        assert (await line.ask(HOST + BEARER, SHORT))[0].startswith("HTTP/1.1 200 ")


async def test_what_a_head_says_goes_with_every_request(gateway: Gateway, fake: FakeInference) -> None:
    said = "x-headgate-priority: low\r\nx-headgate-kv: q8_0\r\nx-stainless-retry-count: 2\r\n"
    async with Line(gateway) as line:
        heads = [(await line.ask(HOST + BEARER + said, body))[0] for body in (SHORT, LONG, SHORT)]
    names = [re.findall(r"x-request-id: (.*)\r", head)[0] for head in heads]
    for name in names:
        explained = (await gateway.admin("GET", f"/admin/requests/{name}")).json()
        assert (explained["priority"], explained["retries"]) == ("low", 2)
    assert [seen.headers["x-headgate-priority"] for seen in fake.seen] == ["low"] * 3
