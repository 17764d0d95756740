"""`make chaos-fleet`: a long run, then a short run per planted defect; prints bars, and exits with 1 if one is missed.

EVENTS=500 SEED=1 GAP=1.2 MINUTES=60 PLANTS=all. The figures are written to benchmarks/results/chaos_fleet.json; the
last line names the logs of a run with violations.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fleet.defects import PROMISES, REVEALED_BY
from tests.fleet.plan import Kind
from tests.fleet.run import bars, run, summary
from tests.rigs import fault_runs
from tests.rigs.fault_runs import Settings
from tests.rigs.redis_server import SERVER


def _small(plant: str, seed: int) -> Settings:
    return Settings(seed, 3, 0.5, plants=(plant,), kinds=(REVEALED_BY[plant],), settles=False)


async def _run(root: Path, settings: Settings) -> dict[str, Any]:
    return summary(await run(root, settings))


def _lines(result: dict[str, Any]) -> Iterator[str]:
    details = fault_runs.listed(result, "kinds", "ends", "nodes", "codes", "admitted", "recovery_seconds")
    last = (
        f"  probes at once: {result['probes_at_once']}; answers at the start of a fault of "
        f"their node: {result['struck']}; checks of ledgers: {result['looks']}"
    )
    yield from fault_runs.report("fleet", result, (*details, last))


SUITE = fault_runs.Suite(
    "fleet", "chaos-fleet", __doc__, 500, Kind, Settings, _small, PROMISES, _run, _lines, bars
)  # fmt: skip


if __name__ == "__main__":
    if SERVER is None:
        sys.stdout.write("skipped: neither redis-server nor valkey-server is installed\n")
        sys.exit(0)
    sys.exit(fault_runs.main(SUITE))
