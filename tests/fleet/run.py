"""One run of the suite: a fleet, users, planned faults, checks of the ledgers, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import Bar
from headgate.cli.bench import percentile
from tests.chaos.judge import Violation
from tests.fleet import judge
from tests.fleet.injector import Injector
from tests.fleet.judge import Facts, Outcome
from tests.fleet.load import Load, references
from tests.fleet.plan import Event, Kind, events
from tests.fleet.settle import Settling
from tests.fleet.system import GATEWAYS, NODES, Fleet

USERS = 4
MOST_AT_ONCE = 5
"""The largest number of simultaneous faults; on a busy machine they start later."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`kinds` None: all kinds; `plants` are names of defects. No fault begins after `most_seconds`."""

    seed: int = 1
    events: int = 500
    gap_seconds: float = 1.2
    users: int = USERS
    plants: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] | None = None
    most_seconds: float = math.inf
    settles: bool = True


@dataclass
class Results:
    """Everything that a run recorded."""

    settings: Settings
    seconds: float = 0.0
    done: Counter[Kind] = field(default_factory=Counter)
    outcomes: list[Outcome] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    probes_at_once: list[int] = field(default_factory=list)
    admitted: dict[str, list[int]] = field(default_factory=dict)
    recovery_seconds: list[float] = field(default_factory=list)
    answers_by_node: dict[str, int] = field(default_factory=dict)
    struck: int = 0
    looks: int = 0


async def run(root: Path, settings: Settings) -> Results:
    """A whole run below the empty folder `root`; returns when every process has ended."""
    results = Results(settings)
    fleet = await Fleet(root, settings.plants).start()
    try:
        await _run(fleet, results)
    finally:
        await fleet.close()
    return results


async def _run(fleet: Fleet, results: Results) -> None:
    loop, settings = asyncio.get_running_loop(), results.settings
    began = loop.time()

    def clock() -> float:
        return loop.time() - began

    known = await references(fleet, next(iter(fleet.nodes)))
    facts = Facts([one.text for one in known])
    planned = events(
        settings.seed, settings.events, settings.gap_seconds, NODES, GATEWAYS, settings.kinds or tuple(Kind)
    )
    async with Load(fleet, known, clock, settings.seed) as load:
        injector = Injector(fleet, load, clock, facts)
        settling = Settling(fleet, load, injector, clock)
        watching = asyncio.create_task(settling.watch())
        load.begin(settings.users)
        try:
            await _inject(injector, planned, clock, settings.most_seconds)
            await load.end()
            if settings.settles:
                await settling.run()
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        results.outcomes = [*load.outcomes, *load.open.values()]
    results.done, results.probes_at_once, results.admitted = injector.done, injector.probes_at_once, injector.admitted
    results.recovery_seconds, results.looks = injector.recovery_seconds, settling.looks
    results.answers_by_node, results.struck = settling.answers_by_node, injector.struck
    results.violations = [
        *judge.violations(results.outcomes, facts), *injector.violations, *settling.violations,
    ]  # fmt: skip
    results.seconds = clock()


async def _inject(
    injector: Injector, planned: Sequence[Event], clock: Callable[[], float], most_seconds: float
) -> None:
    """Starts every event at its time, or when there is room for it; returns when the last one is over."""
    start = clock()
    under_way: set[asyncio.Task[None]] = set()
    try:
        for event in sorted(planned, key=lambda item: item.at_seconds):
            await asyncio.sleep(max(0.0, start + event.at_seconds - clock()))
            while len(under_way) >= MOST_AT_ONCE:
                await asyncio.wait(set(under_way), return_when=asyncio.FIRST_COMPLETED)
            if clock() - start > most_seconds:
                break
            task = asyncio.create_task(injector.inject(event), name=f"{event.number} {event.kind}")
            under_way.add(task)
            task.add_done_callback(_finish(under_way))
        if under_way:
            await asyncio.gather(*under_way)
    finally:
        for task in under_way:
            task.cancel()


def _finish(under_way: set[asyncio.Task[None]]) -> Callable[[asyncio.Task[None]], None]:
    def finish(task: asyncio.Task[None]) -> None:
        under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    return finish


def summary(results: Results) -> dict[str, Any]:
    """All figures of a run."""
    ends = Counter(str(one.end or "open") for one in results.outcomes)
    recovery = results.recovery_seconds
    return {
        "seed": results.settings.seed,
        "plants": list(results.settings.plants),
        "seconds": round(results.seconds, 1),
        "events": results.done.total(),
        "planned": results.settings.events,
        "kinds": {str(kind): count for kind, count in sorted(results.done.items())},
        "requests": len(results.outcomes),
        "ends": dict(sorted(ends.items())),
        "nodes": dict(judge.shares(one.node for one in results.outcomes)),
        "codes": dict(Counter(one.code for one in results.outcomes if one.code)),
        "probes_at_once": results.probes_at_once,
        "admitted": results.admitted,
        "recovery_seconds": {
            "p50": round(percentile(recovery, 0.5), 2) if recovery else None,
            "max": round(max(recovery, default=0.0), 2),
        },
        "struck": results.struck,
        "looks": results.looks,
        "violations": [asdict(one) for one in results.violations],
    }


def bars(result: dict[str, Any], events: int) -> Iterator[Bar]:
    """The promises of the suite; `events` is the required number."""
    yield Bar("fleet_events", result["events"], "events", ">=", events)
    if result["probes_at_once"]:
        yield Bar("fleet_probes_at_once", max(result["probes_at_once"]), "probes", "<=", 1)
    yield Bar("fleet_violations", len(result["violations"]), "violations", "<=", 0)
