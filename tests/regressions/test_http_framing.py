"""Framing of HTTP on both ports, over raw sockets: trailers, and bytes after a complete request."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from headgate.shared.state_directory import INFERENCE_TOKEN
from tests.rigs.processes import Service
from tests.rigs.stack import Stack, chat_body

CHAT = "/v1/chat/completions"
BODY = json.dumps(chat_body("Hello", "demo-mini", max_tokens=2)).encode()


@dataclass
class Port:
    """One of the two services and a key for it."""

    service: Service
    key: str
    stack: Stack

    @property
    def auth(self) -> bytes:
        """The header, or trailer, that authenticates."""
        return f"Authorization: Bearer {self.key}\r\n".encode()

    def exchange(self, data: bytes) -> bytes:
        """All bytes that the service answers to `data` until it closes the connection."""
        with socket.create_connection(("127.0.0.1", self.service.port), timeout=20) as client:
            client.sendall(data)
            return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("framing")).start()
    yield stack
    stack.kill()


@pytest.fixture(params=["gateway", "inference"])
def port(request: pytest.FixtureRequest, stack: Stack) -> Port:
    if request.param == "gateway":
        return Port(stack.front, stack.key, stack)
    token = stack.state.read_secret(INFERENCE_TOKEN)
    assert token is not None
    return Port(stack.inference, token, stack)


def _request(headers: bytes, body: bytes = BODY, path: str = CHAT) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n".encode()
    return head + headers + b"\r\n" + body


def _chunked(headers: bytes, trailers: bytes, body: bytes = BODY, host: bytes = b"Host: localhost\r\n") -> bytes:
    head = b"POST /v1/chat/completions HTTP/1.1\r\n" + host + b"Transfer-Encoding: chunked\r\n" + headers + b"\r\n"
    return head + b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailers)


def _statuses(answers: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answers)]


CLOSE = b"Connection: close\r\n"
LAST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


# --- trailers ---------------------------------------------------------------------------------------------------------
def test_key_in_a_trailer_does_not_authenticate(port: Port) -> None:
    assert _statuses(port.exchange(_chunked(CLOSE, port.auth))) == [401]
    assert _statuses(port.exchange(_chunked(CLOSE + port.auth, b""))) == [200]


def test_key_in_a_trailer_does_not_authenticate_the_next_request(port: Port) -> None:
    """Both requests arrive at once."""
    answers = port.exchange(_chunked(port.auth, port.auth) + _request(CLOSE))
    assert _statuses(answers) == [200, 401]


def test_trailers_that_arrive_after_the_body_are_dropped(port: Port) -> None:
    """The trailers arrive while the request waits for the end of its body."""
    request = _chunked(CLOSE + port.auth, b"x-request-id: from-a-trailer\r\n")
    cut = request.index(b"\r\n0\r\n") + 2
    with socket.create_connection(("127.0.0.1", port.service.port), timeout=20) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(request[:cut])
        client.sendall(request[cut:])
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert _statuses(answer) == [200]
    assert b"from-a-trailer" not in answer


def test_request_id_in_a_trailer_is_ignored(port: Port) -> None:
    answer = port.exchange(_chunked(CLOSE + port.auth, b"x-request-id: from-a-trailer\r\n"))
    assert _statuses(answer) == [200]
    assert b"from-a-trailer" not in answer


def test_host_in_a_trailer_is_ignored(stack: Stack) -> None:
    """Only the gateway checks the Host header."""
    port = Port(stack.front, stack.key, stack)
    request = _chunked(CLOSE + port.auth, b"Host: localhost\r\n", host=b"")
    assert _statuses(port.exchange(request)) == [403]


def test_trailer_does_not_override_the_policy_of_the_head(stack: Stack) -> None:
    """The gateway alone reads this header."""
    port = Port(stack.front, stack.key, stack)
    policy = b"x-request-id: policy-of-the-head\r\nx-headgate-policy: local-only\r\n"
    answer = port.exchange(_chunked(CLOSE + port.auth + policy, b"x-headgate-policy: any\r\n"))
    assert _statuses(answer) == [200]
    assert stack.ask("/admin/requests/policy-of-the-head")["cloud_allowed"] is False


# --- bytes after a request --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cut", [1, 20, -len(BODY), -1], ids=["line", "headers", "body", "last-byte"])
def test_two_requests_in_one_segment_are_both_served_when_the_second_is_incomplete(port: Port, cut: int) -> None:
    first, second = _request(port.auth), _request(port.auth + CLOSE)
    with socket.create_connection(("127.0.0.1", port.service.port), timeout=20) as client:
        client.sendall(first + second[:cut])
        answers = b""
        while not answers.rstrip().endswith(b"}"):
            answers += client.recv(65536)
        client.sendall(second[cut:])
        answers += b"".join(iter(lambda: client.recv(65536), b""))
    assert _statuses(answers) == [200, 200]
    assert "Traceback" not in port.service.log


@pytest.mark.parametrize(
    "garbage",
    [b"NONSENSE\r\n\r\n", b"\x16\x03\x01\x02\n\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"{}" * 40_000],
    ids=["words", "tls", "header", "long"],
)
def test_complete_requests_are_served_when_bytes_after_them_are_not_http(port: Port, garbage: bytes) -> None:
    """The last answer ends the connection."""
    request = _request(port.auth)
    assert _statuses(port.exchange(request + garbage)) == [200]
    assert _statuses(port.exchange(request * 3 + garbage)) == [200, 200, 200]


def test_complete_request_is_served_when_the_body_of_the_next_is_malformed(port: Port) -> None:
    malformed = _chunked(port.auth, b"").replace(b"\r\n%x\r\n" % len(BODY), b"\r\nnot hexadecimal\r\n")
    assert _statuses(port.exchange(_request(port.auth) + malformed)) == [200]
    assert _statuses(port.exchange(malformed)) == [400]


def test_request_with_a_malformed_body_is_answered_once(port: Port) -> None:
    """It has no key either. The refusal for that, which needs no body, must not be a second answer."""
    malformed = _chunked(b"", b"").replace(b"\r\n%x\r\n" % len(BODY), b"\r\nnot hexadecimal\r\n")
    for _ in range(10):
        assert _statuses(port.exchange(malformed)) == [400]
    assert "Traceback" not in port.service.log


def test_bytes_that_are_not_http_are_refused(port: Port) -> None:
    answer = port.exchange(b"NONSENSE\r\n\r\n" + LAST)
    assert _statuses(answer) == [400]
