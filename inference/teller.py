"""Tells listeners what changed, and metrics what workers count; tells each thing once and decides nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from inference import views
from inference.model import Model
from inference.protocol import ModelState, ModelStatus
from inference.workers.worker_link import Heartbeat

if TYPE_CHECKING:
    from inference.authority.shell import Authority

_S = ModelState


class Teller:
    """What listeners were told last, and the timer for what they will be told next."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        self.told: dict[str, ModelStatus] = {}
        self._told_devices: dict[str, tuple[str, ...] | None] = {}
        """What was told of each device; None of one that went."""

    def close(self) -> None:
        """Says nothing any more."""
        if self._timer is not None:
            self._timer.cancel()

    def heard(self, model: Model) -> None:
        """A worker told its progress or sent a beat."""
        running = model.running
        if running is None:
            return
        if model.state in (_S.LOADING, _S.RESTORING):
            self._authority.bus.publish("load", {"id": model.id, "progress": round(running.worker.progress, 3)})
        elif running.worker.beat is not None:
            self._count_tokens(model, running.worker.beat)

    def _count_tokens(self, model: Model, beat: Heartbeat) -> None:
        running = model.running
        assert running is not None
        for kind, count in (("prompt", beat.prompt_tokens), ("generated", beat.generated_tokens)):
            if (grown := count - running.counted.get(kind, 0)) > 0:
                running.counted[kind] = count
                self._authority.metrics.tokens.labels(model.id, kind).inc(grown)

    def changed(self, seconds: float = 0.0) -> None:
        """Tells listeners soon what differs from what they were told; changes that come together go out together."""
        self._authority.outlook.forget()
        due = self._authority.loop.time() + seconds
        if self._timer is not None:
            if self._due_at <= due:
                return
            self._timer.cancel()
        self._due_at = due
        self._timer = self._authority.loop.call_at(due, self._tell)

    def _tell(self) -> None:
        self._timer = None
        for model in self._authority.models.values():
            status = self._authority.status(model)
            if views.differs(status, self.told.get(model.id)):
                self.told[model.id] = status
                self._authority.bus.publish("model", {"model": status.to_json()})
        for name in [name for name in self.told if name not in self._authority.models]:
            del self.told[name]
            self._authority.bus.publish("removed", {"id": name})

    def look_at_devices(self) -> None:
        """Tells of devices that came, went, or are not as well as before; how full they are alone is no news."""
        seen = {reading.id: reading for reading in self._authority.inventory.readings()}
        for name, reading in seen.items():
            now = (reading.name, str(reading.state), reading.note)
            if name in self._told_devices and self._told_devices[name] != now:
                self._authority.bus.publish("device", {"device": reading.to_json()})
            self._told_devices[name] = now
        for name in [name for name, told in self._told_devices.items() if told is not None and name not in seen]:
            self._told_devices[name] = None
            self._authority.bus.publish("removed", {"device": name})

    def snapshot(self) -> dict[str, Any]:
        """The whole state, for those who begin to listen."""
        return {
            "models": [status.to_json() for status in self._authority.statuses()],
            "devices": [reading.to_json() for reading in self._authority.inventory.readings()],
            "ready": self._authority.started and not self._authority.closing,
        }
