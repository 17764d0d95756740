"""Publishes changes of models to listeners; changes at the same time are published together."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from inference.authority.clock import Alarm, Clock
from inference.authority.handlers.watching.prospects import Moment
from inference.authority.state import State
from inference.authority.views import model_status
from inference.authority.views.event_bus import Bus
from inference.protocol import ModelStatus


class Source(Protocol):
    """The part of the authority that the notifier reads."""

    @property
    def state(self) -> State:
        """The current state."""
        ...


class Notifier:
    """The status of each model that listeners have, and the timer of the next publication."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._alarm: Alarm | None = None
        self._due_at = 0.0
        self._closed = False
        self._known: dict[str, ModelStatus] = {}

    def close(self) -> None:
        """Stops publishing."""
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()

    def changed(self, source: Source, seconds: float = 0.0) -> None:
        """Publishes changes within `seconds`."""
        due = self._clock.now() + seconds
        if self._alarm is not None:
            if self._due_at <= due:
                return
            self._alarm.cancel()
        if not self._closed:
            self._due_at = due
            self._alarm = self._clock.call_at(due, partial(self._publish, source))

    def _publish(self, source: Source) -> None:
        self._alarm = None
        state, now = source.state, self._clock.now()
        moment = Moment(state, now)
        for model in state.models.values():
            status = model_status.status(state, model, now, moment)
            if model_status.differs(status, self._known.get(model.id)):
                self._known[model.id] = status
                self._bus.publish("model", {"model": status.to_json()})
        for name in [name for name in self._known if name not in state.models]:
            del self._known[name]
            self._bus.publish("removed", {"id": name})
