"""Reports a run as text, bars and JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.figures import Bar
from headgate.cli.bench import percentile
from tests.chaos.judge import End, Outcome, conversations, tally
from tests.chaos.plan import MIN_SHARE
from tests.chaos.run import Results
from tests.chaos.settle import RECOVERY_SECONDS
from tests.rigs import fault_runs


def failover_seconds(outcomes: Sequence[Outcome]) -> list[float]:
    """Time to the first token of streams that a second tier answered after the first one had been tried."""
    return [
        one.first_token - one.began
        for one in outcomes
        if one.stream and one.attempts > 1 and one.first_token is not None and one.end is End.COMPLETE
    ]


def summary(results: Results) -> dict[str, Any]:
    """All figures of a run."""
    kinds = Counter(str(one.event.kind) for one in results.done)
    failovers = failover_seconds(results.outcomes)
    loads, recovery = results.settled.load_seconds, results.settled.recovery_seconds
    beyond = [seconds - loads.get(name, math.nan) for name, seconds in recovery.items()]
    return {
        "seed": results.settings.seed,
        "plants": list(results.settings.plants),
        "seconds": round(results.seconds, 1),
        "events": len(results.done),
        "planned": len(results.planned),
        "kinds": dict(sorted(kinds.items())),
        "requests": len(results.outcomes),
        "ends": tally(results.outcomes),
        "tiers": dict(Counter(one.tier or "none" for one in results.outcomes)),
        "codes": dict(Counter(one.code for one in results.outcomes if one.code)),
        "conversations": conversations(results.outcomes),
        "failover": _spread(failovers),
        "cold_start_seconds": _rounded(results.cold_start_seconds),
        "load_seconds": _rounded(loads),
        "recovery_seconds": _rounded(recovery),
        "recovery_beyond_load_seconds": round(max(beyond, default=math.nan), 3),
        "backoff_seconds": round(results.settled.backoff_seconds, 2),
        "restarts": {name: _spread(values) for name, values in results.restarts.items()},
        "effect": _spread([one.took_seconds for one in results.done]),
        "looks": results.looks,
        "violations": [asdict(one) for one in results.violations],
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"count": 0}
    return {
        "count": len(values),
        "p50": round(median(values), 4),
        "p99": round(percentile(values, 0.99), 4),
        "max": round(max(values), 4),
    }


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def lines(result: dict[str, Any]) -> Iterator[str]:
    """The text of the report."""
    yield from fault_runs.report("chaos", result, _details(result))


def _details(result: dict[str, Any]) -> Iterator[str]:
    width = max(map(len, result["kinds"]), default=0)
    for kind, count in result["kinds"].items():
        yield f"  {kind:<{width}} {count:>5}  {count / max(1, result['events']):6.1%}"
    yield from fault_runs.listed(
        result, "ends", "tiers", "codes", "conversations", "failover", "restarts", "load_seconds", "recovery_seconds"
    )
    yield f"  backoffs at the end: {result['backoff_seconds']} s; checks of the ledger: {result['looks']}"


def bars(result: dict[str, Any], events: int) -> list[Bar]:
    """The promises of the suite; `events` is the required number."""
    least = min((count / max(1, result["events"]) for count in result["kinds"].values()), default=0.0)
    return [
        Bar("chaos_events", result["events"], "events", ">=", events),
        Bar("chaos_rarest_kind", 100 * least, "percent", ">=", 100 * MIN_SHARE),
        Bar("chaos_continued", result["conversations"]["continued"], "turns", ">=", 1),
        Bar("chaos_spied", result["conversations"]["spied"], "turns", ">=", 1),
        Bar("chaos_violations", len(result["violations"]), "violations", "<=", 0),
        Bar("chaos_recovery_beyond_load", result["recovery_beyond_load_seconds"], "s", "<=", RECOVERY_SECONDS),
    ]
