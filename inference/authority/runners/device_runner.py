"""Performs the effects that read and try devices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from inference.authority import effects, events
from inference.authority.runners.background_tasks import BackgroundTasks
from inference.devices.inventory import Inventory
from inference.workers.helper_client import HelperError

log = logging.getLogger("inference.authority")


class DeviceRunner:
    """Results go to `dispatch` as events."""

    def __init__(self, inventory: Inventory, tasks: BackgroundTasks, dispatch: Callable[[events.Event], None]) -> None:
        self._inventory = inventory
        self._tasks = tasks
        self._dispatch = dispatch
        self.performers: Mapping[type, Callable[[Any], object]] = {
            effects.Observe: self._observe,
            effects.ReadDevices: self._read_devices,
            effects.TryDevice: self._try_device,
            effects.RenewProbes: self._renew_probes,
            effects.ProveSuspension: self._prove_suspension,
        }

    def _observe(self, effect: effects.Observe) -> None:
        del effect
        self._dispatch(events.Observed(self._inventory.measured()))

    def _read_devices(self, effect: effects.ReadDevices) -> None:
        del effect
        self._tasks.start(self._read())

    async def _read(self) -> None:
        problem: str | None = None
        try:
            await self._inventory.refresh()
        except Exception as error:  # noqa: BLE001, RUF100 - any at all: decisions are made on the last figures then
            problem = repr(error)
        self._dispatch(events.DevicesRead(self._inventory.measured(), problem))

    def _try_device(self, effect: effects.TryDevice) -> None:
        self._tasks.start(self._try(effect))

    async def _try(self, effect: effects.TryDevice) -> None:
        failure: str | None = None
        try:
            await self._inventory.trial(effect.device)
        except HelperError as error:
            failure = str(error)
        except Exception as error:
            log.exception("internal error in the trial of %s", effect.device)
            failure = f"internal error in the trial ({type(error).__name__})"
        self._dispatch(events.TrialEnded(effect.device, effect.trial, failure))

    def _renew_probes(self, effect: effects.RenewProbes) -> None:
        self._tasks.start(self._renew(effect))

    async def _renew(self, effect: effects.RenewProbes) -> None:
        try:
            await self._inventory.renew()
        except Exception:
            log.exception("the helpers of the probes could not be restarted")
        self._dispatch(events.ProbesRenewed(effect.command))

    def _prove_suspension(self, effect: effects.ProveSuspension) -> None:
        self._tasks.start(self._prove(effect))

    async def _prove(self, effect: effects.ProveSuspension) -> None:
        problem: str | None = None
        try:
            trouble = await self._inventory.carriers[effect.kind].test(effect.device)
            problem = None if trouble is None else trouble.why
        except Exception as error:
            log.exception("internal error in the suspension test on %s", effect.device.id)
            problem = f"internal error in its test ({type(error).__name__})"
        self._dispatch(events.SuspensionTested(effect.kind, problem))
