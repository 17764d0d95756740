"""Moves a model to the device an operator names: planned there first, and back to where it was if that goes wrong.

Decides nothing about room: the planner is asked for that one device alone, and a refusal leaves everything untouched.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from inference import views
from inference.authority.device_health.health import USABLE
from inference.authority.placement.plan import Refusal, plan
from inference.devices.device import Reading
from inference.devices.host import CPU
from inference.errors import InferenceError, InvalidRequestError, MemoryLimitExceededError
from inference.evictions import Reason
from inference.model import Model
from inference.protocol import ModelState, Priority
from inference.wishes import held_models, request_for, shortages_of

if TYPE_CHECKING:
    from inference.authority.shell import Authority

log = logging.getLogger(__name__)

_SETTLED = (ModelState.READY, ModelState.BUSY)


class Moving:
    """One per authority. A model's `target` is where its next load has to go, its `home` where it came from."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority

    async def move(self, model: Model, device: str, seconds: float | None = None) -> None:
        """Returns when the model answers on `device`; a cold one is loaded there.

        Raises InvalidRequestError for a device it cannot use, MemoryLimitExceededError with numbers before anything is
        touched, and what the load met after the model is back where it was.
        """
        reading = self._usable(model, device)
        self._refuse_second(model)
        if model.running is not None and model.state in _SETTLED and model.running.placement.devices == (device,):
            return
        await self._authority.background.measure_on(model, reading)
        self._refuse_second(model)
        self._check(model, reading)
        running = model.running
        model.target = device
        model.home = running.placement.devices[0] if running is not None and model.state in _SETTLED else None
        log.info("%s moves to %s from %s", model.id, device, model.home or model.state)
        try:
            self._begin(model, device)
            with self._authority.ask(model, priority=Priority.HIGH, seconds=seconds) as ticket:
                await ticket.wait()
        finally:
            failure, model.moved_in_vain = model.moved_in_vain, None
            model.target = model.home = None
        if failure is not None:
            raise failure

    def _begin(self, model: Model, device: str) -> None:
        authority, running = self._authority, model.running
        if running is not None:
            authority.loads.leave(model, Reason.MOVED, explanation=(f"to {device}",))
            authority.loop.call_later(authority.settings.drain_seconds, authority.loads.hurry, model, running)

    def options(self, model: Model, devices: tuple[Reading, ...]) -> tuple[Reading, ...]:
        """`devices`, or the one that a move asks for."""
        reading = None if model.target is None else self._authority.inventory.get(model.target)
        if reading is None:
            return devices
        return (reading,) if reading.state in USABLE else ()

    def turns_back(self, model: Model, error: InferenceError) -> bool:
        """A load of a moved model failed or became impossible: it goes home, and those who wait for it wait on.

        First to its home, then anywhere. False when it is not on its way, or was nowhere before.
        """
        if model.target is None or model.home is None:
            return False
        where = model.home if model.target != model.home else None
        log.warning(
            "%s cannot be loaded on %s and goes back to %s: %s", model.id, model.target, where or "any device", error
        )
        model.moved_in_vain = model.moved_in_vain or error
        model.target, model.retry_at = where, self._authority.loop.time()
        self._authority.loop.call_soon(self._authority.pump)
        return True

    @staticmethod
    def _refuse_second(model: Model) -> None:
        if model.target is not None:
            raise InvalidRequestError(f"{model.id!r} is being moved to {model.target} already", param="device")

    def _usable(self, model: Model, device: str) -> Reading:
        readings = {reading.id: reading for reading in self._authority.inventory.readings()}
        if device not in readings:
            raise InvalidRequestError(
                f"there is no device {device!r}; there are: {', '.join(readings)}", param="device"
            )
        reading = readings[device]
        if reading.state not in USABLE:
            raise InvalidRequestError(f"{device} is {reading.state}", param="device")
        if device != CPU and (model.spec.gpu_layers == 0 or self._authority.settings.force_cpu_mode):
            raise InvalidRequestError(f"{model.id!r} is configured to use no accelerator", param="device")
        return reading

    def _check(self, model: Model, reading: Reading) -> None:
        """Raises unless the model fits on the device, idle models gone, now."""
        authority = self._authority
        request = request_for(model, [reading], divide=False)
        assert request is not None
        authority.observe()
        now = authority.loop.time()
        held = held_models(authority.models.values(), authority.ledger, now)
        own = {item.holding for item in held if item.model == model.id}
        others = [item for item in held if item.holding not in own]
        decision = plan(request, authority.ledger.without(own), others, views.policy(authority.settings, now))
        if isinstance(decision, Refusal):
            raise MemoryLimitExceededError(
                model.id, shortages_of(decision), reason=f"on {reading.id}: {decision.reason}", fix=decision.fix
            )
