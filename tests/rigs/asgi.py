"""Sends requests to an ASGI app without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from headgate.shared.asgi import App


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers by lower-case name, and the body: a JSON value, or bytes of another type."""

    status: int
    headers: Mapping[str, str]
    body: Any


def operations(guarded: Any) -> list[tuple[str, str]]:
    """Every (method, path) of the inference service outside of generation; parameters are in braces."""
    paths = guarded._app.openapi()["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods]


async def ask(
    app: App,
    method: str,
    target: str,
    body: Any = None,
    *,
    key: str | None = "token",
    raw: bytes | None = None,
    more: Mapping[str, str] | None = None,
) -> Answer:
    """One request; `target` is path and query, `body` is sent as JSON, or `raw` unchanged; `more` are headers."""
    path, _, query = target.partition("?")
    data = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    if key is not None:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    headers += [(name.encode(), value.encode()) for name, value in (more or {}).items()]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
        "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    sent: list[Any] = []
    incoming = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not incoming:
            await asyncio.Event().wait()  # the client stays until the answer is complete
        return incoming.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start = next(message for message in sent if message["type"] == "http.response.start")
    text = b"".join(message.get("body", b"") for message in sent if message["type"] == "http.response.body")
    header_values = {name.decode(): value.decode() for name, value in start["headers"]}
    is_json = header_values.get("content-type", "").startswith("application/json")
    return Answer(start["status"], header_values, json.loads(text) if is_json else text)
