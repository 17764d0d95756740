"""Admission: requests wait here until `gateway.access.admission_queue` lets them start."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

from gateway.access import admission_queue as core
from gateway.errors import RefusedError
from gateway.settings import AdmissionSettings
from gateway.telemetry.gateway_metrics import Telemetry
from inference.protocol import Code, Priority


@dataclass(frozen=True, slots=True)
class _Waiting:
    """One waiting request. `client_timeout` is the client's own limit in seconds, None without one."""

    turn: asyncio.Future[None]
    queue_timeout: float
    client_timeout: float | None

    @property
    def is_limited_by_client(self) -> bool:
        """Whether the client's limit is the shorter one."""
        return self.client_timeout is not None and self.client_timeout < self.queue_timeout

    @property
    def seconds(self) -> float:
        """Seconds that the request waits at most."""
        return self.queue_timeout if self.client_timeout is None else min(self.client_timeout, self.queue_timeout)


class Admission:
    """The admission of one gateway. A request runs between `enter` and `leave`."""

    def __init__(self, settings: AdmissionSettings, telemetry: Telemetry) -> None:
        self._settings = settings
        self._queue = core.AdmissionQueue(_bounds(settings))
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._timer: asyncio.TimerHandle | None = None
        telemetry.in_flight.set_function(lambda: len(self._queue.running))
        telemetry.queue_depth.set_function(lambda: len(self._queue.waiting))

    @property
    def in_flight(self) -> int:
        """Number of running requests."""
        return len(self._queue.running)

    @property
    def queued(self) -> int:
        """Number of waiting requests."""
        return len(self._queue.waiting)

    def apply(self, settings: AdmissionSettings) -> None:
        """Applies new bounds. Running and waiting requests stay."""
        self._settings = settings
        self._carry_out(self._queue.resize(_bounds(settings), asyncio.get_running_loop().time()))

    async def enter(self, priority: Priority, client_timeout: float | None = None) -> int:
        """Waits for a place and returns its number; raises RefusedError (429, 504) when there is none in time.

        The wait is at most `client_timeout` seconds.
        """
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        timeout = self._settings.queue_timeout
        now = loop.time()
        deadline = now + (timeout if client_timeout is None else min(client_timeout, timeout))
        effects = self._queue.arrive(number, priority, deadline, now)
        if number in self._queue.running:
            return number  # a request that starts at once does not affect others
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting[number] = _Waiting(turn, timeout, client_timeout)
        self._carry_out(effects)
        try:
            await turn
        except BaseException:
            self.leave(number)
            raise
        finally:
            self._waiting.pop(number, None)
        return number

    def leave(self, number: int) -> None:
        """Releases a place; the next request may start."""
        self._carry_out(self._queue.leave(number, asyncio.get_running_loop().time()))

    def _carry_out(self, effects: list[core.Effect]) -> None:
        for effect in effects:
            waiting = self._waiting.get(effect.number)
            if waiting is None or waiting.turn.done():
                continue
            if isinstance(effect, core.Admit):
                waiting.turn.set_result(None)
            else:
                waiting.turn.set_exception(self._refusal(effect, waiting))
        if self._timer is not None or self._queue.waiting:
            self._arm()

    def _refusal(self, rejected: core.Reject, waiting: _Waiting) -> RefusedError:
        settings = self._settings
        if rejected.why is core.RejectReason.FULL:
            return RefusedError(
                Code.QUEUE_FULL,
                f"{settings.max_in_flight} requests are being served (max_in_flight) and {settings.queue} wait; "
                "try again shortly",
                retry_after=rejected.wait,
            )
        whose = "the client's own timeout of " if waiting.is_limited_by_client else ""
        return RefusedError(
            Code.DEADLINE_EXCEEDED,
            f"the request was not admitted within {whose}{waiting.seconds:g} s; "
            f"{settings.max_in_flight} requests are being served (max_in_flight)",
            retry_after=None if waiting.is_limited_by_client else rejected.wait,
            retryable=False if waiting.is_limited_by_client else None,
        )

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (due := self._queue.next_deadline) is not None:
            self._timer = asyncio.get_running_loop().call_at(due, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._carry_out(self._queue.expire(asyncio.get_running_loop().time()))


def _bounds(settings: AdmissionSettings) -> core.Bounds:
    return core.Bounds(settings.max_in_flight, settings.queue)
