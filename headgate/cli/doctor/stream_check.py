"""Streams an answer through a given address, such as that of a proxy, and checks how its bytes arrive."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx2

from headgate.cli.doctor.findings import Finding, note, ok, problem, warning
from headgate.shared.units import format_duration

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 330.0
"""Longer than the gateway's longest default deadline."""
LONGEST_SECONDS = 600.0
MIN_SECONDS = 0.5
"""A shorter answer does not show whether it is buffered."""
BUFFERED_SHARE = 0.9
"""An answer whose first bytes arrive after this share of its duration is considered buffered."""
TOKENS = 200
PROMPT = "Count from 1 to 60, one number per line."
_DONE = b"data: [DONE]"
_ADVICE = {
    400: "try another model: --model",
    401: "the key is wrong, or the proxy removes the Authorization header; set HEADGATE_KEY to another key",
    403: "this host name is refused; let the proxy send `Host: localhost` to a gateway on loopback",
    404: "the path is wrong; use the address that clients use as base_url, such as https://host/v1",
    413: "raise the body limit of the proxy (nginx: client_max_body_size)",
    502: "the proxy does not reach the gateway; check its upstream address",
    503: "the gateway has no model that can answer; its message says why",
    504: "the time-out of the proxy is shorter than the wait for the first byte; raise it (nginx: proxy_read_timeout)",
}
_FRONTS = (
    ("cf-ray", "Cloudflare", "it ends a request whose first byte takes 100 s; load models ahead (`headgate preload`)"),
    (
        "x-amz-cf-id",
        "CloudFront",
        "it ends a request whose first byte takes 30 s by default (origin response time-out)",
    ),
)


@dataclass
class Stream:
    """One answer as it arrived: `status` is 0 without a response, `arrivals` and `seconds` (the end) are seconds since
    the request, `error` is empty unless the connection failed.
    """

    status: int = 0
    headers: httpx2.Headers = field(default_factory=httpx2.Headers)
    arrivals: list[float] = field(default_factory=list)
    text: bytes = b""
    seconds: float = 0.0
    error: str = ""


def base_of(url: str) -> str:
    """The address before `/v1`. Raises ValueError for anything that is not an http address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an http address; write for example https://llm.example.org/v1")
    return url.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")


def check(url: str, key: str | None, model: str) -> Iterator[Finding]:
    """Requests one token of `model`, which loads it, then streams an answer. Yields what its arrival shows."""
    address = f"{base_of(url)}/v1/chat/completions"
    loaded = _stream(address, key, model, tokens=1)
    is_whole = loaded.status == 200 and not loaded.error and _DONE in loaded.text
    yield from judge(_stream(address, key, model, tokens=TOKENS) if is_whole else loaded)


def _stream(url: str, key: str | None, model: str, *, tokens: int) -> Stream:
    found = Stream()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": model, "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": PROMPT}]}
    began = time.monotonic()
    try:
        timeout = httpx2.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
        with (
            httpx2.Client(timeout=timeout) as client,
            client.stream("POST", url, json=body, headers=headers) as response,
        ):
            found.status, found.headers = response.status_code, response.headers
            for chunk in response.iter_bytes():
                found.arrivals.append(time.monotonic() - began)
                found.text += chunk
                if found.arrivals[-1] > LONGEST_SECONDS:
                    found.error = f"not finished after {format_duration(LONGEST_SECONDS)}"
                    break
    except (httpx2.TransportError, httpx2.InvalidURL) as error:
        found.error = str(error) or type(error).__name__
    found.seconds = time.monotonic() - began
    return found


def judge(found: Stream) -> Iterator[Finding]:
    """What the arrival of an answer shows about the gateway and the proxies in front of it."""
    name = "stream"
    if found.status == 0:
        advice = "check address, name and port; for a certificate of your own set SSL_CERT_FILE"
        yield problem(name, f"no answer: {found.error}", advice)
        return
    if found.status != 200:
        yield problem(
            name,
            f"status {found.status}: {_message(found.text)}",
            _ADVICE.get(found.status, "see the logs of the proxy and of the gateway"),
        )
        return
    kind = found.headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        yield problem(
            name, f"the answer is {kind or 'of no type'}, not text/event-stream", "check what the proxy changes"
        )
        return
    if found.error or _DONE not in found.text:
        yield problem(
            name,
            f"the stream was cut after {format_duration(round(found.seconds))} ({found.error or 'no [DONE]'})",
            "raise the time-outs of the proxy for open responses (nginx: proxy_read_timeout, send_timeout; load "
            "balancers: idle time-out)",
        )
        return
    yield _pace(found.arrivals, found.seconds)
    if encoding := found.headers.get("content-encoding"):
        advice = "exclude text/event-stream (nginx: gzip_types, Caddy: encode match)"
        yield warning("compression", f"the stream is compressed ({encoding}), which delays tokens", advice)
    gaps = [after - before for before, after in zip(found.arrivals, found.arrivals[1:], strict=False)]
    longest = max([*found.arrivals[:1], *gaps], default=0.0)
    for header, front, text in _FRONTS:
        if header in found.headers:
            yield note("proxy in front", f"{front}; the longest silence was {format_duration(round(longest, 1))}", text)


def _pace(arrivals: Sequence[float], seconds: float) -> Finding:
    first, duration = arrivals[0], format_duration(round(seconds, 1))
    pieces = f"{len(arrivals)} pieces"
    if seconds < MIN_SECONDS:
        return note(
            "stream",
            f"complete after {duration} in {pieces}; too short to show whether it is buffered",
            "repeat it with a slower model: --model NAME",
        )
    if first > BUFFERED_SHARE * seconds or len(arrivals) == 1:
        return problem(
            "stream",
            f"all of the answer arrived at once after {duration}: something on the way buffers it",
            "disable buffering of responses (nginx: proxy_buffering off; Apache: flushpackets=on; Caddy: "
            "flush_interval -1; also gzip for text/event-stream)",
        )
    return ok("stream", f"arrived in {pieces} from {format_duration(round(first, 1))} to {duration}")


def _message(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return raw[:100].decode("utf-8", "replace").strip() or "no message"
