"""`make chaos`: a long run, then a short run per planted defect; prints bars, and exits with 1 if one is missed.

EVENTS=1000 SEED=1 GAP=1.2 MINUTES=60 PLANTS=all. The figures are written to benchmarks/results/chaos.json; the last
line names the logs of a run with violations.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.chaos import report
from tests.chaos.defects import PROMISES
from tests.chaos.plan import Kind
from tests.chaos.run import Settings, run
from tests.rigs import fault_runs

BREAKS: dict[str, tuple[Kind, ...]] = {
    "leaked_reservation": (Kind.WORKER_KILL, Kind.WORKER_ABORT),
    "done_on_a_cut": (Kind.WORKER_KILL, Kind.WORKER_ABORT, Kind.BURST),
    "no_death_signal": (Kind.INFERENCE_KILL, Kind.BURST),
    "double_probe": (Kind.CLOUD_OUTAGE,),
    "skipped_release": (Kind.BURST,),
    "shared_tenant": (Kind.BURST,),
    "unverified_states": (Kind.KV_DAMAGE,),
}
"""The faults that reveal each defect; few, so that all these runs take minutes."""


def _small(plant: str, seed: int) -> Settings:
    """A short run with a defect."""
    settings = Settings(seed, 10, 1.0, plants=(plant,), kinds=BREAKS[plant])
    return replace(settings, events=16, kv_ram_gb=0.0) if plant == "unverified_states" else settings


async def _run(root: Path, settings: Settings) -> dict[str, Any]:
    return report.summary(await run(root, settings))


SUITE = fault_runs.Suite(
    "chaos", "chaos", __doc__, 1000, Kind, Settings, _small, PROMISES, _run, report.lines, report.bars
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(fault_runs.main(SUITE))
