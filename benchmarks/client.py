"""A load generator in its own process: sends bursts of streamed requests and records when each byte arrives.

It reads orders as JSON lines on stdin and writes one line per order to stdout. During a burst it only reads sockets and
the clock. It parses the bytes afterwards, so that it uses little CPU time beside the measured system.
"""

from __future__ import annotations

import json
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Piece = tuple[float, bytes]
"""Seconds since the request was sent, and the bytes that arrived then."""

SILENCE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Order:
    """A burst: all `bodies` are posted at once. `address` is ("unix", path) or ("tcp", host, port)."""

    address: tuple[Any, ...]
    path: str
    headers: Mapping[str, str]
    bodies: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Seen:
    """One stream: when each piece of text arrived (seconds after the request was sent), and its end.

    `error` is empty if the stream ended with a finish reason and `[DONE]`.
    """

    times: Sequence[float]
    finish: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    error: str = ""

    @property
    def gaps(self) -> list[float]:
        """Seconds between one piece of text and the next."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Burst:
    """`seconds`: from the first request to the last byte. `cpu_seconds`: CPU time of the client in this time."""

    seconds: float
    cpu_seconds: float
    streams: Sequence[Seen]


class Client:
    """Starts the load generator and sends it orders. A context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.client"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def burst(self, order: Order) -> Burst:
        """Runs one burst."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
        self._process.stdin.flush()
        burst = json.loads(self._process.stdout.readline())
        return Burst(burst["seconds"], burst["cpu_seconds"], [Seen(**stream) for stream in burst["streams"]])

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def run(order: Order) -> Burst:
    """Sends all requests, reads all answers, then parses them."""
    requests = [_request(order, body) for body in order.bodies]
    selector = selectors.DefaultSelector()
    pieces: list[list[Piece]] = [[] for _ in requests]
    began: list[float] = []
    cpu = _cpu_seconds()
    start = end = time.perf_counter()
    for number, request in enumerate(requests):
        began.append(time.perf_counter())
        connection = _connect(order.address)
        connection.sendall(request)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, number)
    left = len(requests)
    while left:
        ready = selector.select(SILENCE_SECONDS)
        now = time.perf_counter()
        if not ready:
            break
        for key, _events in ready:
            number = key.data
            data = key.fileobj.recv(65536)  # type: ignore[union-attr]
            pieces[number].append((now - began[number], data))
            if not data or data.endswith(b"0\r\n\r\n"):
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                left -= 1
                end = now
    cpu = _cpu_seconds() - cpu
    for key in list(selector.get_map().values()):
        key.fileobj.close()  # type: ignore[union-attr]
    selector.close()
    return Burst(end - start, cpu, [read(stream) for stream in pieces])


def read(pieces: Iterable[Piece]) -> Seen:
    """Parses the bytes of one HTTP answer."""
    times: list[float] = []
    texts: list[str] = []
    usage: dict[str, Any] = {}
    finish, done, error, status = None, False, "", 0
    for when, line in _lines(pieces):
        if line.startswith(b"HTTP/1.1 "):
            status = int(line[9:12])
        elif status != 200:
            error = f"status {status}: {line[:300].decode('utf-8', 'replace')}"
        elif line == b"data: [DONE]":
            done = True
        elif line.startswith(b"data:"):
            chunk = json.loads(line[5:])
            if "error" in chunk:
                error = json.dumps(chunk["error"])
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", ()):
                text = choice.get("text") or choice.get("delta", {}).get("content")
                finish = choice.get("finish_reason") or finish
                if text:
                    times.append(when)
                    texts.append(text)
    if not error and not (done and finish):
        error = "the stream ended before its end"
    return Seen(times, finish, usage, "".join(texts), error)


def _lines(pieces: Iterable[Piece]) -> Iterator[tuple[float, bytes]]:
    """The status line and every line of the body, each with the time at which its last byte arrived."""
    head, begun, pending, when = b"", False, b"", 0.0
    unchunk: Callable[[bytes], bytes] = bytes
    for when, data in pieces:
        body = data
        if not begun:
            head += data
            before, begun_here, body = head.partition(b"\r\n\r\n")
            if not begun_here:
                continue
            begun = True
            if b"transfer-encoding: chunked" in before.lower():
                unchunk = Unchunk().push
            yield when, before.partition(b"\r\n")[0]
        *whole, pending = (pending + unchunk(body)).split(b"\n")
        for line in whole:
            yield when, line.rstrip(b"\r")
    if pending:
        yield when, pending


class Unchunk:
    """Removes the chunk sizes from a body that arrives in pieces."""

    def __init__(self) -> None:
        self._rest = b""
        self._left = 0

    def push(self, data: bytes) -> bytes:
        """The bytes of the body in `data`."""
        rest, body = self._rest + data, b""
        while rest:
            if self._left == 0:
                size, whole, after = rest.lstrip(b"\r\n").partition(b"\r\n")
                if not whole:
                    break
                self._left, rest = int(size.partition(b";")[0], 16), after
                if self._left == 0:
                    rest = b""
            body += rest[: self._left]
            taken = min(self._left, len(rest))
            self._left, rest = self._left - taken, rest[taken:]
        self._rest = rest
        return body


def _request(order: Order, body: Mapping[str, Any]) -> bytes:
    payload = json.dumps(body).encode()
    headers = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "Content-Length": str(len(payload)),
        "Connection": "close",
        **order.headers,
    }
    lines = [f"POST {order.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + payload


def _connect(address: Sequence[Any]) -> socket.socket:
    if address[0] == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address[1])
        return connection
    connection = socket.create_connection((address[1], address[2]))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Runs orders until stdin ends."""
    for line in sys.stdin.buffer:
        print(json.dumps(asdict(run(Order(**json.loads(line))))), flush=True)


if __name__ == "__main__":
    main()
