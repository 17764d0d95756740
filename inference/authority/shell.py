"""The single writer of everything about models: who is loaded, who waits, who must leave; touches no request's bytes.

Every change happens in a synchronous method on the loop, so no await can come between a decision and its booking.
Memory is reserved before a process is started, and given back where its exit is seen: that is one place, whatever ended
the worker, so no path can forget it and none can do it twice. What takes time (estimates, probes, loads) runs elsewhere
and comes back as an event; each event ends in `pump`, which looks at every model that is wanted.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from headgate.shared.errors import Problem
from headgate.shared.units import format_bytes
from inference import views
from inference.api.event_bus import Bus
from inference.api.inference_metrics import Metrics
from inference.authority.lifecycle.transitions import Event, advance
from inference.authority.lifecycle.wait_queue import QueueFullError, Waiter
from inference.authority.placement.ledger import Account, Ledger
from inference.authority.placement.plan import Result
from inference.background import Background
from inference.change import Change
from inference.devices.device import Reading
from inference.devices.host import CPU
from inference.devices.inventory import Inventory
from inference.errors import InferenceError, ModelNotFound, QueueFull, ShuttingDown
from inference.estimate.estimator import Estimator
from inference.estimate.headrooms import Headrooms
from inference.evictions import Action, Evictions, Reason
from inference.fixes import Fixes
from inference.governor import Governor
from inference.health import Health
from inference.helpers.build_check import BuildCheck
from inference.homecoming import Homecoming
from inference.loads import Loads
from inference.model import Model, Ticket
from inference.moving import Moving
from inference.outlook import Outlook
from inference.preload import load_all
from inference.protocol import FULL_FOR, ModelState, ModelStatus, Priority
from inference.pump import Pump
from inference.quarantine import Quarantine
from inference.settings import InferenceConfig, check_devices
from inference.shortages import Shortages
from inference.solo import Door
from inference.teller import Teller
from inference.threads import Threads
from inference.waiting import Waiting
from inference.warm import WarmPool
from inference.workers.crash_records import CrashStore
from inference.workers.worker_supervisor import Supervisor

log = logging.getLogger(__name__)

TICK_SECONDS = 0.5
SETTLE_SECONDS = 0.2
UNKNOWN_BYTES = 16 * 2**30
WATCH_SECONDS = 2.0
"""How often the memory of workers is compared with their reservations, and model files with what is known of them."""
_S, _E = ModelState, Event


class Authority:
    """Who may use which memory. All methods belong to the loop's thread."""

    def __init__(
        self,
        config: InferenceConfig,
        *,
        inventory: Inventory,
        estimator: Estimator,
        supervisor: Supervisor,
        crashes: CrashStore,
        bus: Bus,
        metrics: Metrics,
        headrooms: Headrooms,
        build_check: BuildCheck | None = None,
    ) -> None:
        self.config = config
        self.settings = config.settings
        self.inventory = inventory
        self.crashes = crashes
        self.build_check = build_check
        self.bus = bus
        self.metrics = metrics
        self.evictions = Evictions(metrics, bus)
        self.ledger = Ledger()
        self.models = {name: Model(spec) for name, spec in config.models.items()}
        self.started = False
        self.closing = False
        self.background = Background(self, estimator)
        self.loads = Loads(self, supervisor)
        self.waiting = Waiting(self)
        self.door = Door(self)
        self.quarantine = Quarantine(self)
        self.teller = Teller(self)
        self.outlook = Outlook(self)
        self.fixes = Fixes(self)
        self.shortages = Shortages(self, headrooms)
        self.governor = Governor(self)
        self.health = Health(self)
        self.warm = WarmPool(self)
        self.ids = itertools.count(1)
        self.pumping = Pump(self)
        self.moving = Moving(self)
        self.threads = Threads(self)
        self.homecoming = Homecoming(self)
        self._watch_at = self._next_tick = 0.0
        self._ticker: asyncio.TimerHandle | None = None
        bus.snapshot = self.teller.snapshot

    # --- life ------------------------------------------------------------------------------------------------------
    async def start(self, found: Callable[[int], None] = lambda accelerators: None) -> list[Problem]:
        """Finds the devices and opens their accounts; returns configuration problems that only show now.

        Raises BrokenBuildError where llama.cpp does not compute on this CPU. `found` hears how many accelerators there
        are before anything is planned with them, and may raise.
        """
        self.loop = asyncio.get_running_loop()
        if self.build_check is not None:
            await self.build_check.at_start()
        await self.inventory.start()
        found(len(self.inventory.accelerators()))
        self.background.refreshed_at = self.loop.time()
        self.health.begin()
        self.observe()
        self.limit()
        accelerators = self.inventory.accelerators()
        for reading in self.inventory.readings():
            log.info("device %s: %s, %s", reading.id, reading.name, format_bytes(reading.total_bytes))
        if not accelerators:
            log.info("no accelerator is used: models run on the CPU")
        self.governor.begin()
        await self.warm.checkpoint.prove()
        self.started = True
        self.pump()  # the port is open before the devices are known: somebody may be waiting already
        self._next_tick = self.loop.time() + TICK_SECONDS
        self._ticker = self.loop.call_later(TICK_SECONDS, self._tick)
        self.background.spawn(self.background.foresee())
        if not self.settings.enable_lazy_model_loading:
            self.background.spawn(load_all(self))
        return check_devices(self.config, len(accelerators))

    async def build_holds(self) -> bool:
        """Whether llama.cpp still computes on this CPU, after a worker died at its first step."""
        return self.build_check is None or await self.build_check.holds()

    def quiesce(self, error: InferenceError | None = None) -> None:
        """Take nothing new from now on; requests that wait fail with `error`, by default ShuttingDown."""
        self.closing = True
        for model in self.models.values():
            self.waiting.fail(model, error or ShuttingDown())
        self.health.quiesce()

    def end(self) -> None:
        """Takes nothing new and ends what runs: workers are told to stop, which ends their streams honestly."""
        self.quiesce()
        for model in self.models.values():
            if model.running is not None:
                model.running.worker.stop()

    async def close(self) -> None:
        """Ends every worker and helper; returns when all are reaped."""
        self.quiesce()
        self.bus.close()
        if self._ticker is not None:
            self._ticker.cancel()
        self.pumping.close()
        self.threads.close()
        self.teller.close()
        self.background.cancel()
        await self.background.join()
        await self.loads.supervisor.close()
        await self.background.estimator.close()
        await self.inventory.close()
        await self.background.join()

    # --- asking ----------------------------------------------------------------------------------------------------
    def resolve(self, name: str) -> Model:
        """The model with this id or alias; raises ModelNotFound naming those there are."""
        try:
            return self.models[self.config.names[name]]
        except KeyError:
            raise ModelNotFound(name, sorted(self.config.models)) from None

    def ask(
        self,
        model: Model,
        *,
        priority: Priority = Priority.NORMAL,
        seconds: float | None = None,
        counts: bool = True,
        alone: bool = False,
        again: bool = False,
    ) -> Ticket:
        """A wish to use `model`, fulfilled at once if it is ready; `counts` false is no use (a probe).

        `alone`: nobody else may use it meanwhile; `again`: it had a lease before, and finds a place in any queue.
        Waits at most `seconds` (INFERENCE_ACQUIRE_TIMEOUT_SECONDS at most). Raises ShuttingDown, QueueFull, and
        ModelNotFound for a model that was removed since it was resolved; whatever ends the wait later is raised by the
        ticket.
        """
        if self.closing:
            raise ShuttingDown()
        if model.removed:
            raise ModelNotFound(model.id, sorted(self.config.models))
        now = self.loop.time()
        patience = min(self.settings.acquire_timeout_seconds, math.inf if seconds is None else seconds)
        waiter = Waiter(next(self.ids), priority, now + patience, now, alone)
        ticket = Ticket(model, waiter, patience, self.waiting.give_up)
        ticket.counts = counts
        is_ready = model.state in (_S.READY, _S.BUSY)
        if is_ready and not model.queue.waiters and self.door.is_open(model, alone=alone):
            self.metrics.placements.labels(Result.DEPLOYED.lower(), "ready").inc()
            ticket.grant(self.waiting.lease(model, counts=counts, alone=alone))
            return ticket
        if not model.queue.waiters:
            model.wanted_at = now
        try:
            model.queue = model.queue.push(waiter, None if again else self.settings.queue_limits)
        except QueueFullError:
            self.governor.adviser.turned_away(priority)
            raise QueueFull(
                f"{model.queue.count(priority)} requests of {priority} priority wait for {model.id!r} already "
                f"(INFERENCE_QUEUE_{priority.upper()})",
                retry_after=self.waiting.seconds_to_service(model, priority),
                details={FULL_FOR: [priority]},
            ) from None
        model.tickets[waiter.id] = ticket
        self.teller.changed(SETTLE_SECONDS)
        if math.isfinite(patience):
            ticket.timer = self.loop.call_later(patience, self.waiting.expire, ticket)
        self.pump()
        return ticket

    # --- by hand ---------------------------------------------------------------------------------------------------
    async def load(self, model: Model, seconds: float | None = None) -> None:
        """Loads the model and returns when it is ready; raises what a request would meet."""
        with self.ask(model, priority=Priority.HIGH, seconds=seconds) as ticket:
            await ticket.wait()

    async def unload(self, model: Model, *, now: bool = False) -> None:
        """Lets the model leave once what runs is done (or INFERENCE_DRAIN_SECONDS passed), or at once; returns then."""
        running = model.running
        if running is None:
            return
        self.loads.leave(model, Reason.BY_HAND)
        if now:
            running.worker.stop()
        else:
            self.loop.call_later(self.settings.drain_seconds, running.worker.stop)
        await asyncio.shield(running.worker.exited)
        await asyncio.sleep(0)  # the exit's own callback has run now

    async def offload(self, model: Model) -> None:
        """Lets a loaded model leave its device for the warm pool once what runs is done; returns when it is there.

        Raises InvalidRequestError where that is impossible. A model for which there is no room is unloaded.
        """
        if model.state is _S.WARM:
            return
        self.warm.refuse(model)
        running = model.running
        assert running is not None
        self.loads.leave(model, Reason.BY_HAND, Action.OFFLOAD)
        self.loop.call_later(self.settings.drain_seconds, self.loads.hurry, model, running)
        await self.warm.settled(model)

    def reload(self, config: InferenceConfig) -> list[str]:
        """Applies another configuration; returns the differences, one sentence each. The listening address stays."""
        return Change(self).apply(config)

    # --- seeing ----------------------------------------------------------------------------------------------------
    def observe(self) -> tuple[Reading, ...]:
        """Takes the newest readings into the ledger, and returns them."""
        readings = self.inventory.readings()
        for reading, (capacity, budget) in views.allowances(readings, self.settings):
            self.ledger = self.ledger.open(Account(reading.id, capacity, budget)).observe(
                reading.id, reading.used_bytes, reading.free_bytes
            )
        for reading in readings:
            if reading.unified:
                self.ledger = self.ledger.share(reading.id, CPU)
        return readings

    def limit(self) -> None:
        """Sets the cap on the sum of our bytes: the configured one, or a guess where a device tells no size."""
        limit = self.settings.memory_limit_bytes
        if limit is None and any(reading.total_bytes <= 0 for reading in self.inventory.readings()):
            limit = UNKNOWN_BYTES
        self.ledger = replace(self.ledger, limit_bytes=limit)

    def status(self, model: Model) -> ModelStatus:
        """One model as the outside sees it."""
        return views.status(model, self, self.loop.time())

    def statuses(self) -> list[ModelStatus]:
        """All models in the order of the file."""
        return [self.status(model) for model in self.models.values()]

    def pump(self) -> None:
        """Looks at every model that is wanted and does what can be done now."""
        self.pumping.run()

    # --- time ------------------------------------------------------------------------------------------------------
    def _tick(self) -> None:
        self._ticker = self.loop.call_later(TICK_SECONDS, self._tick)
        now = self.loop.time()
        late_seconds, self._next_tick = now - self._next_tick, now + TICK_SECONDS
        if late_seconds > TICK_SECONDS:
            self.waiting.put_off(late_seconds)
        for model in list(self.models.values()):
            if model.state is _S.FAILED and now >= model.retry_at and not model.queue.waiters:
                self.move(model, _E.RETRY)
            idle = model.state is _S.READY and not model.in_flight and not model.queue.waiters
            if idle and not model.spec.pinned and now - model.last_used_at >= model.spec.idle_timeout:
                self.loads.leave(model, Reason.IDLE, self.warm.action(model))
        if now >= self._watch_at:
            self._watch_at = now + WATCH_SECONDS
            self.loads.watch()
            self.background.look_at_files()
        self.health.tick()
        self.shortages.tick(now)
        self.homecoming.tick(now)
        self.governor.tick(now)
        self.teller.look_at_devices()

    # --- telling ---------------------------------------------------------------------------------------------------
    def move(self, model: Model, event: Event, *, quietly: bool = False) -> None:
        """The one way a model changes its state; listeners hear of it, of a quiet one a little later."""
        model.state = advance(model.state, event)
        self.warm.moved(model)
        self.threads.changed(model)
        self.teller.changed(SETTLE_SECONDS if quietly else 0.0)

    def balances(self) -> Mapping[str, Any]:
        """Every account in numbers, with fresh readings."""
        return {reading.id: self.ledger.balance(reading.id) for reading in self.observe()}

    def reading(self, device: str) -> Reading | None:
        """One device's newest reading."""
        return self.inventory.get(device)
