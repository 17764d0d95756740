"""The list of nodes from `inference.nodes`: URLs, and sources that change while the gateway runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from gateway.settings import NodeSettings, node_source
from headgate.shared.child_process import PARENT_ENV

log = logging.getLogger("gateway.nodes.membership")

DNS_SECONDS = 5.0
"""Time between two look-ups of a name."""
FIRST_SECONDS = 2.0
"""How long the start of the gateway waits for the first addresses of a name."""
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 30.0
"""Before the helper of a Ray cluster is started again."""
HELPER = (sys.executable, "-m", "headgate.ray_cluster.watch")
MAX_LINE_BYTES = 2**24
END_SECONDS = 2.0
"""How long the helper may take to end."""


_Addresses = list[tuple[Any, Any, int, str, Any]]
"""As `getaddrinfo` returns them."""


class Address(NamedTuple):
    """The address of a node. `server_name`: the name in its certificate, if that is not the host of `url`."""

    url: str
    server_name: str | None = None


class Membership:
    """The nodes of one configuration. Sources that `before` has too begin with its lists."""

    def __init__(
        self, settings: NodeSettings, before: Membership | None = None, helper: Sequence[str] = HELPER
    ) -> None:
        """`helper` is the command that prints the members of a Ray cluster."""
        self._helper = helper
        self._scheme = "https" if settings.tls.ca or settings.tls.certificate else "http"
        sources = [node_source(entry) for entry in settings.nodes]
        self._fixed = {source.name: Address(source.address) for source in sources if source.kind == "url"}
        self._names = [source.address for source in sources if source.kind == "dns"]
        self._clusters = [source.address for source in sources if source.kind == "ray"]
        known = {} if before is None else before._found
        self._found: dict[str, Mapping[str, Address]] = {one: known[one] for one in self._sources if one in known}
        """The last list of each source that changes."""
        self._errors: dict[str, str] = {}
        """Why a source cannot be read; logged once."""
        self._look_ups: dict[str, asyncio.Task[_Addresses]] = {}
        """The look-ups that run, by name. Each holds a thread that cannot be cancelled, so a name has one at most."""

    @property
    def _sources(self) -> list[str]:
        return [*(f"dns:{name}" for name in self._names), *(f"ray:{address}" for address in self._clusters)]

    @property
    def addresses(self) -> Mapping[str, Address]:
        """The address of each node by its name."""
        return {**{name: one for found in self._found.values() for name, one in found.items()}, **self._fixed}

    @property
    def is_complete(self) -> bool:
        """Whether every source has been read."""
        return len(self._found) == len(self._sources)

    async def first(self) -> None:
        """Looks up the names once, for FIRST_SECONDS at most."""
        await asyncio.gather(*(self._look_up(name, FIRST_SECONDS) for name in self._names))

    async def run(self, on_change: Callable[[], None]) -> None:
        """Watches the sources until cancelled; `on_change` is called when one has another list."""
        async with asyncio.TaskGroup() as group:
            for name in self._names:
                group.create_task(self._watch_name(name, on_change))
            for address in self._clusters:
                group.create_task(self._watch_cluster(address, on_change))

    def _note(self, source: str, found: Mapping[str, Address]) -> bool:
        """Notes the list of a source; whether it has changed."""
        self._errors.pop(source, None)
        if self._found.get(source) == found:
            return False
        others = [self._fixed, *(nodes for other, nodes in self._found.items() if other != source)]
        self._found[source] = found
        for name, one in found.items():
            if twin := next((nodes[name].url for nodes in others if nodes.get(name, one).url != one.url), None):
                log.warning(
                    "two nodes are named %s: %s and %s; only %s is used, so give them different names",
                    name, twin, one.url, self.addresses[name].url,
                )  # fmt: skip
        return True

    def _note_error(self, source: str, reason: str) -> None:
        """A source could not be read: its last list stays."""
        if self._errors.get(source) != reason:
            log.warning("the nodes of %s cannot be read: %s", source, reason)
        self._errors[source] = reason

    # --- names -------------------------------------------------------------------------------------------------------
    async def _watch_name(self, address: str, on_change: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(DNS_SECONDS)
            if await self._look_up(address, DNS_SECONDS):
                on_change()

    async def _look_up(self, address: str, seconds: float) -> bool:
        """Resolves HOST:PORT; whether the addresses have changed."""
        host, _, port = address.rpartition(":")
        task = self._look_ups.get(address)
        if task is None:
            resolve = asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
            task = self._look_ups[address] = asyncio.ensure_future(resolve)
            task.add_done_callback(_ignore)
        await asyncio.wait((task,), timeout=seconds)
        if not task.done():
            self._note_error(f"dns:{address}", f"no answer for {seconds:g} s")
            return False
        self._look_ups.pop(address, None)
        try:
            found = task.result()
        except (OSError, UnicodeError) as error:  # UnicodeError: `a..b` cannot be a name
            self._note_error(f"dns:{address}", str(error))
            return False
        hosts = sorted({f"[{item[4][0]}]" if item[0] is socket.AF_INET6 else str(item[4][0]) for item in found})
        nodes = {f"{one}:{port}": Address(f"{self._scheme}://{one}:{port}", host) for one in hosts}
        return self._note(f"dns:{address}", nodes)

    # --- Ray clusters ------------------------------------------------------------------------------------------------
    async def _watch_cluster(self, address: str, on_change: Callable[[], None]) -> None:
        """Reads the lists that a helper process prints, and starts it again when it ends."""
        pause = MIN_PAUSE_SECONDS
        while True:
            try:
                async with _running((*self._helper, *([address] if address else ()))) as process:
                    assert process.stdout is not None
                    while line := await process.stdout.readline():
                        pause = MIN_PAUSE_SECONDS
                        if self._note(f"ray:{address}", _members(line)):
                            on_change()
                reason = f"its helper ended with status {process.returncode}"
            except (OSError, ValueError, KeyError, TypeError) as error:
                reason = f"{type(error).__name__}: {error}"
            self._note_error(f"ray:{address}", reason)
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)


def _ignore(task: asyncio.Task[_Addresses]) -> None:
    """A look-up that nothing waits for any more may fail without a log line."""
    if not task.cancelled():
        task.exception()


@contextlib.asynccontextmanager
async def _running(command: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """A helper process, so that Ray itself is not loaded into the gateway. It ends with this process."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MAX_LINE_BYTES,
        env={**os.environ, PARENT_ENV: str(os.getpid())},
    )  # fmt: skip
    try:
        yield process
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _members(line: bytes) -> dict[str, Address]:
    """The nodes in a line of the helper; raises ValueError, KeyError or TypeError for another line."""
    found: dict[str, Any] = orjson.loads(line)
    return {str(node["name"]): Address(str(node["url"]).rstrip("/")) for node in found["nodes"]}
