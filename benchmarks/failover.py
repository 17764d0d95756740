"""Measures the added latency if the first tier refuses connections, answers 503, or does not answer.

The second tier is a cloud with OpenAI's API. The reference is a route with that tier alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from benchmarks import gateways, upstream
from benchmarks.asking import Connection, check, close, request
from benchmarks.gateway_samples import FIRST_TOKEN_SECONDS, Failed
from benchmarks.gateways import Target
from benchmarks.upstream import Upstream
from tests.rigs.processes import free_port

REFUSED, BUSY, SILENT = "refused", "503", "silent"
_MODELS: Mapping[str, str] = {REFUSED: upstream.AT_ONCE, BUSY: upstream.BUSY, SILENT: upstream.SILENT}
_SECOND = "second/" + upstream.AT_ONCE
TO_OPEN = 5
"""Consecutive failures that open a breaker (default configuration)."""


def config(url: str) -> dict[str, Any]:
    """A route for each kind of failure, and one without the first tier."""
    routes = {kind: {"chain": [f"local/{model}", _SECOND]} for kind, model in _MODELS.items()}
    return {
        "providers": {"second": {"kind": "openai", "api_key": "key", "base_url": f"{url}/v1"}},
        "routes": {**routes, "without": {"chain": [_SECOND]}},
        "deadlines": {"first_token": f"{FIRST_TOKEN_SECONDS * 1000:g}ms"},
    }


async def measure(service: Upstream, root: Path, core: int, times: int) -> list[Failed]:
    """Measures each kind of failure with a closed and an open breaker."""
    found = []
    for kind in _MODELS:
        url = f"http://127.0.0.1:{free_port()}" if kind == REFUSED else service.url
        start = gateways.headgate(url, root, core, config(service.url), f"failover-{kind}")
        target = await asyncio.to_thread(start.__enter__)
        try:
            found += await _fail(target, kind, times)
        finally:
            start.__exit__(None, None, None)
    return found


async def _fail(target: Target, kind: str, times: int) -> list[Failed]:
    connection = await Connection.open(target.port)
    try:
        for _ in range(10):
            await _ask(connection, target, "without")
        closed, without = [], []
        for _ in range(times):
            without.append(await _ask(connection, target, "without"))
            await _reset(connection, target, kind)
            closed.append(await _ask(connection, target, kind))
        for _ in range(TO_OPEN):
            await _ask(connection, target, kind)
        skipped = [await _ask(connection, target, kind) for _ in range(times)]
    finally:
        await close(connection)
    return [Failed(kind, False, closed, without), Failed(kind, True, skipped, without)]


async def _ask(connection: Connection, target: Target, route: str) -> float:
    """Returns the seconds of one answer."""
    body = {"model": route, "messages": [{"role": "user", "content": "hello"}]}
    begun = time.perf_counter()
    reply = check(await connection.answer(request(target.port, body, target.headers)))
    return reply.ended - begun


async def _reset(connection: Connection, target: Target, kind: str) -> None:
    """Closes the breakers of the first tier. A breaker without any failure does not exist yet."""
    headers = {"authorization": f"Bearer {gateways.ADMIN_KEY}"}
    for name in ("local", f"local/{_MODELS[kind]}"):
        path = f"/admin/breakers/{quote(name)}/reset"
        await connection.answer(request(target.port, {}, headers, path))
