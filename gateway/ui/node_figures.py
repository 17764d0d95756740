"""The figures of one node while a page of the dashboard is open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from gateway.nodes.node import Node
from gateway.providers.local.inference_snapshot import Events
from gateway.ui.page_state import LiveFigures


class NodeFigures:
    """A second event stream of a node, with its figures. `on_devices` is called with each new state of its devices."""

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
        """The DEVICE records, with the name of the node where there are several."""
        name = self.node.name
        return [{**device, "node": name} for device in self.live.devices] if name else self.live.devices

    def apply(self, kind: str, data: Mapping[str, Any]) -> None:
        """Takes an event of the stream; raises KeyError, TypeError or ValueError for a malformed one."""
        if kind == "figures":
            self.live.take(data, time.monotonic())
            self._on_devices(self.node.name, self.devices)

    def poll_soon(self) -> None:
        """Nothing is lost with the stream: the next one begins with all figures."""
