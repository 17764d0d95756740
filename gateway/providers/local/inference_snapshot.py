"""Keeps the newest snapshot of the inference service's models; it advises, the service decides.

A snapshot older than STALE_SECONDS is unknown, not down: nothing is concluded from silence. What `/events` tells is
taken over at once; polling goes on all the same, so that without events the view is only a little older.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gateway.breaker import probe_schedule
from gateway.errors import UpstreamError
from gateway.providers.local.failing_models import Ailment, ailment
from inference.protocol import DeviceState, ModelState, ModelStatus

log = logging.getLogger("gateway.providers.local.inference_snapshot")

POLL_SECONDS = 2.0
MISSING_POLL_SECONDS = 0.5
"""While the service does not answer, it is looked for more often: a refused connection costs next to nothing."""
STALE_SECONDS = 10.0
FETCH_SECONDS = 1.0

Fetch = Callable[[str, float], Awaitable[Any]]
"""Gets the JSON at a path within so many seconds or raises UpstreamError."""

_ANSWERS = (ModelState.READY, ModelState.BUSY)


class InferenceView:
    """The models of the service by id, refreshed by polling `/v1/models`.

    `on_return` is called when the service answers that did not before, or that nobody had asked yet; `on_missing` with
    every question that it leaves unanswered once it was seen; `on_ready` with a model that is ready and was not.
    """

    def __init__(
        self,
        fetch: Fetch,
        clock: Callable[[], float] = time.monotonic,
        on_return: Callable[[], None] = lambda: None,
        on_missing: Callable[[], None] = lambda: None,
        on_ready: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._fetch = fetch
        self._on_return = on_return
        self._on_missing = on_missing
        self._on_ready = on_ready
        self._clock = clock
        self._models: dict[str, ModelStatus] = {}
        self._told_at: dict[str, float] = {}
        """When each model's status was heard of."""
        self._devices: dict[str, tuple[DeviceState, float]] = {}
        """What was told of each device, and when."""
        self._aliases: Mapping[str, str] = {}
        """By model id; made when something is heard, because then nobody waits for it."""
        self._seen_at: float | None = None
        self._reachable: bool | None = None
        self._wanted = asyncio.Event()
        self._refreshing: asyncio.Task[None] | None = None

    def use(self, fetch: Fetch) -> None:
        """Asks another service from now on; what the old one said is forgotten."""
        self._fetch = fetch
        self._seen_at = None
        self._reachable = None
        self._models, self._aliases, self._devices, self._told_at = {}, {}, {}, {}

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
        seen = self._seen_at
        return self._models if seen is not None and self._clock() - seen < STALE_SECONDS else {}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Model id by alias; kept while the service is silent, because names do not change with its health."""
        return self._aliases

    def ailment(self, model: str) -> Ailment | None:
        """Why a request would likely fail at `model` now, None while nothing speaks against it. Advice only.

        What was told of a device counts until more is heard of the model: models leave a lost device at once, so one
        that still is there was not on it, or the device is back.
        """
        status = self.models.get(model)
        return None if status is None else self._ailment(status)

    def look(self) -> None:
        """Something happened: the service is asked now instead of at the next turn."""
        self._wanted.set()

    def hear(self, kind: str, data: Mapping[str, Any]) -> None:
        """Takes over one event of the service; raises KeyError, TypeError or ValueError for one that makes no sense."""
        now = self._clock()
        if kind == "snapshot":
            statuses = [ModelStatus.from_json(item) for item in data["models"]]
            devices = {str(item["id"]): (DeviceState(item["state"]), now) for item in data["devices"]}
            self._devices, self._seen_at = devices, now
            self._take(statuses, now, now)
            if data["ready"]:
                self._note_answer()
        elif kind == "model":
            status = ModelStatus.from_json(data["model"])
            self._take(list({**self._models, status.id: status}.values()), now, now, {status.id})
        elif kind == "device":
            self._devices[str(data["device"]["id"])] = DeviceState(data["device"]["state"]), now
        elif kind == "removed" and "id" in data:
            self._take([model for name, model in self._models.items() if name != data["id"]], now, now, set())
        elif kind == "removed":
            self._devices[str(data["device"])] = DeviceState.LOST, now
        elif kind == "eviction":
            self.look()

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
        fetch, began = self._fetch, self._clock()
        try:
            answer = await fetch("/v1/models", FETCH_SECONDS)
            models = [ModelStatus.from_json(item) for item in answer["data"]]
        except Exception as error:
            if fetch is self._fetch:
                self._note_missing(error)
            return
        if fetch is not self._fetch:
            return  # another service is asked meanwhile
        self._seen_at = self._clock()
        self._take(models, self._seen_at, began)
        self._note_answer()

    def _note_answer(self) -> None:
        """It is there; told once."""
        was_reachable, self._reachable = self._reachable, True
        if not was_reachable:
            log.info("the inference service answers: %d models", len(self._models))
            self._on_return()

    def _take(self, models: list[ModelStatus], now: float, asked: float, fresh: set[str] | None = None) -> None:
        """Replaces the models by what was asked for at `asked`; of `fresh` alone it is news, None: of all.

        What was heard of a model since then is newer and stays.
        """
        before, told = self._models, self._told_at
        self._models, self._told_at = {}, {}
        for model in models:
            is_news = fresh is None or model.id in fresh
            newer = model.id in before and (told[model.id] > asked or not is_news)
            self._models[model.id] = before[model.id] if newer else model
            self._told_at[model.id] = told[model.id] if newer else now
        self._aliases = {alias: model.id for model in self._models.values() for alias in model.aliases}
        for name, model in self._models.items():
            if model.state in _ANSWERS and (name not in before or before[name].state not in _ANSWERS):
                self._on_ready(name)

    def _ailment(self, status: ModelStatus) -> Ailment | None:
        told_at = self._told_at[status.id]
        devices = {name: state for name, (state, at) in self._devices.items() if at >= told_at}
        return ailment(status, devices, self._clock() - told_at)

    def _note_missing(self, error: Exception) -> None:
        """No answer, or one that makes no sense; told once, with the traceback when it is nothing foreseen."""
        if self._reachable is not False:
            foreseen = isinstance(error, UpstreamError | KeyError | TypeError | ValueError | AttributeError)
            said = f"{type(error).__name__}: {error}"
            log.warning(
                "the inference service does not tell its models: %s", said, exc_info=None if foreseen else error
            )
        self._reachable = False
        if self.was_seen and isinstance(error, UpstreamError) and probe_schedule.is_down(error):
            self._on_missing()
