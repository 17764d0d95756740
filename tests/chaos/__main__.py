"""`make chaos`: a long run, then one short run per planted defect; prints bars and exits with 1 when one is short.

EVENTS=1000 SEED=1 GAP=1.2 MINUTES=60 PLANTS=all; the figures go to benchmarks/results/chaos.json, the logs of a run
that broke a promise stay where the last line says.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
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
}
"""The faults under which each defect shows; few, so that five runs take minutes."""


def small(plant: str, seed: int) -> Settings:
    """A short run with a defect."""
    return Settings(seed, 10, 1.0, plants=(plant,), kinds=BREAKS[plant])


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
    """Runs, tells and keeps."""
    given = _arguments()
    kinds = tuple(Kind(name) for name in given.kinds.split(",")) if given.kinds else None
    bars: list[Bar] = []
    runs: dict[str, Any] = {}
    if given.events:
        said = _one(Settings(given.seed, given.events, given.gap, kinds=kinds, most_seconds=60 * given.minutes))
        runs["run"] = said
        bars += report.bars(said, given.events)
    names = {"all": list(PLANTS), "none": []}.get(given.plants, given.plants.split(","))
    for name in names:
        said = _one(small(name, given.seed))
        runs[name] = said
        found = sum(one["promise"] == PROMISES[name] for one in said["violations"])
        bars.append(Bar(f"chaos_finds_{name}", found, "violations", ">=", 1))
    report.keep(given.results, runs)
    for bar in bars:
        _say(bar.line())
    return 0 if all(bar.reached for bar in bars) else 1


def _one(settings: Settings) -> dict[str, Any]:
    root = Path(tempfile.mkdtemp(prefix="hg-chaos-"))
    results = asyncio.run(run(root / "x", settings))
    said = report.summary(results)
    for line in report.lines(said):
        _say(line)
    if said["violations"] and not settings.plants:
        _say(f"  logs: {root}")
    else:
        shutil.rmtree(root)
    return said


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
