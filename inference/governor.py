"""Looks at the devices again and again and carries out what relief decides; decides nothing about pressure itself.

A regular check comes every INFERENCE_PRESSURE_CHECK_INTERVAL_SECONDS with fresh readings; one out of turn when others
took more, when we booked more, when a level rose, and when a load was refused. Models leave by the authority's one way
out, workers are told over their link, and loads ask here before they are planned.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from headgate.shared.units import format_bytes
from inference.adviser import Adviser
from inference.authority.placement.plan import Refusal
from inference.authority.pressure.levels import Bounds, Level, Use, admit, grew, settle
from inference.authority.pressure.relief import (
    SAYS,
    Leave,
    Limit,
    Relief,
    Rules,
    Rung,
    Scene,
    State,
    Tenant,
    Watch,
    refusal,
    step,
)
from inference.devices.device import Reading
from inference.environment_settings import InferenceSettings
from inference.evictions import Action, Reason
from inference.history import DeviceSample, History, Sample
from inference.model import Model
from inference.protocol import DeviceState, ModelState
from inference.wishes import candidates, held_models

if TYPE_CHECKING:
    from inference.authority.shell import Authority

log = logging.getLogger(__name__)

MIB = 2**20
_S = ModelState


def rules(settings: InferenceSettings) -> Rules:
    """What the settings ask for."""
    bounds = Bounds(
        settings.pressure_moderate, settings.pressure_high, settings.pressure_critical, settings.pressure_emergency
    )
    return Rules(
        bounds, settings.eviction_idle_threshold_seconds, settings.pressure_eager, settings.enable_memory_governor
    )


class Governor:
    """One per authority, on its loop. `history` has a sample of every regular check."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._state: State = {}
        self._limits: dict[str, int] = {}
        self._due_at = 0.0
        self._refreshing = False
        self._asked = False
        self.history = History()
        self.adviser = Adviser(authority)

    # --- when ------------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """The first look, when the devices are known: a device that is full already is said to be."""
        self._due_at = self._authority.loop.time() + self._authority.settings.pressure_check_interval_seconds
        self.check(regular=False)
        self._sample()
        self.adviser.tell()

    def tick(self, now: float) -> None:
        """Called often: begins a check when one is due, or when something about a device calls for one."""
        if now >= self._due_at and not self._refreshing:
            self._due_at = now + self._authority.settings.pressure_check_interval_seconds
            self._refreshing = True
            self._authority.background.spawn(self._refresh_then_check())
        elif any(self._calls(use) for use in self.uses()):
            self.check(regular=False)

    def refused(self) -> None:
        """A load was refused: there is a check soon, once however many are refused until then."""
        if not self._asked:
            self._asked = True
            self._authority.loop.call_soon(self._answer)

    def _answer(self) -> None:
        self._asked = False
        if not self._authority.closing:
            self.check(regular=False)

    def _calls(self, use: Use) -> bool:
        gauge = self._state.get(use.device, Watch()).gauge
        higher = settle(gauge, use, self.bounds).level > gauge.level
        return higher or grew(gauge, use) or use.ours_bytes > gauge.ours_bytes

    async def _refresh_then_check(self) -> None:
        try:
            await self._authority.inventory.refresh()
            self._authority.background.refreshed_at = self._authority.loop.time()
        except Exception as error:  # noqa: BLE001, RUF100 - any at all: the last figures are better than no check
            log.warning("the devices could not be read for a check: %r", error)
        finally:
            self._refreshing = False
        if not self._authority.closing:
            self.check(regular=True)
            self._sample()
            self.adviser.tell()
            self._authority.pump()

    def booked(self) -> None:
        """Memory was just reserved: what others use at this moment is part of the plan."""
        uses = {use.device: use for use in self.uses()}
        self._state = {
            device: replace(watch, gauge=admit(watch.gauge, uses[device]))
            if device in uses and uses[device].ours_bytes > watch.gauge.ours_bytes
            else watch
            for device, watch in self._state.items()
        }

    def renewed(self, holding: str) -> None:
        """A worker takes its model up again: it knows of no limit that it was told before."""
        self._limits.pop(holding, None)

    # --- a check ---------------------------------------------------------------------------------------------------
    def check(self, *, regular: bool) -> None:
        """Takes the newest readings, and does what follows from them."""
        before = self._state
        uses = self.uses()
        scene = Scene(uses, self._tenants(), self._wanted())
        self._state, actions = step(before, scene, rules(self._authority.settings), regular=regular)
        for use in uses:
            self._tell(use, before.get(use.device, Watch()), self._state[use.device])
            short = self._authority.ledger.balance(use.device).shortfall_bytes
            self.adviser.looked(use, self._state[use.device].gauge.level, short)
        for action in actions:
            self._carry_out(action)

    def uses(self) -> tuple[Use, ...]:
        """Every account's use now, as the ledger has it; what a lost device held has no use."""
        readings = self._authority.observe()
        own = [reading for reading in readings if self._authority.ledger.account_of(reading.id) == reading.id]
        return tuple(self._use(reading) for reading in own if reading.state is not DeviceState.LOST)

    def _use(self, reading: Reading) -> Use:
        """A device that tells no size counts with what may be used."""
        balance = self._authority.ledger.balance(reading.id)
        total = reading.total_bytes if reading.total_bytes > 0 else balance.capacity_bytes
        return Use(self._authority.ledger.account_of(reading.id), total, balance.ours_bytes, balance.foreign_bytes)

    def _tenants(self) -> list[Tenant]:
        models = self._authority.models
        now = self._authority.loop.time()
        held = [item for item in held_models(models.values(), self._authority.ledger, now) if item.model in models]
        self._limits = {item.holding: self._limits[item.holding] for item in held if item.holding in self._limits}
        return [
            Tenant(
                item.model,
                item.standing,
                item.bytes,
                now - item.last_used_at,
                models[item.model].effective.parallel,
                self._limits.get(item.holding),
            )
            for item in held
        ]

    def _wanted(self) -> set[str]:
        """Accounts on which somebody who waits would be booked if there were room."""
        readings = self._authority.inventory.readings()
        waiting = [
            model
            for model in self._authority.models.values()
            if model.queue.waiters and model.state in (_S.COLD, _S.WARM) and model.estimating is None
        ]
        settings = self._authority.settings
        devices = [device.id for model in waiting for device in candidates(model.effective, readings, settings)]
        return {self._authority.ledger.account_of(device) for device in devices}

    def _tell(self, use: Use, before: Watch, now: Watch) -> None:
        if (before.gauge.level, before.rung) == (now.gauge.level, now.rung):
            return
        rises = now.gauge.level > before.gauge.level and now.gauge.level >= Level.HIGH
        log.log(
            logging.WARNING if rises or now.rung > before.rung else logging.INFO,
            "%s is at %s (%s before): %s%s",
            use.device, now.gauge.level, before.gauge.level, _numbers(use),
            "" if now.rung == before.rung else f"; {SAYS[now.rung]}",
        )  # fmt: skip
        self._authority.bus.publish(
            "pressure", {"device": use.device, "level": str(now.gauge.level), "rung": now.rung.name.lower()}
        )
        self._authority.teller.changed()

    def _carry_out(self, action: Relief) -> None:
        model = self._authority.models[action.model]
        running = model.running
        if isinstance(action, Leave):
            how = Action.OFFLOAD if action.offload else Action.UNLOAD
            self._authority.loads.leave(model, Reason.PRESSURE, how, (action.reason,))
        elif running is not None and isinstance(action, Limit):
            log.warning("%s admits at most %d at once: %s", model.id, action.sequences, action.reason)
            self._limits[running.holding] = action.sequences
            running.worker.limit(action.sequences)
        elif running is not None:
            log.info("%s drops the prefixes that it retains: %s", model.id, action.reason)
            running.worker.forget()

    # --- what others ask -------------------------------------------------------------------------------------------
    def level(self, use: Use) -> Level:
        """The level of a device now; the one place that says so."""
        gauge = self._state.get(use.device, Watch()).gauge
        return settle(gauge, use, self.bounds).level

    def levels(self) -> Mapping[str, tuple[Use, Level]]:
        """Use and level of every device now."""
        uses = {reading.id: self._use(reading) for reading in self._authority.observe()}
        shared = {name: uses.get(use.device, use) for name, use in uses.items()}
        return {name: (use, self.level(use)) for name, use in shared.items()}

    @property
    def bounds(self) -> Bounds:
        """Where levels begin, by the settings of now."""
        return rules(self._authority.settings).bounds

    def rungs(self) -> Mapping[str, Rung]:
        """How far the ladder is climbed on every device."""
        return {device: watch.rung for device, watch in self._state.items()}

    def limits(self) -> Mapping[str, int]:
        """Sequences that models were told to compute at once, of those that were told a number at all."""
        held = [model for model in self._authority.models.values() if model.running is not None]
        said = {model.id: self._limits.get(model.running.holding) for model in held if model.running is not None}
        return {name: count for name, count in said.items() if count is not None}

    def open_to(self, model: Model, devices: Sequence[Reading]) -> Sequence[Reading] | Refusal:
        """The devices of `devices` onto which the model may be loaded now, or why the ladder refuses all of them."""
        spec = model.effective
        extras = spec.mmproj is not None or bool(spec.lora)
        accounts = {device.id: self._authority.ledger.account_of(device.id) for device in devices}
        refused = {name: refusal(self._state, account, extras=extras) for name, account in accounts.items()}
        open_devices = [device for device in devices if refused[device.id] is None]
        if open_devices or not devices:
            return open_devices
        levels = self.levels()
        said = tuple(f"{why} ({_numbers(levels[name][0])})" for name, why in refused.items())
        return Refusal((), "; ".join(said), trace=said)

    def _sample(self) -> None:
        models = self._authority.models.values()
        ready = [model for model in models if model.state in (_S.READY, _S.BUSY)]
        slots = sum(model.effective.parallel for model in ready)
        self.history.add(
            Sample(
                timestamp=round(time.time(), 3),
                devices={device: _sample(use, level) for device, (use, level) in self.levels().items()},
                active_requests=sum(model.in_flight for model in models),
                queued_requests=sum(len(model.queue) for model in models),
                pool_utilization=round(_active(ready) / slots, 4) if slots else 0.0,
                models_loaded=len(ready),
                models_warm=sum(model.state is _S.WARM for model in models),
            )
        )


def _active(ready: Iterable[Model]) -> int:
    beats = (model.running.worker.beat for model in ready if model.running is not None)
    return sum(beat.active for beat in beats if beat is not None)


def _sample(use: Use, level: Level) -> DeviceSample:
    free = max(0, use.total_bytes - use.used_bytes)
    used_mb, free_mb, foreign_mb, ours_mb = (
        round(count / MIB, 3) for count in (use.used_bytes, free, use.foreign_bytes, use.ours_bytes)
    )
    return DeviceSample(used_mb, free_mb, foreign_mb, ours_mb, str(level))


def _numbers(use: Use) -> str:
    return (
        f"{format_bytes(use.used_bytes)} of {format_bytes(use.total_bytes)} are in use, "
        f"{format_bytes(use.foreign_bytes)} of it by others"
    )
