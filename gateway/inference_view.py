"""Keeps the newest snapshot of the inference service's models; it advises, the service decides.

A snapshot older than STALE_SECONDS is unknown, not down: nothing is concluded from silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gateway.errors import UpstreamError
from inference.protocol import ModelStatus

log = logging.getLogger("gateway.inference_view")

POLL_SECONDS = 2.0
MISSING_POLL_SECONDS = 0.5
"""While the service does not answer, it is looked for more often: a refused connection costs next to nothing."""
DOUBT_SECONDS = 30.0
"""A service that answers this question and breaks every other is doubted no more often than that."""
STALE_SECONDS = 10.0
FETCH_SECONDS = 1.0

Fetch = Callable[[str, float], Awaitable[Any]]
"""Gets the JSON at a path within so many seconds or raises UpstreamError."""


class InferenceView:
    """The models of the service by id, refreshed by polling `/v1/models`.

    `on_return` is called when the service answers that did not before, or that nobody had asked yet.
    """

    def __init__(
        self,
        fetch: Fetch,
        clock: Callable[[], float] = time.monotonic,
        on_return: Callable[[], None] = lambda: None,
    ) -> None:
        self._fetch = fetch
        self._on_return = on_return
        self._clock = clock
        self._models: Mapping[str, ModelStatus] = {}
        self._aliases: Mapping[str, str] = {}
        self._seen_at: float | None = None
        self._reachable: bool | None = None
        self._doubted_at = -math.inf
        self._wanted = asyncio.Event()
        self._refreshing: asyncio.Task[None] | None = None

    def use(self, fetch: Fetch) -> None:
        """Asks another service from now on; what the old one said is forgotten."""
        self._fetch = fetch
        self._seen_at = None
        self._reachable = None
        self._models, self._aliases = {}, {}

    @property
    def is_fresh(self) -> bool:
        """Whether the snapshot may be believed."""
        return self._seen_at is not None and self._clock() - self._seen_at < STALE_SECONDS

    @property
    def reachable(self) -> bool | None:
        """Whether the last question was answered; None before the first."""
        return self._reachable

    @property
    def was_seen(self) -> bool:
        """Whether this service ever answered."""
        return self._seen_at is not None

    @property
    def models(self) -> Mapping[str, ModelStatus]:
        """The models by id, empty when unknown."""
        return self._models if self.is_fresh else {}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Model id by alias; kept while the service is silent, because names do not change with its health."""
        return self._aliases

    def doubt(self) -> None:
        """Others found the service gone: it is asked now, and its next answer is a return.

        Otherwise a service that died and came back between two questions would never be seen to return.
        """
        now = self._clock()
        if now - self._doubted_at >= DOUBT_SECONDS:
            self._doubted_at = now
            self._reachable = False
        self._wanted.set()

    async def refresh(self) -> None:
        """Asks the service once; callers at the same time share one question. Never raises for a silent service."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh(), name="inference-view")
        await asyncio.shield(self._refreshing)

    async def ensure(self, max_age: float) -> None:
        """Refreshes unless the snapshot is younger than `max_age` seconds."""
        if self._seen_at is None or self._clock() - self._seen_at > max_age:
            await self.refresh()

    async def run(self) -> None:
        """Polls until cancelled, whatever happens."""
        while True:
            try:
                await self.refresh()
            except Exception:
                log.exception("the view of the inference service could not be renewed")
            self._wanted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS if self._reachable else MISSING_POLL_SECONDS):
                    await self._wanted.wait()

    async def _refresh(self) -> None:
        fetch = self._fetch
        try:
            answer = await fetch("/v1/models", FETCH_SECONDS)
            models = [ModelStatus.from_json(item) for item in answer["data"]]
        except Exception as error:
            if fetch is self._fetch:
                self._note_missing(error)
            return
        if fetch is not self._fetch:
            return  # another service is asked meanwhile
        was_reachable, self._reachable = self._reachable, True
        self._seen_at = self._clock()
        self._models = {model.id: model for model in models}
        self._aliases = {alias: model.id for model in models for alias in model.aliases}
        if not was_reachable:
            log.info("the inference service answers: %d models", len(models))
            self._on_return()

    def _note_missing(self, error: Exception) -> None:
        """No answer, or one that makes no sense; told once, with the traceback when it is nothing foreseen."""
        if self._reachable is not False:
            foreseen = isinstance(error, UpstreamError | KeyError | TypeError | ValueError | AttributeError)
            said = f"{type(error).__name__}: {error}"
            log.warning(
                "the inference service does not tell its models: %s", said, exc_info=None if foreseen else error
            )
        self._reachable = False
