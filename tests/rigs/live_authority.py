"""A running authority as tests look at it: models and workers by id, always as they are now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from inference.authority import events
from inference.authority.handlers.operating.commands import Planned
from inference.authority.handlers.queries import device_view, pressure_view
from inference.authority.handlers.watching import advisor
from inference.authority.leases import Lease, Ticket
from inference.authority.pressure.levels import Level, Use
from inference.authority.shell import Authority
from inference.authority.state import State, WorkerRecord
from inference.authority.views.figures import offloaded
from inference.devices.device import Reading
from inference.estimate.model_estimate import Estimate
from inference.protocol import ModelState, ModelStatus
from inference.workers.worker_process import WorkerProcess


class LiveWorker:
    """One worker; its record as it is now, or as it was last."""

    def __init__(self, authority: Authority, id: str) -> None:
        self._authority = authority
        self.id = id
        self._last = authority.state.workers[id]

    @property
    def record(self) -> WorkerRecord:
        """The record."""
        self._last = self._authority.state.workers.get(self.id, self._last)
        return self._last

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LiveWorker) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def worker(self) -> WorkerProcess:
        """The process."""
        process = self._authority.process(self._last.model)
        assert process is not None
        return process

    def __getattr__(self, name: str) -> Any:
        return getattr(self.record, name)


class LiveModel:
    """One model; its record as it is now, or as it was last."""

    __slots__ = ("_authority", "_last", "id")

    def __init__(self, authority: Authority, id: str) -> None:
        self._authority = authority
        self.id = id
        self._last = authority.model(id)

    @property
    def record(self) -> Any:
        """The record."""
        found = self._authority.state.models.get(self.id)
        self._last = replace(self._last, state=ModelState.COLD, worker=None) if found is None else found
        return self._last

    @property
    def running(self) -> LiveWorker | None:
        """Its worker, or None."""
        id = self.record.worker
        return None if id not in self._authority.state.workers else LiveWorker(self._authority, id)

    async def becomes(self, *states: ModelState, seconds: float = 10.0) -> None:
        """Returns once it is in one of `states`, which is looked at after each step."""
        async with asyncio.timeout(seconds):
            await self._authority.reached(lambda _: self.record.state in states)

    @property
    def in_flight(self) -> int:
        """Requests in flight."""
        return self._authority.state.in_flight(self.record)

    @property
    def estimates(self) -> Mapping[str, Estimate]:
        """Its estimates with the effective settings."""
        return self._authority.state.estimates_of(self.record.effective)

    @property
    def loads(self) -> int:
        """Loads from the file."""
        return self.record.loads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.record, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LiveModel) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)


def id_of(model: LiveModel | str) -> str:
    """The id of a model."""
    return model if isinstance(model, str) else model.id


class LiveAuthority:
    """The authority of a service, with models instead of ids; everything else is the authority's own."""

    def __init__(self, authority: Authority) -> None:
        self.shell = authority

    def __getattr__(self, name: str) -> Any:
        return getattr(self.shell, name)

    @property
    def state(self) -> State:
        """The state as it is now."""
        return self.shell.state

    @property
    def ledger(self) -> Any:
        """The ledger as it is now."""
        return self.shell.state.ledger

    @property
    def models(self) -> dict[str, LiveModel]:
        """All models."""
        return {name: LiveModel(self.shell, name) for name in self.shell.state.models}

    def resolve(self, name: str) -> LiveModel:
        """A model by id or alias."""
        return LiveModel(self.shell, self.shell.resolve(name))

    def status(self, model: LiveModel | str) -> ModelStatus:
        """As clients see it."""
        return self.shell.status(id_of(model))

    def ask(self, model: LiveModel | str, **more: Any) -> Ticket:
        """A request for a model."""
        return self.shell.ask(id_of(model), **more)

    async def use(self, model: LiveModel | str, seconds: float = 10) -> Lease:
        """A lease."""
        lease = await self.ask(model).wait(seconds)
        assert lease is not None
        return lease

    async def load(self, model: LiveModel | str, seconds: float | None = None) -> None:
        """Loads a model."""
        await self.shell.load(id_of(model), seconds)

    async def unload(self, model: LiveModel | str, *, now: bool = False) -> None:
        """Unloads a model."""
        await self.shell.command(events.Unload(id_of(model), now))

    async def offload(self, model: LiveModel | str) -> None:
        """Offloads a model."""
        await self.shell.command(events.Offload(id_of(model)))

    async def move(self, model: LiveModel | str, device: str, seconds: float | None = None) -> None:
        """Moves a model."""
        await self.shell.command(events.Move(id_of(model), device, seconds))

    async def recover(self, device: str) -> Reading:
        """Recovers a device."""
        found: Reading = await self.shell.command(events.Recover(device))
        return found

    async def dry_run(self, model: LiveModel | str, changes: Mapping[str, Any] | None = None) -> Any:
        """The decision and the estimate of a dry run."""
        planned: Planned = await self.shell.command(events.Plan(id_of(model), changes or {}))
        return planned.outcome, planned.estimate

    async def measure(self, model: LiveModel | str) -> None:
        """Returns when the model is measured."""
        await self.dry_run(model)

    # --- figures -----------------------------------------------------------------------------------------------------
    def offloaded(self) -> list[dict[str, Any]]:
        """Warm models."""
        return offloaded(self.shell.state, self.shell.now)

    def levels(self) -> Mapping[str, tuple[Use, Level]]:
        """Use and level of devices, freshly read."""
        self.shell.observe()
        return pressure_view.levels(self.shell.state, self.shell.now)

    def restrictions(self) -> Mapping[str, Any]:
        """The restriction of every device."""
        return pressure_view.restrictions(self.shell.state)

    def alerts(self) -> Any:
        """Alerts, freshly read."""
        self.shell.observe()
        return advisor.alerts(self.shell.state, self.shell.now)

    def reading(self, device: str) -> Reading | None:
        """A device as decisions see it."""
        return device_view.reading(self.shell.state, device, self.shell.now)

    def readings(self) -> tuple[Reading, ...]:
        """All devices as decisions see them."""
        return device_view.readings(self.shell.state, self.shell.now)

    # --- time --------------------------------------------------------------------------------------------------------
    async def reached(self, probe: Callable[[], bool], seconds: float = 10.0) -> None:
        """Returns once `probe` holds, which is evaluated after each step."""
        async with asyncio.timeout(seconds):
            await self.shell.reached(lambda _: probe())

    async def emptied(self, seconds: float = 10.0) -> None:
        """Returns once nothing is booked but stored sequences."""
        await self.reached(lambda: all(item.cache for item in self.ledger.holdings.values()), seconds)
