"""One run of the suite: a system, users, planned faults, a watch, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos import judge
from tests.chaos.injector import KINDS, Done, Injector
from tests.chaos.judge import Facts, Outcome, Violation
from tests.chaos.load import Load
from tests.chaos.plan import Event, Kind, events
from tests.chaos.settle import Settled, Settling
from tests.chaos.system import ALONE, BACKED, DEVICES, KEYS, KV_RAM_GB, MODELS, System
from tests.chaos.watch import Watch

USERS = 6
MOST_AT_ONCE = 6
"""The largest number of simultaneous faults; on a busy machine they start later."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`kinds` None: all kinds; `plants` are names of defects. No fault begins after `most_seconds`.

    With `measures` false, undisturbed durations are not measured; with `settles` false, the final checks are left out.
    """

    seed: int = 1
    events: int = 1000
    gap_seconds: float = 1.2
    users: int = USERS
    plants: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] | None = None
    most_seconds: float = math.inf
    measures: bool = True
    settles: bool = True
    kv_ram_gb: float = KV_RAM_GB


@dataclass
class Results:
    """Everything that a run recorded."""

    settings: Settings
    planned: tuple[Event, ...]
    seconds: float = 0.0
    done: list[Done] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    cold_start_seconds: dict[str, float] = field(default_factory=dict)
    settled: Settled = field(default_factory=Settled)
    restarts: dict[str, list[float]] = field(default_factory=dict)
    looks: int = 0


async def run(root: Path, settings: Settings) -> Results:
    """A whole run below the empty folder `root`; returns when every process has ended."""
    kinds = settings.kinds or KINDS
    planned = events(settings.seed, settings.events, settings.gap_seconds, MODELS, DEVICES, kinds)
    results = Results(settings, planned)
    system = await System(root, settings.plants, settings.kv_ram_gb).start()
    try:
        await _run(system, results)
    finally:
        await system.close()
    return results


async def _run(system: System, results: Results) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()

    def clock() -> float:
        return loop.time() - began

    settings = results.settings
    async with Load(system.base_url, KEYS, (*BACKED, ALONE), clock, settings.seed) as load:
        settling = Settling(system, load, clock)
        if settings.measures:
            results.cold_start_seconds = await settling.all_answer()
        injector, watch = Injector(system, load, clock), Watch(system, clock)
        watching = asyncio.create_task(watch.run())
        load.begin(settings.users)
        await _inject(injector, results.planned, clock, settings.most_seconds)
        await load.end()
        if settings.settles:
            results.settled = await settling.run(measures=settings.measures)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        results.outcomes = [*load.outcomes, *load.open.values()]
        results.done, results.restarts, results.looks = injector.done, injector.restarts, watch.samples
        results.violations = [*_judged(injector, results), *watch.violations, *results.settled.violations]
    results.seconds = clock()


async def _inject(
    injector: Injector, planned: Sequence[Event], clock: Callable[[], float], most_seconds: float
) -> None:
    """Starts every event at its time, or when there is room for it; returns when the last one is over."""
    start = clock()
    under_way: set[asyncio.Task[None]] = set()
    for event in sorted(planned, key=lambda item: item.at_seconds):
        await asyncio.sleep(max(0.0, start + event.at_seconds - clock()))
        while len(under_way) >= MOST_AT_ONCE:
            await asyncio.wait(set(under_way), return_when=asyncio.FIRST_COMPLETED)
        if clock() - start > most_seconds:
            break
        task = asyncio.create_task(injector.inject(event), name=f"{event.number} {event.kind}")
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    if under_way:
        await asyncio.wait(set(under_way))


def _judged(injector: Injector, results: Results) -> list[Violation]:
    facts = Facts(injector.windows, injector.outages, frozenset(BACKED))
    missed = [
        Violation("every fault takes effect", event.at_seconds, f"event {event.number}, {event.kind}: {why}")
        for event, why in injector.missed
    ]
    stored = judge.kv_violations(results.outcomes)
    return [*judge.violations(results.outcomes, facts), *stored, *injector.violations, *missed]
