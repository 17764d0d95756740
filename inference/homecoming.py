"""Takes a model that fell back to the CPU home to an accelerator that has room for it; makes room for nobody.

Only a model that nobody uses at the moment moves, and only where it fits as things are: whoever is on the accelerator
stays.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from inference import views
from inference.authority.placement.plan import Placement, Refusal, Result, Standing, plan
from inference.authority.placement.reduction import REST_SECONDS
from inference.devices.host import CPU
from inference.errors import InferenceError
from inference.model import Model
from inference.protocol import ModelState
from inference.wishes import candidates, held_models, request_for

if TYPE_CHECKING:
    from inference.authority.shell import Authority

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""How often it is looked whether there is room."""


class Homecoming:
    """One per authority, on its loop."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._look_at: dict[str, float] = {}
        self._going: set[str] = set()

    def tick(self, now: float) -> None:
        """Called often; looks at each model that fell back, once in a while, when nobody uses it."""
        for model in self._authority.models.values():
            if not self._authority.shortages.is_fallback(model):
                self._look_at.pop(model.id, None)
            elif self._is_idle(model) and now >= max(self._look_at.get(model.id, 0.0), model.sheltered_until):
                self._look_at[model.id] = now + LOOK_SECONDS
                self._going.add(model.id)
                self._authority.background.spawn(self._go(model))

    def _is_idle(self, model: Model) -> bool:
        free = model.state is ModelState.READY and not model.in_flight and not model.queue.waiters
        return free and model.target is None and model.id not in self._going

    async def _go(self, model: Model) -> None:
        authority = self._authority
        try:
            await authority.inventory.refresh()
            await authority.background.measure(model)
            self._going.discard(model.id)
            if not authority.shortages.is_fallback(model) or not self._is_idle(model):
                return
            device = self._room(model)
            if device is not None:
                log.info("%s goes home: %s has room for it again", model.id, device)
                await authority.moving.move(model, device)
                authority.metrics.recoveries.labels("accelerator").inc()
        except InferenceError as error:
            model.sheltered_until = authority.loop.time() + REST_SECONDS
            log.warning("%s stays on the CPU for now: %s", model.id, error.message)
        finally:
            self._going.discard(model.id)

    def _room(self, model: Model) -> str | None:
        """The one accelerator where it fits while everybody stays, or None."""
        authority = self._authority
        now = authority.loop.time()
        devices = candidates(model.effective, authority.observe(), authority.settings)
        allowed = authority.governor.open_to(model, [device for device in devices if device.id != CPU])
        if isinstance(allowed, Refusal):
            return None
        request = request_for(model, allowed, divide=False)
        if request is None:
            return None
        held = held_models(authority.models.values(), authority.ledger, now)
        own = {item.holding for item in held if item.model == model.id}
        others = [replace(item, standing=Standing.BUSY) for item in held if item.holding not in own]
        found = plan(request, authority.ledger.without(own), others, views.policy(authority.settings, now))
        alone = isinstance(found, Placement) and found.result is Result.FREE and len(found.devices) == 1
        return found.device if isinstance(found, Placement) and alone else None
