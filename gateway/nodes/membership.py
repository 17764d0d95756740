"""The list of nodes from `inference.nodes`: URLs, and sources that change while the gateway runs."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping

from gateway.settings import InferenceSettings, node_source

log = logging.getLogger("gateway.nodes.membership")

DNS_SECONDS = 5.0
"""Time between two look-ups of a name."""
FIRST_SECONDS = 2.0
"""How long the start of the gateway waits for the first list of each source."""


class Membership:
    """The nodes of one configuration: `urls` by name."""

    def __init__(self, settings: InferenceSettings) -> None:
        self._scheme = "https" if settings.tls.certificate or settings.tls.ca else "http"
        sources = [node_source(entry) for entry in settings.nodes]
        self._fixed = {source.name: source.address for source in sources if source.kind == "url"}
        self._found: dict[str, Mapping[str, str]] = {}
        """The last list of each source that changes."""
        self._errors: dict[str, str] = {}
        """Why a source cannot be read; logged once."""
        self._names = tuple(source.address for source in sources if source.kind == "dns")

    @property
    def urls(self) -> Mapping[str, str]:
        """The URL of each node by its name."""
        return {**{name: url for found in self._found.values() for name, url in found.items()}, **self._fixed}

    @property
    def is_fixed(self) -> bool:
        """Whether the list does not change while the configuration is in force."""
        return not self._names

    async def first(self) -> None:
        """Reads each source once, for FIRST_SECONDS at most."""
        await asyncio.gather(*(self._look_up(name, FIRST_SECONDS) for name in self._names))

    async def run(self, on_change: Callable[[], None]) -> None:
        """Watches the sources until cancelled; `on_change` is called when one has another list."""
        async with asyncio.TaskGroup() as group:
            for name in self._names:
                group.create_task(self._watch_name(name, on_change))

    # --- names -------------------------------------------------------------------------------------------------------
    async def _watch_name(self, address: str, on_change: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(DNS_SECONDS)
            if await self._look_up(address, DNS_SECONDS):
                on_change()

    async def _look_up(self, address: str, seconds: float) -> bool:
        """Resolves HOST:PORT; whether the addresses have changed. Without an answer the last addresses stay."""
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(seconds):
                found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no answer for {seconds:g} s"
            if self._errors.get(address) != reason:
                log.warning("the nodes of dns:%s cannot be read: %s", address, reason)
            self._errors[address] = reason
            return False
        self._errors.pop(address, None)
        hosts = sorted({f"[{item[4][0]}]" if item[0] is socket.AF_INET6 else str(item[4][0]) for item in found})
        return self._note(f"dns:{address}", {f"{one}:{port}": f"{self._scheme}://{one}:{port}" for one in hosts})

    def _note(self, source: str, found: Mapping[str, str]) -> bool:
        if self._found.get(source) == found:
            return False
        self._found[source] = found
        return True
