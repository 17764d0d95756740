"""`make chaos`: a long run, then a short run per planted defect; prints bars, and exits with 1 if one is missed.

EVENTS=1000 SEED=1 GAP=1.2 MINUTES=60 PLANTS=all. The figures are written to benchmarks/results/chaos.json; the last
line names the logs of a run with violations.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.figures import Bar
from tests.chaos import report
from tests.chaos.defects import PLANTS, PROMISES
from tests.chaos.plan import Kind
from tests.chaos.run import Settings, run
from tests.rigs.stack import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results" / "chaos.json"
BREAKS: dict[str, tuple[Kind, ...]] = {
    "leaked_reservation": (Kind.WORKER_KILL, Kind.WORKER_ABORT),
    "done_on_a_cut": (Kind.WORKER_KILL, Kind.WORKER_ABORT, Kind.BURST),
    "no_death_signal": (Kind.INFERENCE_KILL, Kind.BURST),
    "double_probe": (Kind.CLOUD_OUTAGE,),
    "skipped_release": (Kind.BURST,),
    "shared_tenant": (Kind.BURST,),
    "unverified_states": (Kind.KV_DAMAGE,),
}
"""The faults that reveal each defect; few, so that five runs take minutes."""


def small(plant: str, seed: int) -> Settings:
    """A short run with a defect."""
    settings = Settings(seed, 10, 1.0, plants=(plant,), kinds=BREAKS[plant])
    return replace(settings, events=16, kv_ram_gb=0.0) if plant == "unverified_states" else settings


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--events", type=int, default=1000)
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
    kinds = tuple(Kind(name) for name in given.kinds.split(",")) if given.kinds else None
    bars: list[Bar] = []
    runs: dict[str, Any] = {}
    if given.events:
        result = _one(Settings(given.seed, given.events, given.gap, kinds=kinds, most_seconds=60 * given.minutes))
        runs["run"] = result
        bars += report.bars(result, given.events)
    names = {"all": list(PLANTS), "none": []}.get(given.plants, given.plants.split(","))
    for name in names:
        result = _one(small(name, given.seed))
        runs[name] = result
        found = sum(one["promise"] == PROMISES[name] for one in result["violations"])
        bars.append(Bar(f"chaos_finds_{name}", found, "violations", ">=", 1))
    report.keep(given.results, runs)
    for bar in bars:
        _print(bar.line())
    return 0 if all(bar.reached for bar in bars) else 1


def _one(settings: Settings) -> dict[str, Any]:
    root = Path(tempfile.mkdtemp(prefix="hg-chaos-"))
    results = asyncio.run(run(root / "x", settings))
    result = report.summary(results)
    for line in report.lines(result):
        _print(line)
    if result["violations"] and not settings.plants:
        _print(f"  logs: {root}")
    else:
        shutil.rmtree(root)
    return result


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
