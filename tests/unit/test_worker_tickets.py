"""Tickets: outputs that are read on arrival do not wake the reader, keep their order, and count as read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from inference.worker.engine.output_tickets import Ticket

LONG = 30.0


async def waiting(ticket: Ticket[str], seconds: float = LONG) -> asyncio.Task[list[str]]:
    """A task that waits in `take`."""
    task = asyncio.create_task(ticket.take(seconds))
    await asyncio.sleep(0)
    return task


async def test_output_read_on_arrival_does_not_wake_the_reader() -> None:
    ticket: Ticket[str] = Ticket(asyncio.get_running_loop())
    seen: list[str] = []
    ticket.on_arrival = lambda output: output != "end" and not seen.append(output)
    task = await waiting(ticket)
    ticket.put("a")
    ticket.put("b")
    assert (seen, ticket.read, task.done()) == (["a", "b"], 2, False)
    ticket.put("end")
    ticket.put("after the end")
    assert await task == ["end", "after the end"]
    assert (seen, ticket.read) == (["a", "b"], 4)


async def test_outputs_keep_their_order() -> None:
    """Outputs that arrive between two waits are left for the next one."""
    ticket: Ticket[str] = Ticket(asyncio.get_running_loop())
    seen: list[str] = []
    ticket.on_arrival = lambda output: not seen.append(output)
    ticket.put("a")
    assert await ticket.take(LONG) == ["a"]
    ticket.put("b")
    task = asyncio.create_task(ticket.take(LONG))
    assert await task == ["b"]
    assert seen == []


class Clock:
    """A clock and timers of a loop, moved by the test; futures are those of the real loop."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []
        self.create_future = asyncio.get_running_loop().create_future

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[..., None], *given: Any) -> asyncio.TimerHandle:
        self.timers.append((self.now + seconds, call, given))
        return asyncio.TimerHandle(0, print, (), asyncio.get_running_loop())

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        due = [timer for timer in self.timers if timer[0] <= self.now]
        self.timers = [timer for timer in self.timers if timer[0] > self.now]
        for _at, call, given in due:
            call(*given)


async def test_timeout_starts_at_the_last_output_read_on_arrival() -> None:
    """One timer is used, and set again only when it fires."""
    clock = Clock()
    ticket: Ticket[str] = Ticket(clock)  # type: ignore[arg-type]
    ticket.on_arrival = lambda _output: True
    task = await waiting(ticket, 10.0)
    clock.pass_time(9.0)
    ticket.put("more")
    assert len(clock.timers) == 1
    clock.pass_time(9.0)
    await asyncio.sleep(0)
    assert not task.done()
    clock.pass_time(1.0)
    assert await task == []


async def test_read_on_arrival_ends_the_stall() -> None:
    stalled: list[bool] = []
    ticket: Ticket[str] = Ticket(asyncio.get_running_loop())
    ticket.on_room = lambda: stalled.append(ticket.stalled)
    ticket.on_arrival = lambda _output: True
    task = await waiting(ticket)
    ticket.stalled = True
    ticket.put("a")
    ticket.put("b")
    assert stalled == [False]
    ticket.leave()
    assert await task == []


async def test_output_can_be_taken_after_on_arrival_failed() -> None:
    """Other outputs of the same delivery are not affected."""

    def fails(_output: str) -> bool:
        raise ValueError("not this one")

    ticket: Ticket[str] = Ticket(asyncio.get_running_loop())
    ticket.on_arrival = fails
    task = await waiting(ticket)
    ticket.put("a")
    assert await task == ["a"]
    assert ticket.read == 1


@pytest.mark.parametrize("gone_first", [False, True])
async def test_disconnect_ends_the_wait(gone_first: bool) -> None:
    ticket: Ticket[str] = Ticket(asyncio.get_running_loop())
    if gone_first:
        ticket.leave()
        assert await ticket.take(LONG) == []
    else:
        task = await waiting(ticket)
        ticket.leave()
        assert await task == []
