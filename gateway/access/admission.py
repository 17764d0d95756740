"""Holds requests at the door until `gateway.access.admission_queue` lets them in; decides nothing itself."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from types import TracebackType

from gateway.access import admission_queue as core
from gateway.errors import RefusedError
from gateway.settings import AdmissionSettings
from gateway.telemetry.gateway_metrics import Telemetry
from inference.protocol import Code, Priority


@dataclass(frozen=True, slots=True)
class _Waiting:
    """One request at the door: `patience` is the caller's own limit in seconds, None when it named none."""

    turn: asyncio.Future[None]
    queue_timeout: float
    patience: float | None

    @property
    def is_own(self) -> bool:
        """Whether the caller gives up first."""
        return self.patience is not None and self.patience < self.queue_timeout

    @property
    def seconds(self) -> float:
        """How long it waits."""
        return self.queue_timeout if self.patience is None else min(self.patience, self.queue_timeout)


class Admission:
    """The door of one gateway. Around what a request does goes `async with admission.enter(priority)`, or, where every
    step counts, `walk_in` or else `take` before it and `leave` behind it.
    """

    def __init__(self, settings: AdmissionSettings, telemetry: Telemetry) -> None:
        self._settings = settings
        self._bounds = _bounds(settings)
        self._door = core.Door()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._timer: asyncio.TimerHandle | None = None
        telemetry.in_flight.set_function(lambda: len(self._door.running))
        telemetry.queue_depth.set_function(lambda: len(self._door.waiting))

    @property
    def in_flight(self) -> int:
        """Requests inside."""
        return len(self._door.running)

    def apply(self, settings: AdmissionSettings) -> None:
        """New bounds; nobody inside or waiting is turned away by them."""
        self._settings = settings
        self._bounds = _bounds(settings)
        self._step(core.resize(self._door, self._bounds, asyncio.get_running_loop().time()))

    def walk_in(self) -> int | None:
        """A place that is free, by its number, which is given back with `leave`; None when it is to be waited for."""
        number = next(self._numbers)
        door = core.walk_in(self._door, self._bounds, number, asyncio.get_running_loop().time())
        if door is None:
            return None
        self._door = door
        return number

    def enter(self, priority: Priority, patience: float | None = None) -> _Place:
        """A place for one request, taken on entering the context. See `take`."""
        return _Place(self, priority, patience)

    async def take(self, priority: Priority, patience: float | None = None) -> int:
        """Waits for a place and returns its number; raises RefusedError (429, 504) when there is none in time.

        `patience` is the caller's own time-out in seconds: nobody is left waiting longer.
        """
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        timeout = self._settings.queue_timeout
        now = loop.time()
        deadline = now + (timeout if patience is None else min(patience, timeout))
        outcome = core.arrive(self._door, self._bounds, number, priority, deadline, now)
        if number in outcome[0].running:
            self._door = outcome[0]  # nobody else is let in or turned away where somebody walks in
            return number
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting[number] = _Waiting(turn, timeout, patience)
        self._step(outcome)
        try:
            await turn
        except BaseException:
            self.leave(number)
            raise
        finally:
            self._waiting.pop(number, None)
        return number

    def leave(self, number: int) -> None:
        """The request of this place ended; the next one may start."""
        self._step(core.leave(self._door, self._bounds, number, asyncio.get_running_loop().time()))

    def _step(self, outcome: tuple[core.Door, tuple[core.Effect, ...]]) -> None:
        self._door, effects = outcome
        for effect in effects:
            waiting = self._waiting.get(effect.number)
            if waiting is None or waiting.turn.done():
                continue
            if isinstance(effect, core.Admit):
                waiting.turn.set_result(None)
            else:
                waiting.turn.set_exception(self._refusal(effect, waiting))
        if self._timer is not None or self._door.waiting:
            self._arm()

    def _refusal(self, turned: core.TurnAway, waiting: _Waiting) -> RefusedError:
        settings = self._settings
        if turned.why is core.Why.FULL:
            return RefusedError(
                Code.QUEUE_FULL,
                f"{settings.max_in_flight} requests are being served and {settings.queue} wait; try again shortly",
                retry_after=turned.wait,
            )
        whose = "the caller's own time-out of " if waiting.is_own else ""
        return RefusedError(
            Code.DEADLINE_EXCEEDED,
            f"no place came free within {whose}{waiting.seconds:g} s; "
            f"{settings.max_in_flight} requests are being served",
            retry_after=None if waiting.is_own else turned.wait,
            should_retry=False if waiting.is_own else None,
        )

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (due := core.next_deadline(self._door)) is not None:
            self._timer = asyncio.get_running_loop().call_at(due, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._step(core.expire(self._door, self._bounds, asyncio.get_running_loop().time()))


def _bounds(settings: AdmissionSettings) -> core.Bounds:
    return core.Bounds(settings.max_in_flight, settings.queue)


class _Place:
    """A context that holds one place."""

    def __init__(self, admission: Admission, priority: Priority, patience: float | None) -> None:
        self._admission = admission
        self._priority = priority
        self._patience = patience
        self._number = 0

    async def __aenter__(self) -> None:
        self._number = await self._admission.take(self._priority, self._patience)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission.leave(self._number)
