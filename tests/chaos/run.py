"""One run of the suite: a system, users, planned faults, a watch, and the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos import judge
from tests.chaos.injector import KINDS, Done, Injector
from tests.chaos.judge import Facts, Outcome, Violation
from tests.chaos.load import Load
from tests.chaos.plan import Event, events
from tests.chaos.settle import Settled, Settling
from tests.chaos.system import ALONE, BACKED, DEVICES, KEYS, KV_RAM_GB, MODELS, System
from tests.chaos.watch import Watch
from tests.rigs import fault_runs

USERS = 6
MAX_AT_ONCE = 6
"""The largest number of simultaneous faults; on a busy machine they start later."""


@dataclass(frozen=True)
class Settings(fault_runs.Settings):
    """With `measures` false, undisturbed durations are not measured."""

    users: int = USERS
    measures: bool = True
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
    settings, clock = results.settings, fault_runs.stopwatch()
    async with Load(system.base_url, KEYS, (*BACKED, ALONE), clock, settings.seed) as load:
        settling = Settling(system, load, clock)
        if settings.measures:
            results.cold_start_seconds = await settling.all_answer()
        injector, watch = Injector(system, load, clock), Watch(system, clock)
        with fault_runs.reported_errors(results.violations, clock):
            async with fault_runs.during(watch.run()):
                load.begin(settings.users)
                await fault_runs.inject(results.planned, injector.inject, clock, MAX_AT_ONCE, settings.max_seconds)
                await load.end()
                if settings.settles:
                    await settling.run(measures=settings.measures)
        results.settled = settling.found
        results.outcomes = [*load.outcomes, *load.open.values()]
        results.done, results.restarts, results.looks = injector.done, injector.restarts, watch.samples
        results.violations += [*_judged(injector, results), *watch.violations, *results.settled.violations]
    results.seconds = clock()


def _judged(injector: Injector, results: Results) -> list[Violation]:
    facts = Facts(injector.windows, injector.outages, frozenset(BACKED))
    missed = [
        Violation("every fault takes effect", event.at_seconds, f"event {event.number}, {event.kind}: {why}")
        for event, why in injector.missed
    ]
    stored = judge.kv_violations(results.outcomes)
    return [*judge.violations(results.outcomes, facts), *stored, *injector.violations, *missed]
