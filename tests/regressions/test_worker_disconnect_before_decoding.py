"""A request is not decoded when its client left while it waited for a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inference.worker.api.body_intake import Intake
from inference.worker.api.worker_exchange import Exchange
from inference.worker.worker_errors import GoneError


class _Client:
    """Sends an empty object, and disconnects when `leaves` is set."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()
        self.watched = asyncio.Event()
        self._sent = False
        scope = {"method": "POST", "path": "/v1/chat/completions", "headers": [(b"content-length", b"2")]}
        self.exchange = Exchange(scope, self._receive, self._send)

    async def _receive(self) -> MutableMapping[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": b"{}"}
        self.watched.set()
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        raise AssertionError(message)


def test_request_of_disconnected_client_is_not_decoded() -> None:
    """A callback that is set after the disconnect is called too."""
    decoded: list[str] = []

    async def scenario() -> None:
        held = threading.Event()
        left, stayed = _Client(), _Client()
        with ThreadPoolExecutor(1) as executor:
            executor.submit(held.wait)
            intake = Intake(executor)
            first = asyncio.create_task(intake.decoded(left.exchange, lambda _body: decoded.append("left")))
            second = asyncio.create_task(intake.decoded(stayed.exchange, lambda _body: decoded.append("stayed")))
            try:
                await left.watched.wait()
                await stayed.watched.wait()
                seen = asyncio.Event()
                left.exchange.on_disconnect(seen.set)
                left.leaves.set()
                await seen.wait()
            finally:
                held.set()
            with pytest.raises(GoneError):
                await first
            await second
        called: list[str] = []
        left.exchange.on_disconnect(lambda: called.append("left"))
        stayed.exchange.on_disconnect(lambda: called.append("stayed"))
        assert called == ["left"]
        stayed.exchange.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert decoded == ["stayed"]
