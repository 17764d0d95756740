"""One run of the suite: a fleet, users, planned faults, checks of the ledgers, and the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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
from tests.fleet.plan import Kind, events
from tests.fleet.settle import Settling
from tests.fleet.system import GATEWAYS, NODES, Fleet
from tests.rigs import fault_runs
from tests.rigs.fault_runs import Settings

USERS = 4
MAX_AT_ONCE = 5
"""The largest number of simultaneous faults; on a busy machine they start later."""


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
    settings, clock = results.settings, fault_runs.stopwatch()
    known = await references(fleet, next(iter(fleet.nodes)))
    facts = Facts([one.text for one in known])
    planned = events(
        settings.seed, settings.events, settings.gap_seconds, NODES, GATEWAYS, settings.kinds or tuple(Kind)
    )
    async with Load(fleet, known, clock, settings.seed) as load:
        injector = Injector(fleet, load, clock, facts)
        settling = Settling(fleet, load, injector, clock)
        with fault_runs.reported_errors(results.violations, clock):
            async with fault_runs.during(settling.watch()):
                load.begin(USERS)
                await fault_runs.inject(planned, injector.inject, clock, MAX_AT_ONCE, settings.max_seconds)
                await load.end()
                if settings.settles:
                    await settling.run()
        results.outcomes = [*load.outcomes, *load.open.values()]
    results.done, results.probes_at_once, results.admitted = injector.done, injector.probes_at_once, injector.admitted
    results.recovery_seconds, results.looks = injector.recovery_seconds, settling.looks
    results.struck = injector.struck
    results.violations += [
        *judge.violations(results.outcomes, facts), *injector.violations, *settling.violations,
    ]  # fmt: skip
    results.seconds = clock()


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
        "nodes": dict(sorted(Counter(one.node for one in results.outcomes).items())),
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
