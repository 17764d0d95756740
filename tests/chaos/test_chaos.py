"""A short part of the suite: every kind of fault once under load, and one planted defect that must be found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import report
from tests.chaos.defects import PROMISES
from tests.chaos.plan import Kind
from tests.chaos.run import Settings, run

pytestmark = pytest.mark.timeout(300)


async def test_promises_are_kept_under_every_kind_of_fault(tmp_path: Path) -> None:
    """The long run is `make chaos`."""
    results = await run(tmp_path / "x", Settings(seed=5, events=len(Kind), gap_seconds=0.6, users=4, measures=False))
    report_text = "\n".join(report.lines(report.summary(results)))
    assert {one.event.kind for one in results.done} == set(Kind), report_text
    assert results.violations == [], report_text


async def test_planted_defect_of_unfinished_streams_is_found(tmp_path: Path) -> None:
    """The suite detects a gateway that ends broken streams in [DONE]."""
    settings = Settings(
        seed=1, events=4, gap_seconds=0.5, users=2, plants=("done_on_a_cut",), kinds=(Kind.WORKER_KILL,)
    )
    results = await run(tmp_path / "x", settings)
    assert PROMISES["done_on_a_cut"] in {one.promise for one in results.violations}
