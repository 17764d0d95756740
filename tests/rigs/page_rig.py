"""A page of the dashboard without a browser: its session, and the events that it gets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2

from headgate.shared.sse import SseSplitter

CSRF = "x-csrf-token"


class Page:
    """One signed-in page of the gateway at `url`. `events` are all events of its open stream so far."""

    def __init__(self, client: httpx2.AsyncClient, session: dict[str, Any]) -> None:
        self.client = client
        self.session = session
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.has_ended = False
        self._has_news = asyncio.Event()

    @classmethod
    @contextlib.asynccontextmanager
    async def signed_in(cls, url: str, key: str) -> AsyncIterator[Page]:
        """A new session with `key`."""
        async with httpx2.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
            answer = await client.post("/ui/session", json={"key": key})
            assert answer.status_code == 200, answer.text
            yield cls(client, answer.json())

    async def get(self, path: str) -> httpx2.Response:
        """A GET with the session."""
        return await self.client.get(path)

    async def post(self, path: str, body: Any = None) -> httpx2.Response:
        """A POST with the session and its CSRF token."""
        return await self.client.post(path, json=body or {}, headers={CSRF: self.session["csrf"]})

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[dict[str, Any]]:
        """The stream is open; the value is its snapshot."""
        reading = asyncio.create_task(self._read())
        try:
            yield await self.next("snapshot")
        finally:
            reading.cancel()
            await asyncio.wait({reading})

    async def next(self, kind: str, is_wanted: Callable[[dict[str, Any]], Any] = lambda _: True) -> dict[str, Any]:
        """The first event of this kind so far, or the next one, that `is_wanted`."""
        async with asyncio.timeout(15):
            while True:
                for found, data in self.events:
                    if found == kind and is_wanted(data):
                        return data
                assert not self.has_ended, f"the stream ended without such a {kind}"
                self._has_news.clear()
                await self._has_news.wait()

    async def ended(self) -> None:
        """Returns when the gateway has ended the stream."""
        async with asyncio.timeout(15):
            while not self.has_ended:
                self._has_news.clear()
                await self._has_news.wait()

    async def _read(self) -> None:
        splitter = SseSplitter(2**22)
        self.has_ended = False
        try:
            async with self.client.stream("GET", "/ui/api/events") as response:
                assert response.status_code == 200
                async for piece in response.aiter_raw():
                    for frame in splitter.feed(piece):
                        assert frame.event is not None
                        assert frame.data is not None
                        self.events.append((frame.event.decode(), json.loads(frame.data)))
                    self._has_news.set()
        finally:
            self.has_ended = True
            self._has_news.set()
