"""`make chaos-fleet`: a long run, then a short run per planted defect; prints bars, and exits with 1 if one is missed.

EVENTS=500 SEED=1 GAP=1.2 MINUTES=60 PLANTS=all. The figures are written to benchmarks/results/chaos_fleet.json; the
last line names the logs of a run with violations.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.figures import Bar
from tests.fleet.defects import PLANTS, PROMISES, REVEALED_BY
from tests.fleet.plan import Kind
from tests.fleet.run import Settings, bars, run, summary
from tests.fleet.system import redis_server
from tests.rigs.stack import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results" / "chaos_fleet.json"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos-fleet", description=__doc__)
    parser.add_argument("--events", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gap", type=float, default=1.2)
    parser.add_argument("--minutes", type=float, default=60.0, help="no further fault begins after so long")
    parser.add_argument("--plants", default="all", help="all, none, or names of defects")
    parser.add_argument("--kinds", default="", help="only these, comma-separated")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> int:
    """Runs, prints and saves."""
    given = _arguments()
    if redis_server() is None:
        _print("skipped: neither redis-server nor valkey-server is installed")
        return 0
    kinds = tuple(Kind(name) for name in given.kinds.split(",")) if given.kinds else None
    found: list[Bar] = []
    runs: dict[str, Any] = {}
    if given.events:
        most = 60 * given.minutes
        result = _one(Settings(given.seed, given.events, given.gap, kinds=kinds, most_seconds=most))
        runs["run"] = result
        found += bars(result, given.events)
    for name in {"all": list(PLANTS), "none": []}.get(given.plants, given.plants.split(",")):
        kind = REVEALED_BY[name]
        result = _one(Settings(given.seed, 3, 0.5, plants=(name,), kinds=(kind,), settles=False))
        runs[name] = result
        seen = sum(one["promise"] == PROMISES[name] for one in result["violations"])
        found.append(Bar(f"fleet_finds_{name}", seen, "violations", ">=", 1))
    given.results.parent.mkdir(parents=True, exist_ok=True)
    given.results.write_text(json.dumps(runs, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for bar in found:
        _print(bar.line())
    return 0 if all(bar.reached for bar in found) else 1


def _one(settings: Settings) -> dict[str, Any]:
    root = Path(tempfile.mkdtemp(prefix="hg-fleet-"))
    result = summary(asyncio.run(run(root / "x", settings)))
    for line in _lines(result):
        _print(line)
    if result["violations"] and not settings.plants:
        _print(f"  logs: {root}")
    else:
        shutil.rmtree(root)
    return result


def _lines(result: dict[str, Any]) -> Iterator[str]:
    plants = f", with {', '.join(result['plants'])}" if result["plants"] else ""
    yield (
        f"fleet, seed {result['seed']}{plants}: {result['events']} of {result['planned']} events took effect in "
        f"{result['seconds']:.0f} s, under {result['requests']} requests"
    )
    for name in ("kinds", "ends", "nodes", "codes", "admitted", "recovery_seconds"):
        yield f"  {name}: {', '.join(f'{key} {value}' for key, value in result[name].items())}"
    yield (
        f"  probes at once: {result['probes_at_once']}; answers at the start of a fault of "
        f"their node: {result['struck']}; checks of ledgers: {result['looks']}"
    )
    for one in result["violations"][:40]:
        yield f"  VIOLATION at {one['at']:.1f} s: {one['promise']}: {one['seen']}"


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
