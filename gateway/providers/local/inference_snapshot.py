"""The latest known state of the inference service's models, from polling and from `/events`.

It may be outdated: the inference service decides. A snapshot older than STALE_SECONDS counts as unknown, not as down.
Polling continues while events arrive, so that without events the view is only a little older.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec
import orjson

from gateway.breaker import probe_schedule
from gateway.errors import UpstreamError
from gateway.providers.local.candidate_facts import UNUSABLE, LikelyFailure, likely_failure
from headgate.shared.sse import SseSplitter
from inference.protocol import DeviceState, ModelState, ModelStatus

log = logging.getLogger("gateway.providers.local.inference_snapshot")

POLL_SECONDS = 2.0
MISSING_POLL_SECONDS = 0.5
"""While the service does not answer, it is polled more often, because a refused connection costs little."""
STALE_SECONDS = 10.0
FETCH_SECONDS = 1.0

Fetch = Callable[[str, float], Awaitable[Any]]
"""Gets the JSON at a path within a number of seconds; raises UpstreamError."""

_READY_STATES = (ModelState.READY, ModelState.BUSY)


def model_status(data: Mapping[str, Any]) -> ModelStatus:
    """Like `ModelStatus.from_json`, in a seventh of its time: a gateway reads the models of all nodes again and again.

    Raises KeyError, TypeError or ValueError for an entry that is not one of a model.
    """
    return msgspec.convert({"state": "cold", **data.get("headgate", {}), "id": data["id"]}, ModelStatus)


class InferenceView:
    """The models of the service by id, refreshed by polling `/v1/models`.

    `on_return` is called when the service becomes reachable; `on_missing` for each failed connection after the first
    answer; `on_ready` with each model that becomes ready; `on_reachable` when `reachable` changes; `on_change` when
    `models` may have changed. `name` is for the log.
    """

    def __init__(
        self,
        fetch: Fetch,
        clock: Callable[[], float] = time.monotonic,
        on_return: Callable[[], None] = lambda: None,
        on_missing: Callable[[], None] = lambda: None,
        on_ready: Callable[[str], None] = lambda _: None,
        on_reachable: Callable[[bool], None] = lambda _: None,
        on_change: Callable[[], None] = lambda: None,
        name: str = "the inference service",
    ) -> None:
        self._fetch = fetch
        self._on_return = on_return
        self._on_missing = on_missing
        self._on_ready = on_ready
        self._on_reachable = on_reachable
        self._on_change = on_change
        self._name = name
        self.reachable_since = time.time()
        """When `reachable` changed, in Unix seconds."""
        self._clock = clock
        self._models: dict[str, ModelStatus] = {}
        self._reported_at: dict[str, float] = {}
        """When each model's status was received."""
        self._unusable: dict[str, tuple[DeviceState, float]] = {}
        """The state of each unusable device, and when it was received."""
        self._aliases: Mapping[str, str] = {}
        """Model id by alias."""
        self._seen_at: float | None = None
        self._reachable: bool | None = None
        self._wanted = asyncio.Event()
        self._refreshing: asyncio.Task[None] | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether the snapshot is younger than STALE_SECONDS."""
        return self.age < STALE_SECONDS

    @property
    def is_complete(self) -> bool:
        """Whether a model that is not listed does not exist: the same as `is_fresh` for one service."""
        return self.is_fresh

    @property
    def age(self) -> float:
        """Seconds since the last answer or `snapshot` event; infinite before the first."""
        return math.inf if self._seen_at is None else self._clock() - self._seen_at

    @property
    def reachable(self) -> bool | None:
        """Whether the last poll was answered, or a ready service has sent a snapshot since; None before the first."""
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
        """Model id by alias; kept when the snapshot becomes stale."""
        return self._aliases

    def likely_failure(self, model: str) -> LikelyFailure | None:
        """Why a request to `model` would likely fail now; None without a reason.

        The state of a device counts only until the model's next status: models are removed from a lost device at once,
        so a later status with this device means that the device is back.
        """
        status = self.models.get(model)
        if status is None:
            return None
        reported_at = self._reported_at[model]
        unusable = {name: state for name, (state, at) in self._unusable.items() if at >= reported_at}
        return likely_failure(status, unusable, self._clock() - reported_at)

    def poll_soon(self) -> None:
        """Polls the service now instead of after the pause."""
        self._wanted.set()

    def apply(self, kind: str, data: Mapping[str, Any]) -> None:
        """Applies one event of the service; raises KeyError, TypeError or ValueError for a malformed one."""
        now = self._clock()
        if kind == "snapshot":
            statuses = [model_status(item) for item in data["models"]]
            devices = {str(item["id"]): DeviceState(item["state"]) for item in data["devices"]}
            self._seen_at = now
            self._unusable = {name: (state, now) for name, state in devices.items() if state in UNUSABLE}
            self._take(statuses, now, now)
            if data["ready"]:
                self._note_answer()
        elif kind == "model":
            status = model_status(data["model"])
            self._take(list({**self._models, status.id: status}.values()), now, now, {status.id})
        elif kind == "device":
            self._note_device(str(data["device"]["id"]), DeviceState(data["device"]["state"]), now)
        elif kind == "removed" and "id" in data:
            self._take([model for name, model in self._models.items() if name != data["id"]], now, now, set())
        elif kind == "removed":
            self._note_device(str(data["device"]), DeviceState.LOST, now)
        elif kind == "eviction":
            self.poll_soon()

    async def refresh(self) -> None:
        """Polls the service once; concurrent callers share one poll. Does not raise if the service does not answer."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh(), name="inference-view")
        await asyncio.shield(self._refreshing)

    async def ensure(self, max_age: float) -> None:
        """Refreshes unless the snapshot is younger than `max_age` seconds."""
        if self.age > max_age:
            await self.refresh()

    async def run(self) -> None:
        """Polls until cancelled."""
        while True:
            try:
                await self.refresh()
            except Exception:
                log.exception("internal error: the state of the inference service could not be refreshed")
            self._wanted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS if self._reachable else MISSING_POLL_SECONDS):
                    await self._wanted.wait()

    async def _refresh(self) -> None:
        began = self._clock()
        try:
            answer = await self._fetch("/v1/models", FETCH_SECONDS)
            models = [model_status(item) for item in answer["data"]]
        except Exception as error:
            self._note_missing(error)
            self._on_change()
            return
        self._seen_at = self._clock()
        self._take(models, self._seen_at, began)
        self._note_answer()

    def _note_answer(self) -> None:
        """Marks the service as reachable; logs a change."""
        if self._set_reachable(True):
            log.info("connected to %s: %d models", self._name, len(self._models))
            self._on_return()

    def _set_reachable(self, is_reachable: bool) -> bool:
        """Sets `reachable`; returns whether it has changed."""
        if self._reachable is is_reachable:
            return False
        self._reachable, self.reachable_since = is_reachable, time.time()
        self._on_reachable(is_reachable)
        return True

    def _take(self, models: list[ModelStatus], now: float, sent_at: float, ids: set[str] | None = None) -> None:
        """Replaces the models by an answer to a request that was sent at `sent_at`.

        A status that was received since then is newer and is kept. `ids` are the models that the answer is about;
        None means all.
        """
        before, reported = self._models, self._reported_at
        self._models, self._reported_at = {}, {}
        for model in models:
            is_reported = ids is None or model.id in ids
            newer = model.id in before and (reported[model.id] > sent_at or not is_reported)
            self._models[model.id] = before[model.id] if newer else model
            self._reported_at[model.id] = reported[model.id] if newer else now
        self._aliases = {alias: model.id for model in self._models.values() for alias in model.aliases}
        for name, model in self._models.items():
            if model.state in _READY_STATES and (name not in before or before[name].state not in _READY_STATES):
                self._on_ready(name)
        self._on_change()

    def _note_device(self, name: str, state: DeviceState, now: float) -> None:
        if state in UNUSABLE:
            self._unusable[name] = state, now
        else:
            self._unusable.pop(name, None)

    def _note_missing(self, error: Exception) -> None:
        """Marks the service as not reachable; logs a change, with a traceback if the error is unexpected."""
        if self._set_reachable(False):
            is_expected = isinstance(error, UpstreamError | KeyError | TypeError | ValueError | AttributeError)
            reason = f"{type(error).__name__}: {error}"
            log.warning("models of %s cannot be read: %s", self._name, reason, exc_info=None if is_expected else error)
        if self.was_seen and isinstance(error, UpstreamError) and probe_schedule.is_down(error):
            self._on_missing()


# --- events -----------------------------------------------------------------------------------------------------------
SILENCE_SECONDS = 15.0
"""Three intervals of the service's `beat` events."""
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 30.0
MAX_FRAME_BYTES = 4 * 2**20
"""Limit of one event. The snapshot of a thousand models is much smaller."""


_UNNUMBERED = ("beat", "figures", "kv")
"""Events that repeat the number of the last one."""


class Source(Protocol):
    """Where events come from."""

    def events(
        self, silence_seconds: float, *, figures: bool = False, kv: bool = False
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The bytes of the event stream; raises UpstreamError if it cannot be opened or is silent for that long.

        With `figures` or `kv` the service also sends these events.
        """
        ...


class Sink(Protocol):
    """Where events go."""

    def apply(self, kind: str, data: Mapping[str, Any]) -> None:
        """Applies one event; raises KeyError, TypeError or ValueError for a malformed one."""
        ...

    def poll_soon(self) -> None:
        """Some events were lost, or the stream ended."""
        ...


class Events:
    """A subscription. `source` is called for each stream, because a reload may change it.

    A stream that ends, fails, is malformed or becomes silent is opened again after a pause.
    """

    def __init__(self, source: Callable[[], Source], sink: Sink, *, figures: bool = False, kv: bool = False) -> None:
        self._source = source
        self._sink = sink
        self._figures = figures
        self._kv = kv
        self._retry = asyncio.Event()
        self._last_reason = ""
        self.is_open = False
        """Whether a stream is open and began with a snapshot."""

    def retry(self) -> None:
        """Ends the pause before the next try: the service is reachable."""
        self._retry.set()

    async def run(self) -> None:
        """Reads events until cancelled."""
        pause = MIN_PAUSE_SECONDS
        while True:
            why = await self._listen()
            self._retry.clear()
            pause = MIN_PAUSE_SECONDS if self.is_open else pause
            if self.is_open:
                self.is_open = False
                self._sink.poll_soon()
            self._log_reason(why)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._retry.wait()
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _listen(self) -> str:
        """Reads one stream to its end; returns the reason of its end."""
        try:
            source = self._source()
            async with source.events(SILENCE_SECONDS, figures=self._figures, kv=self._kv) as pieces:
                stream = _Stream(self._sink)
                async for piece in pieces:
                    if self._source() is not source:
                        return "the configured service has changed"
                    stream.feed(piece)
                    self.is_open = self.is_open or stream.has_begun
        except UpstreamError as error:
            return str(error)
        except ValueError as error:
            return f"invalid event: {error}"
        except Exception as error:
            log.exception("internal error: events of the inference service could not be processed")
            return repr(error)
        return "the stream ended"

    def _log_reason(self, why: str) -> None:
        """Logs why there are no events, unless the previous reason was the same or the stream is for figures."""
        if why != self._last_reason and not self._figures:
            log.info("no event stream from the inference service (%s); polling it every few seconds", why)
        self._last_reason = why


class _Stream:
    """One stream: a snapshot, then numbered changes. Raises ValueError for a malformed stream."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._splitter = SseSplitter(MAX_FRAME_BYTES)
        self._number = 0
        self.has_begun = False

    def feed(self, piece: bytes) -> None:
        """Processes the next bytes."""
        for frame in self._splitter.feed(piece):
            if frame.data is not None and frame.event is not None:
                data = orjson.loads(frame.data)
                if not isinstance(data, dict):
                    raise ValueError("an event that is not an object")
                self._take(frame.event.decode("ascii", "replace"), data)

    def _take(self, kind: str, data: dict[str, Any]) -> None:
        if not self.has_begun and kind != "snapshot":
            raise ValueError("the stream does not begin with a snapshot")
        number = data.get("number")
        if kind not in ("snapshot", *_UNNUMBERED) and number != self._number + 1:
            self._sink.poll_soon()  # some were lost
        if kind not in _UNNUMBERED and isinstance(number, int):
            self._number = number
        try:
            self._sink.apply(kind, data)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the event {kind!r} is malformed: {error!r}") from error
        self.has_begun = True
