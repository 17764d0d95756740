"""The shared parts of several gateways in one event loop, each with its own clock, on a real server."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from gateway.breaker.breaker_file import BreakerFile
from gateway.breaker.breakers import Breakers, Lease
from gateway.breaker.claimed_permits import acquire_claimed
from gateway.breaker.outcome import Failure, Scope
from gateway.breaker.permits import BreakerState, Rule
from gateway.shared_state.breaker_sync import BreakerSync
from gateway.shared_state.shared_state import SharedState
from headgate.shared.state_directory import StateDir

PAIR = Failure(Scope.PAIR, reached=True)
OPEN_SECONDS = 0.2
"""The open period of a breaker."""
_numbers = itertools.count()


async def until(condition: Callable[[], bool], seconds: float = 8.0) -> None:
    """Waits until `condition` holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


class SharedGateway:
    """An async context manager. `skew_seconds`: by how much its clocks differ from those of other machines."""

    def __init__(self, url: str, root: Path, skew_seconds: float = 0.0, rule: Rule | None = None) -> None:
        self.states: list[bool] = []
        self.errors: list[str] = []
        self.clock = lambda: time.monotonic() + skew_seconds
        self.state = SharedState(url, lambda is_up, _: self.states.append(is_up), self.errors.append, self.clock)
        directory = root / f"gateway-{next(_numbers)}"
        directory.mkdir()
        self.file = BreakerFile(StateDir(directory), self.clock, lambda: time.time() + skew_seconds)
        self.breakers = Breakers(rule or Rule(failures=2, open=OPEN_SECONDS), self.clock, store=self.file)

    async def start(self) -> None:
        """Begins to share."""
        self.sync = BreakerSync(self.state, self.file, self.breakers, lambda provider: provider in ("p", "local"))
        await self.state.start()

    async def __aenter__(self) -> SharedGateway:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.state.stop()

    def is_state(self, state: BreakerState, model: str = "m") -> bool:
        """Whether the breaker of the pair has `state` here."""
        breaker = self.breakers.by_model("p").get(model)
        return (BreakerState.CLOSED if breaker is None else breaker.state) is state

    async def acquire(self, model: str = "m", expires_in: float = 60.0, provider: str = "p") -> Lease | None:
        """A lease of the pair, or None when it was refused."""
        found = await acquire_claimed(self.breakers, provider, model, self.clock() + expires_in)
        return found if isinstance(found, Lease) else None

    async def open(self, model: str = "m") -> None:
        """Lets attempts fail until the breaker of the pair opens."""
        while not self.is_state(BreakerState.OPEN, model):
            lease = await self.acquire(model)
            assert lease is not None
            lease.settle(PAIR, "it failed")
