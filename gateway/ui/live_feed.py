"""Distributes the live state to open pages as server-sent events.

While a page is open, one loop compares the state with what the pages have and publishes the differences. Without an
open page nothing runs. A page that reads too slowly loses its queue and gets a new snapshot instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

import headgate
from gateway.nodes.node import Node
from gateway.providers.local.inference_snapshot import Events
from gateway.runtime import Runtime
from gateway.ui.page_state import LiveFigures, ShownRequests, first_requests, is_news, model_json, request_json
from headgate.shared.log import line_of

log = logging.getLogger("gateway.ui.live_feed")

TICK_SECONDS = 0.25
SLOW_TICKS = 4
"""The load of the gateway, the running minute, breakers, and figures of models are compared once in SLOW_TICKS ticks:
once a second."""
BEAT_SECONDS = 5.0
RETRY_MILLISECONDS = 1000
"""Pause of a client that reopens a stream by itself. The page closes a broken stream and has pauses of its own."""
MAX_WAITING = 500
"""Events that may wait for one page. With more of them they are dropped, and the page gets a new snapshot."""
MAX_PAGES = 50
MAX_ENTRIES = 500
MAX_LINES = 200
_END = object()


@dataclass(frozen=True, slots=True)
class Viewer:
    """The rights of a page: an admin sees all requests and log lines, others the requests of their own key."""

    key: str
    is_admin: bool


@dataclass(eq=False, slots=True)
class _Page:
    viewer: Viewer
    queue: deque[bytes | object] = field(default_factory=deque)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)
    is_behind: bool = False

    def put(self, frame: bytes | object) -> None:
        """Queues a frame; a full queue is dropped in favour of a new snapshot."""
        if len(self.queue) >= MAX_WAITING:
            self.queue.clear()
            self.is_behind = True
        self.queue.append(frame)
        self.has_news.set()


class LiveFeed:
    """The pages of one gateway."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._pages: set[_Page] = set()
        self._number = 0
        self._closed = False
        self._tasks: list[asyncio.Task[None]] = []
        self._figures: dict[str, NodeFigures] = {}
        """By name of the node, while a page is open."""
        self._requests = ShownRequests()
        self._models: dict[tuple[str, str], dict[str, Any]] = {}
        """The `Model` record (see `types.js`) of each model of each node."""
        self._shown: dict[tuple[str, str], Any] = {}
        """The last data of events that exist once per gateway or node, by kind of event and name of the node."""
        self._breakers: dict[str, dict[str, Any]] = {}
        self._load = (0, 0)
        """Running and queued requests."""
        self._lines_shown = 0
        self.entries: deque[dict[str, Any]] = deque(maxlen=MAX_ENTRIES)
        self.lines = LogLines()

    @property
    def is_full(self) -> bool:
        """Whether no further page can be served."""
        return len(self._pages) >= MAX_PAGES

    def add_entry(self, entry: dict[str, Any]) -> None:
        """Adds an entry to the timeline."""
        self.entries.append(entry)
        self._publish("timeline", {"entry": entry})

    async def listen(self, viewer: Viewer, is_valid: Callable[[], bool]) -> AsyncIterator[bytes]:
        """The events of one page as SSE frames, until `is_valid` is false or the gateway stops."""
        page = _Page(viewer)
        self._join(page)
        try:
            yield self._frame("snapshot", self._snapshot(viewer))
            while not self._closed and is_valid():
                page.has_news.clear()
                if not page.queue:
                    try:
                        async with asyncio.timeout(BEAT_SECONDS):
                            await page.has_news.wait()
                    except TimeoutError:
                        yield self._frame("beat", {})
                        continue
                if page.is_behind:
                    page.is_behind = False
                    page.queue.clear()
                    yield self._frame("snapshot", self._snapshot(viewer))
                    continue
                frame = page.queue.popleft()
                if not isinstance(frame, bytes):
                    return
                yield frame
        finally:
            self._leave(page)

    def model(self, node: str, status: Mapping[str, Any]) -> dict[str, Any]:
        """The `Model` record of a model of a node, from `status`, its object in `/v1/models`."""
        name, now = status["id"], time.time()
        figures: Mapping[str, Any] = {}
        rate = None
        if (known := self._figures.get(node)) is not None:
            figures, rate = known.live.of(name), known.live.tokens_per_second(name, time.monotonic())
        found = model_json(status, figures, rate, self._runtime.traffic.times(name, now), now)
        return {**found, "node": node} if node else found

    def close(self) -> None:
        """Ends the streams of all pages."""
        self._closed = True
        for page in self._pages:
            page.queue.clear()
            page.put(_END)

    def _join(self, page: _Page) -> None:
        if not self._pages:
            self._shown.clear()
            self._requests.changed(self._runtime.records)  # the snapshot of the page has these
            self._update(slow=True)
            loop = asyncio.get_running_loop()
            self._tasks = [loop.create_task(self._run(), name="live-feed")]
        self._pages.add(page)

    def _leave(self, page: _Page) -> None:
        self._pages.discard(page)
        if not self._pages:
            tasks, self._tasks = self._tasks, []
            for task in tasks:
                task.cancel()
            for figures in self._figures.values():
                figures.stop()
            self._figures.clear()

    def retry(self, node: str) -> None:
        """A node answers again: opens the stream of its figures now."""
        if node in self._figures:
            self._figures[node].retry()

    # --- nodes -------------------------------------------------------------------------------------------------------
    def _follow_nodes(self) -> None:
        """Opens a stream of figures for each new node, and ends those of nodes that were removed."""
        nodes = self._runtime.fleet.nodes
        for name, figures in tuple(self._figures.items()):
            if nodes.get(name) is not figures.node:
                figures.stop()
                del self._figures[name]
                self._set_devices(name, [])
        for name, node in nodes.items():
            if name not in self._figures:
                self._figures[name] = NodeFigures(node, self._set_devices)
        for name, model in [key for key in self._models if key[0] not in nodes]:
            self._remove_model(name, model)

    def _set_devices(self, node: str, devices: list[dict[str, Any]]) -> None:
        self._set("devices", {"devices": devices, **_of_node(node)}, node)

    # --- differences -------------------------------------------------------------------------------------------------
    async def _run(self) -> None:
        tick = 0
        while True:
            await asyncio.sleep(TICK_SECONDS)
            tick += 1
            try:
                self._update(slow=tick % SLOW_TICKS == 0)
            except Exception:
                log.exception("internal error: the dashboard could not be updated")

    def _update(self, *, slow: bool) -> None:
        """Publishes what has changed since the last call."""
        runtime = self._runtime
        self._follow_nodes()
        for record in self._requests.changed(runtime.records):
            self._publish("request", {"request": request_json(record)}, key=record.key)
        self._set("inference", self._inference())
        self._update_models(slow=slow)
        self._update_lines()
        if slow:
            load = (runtime.admission.in_flight, runtime.admission.queued)
            if load != self._load:
                self._load = load
                self._publish("gateway", {"gateway": self._gateway()})
            self._set("minute", {"minute": runtime.traffic.minute(time.time())})
            self._update_breakers()

    def _set(self, kind: str, data: dict[str, Any], node: str = "") -> None:
        if self._shown.get((kind, node)) != data:
            self._shown[kind, node] = data
            self._publish(kind, data)

    def _update_models(self, *, slow: bool) -> None:
        for node, figures in self._figures.items():
            view = figures.node.view
            if not view.reachable or not view.is_fresh:
                continue  # the last known models stay as they were
            found = view.models
            for name in [name for of, name in self._models if of == node and name not in found]:
                self._remove_model(node, name)
            for name, status in found.items():
                shown = self._models.get((node, name))
                if not slow and shown is not None and shown["headgate"]["state"] == str(status.state):
                    continue
                model = self.model(node, status.to_json())
                if is_news(model, shown):
                    self._models[node, name] = model
                    self._publish("model", {"model": model})

    def _remove_model(self, node: str, name: str) -> None:
        del self._models[node, name]
        self._publish("removed", {"id": name, **_of_node(node)})

    def _update_breakers(self) -> None:
        found = {item["name"]: item for item in self._runtime.breakers.describe()}
        for name in self._breakers.keys() - found.keys():
            self._publish("breaker", {"breaker": {"name": name, "state": None}})
        for name, item in found.items():
            if _steady(item) != _steady(self._breakers.get(name)):
                self._publish("breaker", {"breaker": item})
            else:
                found[name] = self._breakers[name]
        self._breakers = found

    def _update_lines(self) -> None:
        for line in self.lines.since(self._lines_shown):
            self._publish("log", {"line": line}, admin_only=True)
        self._lines_shown = self.lines.total

    # --- records -----------------------------------------------------------------------------------------------------
    def _gateway(self) -> dict[str, Any]:
        runtime = self._runtime
        return {
            "version": headgate.__version__,
            "now": round(time.time(), 3),
            "uptime_seconds": round(runtime.uptime_seconds, 1),
            "in_flight": runtime.admission.in_flight,
            "queued": runtime.admission.queued,
        }

    def _inference(self) -> dict[str, Any]:
        view = self._runtime.view
        nodes = [
            {
                "name": node.name,
                "url": node.url,
                "reachable": node.view.reachable,
                "since": round(node.view.reachable_since, 3),
            }
            for node in self._runtime.fleet.nodes.values()
            if node.name
        ]
        return {"reachable": view.reachable, "since": round(view.reachable_since, 3), "nodes": nodes}

    def _snapshot(self, viewer: Viewer) -> dict[str, Any]:
        runtime = self._runtime
        return {
            "gateway": self._gateway(),
            "inference": self._inference(),
            "models": list(self._models.values()),
            "devices": [device for figures in self._figures.values() for device in figures.devices],
            "breakers": runtime.breakers.describe(),
            "requests": first_requests(runtime.records, None if viewer.is_admin else viewer.key),
            "minutes": runtime.traffic.minutes(time.time()),
            "timeline": list(self.entries),
            "log": list(self.lines) if viewer.is_admin else [],
        }

    # --- events ------------------------------------------------------------------------------------------------------
    def _publish(self, kind: str, data: dict[str, Any], *, key: str | None = None, admin_only: bool = False) -> None:
        """Queues an event for the pages; with `key` or `admin_only` not for those that must not see it."""
        pages = [
            page
            for page in self._pages
            if page.viewer.is_admin or not (admin_only or (key is not None and page.viewer.key != key))
        ]
        if not pages:
            return
        self._number += 1
        frame = self._frame(kind, data)
        for page in pages:
            page.put(frame)

    def _frame(self, kind: str, data: dict[str, Any]) -> bytes:
        body = orjson.dumps({"number": self._number, **data})
        retry = b"retry: %d\n" % RETRY_MILLISECONDS if kind == "snapshot" else b""
        return b"event: %b\n%bdata: %b\n\n" % (kind.encode(), retry, body)


def _of_node(node: str) -> dict[str, str]:
    """The name of one of several nodes in an event."""
    return {"node": node} if node else {}


def _steady(breaker: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A breaker without the values that follow the clock."""
    return None if breaker is None else {**breaker, "retry_after": None, "opens_until": None, "ramp": None}


class NodeFigures:
    """A second event stream of a node, with its figures. Each update calls `on_devices` with node and devices."""

    def __init__(self, node: Node, on_devices: Callable[[str, list[dict[str, Any]]], None]) -> None:
        self.node = node
        self.live = LiveFigures()
        self._on_devices = on_devices
        self._stream = Events(lambda: node.provider, self, figures=True)
        self._task = asyncio.get_running_loop().create_task(self._stream.run(), name="live-figures")

    def stop(self) -> None:
        """Ends the stream."""
        self._task.cancel()

    def retry(self) -> None:
        """The node answers again: opens the stream now."""
        self._stream.retry()

    @property
    def devices(self) -> list[dict[str, Any]]:
        """The `Device` records (see `types.js`), with the name of the node where there are several."""
        name = self.node.name
        return [{**device, "node": name} for device in self.live.devices] if name else self.live.devices

    def apply(self, kind: str, data: Mapping[str, Any]) -> None:
        """Takes an event of the stream; raises KeyError, TypeError or ValueError for a malformed one."""
        if kind == "figures":
            self.live.take(data, time.monotonic())
            self._on_devices(self.node.name, self.devices)

    def poll_soon(self) -> None:
        """Does nothing: the next stream begins with all figures."""


class LogLines(logging.Handler):
    """The last warnings and errors of this process and of the inference service."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[dict[str, Any]] = deque(maxlen=MAX_LINES)
        self.total = 0
        """Number of lines so far."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps one line of this process; called by any thread."""
        with contextlib.suppress(Exception):  # other handlers report a line that cannot be formatted
            self.add(line_of(record))

    def add(self, line: dict[str, Any]) -> None:
        """Keeps one line, in the form of `line_of`."""
        self._lines.append(line)
        self.total += 1

    def __iter__(self) -> Any:
        return iter(tuple(self._lines))

    def since(self, total: int) -> list[dict[str, Any]]:
        """The lines after the first `total` ones, as far as they are kept."""
        count = self.total - total
        return list(self)[-count:] if count > 0 else []
