"""Injects planned faults into a running fleet, and checks what each of them must not do."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from inference.devices.simgpu.control import SimulatorError
from tests.chaos.judge import Violation
from tests.fleet import judge
from tests.fleet.judge import NEW, Facts, Outage, Trouble
from tests.fleet.launcher import write_clock
from tests.fleet.load import Load
from tests.fleet.plan import Event, Kind
from tests.fleet.system import (
    DEVICE,
    LIMIT_PER_MINUTE,
    LIMITED_KEYS,
    MODEL,
    Fleet,
    Gateway,
    limited_key,
)
from tests.rigs.link_proxy import LinkState
from tests.rigs.processes import Service
from tests.rigs.stack import until

MAX_NODES = 2
"""Nodes in trouble at the same time; the others answer."""
RECOVERY_SECONDS = 45.0
"""Time until all gateways use a healed node again, on a busy machine."""
DEVICE_SECONDS = 120.0
"""Time until a node uses a device that was lost and is back."""
STORE_SECONDS = 20.0
AFTERMATH_SECONDS = 3.0
"""Time after a fault in which a request that ran during it may fail."""
SKEW_SECONDS = 30.0
OCCUPY_SECONDS = 1.0
HELD_SECONDS = 0.4
"""Duration of a failing request: long enough for others to overlap."""
MAX_PAUSE_SECONDS = 40.0
"""Time until the next probe. It grows with each false recovery: an open period that a probe ended, with a failure
after it."""
OBSERVED_SECONDS = 4.0
"""Several open periods of a breaker."""
SHARED_SECONDS = 1.5
"""Longer than the interval at which gateways report to the store: each knows the requests of a key at the others."""
REQUESTS_PER_GATEWAY = 8
"""Requests with a limited key; all together more than it may send."""
FAILING = (b"POST /v1/chat/completions ",)


@dataclass
class Injector:
    """`clock` is that of the run. `done` counts the faults that took effect; other fields hold what was measured."""

    fleet: Fleet
    load: Load
    clock: Callable[[], float]
    facts: Facts
    done: Counter[Kind] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    probes_at_once: list[int] = field(default_factory=list)
    admitted: dict[str, list[int]] = field(default_factory=lambda: {"with": [], "without": []})
    recovery_seconds: list[float] = field(default_factory=list)
    struck: int = 0
    """Number of answers that a node was sending when a fault of that node began."""

    def __post_init__(self) -> None:
        self._nodes = {name: asyncio.Lock() for name in self.fleet.nodes}
        self._gateways = [asyncio.Lock() for _ in self.fleet.gateways]
        self._store = asyncio.Lock()
        self._room = asyncio.Semaphore(MAX_NODES)
        self._keys: Iterator[int] = itertools.cycle(range(LIMITED_KEYS))

    async def inject(self, event: Event) -> None:
        """Injects one event, ends it, and waits until the fleet has recovered from it."""
        act: Callable[[Event], Awaitable[None]] = getattr(self, f"_{event.kind}")
        try:
            await act(event)
        except (httpx2.HTTPError, SimulatorError, OSError, LookupError, AssertionError) as error:  # with TimeoutError
            self._violate(judge.EFFECT, f"event {event.number}, {event.kind}: {type(error).__name__}: {error}")
            return
        self.done[event.kind] += 1

    # --- the store -----------------------------------------------------------------------------------------------
    async def _store_kill(self, event: Event) -> None:
        async with self._store:
            await self.fleet.stop(self.fleet.store)
            await asyncio.sleep(event.seconds)
            await self.fleet.start_store(empty=event.draw < 0.5)
            await self._store_is_used()

    async def _store_stop(self, event: Event) -> None:
        async with self._store:
            await self._stopped(self.fleet.store, event.seconds)
            await self._store_is_used()

    async def _store_partition(self, event: Event) -> None:
        async with self._store:
            with contextlib.ExitStack() as links:
                for number in event.gateways:
                    links.enter_context(self.fleet.gateways[number].store_link.being(_broken(event)))
                await asyncio.sleep(event.seconds)
            await self._store_is_used()

    async def _store_is_used(self) -> None:
        """Returns when every gateway that runs has a connection to the store."""

        async def used() -> bool:
            return all([await self.has_store(gateway) is not False for gateway in self.fleet.gateways])

        await self._expect(judge.RECOVERS, "every gateway uses the store", used, STORE_SECONDS)

    async def has_store(self, gateway: Gateway) -> bool | None:
        """Whether this gateway reaches the store; None while it does not answer."""
        try:
            text = await self.fleet.gateway(gateway.number, "/metrics")
        except httpx2.HTTPError:
            return None
        found = re.search(r"^gateway_shared_state_up (\S+)$", text, re.MULTILINE)
        return found is not None and float(found[1]) == 1.0

    # --- nodes ---------------------------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def _troubled(self, name: str, gateways: Sequence[int] | None = None) -> AsyncIterator[None]:
        """Answers of this node may break during this, at these gateways; it ends when all use the node again."""
        async with self._room, self._nodes[name]:
            await self._occupy(name, gateways or range(len(self.fleet.gateways)))
            start = self.clock()
            self.struck += sum(one.node == name for one in self.load.open.values())
            try:
                yield
                healed = self.clock()
                await self._is_used(name)
                self.recovery_seconds.append(self.clock() - healed)
            finally:
                end = self.clock() + AFTERMATH_SECONDS
                for number in gateways or (None,):
                    self.facts.troubles.append(Trouble(name, start, end, number))

    async def _occupy(self, name: str, gateways: Sequence[int]) -> None:
        """Returns when the node answers a request of one of these gateways, or after OCCUPY_SECONDS."""
        prompts = range(len(self.load.prompts))
        started = [self.load.start(number, prompt) for number in gateways for prompt in random.sample(prompts, 2)]
        with contextlib.suppress(AssertionError):
            answers = lambda: any(one.node == name and one.end is None for one in started)  # noqa: E731
            await until(f"{name} answers", answers, seconds=OCCUPY_SECONDS, every=0.01)

    async def _is_used(self, name: str) -> None:
        async def used() -> bool:
            return not any([await self.blocked(number, name) for number in range(len(self.fleet.gateways))])

        await self._expect(judge.RECOVERS, f"every gateway may use {name}", used, RECOVERY_SECONDS)

    async def not_closed(self, number: int, node: str) -> list[dict[str, Any]]:
        """The breakers of a node that are not closed at this gateway; none while it does not answer."""
        try:
            found = await self.fleet.breakers(number)
        except httpx2.HTTPError:
            return []
        return [one for one in found if one["node"] == node and one["state"] != "closed"]

    async def blocked(self, number: int, node: str) -> list[dict[str, Any]]:
        """The breakers of a node that refuse all requests at this gateway now."""
        return [one for one in await self.not_closed(number, node) if one["retry_after"]]

    def _name(self, event: Event) -> str:
        return list(self.fleet.nodes)[event.node]

    async def _node_kill(self, event: Event) -> None:
        name = self._name(event)
        async with self._troubled(name):
            await self.fleet.stop(self.fleet.nodes[name].service)
            await asyncio.sleep(event.seconds)
            await self.fleet.start_node(name)

    async def _node_stop(self, event: Event) -> None:
        name = self._name(event)
        async with self._troubled(name):
            await self._stopped(self.fleet.nodes[name].service, 2 * event.seconds)

    async def _node_restart(self, event: Event) -> None:
        await self._restarted(self._name(event))

    async def _restarted(self, name: str) -> None:
        async with self._troubled(name):
            await self.fleet.stop(self.fleet.nodes[name].service, signal.SIGTERM)
            await self.fleet.start_node(name)

    async def _node_partition(self, event: Event) -> None:
        name = self._name(event)
        async with self._troubled(name, event.gateways):
            with contextlib.ExitStack() as links:
                for number in event.gateways:
                    links.enter_context(self.fleet.gateways[number].links[name].being(_broken(event)))
                await asyncio.sleep(2 * event.seconds)

    async def _node_delay(self, event: Event) -> None:
        """Slow links break nothing."""
        name = self._name(event)
        links = [self.fleet.gateways[number].links[name] for number in event.gateways]
        async with self._nodes[name]:
            for link in links:
                link.delay = 0.02 + 0.2 * event.draw
            await asyncio.sleep(event.seconds)
            for link in links:
                link.delay = 0.0

    async def _device_loss(self, event: Event) -> None:
        name = self._name(event)
        async with self._troubled(name):
            await self.fleet.nodes[name].simulator("cut", DEVICE)
            await asyncio.sleep(event.seconds)
            await self.fleet.heal_device(name)

            async def loaded() -> bool:
                try:
                    await self.fleet.node(name, f"/models/{MODEL}/load?seconds=5", "POST", seconds=8.0)
                except httpx2.HTTPError:
                    return False
                return True

            await self._expect(judge.RECOVERS, f"{name} uses its device again", loaded, DEVICE_SECONDS, every=1.0)

    # --- gateways ------------------------------------------------------------------------------------------------
    async def _gateway_kill(self, event: Event) -> None:
        number = event.gateways[0]
        async with self._gateways[number]:
            start = self.clock()
            await self.fleet.stop(self.fleet.gateways[number].service)
            await asyncio.sleep(event.seconds)
            await self._gateway_starts(number, start)

    async def _gateway_restart(self, event: Event) -> None:
        await self._gateway_restarted(event.gateways[0])

    async def _gateway_restarted(self, number: int) -> None:
        """A gateway that ends after SIGTERM answers the requests that it has."""
        async with self._gateways[number]:
            start = self.clock()
            await self.fleet.stop(self.fleet.gateways[number].service, signal.SIGTERM)
            await self._gateway_starts(number, start, drains=True)

    async def _gateway_starts(self, number: int, start: float, *, drains: bool = False) -> None:
        try:
            await self.fleet.start_gateway(number)
        finally:
            self.facts.outages.append(Outage(number, start, self.clock(), drains))

    async def _isolation(self, event: Event) -> None:
        """A gateway without any node answers with errors."""
        number = event.gateways[0]
        async with self._gateways[number]:
            start = self.clock()
            with contextlib.ExitStack() as links:
                for link in self.fleet.gateways[number].links.values():
                    links.enter_context(link.being(_broken(event)))
                await asyncio.sleep(event.seconds)

            async def used() -> bool:
                return not any([await self.blocked(number, name) for name in self.fleet.nodes])

            try:
                await self._expect(judge.RECOVERS, f"gateway-{number} uses all nodes", used, RECOVERY_SECONDS)
            finally:
                self.facts.isolated.append(Outage(number, start, self.clock() + AFTERMATH_SECONDS))

    async def _clock_skew(self, event: Event) -> None:
        """The wall clocks of these gateways move by 30 s, forward or back."""
        for number in event.gateways:
            offset = SKEW_SECONDS if event.draw < 0.5 else -SKEW_SECONDS
            write_clock(self.fleet.gateways[number].clock, 0.0 if event.draw > 0.9 else offset)

    async def _rolling_restart(self, event: Event) -> None:
        """Everything, one after the other."""
        for name in self.fleet.nodes:
            await self._restarted(name)
        for number in range(len(self.fleet.gateways)):
            await self._gateway_restarted(number)
        async with self._store:
            await self.fleet.stop(self.fleet.store, signal.SIGTERM)
            await self.fleet.start_store()
            await self._store_is_used()

    # --- what the gateways share ---------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def _whole(self) -> AsyncIterator[None]:
        """The store and all gateways run, and no other fault touches them."""
        async with contextlib.AsyncExitStack() as held:
            for lock in (self._store, *self._gateways):
                await held.enter_async_context(lock)
            await self._store_is_used()
            yield

    async def _half_open(self, event: Event) -> None:
        """A node fails at all gateways: while its breaker is open, no two probes overlap."""
        name = self._name(event)
        numbers = range(len(self.fleet.gateways))
        links = [gateway.links[name] for gateway in self.fleet.gateways]
        async with self._whole(), self._troubled(name):
            for link in links:
                link.failing, link.hold, link.failed = FAILING, HELD_SECONDS, []
            try:
                await until(f"the breaker of {name} is open at all gateways", lambda: self._opened(name), seconds=30.0)
                await asyncio.sleep(HELD_SECONDS + 0.2)  # earlier requests end
                since = asyncio.get_running_loop().time()

                async def probes() -> list[tuple[float, float]]:
                    return [period for link in links for period in link.failed if period[0] >= since]

                await until(f"a probe of {name}", probes, seconds=MAX_PAUSE_SECONDS)
                await asyncio.sleep(OBSERVED_SECONDS)
                periods = await probes()
            finally:
                for link in links:
                    link.failing = ()
        most = judge.max_at_once(periods)
        self.probes_at_once.append(most)
        if most > 1:
            times = ", ".join(f"{start - since:.2f} to {end - since:.2f} s" for start, end in sorted(periods))
            self._violate(judge.ONE_PROBE, f"{name}, {len(numbers)} gateways: {most} at once, {times}")

    async def _opened(self, name: str) -> bool:
        """Whether the breaker is open at all gateways; else sends requests that open it."""
        closed = [
            number for number in range(len(self.fleet.gateways)) if not await self.not_closed(number, name)
        ]  # fmt: skip
        await asyncio.gather(*(self.load.ask(number, prompt) for number in closed for prompt in (NEW, NEW, 0, 1, 2)))
        return not closed

    async def _limits(self, _event: Event) -> None:
        """All gateways together admit what the limit of a key allows."""
        async with self._whole():
            admitted, seconds = await self._burst(limited_key(next(self._keys)))
        self.admitted["with"].append(admitted)
        most = judge.max_admitted(LIMIT_PER_MINUTE, seconds, len(self.fleet.gateways), is_alone=False)
        if not LIMIT_PER_MINUTE - 1 <= admitted <= most:
            self._violate(judge.LIMITED, f"{admitted} admitted in {seconds:.2f} s of {LIMIT_PER_MINUTE} to {most}")

    async def _limits_alone(self, event: Event) -> None:
        """Without the store each gateway admits its own part of the limit, in all at most one part more than the limit.

        When the store is back, it has the requests that were admitted without it.
        """
        key = limited_key(next(self._keys))
        async with self._whole():
            began = self.clock()
            before, _ = await self._burst(key, 1)
            await asyncio.sleep(SHARED_SECONDS)
            await self.fleet.stop(self.fleet.store)
            alone, _ = await self._burst(key)
            lost_for = self.clock() - began
            await self.fleet.start_store(empty=event.draw < 0.5)
            await self._store_is_used()
            after, _ = await self._burst(key)
        self.admitted["without"].append(alone)
        parts = (
            ("without store", before + alone, lost_for),
            ("with it again", before + alone + after, self.clock() - began),
        )
        for when, admitted, seconds in parts:
            most = judge.max_admitted(LIMIT_PER_MINUTE, seconds, len(self.fleet.gateways), is_alone=True)
            if alone < 1 or admitted > most:
                self._violate(
                    judge.LIMITED, f"{when}: {admitted} admitted in {seconds:.2f} s of {most}, {alone} without store"
                )

    async def _burst(self, key: str, count: int = REQUESTS_PER_GATEWAY) -> tuple[int, float]:
        """Sends requests through all gateways; returns the number of admitted ones and the seconds."""
        began = self.clock()

        async def ask(number: int) -> int:
            return sum([await self.load.admitted(number, key) for _ in range(count)])

        admitted = await asyncio.gather(*(ask(number) for number in range(len(self.fleet.gateways))))
        return sum(admitted), self.clock() - began

    # --- help ----------------------------------------------------------------------------------------------------
    async def _stopped(self, service: Service, seconds: float) -> None:
        service.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            service.signal(signal.SIGCONT)

    async def _expect(
        self, promise: str, what: str, look: Callable[[], Any], seconds: float, every: float = 0.2
    ) -> None:
        try:
            await until(what, look, seconds=seconds, every=every)
        except (AssertionError, TimeoutError) as error:
            self._violate(promise, str(error) or what)

    def _violate(self, promise: str, seen: str) -> None:
        self.violations.append(Violation(promise, self.clock(), seen))


def _broken(event: Event) -> LinkState:
    return LinkState.CUT if event.draw < 0.5 else LinkState.SILENT
