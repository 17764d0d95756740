"""A mock model service: it answers at once, at a pace, with an error, or not at all, depending on the model name.

Streams are those of the inference service (chunks as a worker writes them; also /v1/models, /events, /readyz); whole
answers are OpenAI's. A stream without a pace arrives as a worker would send it with a long `stream_interval`: the first
token, then all others with the end. The service uses raw asyncio protocols, because it shares its core with the load
generator.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping

import httptools
import orjson

from inference.protocol import DONE, H_STREAM_INTERVAL, Code, ModelState, ModelStatus, error_body

AT_ONCE, PACED, ENDLESS, BUSY, SILENT = "bench", "bench-paced", "bench-endless", "bench-busy", "bench-silent"
"""Models: an immediate answer, a paced one, an endless one, a 503, and no answer."""

CLOUD_SHORT, CLOUD_LONG, CLOUD_TOOLS = "cloud-100", "cloud-1000", "cloud-tools"
CLOUD_MODELS = (CLOUD_SHORT, CLOUD_LONG, CLOUD_TOOLS)
"""Models of a cloud: answers of 100 and 1,000 tokens with one token per chunk, and a tool call in 100 chunks."""
CLOUD_BEGUN = "cloud-begun"
"""As CLOUD_SHORT, but the chunks after the first token come CLOUD_PAUSE_SECONDS later."""
CLOUD_PAUSE_SECONDS = 0.002

PACE_SECONDS = 0.02
"""Time between two tokens of a paced stream: 50 tokens per second."""
PHASES = 20
"""Paced streams are spread over this many points within a pace."""
ANSWER_TOKENS = 8
_WORD = "water "
_INTERVAL = re.compile(H_STREAM_INTERVAL.encode() + rb": (\d+)\r\n")

_HEAD = {"id": "chatcmpl-0123456789abcdef01234567", "object": "chat.completion.chunk", "created": 1, "model": AT_ONCE}
_BEGIN = b"data: " + orjson.dumps(_HEAD)[:-1]
_USAGE = {"prompt_tokens": 12, "completion_tokens": ANSWER_TOKENS, "total_tokens": 12 + ANSWER_TOKENS}


def _chunk(delta: bytes, finish: bytes = b"null") -> bytes:
    """A chunk as the worker writes it for a request with usage, as a chunk of HTTP."""
    chunk = b'%b,"choices":[{"index":0,"delta":%b,"logprobs":null,"finish_reason":%b}],"usage":null}\n\n'
    return _framed(chunk % (_BEGIN, delta, finish))


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_ROLE = _chunk(b'{"role":"assistant","content":""}')
TOKEN = _chunk(b'{"content":"%b"}' % _WORD.encode())
_LAST = (
    _chunk(b"{}", b'"stop"')
    + _framed(_BEGIN + b',"choices":[],"usage":' + orjson.dumps(_USAGE) + b"}\n\n")
    + _framed(DONE)
    + b"0\r\n\r\n"
)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sun, 01 Jan 2026 00:00:00 GMT\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\nx-headgate-device: cpu\r\ntransfer-encoding: chunked\r\n\r\n"
)
_STREAM = _STREAM_HEAD + _ROLE + TOKEN * ANSWER_TOKENS + _LAST
_JOINED = _STREAM_HEAD + _ROLE + TOKEN + _chunk(b'{"content":"%b"}' % (_WORD * (ANSWER_TOKENS - 1)).encode()) + _LAST
LONG_INTERVAL_MILLISECONDS = 100
"""With a stream interval from this on, all tokens but the first are sent as one chunk."""


def _cloud_chunk(delta: bytes, finish: bytes = b"null", usage: bytes = b"null") -> bytes:
    """A chunk as OpenAI writes it, as a chunk of HTTP."""
    choices = (
        b"" if usage != b"null" else b'{"index":0,"delta":%b,"logprobs":null,"finish_reason":%b}' % (delta, finish)
    )
    return _framed(
        b'data: {"id":"chatcmpl-CkR3q0D7Vh4iWbQ0oZ2mN8uXyT1aB","object":"chat.completion.chunk","created":1764000000,'
        b'"model":"gpt-4o-mini-2024-07-18","service_tier":"default","system_fingerprint":"fp_560af6e559",'
        b'"choices":[%b],"usage":%b,"obfuscation":"x7Yq"}\n\n' % (choices, usage)
    )


def _cloud_usage(tokens: int) -> bytes:
    return orjson.dumps(
        {
            "prompt_tokens": 12, "completion_tokens": tokens, "total_tokens": 12 + tokens,
            "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
        }
    )  # fmt: skip


_CLOUD_ROLE = _cloud_chunk(b'{"role":"assistant","content":"","refusal":null}')


def _cloud_stream(deltas: list[bytes], finish: bytes) -> bytes:
    end = _cloud_chunk(b"{}", finish) + _cloud_chunk(b"", usage=_cloud_usage(len(deltas)))
    return _STREAM_HEAD + _CLOUD_ROLE + b"".join(map(_cloud_chunk, deltas)) + end + _framed(DONE) + b"0\r\n\r\n"


def _tool_delta(number: int) -> bytes:
    if not number:
        return b'{"tool_calls":[{"index":0,"id":"call_1","type":"function","function":{"name":"f","arguments":""}}]}'
    arguments = {1: b'{\\"text\\":\\"', 99: b'\\"}'}.get(number, b"water ")
    return b'{"tool_calls":[{"index":0,"function":{"arguments":"%b"}}]}' % arguments


def _json(status: bytes, body: object) -> bytes:
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        len(content),
        content,
    )


_WHOLE = _json(
    b"200 OK",
    {
        **_HEAD,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": _WORD * ANSWER_TOKENS, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": _USAGE,
    },
)


def _cloud_whole(message: Mapping[str, object], finish: str) -> bytes:
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
    return _json(
        b"200 OK",
        {
            "id": "chatcmpl-CkR3q0D7Vh4iWbQ0oZ2mN8uXyT1aB", "object": "chat.completion", "created": 1764000000,
            "model": "gpt-4o-mini-2024-07-18", "choices": [choice], "usage": orjson.loads(_cloud_usage(100)),
            "service_tier": "default", "system_fingerprint": "fp_560af6e559",
        },
    )  # fmt: skip


_WORDS: Mapping[str, object] = {"role": "assistant", "content": _WORD * 100, "refusal": None, "annotations": []}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"text":"water"}'}}
_DELTAS = [b'{"content":"water "}', b'{"content":"wheel "}'] * 50
"""Different words, because LiteLLM ends a stream that repeats a chunk a hundred times."""
_CLOUD: Mapping[str, tuple[bytes, bytes]] = {
    CLOUD_SHORT: (_cloud_stream(_DELTAS, b'"stop"'), _cloud_whole(_WORDS, "stop")),
    CLOUD_LONG: (_cloud_stream(_DELTAS * 10, b'"stop"'), _cloud_whole(_WORDS, "stop")),
    CLOUD_TOOLS: (
        _cloud_stream([_tool_delta(number) for number in range(100)], b'"tool_calls"'),
        _cloud_whole({"role": "assistant", "content": None, "tool_calls": [_CALL]}, "tool_calls"),
    ),
}
"""The stream and the whole answer of each model of the cloud."""
_FIRST_TOKEN_BYTES = len(_STREAM_HEAD + _CLOUD_ROLE + _cloud_chunk(_DELTAS[0]))
_MODELS = [
    ModelStatus(
        name, ModelState.READY, context_length=4096, parallel=256, devices=("cpu",), fits=True,
        capabilities=("chat", "completions", "tools"), loads=1, pid=1,
    ).to_json()
    for name in (AT_ONCE, PACED, ENDLESS, BUSY, SILENT)
]  # fmt: skip
_SNAPSHOT = orjson.dumps({"number": 1, "models": _MODELS, "devices": [], "ready": True})
LISTED = orjson.dumps({"object": "list", "data": _MODELS})
_OTHERS: Mapping[bytes, bytes] = {
    b"/v1/models": _json(b"200 OK", LISTED),
    b"/readyz": _json(b"200 OK", {"status": "ready"}),
    b"/livez": _json(b"200 OK", {"status": "ok"}),
    b"/events": _STREAM_HEAD + _framed(b"event: snapshot\ndata: " + _SNAPSHOT + b"\n\n"),
}
_NOTHING = _json(b"404 Not Found", error_body(Code.NOT_FOUND, "unknown path"))
_REFUSAL = _json(b"503 Service Unavailable", error_body(Code.MODEL_FAILED, "the model failed"))
_BEAT = _framed(b'event: beat\ndata: {"number":1}\n\n')
BEAT_SECONDS = 5.0


class Upstream:
    """The service on a port of loopback, an async context manager. `on_left` is called when the client
    of a paced or endless answer disconnects."""

    def __init__(self, tokens: int = 250) -> None:
        """`tokens`: of a paced answer."""
        self.tokens = tokens
        self.port = 0
        self.on_left: Callable[[], None] = lambda: None
        self.served = 0
        self.connections: set[_Connection] = set()
        self.listening: set[_Connection] = set()
        self._phases: list[set[_Connection]] = [set() for _ in range(PHASES)]
        self._joined = 0

    async def __aenter__(self) -> Upstream:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        self._loop = loop
        self._next = loop.time()
        self._number = 0
        self._ticker = loop.call_later(0, self._tick)
        self._beats = loop.call_later(BEAT_SECONDS, self._beat)
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._ticker.cancel()
        self._beats.cancel()
        self._server.close()
        for connection in tuple(self.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # the loop closes the sockets

    @property
    def url(self) -> str:
        """The URL of the service."""
        return f"http://127.0.0.1:{self.port}"

    def join(self, connection: _Connection) -> int:
        """Adds a paced stream and returns its phase."""
        self._joined += 1
        phase = self._joined % PHASES
        self._phases[phase].add(connection)
        return phase

    def leave(self, connection: _Connection, phase: int) -> None:
        """Removes a stream."""
        self._phases[phase].discard(connection)

    def _tick(self) -> None:
        now = self._loop.time()
        while self._next <= now:  # after a delay all missed tokens are sent now
            for connection in tuple(self._phases[self._number % PHASES]):
                connection.say_more()
            self._number += 1
            self._next += PACE_SECONDS / PHASES
        # half a tick more: uvloop counts whole milliseconds and would wake up repeatedly before the time
        self._ticker = self._loop.call_at(self._next + PACE_SECONDS / PHASES / 2, self._tick)

    def _beat(self) -> None:
        for connection in self.listening:
            connection.write(_BEAT)
        self._beats = self._loop.call_later(BEAT_SECONDS, self._beat)


class _Connection(asyncio.Protocol):
    """One connection. It is also the callback object of its HTTP parser."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self._has_long_interval = False
        self._phase: int | None = None
        self._left = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.write = transport.write
        self._upstream.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if (interval := _INTERVAL.search(data)) is not None:
            self._has_long_interval = int(interval[1]) >= LONG_INTERVAL_MILLISECONDS
        self._parser.feed_data(data)

    def connection_lost(self, _error: Exception | None) -> None:
        self._upstream.connections.discard(self)
        self._upstream.listening.discard(self)
        if self._phase is not None:
            self._over()
            self._upstream.on_left()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        url, self._url = self._url, b""
        body, self._body = b"".join(self._body), []
        is_joined, self._has_long_interval = self._has_long_interval, False
        if not url.endswith(b"/chat/completions"):
            self.write(_OTHERS.get(url, _NOTHING))
            if url == b"/events":
                self._upstream.listening.add(self)
            return
        self._upstream.served += 1
        asked = orjson.loads(body)
        model, streams = asked.get("model"), bool(asked.get("stream"))
        if model in _CLOUD:
            self.write(_CLOUD[model][0 if streams else 1])
        elif model == CLOUD_BEGUN:
            self._begin_stream(_CLOUD[CLOUD_SHORT][0])
        elif model == AT_ONCE:
            self.write((_JOINED if is_joined else _STREAM) if streams else _WHOLE)
        elif model == BUSY:
            self.write(_REFUSAL)
        elif model != SILENT:
            self._left = self._upstream.tokens if model == PACED else 2**62
            if streams:
                self.write(_STREAM_HEAD + _ROLE + TOKEN)
            self._phase = self._upstream.join(self)

    def _begin_stream(self, stream: bytes) -> None:
        self.write(stream[:_FIRST_TOKEN_BYTES])
        asyncio.get_running_loop().call_later(CLOUD_PAUSE_SECONDS, self.write, stream[_FIRST_TOKEN_BYTES:])

    def say_more(self) -> None:
        """Sends the next token of this stream."""
        self._left -= 1
        if self._left > 0:
            self.write(TOKEN)
        else:
            self._over()
            self.write(_LAST)

    def _over(self) -> None:
        assert self._phase is not None
        self._upstream.leave(self, self._phase)
        self._phase = None
