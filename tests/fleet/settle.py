"""Checks the ledgers of all nodes during a run, and at its end whether the fleet has converged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx2

from tests.chaos.judge import End, Violation
from tests.chaos.watch import LEAK_SECONDS, Since, unbalanced, unowned
from tests.fleet import judge
from tests.fleet.injector import Injector
from tests.fleet.judge import NEW, Outcome
from tests.fleet.load import Load
from tests.fleet.system import DEVICE, MODEL, Fleet
from tests.rigs.stack import until

EVERY_SECONDS = 2.0
SETTLE_SECONDS = 60.0
REQUESTS_AT_ONCE = 24
"""More than all nodes have places."""


class Settling:
    """`clock` is that of the run; `violations` has the findings."""

    def __init__(self, fleet: Fleet, load: Load, injector: Injector, clock: Callable[[], float]) -> None:
        self._fleet, self._load, self._injector, self._clock = fleet, load, injector, clock
        self._holdings = {name: Since(LEAK_SECONDS) for name in fleet.nodes}
        self.violations: list[Violation] = []
        self.looks = 0

    async def watch(self) -> None:
        """Checks every ledger until cancelled."""
        while True:
            for name in self._fleet.nodes:
                await self._look(name)
            await asyncio.sleep(EVERY_SECONDS)

    async def _look(self, name: str) -> None:
        try:
            dump = await self._fleet.node(name, "/memory/dump", "POST", {}, 2.0)
            devices = {one["id"]: one for one in (await self._fleet.node(name, "/devices", seconds=2.0))["devices"]}
        except (httpx2.HTTPError, KeyError):
            self._holdings[name].forget()
            return
        self.looks += 1
        for text in (*unbalanced(devices), *self._holdings[name].note(unowned(dump), self._clock())):
            self._violate(judge.LEDGER, f"{name}: {text}")

    async def run(self) -> None:
        """All faults have ended: breakers close, the store and all nodes are used, and no byte is left."""
        await self._expect("all breakers are closed", self._are_closed)
        await self._expect("every gateway uses the store", self._have_store)
        await self._expect("all nodes answer", self._all_answer)
        for name in self._fleet.nodes:
            await self._expect(f"no request is in flight at {name}", partial(self._is_idle, name))
            await self._fleet.node(name, f"/models/{MODEL}/unload", "POST", seconds=30.0)
            await self._expect(f"the ledger of {name} is empty", partial(self._is_empty, name), judge.LEDGER)

    async def _are_closed(self) -> bool:
        """Each breaker gets requests that may close it."""
        gateways = range(len(self._fleet.gateways))
        await self._many_requests()
        states = [one["state"] for number in gateways for one in await self._fleet.breakers(number)]
        return all(state == "closed" for state in states)

    async def _have_store(self) -> bool:
        return all([await self._injector.has_store(gateway) for gateway in self._fleet.gateways])

    async def _all_answer(self) -> bool:
        """Many requests at once are divided among all nodes."""
        outcomes = await self._many_requests()
        return {one.node for one in outcomes if one.end is End.COMPLETE} == set(self._fleet.nodes)

    async def _many_requests(self) -> list[Outcome]:
        """Each gateway in turn: it counts only its own requests, and fills the fastest nodes first."""
        found: list[Outcome] = []
        for gateway in range(len(self._fleet.gateways)):
            found += await asyncio.gather(*(self._load.ask(gateway, NEW) for _ in range(REQUESTS_AT_ONCE)))
        return found

    async def _is_idle(self, name: str) -> bool:
        models = (await self._fleet.node(name, "/v1/models"))["data"]
        return not any(one["headgate"]["in_flight"] or one["headgate"]["queued"] for one in models)

    async def _is_empty(self, name: str) -> bool:
        dump = await self._fleet.node(name, "/memory/dump", "POST", {})
        return not [
            holding for holding in dump["ledger"]["holdings"].values() if holding["devices_mb"].get(DEVICE)
        ]  # fmt: skip

    async def _expect(self, what: str, look: Callable[[], Any], promise: str = judge.CONVERGES) -> None:
        try:
            await until(what, look, seconds=SETTLE_SECONDS, every=0.5)
        except (AssertionError, TimeoutError, httpx2.HTTPError) as error:
            self._violate(promise, str(error) or repr(error))

    def _violate(self, promise: str, seen: str) -> None:
        self.violations.append(Violation(promise, self._clock(), seen))
