"""Models that cannot be loaded together take turns: under load that never pauses, without a failed or a cut request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference.authority.leases import Lease
from inference.authority.lifecycle.departures import Reason
from inference.protocol import ModelState, Priority
from tests.rigs.authority_rig import Start, services
from tests.rigs.instant_workers import InstantSupervisor
from tests.rigs.live_authority import LiveModel as Model


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


@contextlib.asynccontextmanager
async def kept_busy(authority: object, model: Model) -> AsyncIterator[list[Lease]]:
    """Asks for `model` again and again so that it never is idle: the next request is there before the last one ends."""
    served: list[Lease] = []

    async def client() -> None:
        while True:
            with authority.ask(model) as ticket:  # type: ignore[attr-defined]
                lease = await ticket.wait()
                served.append(lease)
                await asyncio.sleep(0.02)
                lease.release(completed=True)

    clients = [asyncio.create_task(client()) for _ in range(3)]
    try:
        yield served
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def test_a_model_that_is_never_idle_lets_another_one_have_its_turn(start: Start) -> None:
    service = await start({"a": {}, "b": {}}, MEMORY_LIMIT_GB="0.15", ENABLE_CPU_OFFLOAD="false")
    authority = service.authority
    a, b = authority.resolve("a"), authority.resolve("b")
    async with kept_busy(authority, a) as served:
        await authority.reached(lambda: len(served) > 3)
        lease = await authority.ask(b).wait(20)
        assert lease is not None
        before = len(served)
        assert a.loads == 1
        lease.release()
        await authority.reached(lambda: len(served) > before + 3)
        assert (a.loads, b.loads) == (2, 1)
    first = authority.state.evictions[0]
    assert (first.model_name, first.reason) == ("a", Reason.MEMORY_WANTED)
    assert "the turn of a is over" in first.explanation[0]


async def test_fifty_swaps_under_mixed_load_fail_no_request(start: Start) -> None:
    parts = {"supervisor": InstantSupervisor({"a": 0.02, "b": 0.05})}
    service = await start(
        {"a": {}, "b": {}},
        MEMORY_LIMIT_GB="0.15",
        ENABLE_CPU_OFFLOAD="false",
        parts=parts,
    )
    authority = service.authority
    a, b = authority.resolve("a"), authority.resolve("b")
    async with kept_busy(authority, a) as of_a, kept_busy(authority, b) as of_b:
        async with asyncio.timeout(60):
            while a.loads + b.loads < 50:
                await asyncio.sleep(0.02)
    assert abs(a.loads - b.loads) <= 1, "they take turns"
    assert min(len(of_a), len(of_b)) >= 3 * 24, "everybody who waits is served in each turn"
    assert not any(model.backoff.failures for model in (a, b))


async def test_answers_under_way_are_never_cut_and_newcomers_wait(start: Start) -> None:
    service = await start({"a": {}, "b": {}}, MEMORY_LIMIT_GB="0.15")
    authority = service.authority
    a, b = authority.resolve("a"), authority.resolve("b")
    long_answer = await authority.ask(a).wait(10)
    assert long_answer is not None
    other = authority.ask(b)
    await a.becomes(ModelState.DRAINING)
    newcomer = authority.ask(a)
    assert await newcomer.wait(0.3) is None
    assert other.pending
    long_answer.release(completed=True)
    lease = await other.wait(10)
    assert lease is not None
    lease.release(completed=True)
    assert await newcomer.wait(10) is not None
    newcomer.close()


async def test_who_drains_for_somebody_that_left_stays(start: Start) -> None:
    service = await start({"a": {}, "b": {}}, MEMORY_LIMIT_GB="0.15")
    authority = service.authority
    a, b = authority.resolve("a"), authority.resolve("b")
    lease = await authority.ask(a).wait(10)
    assert lease is not None
    other = authority.ask(b)
    await a.becomes(ModelState.DRAINING)
    newcomer = authority.ask(a)
    other.close()
    assert a.state is ModelState.BUSY
    assert await newcomer.wait(5) is not None
    assert a.loads == 1
    lease.release()
    newcomer.close()
    assert not authority.state.evictions


async def test_min_residency_is_kept_against_a_model_that_is_wanted(start: Start) -> None:
    service = await start({"a": {"min_residency": 1.5}, "b": {}}, MEMORY_LIMIT_GB="0.15")
    authority = service.authority
    a, b = authority.resolve("a"), authority.resolve("b")
    async with kept_busy(authority, a) as served:
        await authority.reached(lambda: len(served) > 3)
        ready_at, wanted_at = a.running.ready_at, authority.now
        with authority.ask(b) as ticket:
            await authority.reached(lambda: a.state is not ModelState.BUSY and a.state is not ModelState.READY)
            left_at = authority.now
            assert left_at - ready_at >= 1.5
            assert left_at - wanted_at >= 1.5
            assert await ticket.wait(20) is not None


async def test_a_load_that_everybody_left_is_given_up_only_for_another_model(start: Start) -> None:
    service = await start({"a": {}, "b": {}}, {"a": {"load_seconds": 30}, "b": {}}, MEMORY_LIMIT_GB="0.15")
    authority = service.authority
    a, b = authority.resolve("a"), authority.resolve("b")
    ticket = authority.ask(a)
    await a.becomes(ModelState.LOADING)
    ticket.close()
    assert a.state is ModelState.LOADING
    lease = await authority.ask(b).wait(10)
    assert lease is not None
    assert (a.state, a.loads) == (ModelState.COLD, 0)
    lease.release()


async def test_the_room_for_the_first_is_not_taken_by_a_smaller_one_behind_it(start: Start) -> None:
    service = await start({"a": {}, "big": {}, "small": {}}, {}, MEMORY_LIMIT_GB="0.2")
    authority = service.authority
    service.estimator.sizes.update(big=180, small=90)
    a, big, small = (authority.resolve(name) for name in ("a", "big", "small"))
    lease = await authority.ask(a).wait(10)
    assert lease is not None
    first = authority.ask(big)
    await a.becomes(ModelState.DRAINING)
    second = authority.ask(small)
    assert await second.wait(0.3) is None, "there is room for it now, and big waits for that room"
    lease.release()
    served = await first.wait(10)
    assert served is not None
    assert second.pending
    served.release()
    assert await second.wait(10) is not None
    assert (big.loads, small.loads) == (1, 1)
    second.close()


async def test_priorities_decide_which_model_is_next(start: Start) -> None:
    service = await start({"a": {}, "b": {}, "c": {}}, MEMORY_LIMIT_GB="0.15")
    authority = service.authority
    a, b, c = (authority.resolve(name) for name in "abc")
    lease = await authority.ask(a).wait(10)
    service.estimator.gate = asyncio.Event()  # neither is measured until both are wanted
    later = authority.ask(b, priority=Priority.LOW)
    sooner = authority.ask(c, priority=Priority.HIGH)
    service.estimator.gate.set()
    await authority.reached(lambda: bool(b.estimates and c.estimates))
    lease.release()
    got = await sooner.wait(10)
    assert got is not None
    assert (b.loads, c.loads) == (0, 1)
    got.release()
    assert await later.wait(10) is not None
    later.close()


async def test_models_that_fit_side_by_side_load_at_the_same_time(start: Start) -> None:
    behavior = {name: {"load_seconds": 0.5} for name in "ab"}
    service = await start({"a": {}, "b": {}}, behavior)
    authority = service.authority
    a, b = authority.resolve("a"), authority.resolve("b")
    tickets = [authority.ask(a), authority.ask(b)]
    await authority.reached(lambda: a.state is b.state is ModelState.LOADING)
    for ticket in tickets:
        assert await ticket.wait(10) is not None
        ticket.close()
    for model in (a, b):
        await authority.unload(model, now=True)
    await authority.emptied()
