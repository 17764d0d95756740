"""A slice of `make resume-proof`: real processes, a cut connection and a killed worker, the same answer to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.resume_proof import Proof

pytestmark = pytest.mark.timeout(120)


def test_an_answer_that_broke_off_is_the_one_that_would_have_come(tmp_path: Path) -> None:
    """Text, finish reason and counts."""
    with Proof(tmp_path) as proof:
        cuts = [
            *proof.cuts("demo", "What is the capital of France?", "cut"),
            *proof.cuts("demo", "What is 3 + 4?", "kill", every=6),
        ]
    assert {cut.way for cut in cuts} == {"cut", "kill"}
    assert len(cuts) > 6
    assert [cut.said for cut in cuts if not cut.same] == []


def test_so_is_one_whose_tokens_came_together(tmp_path: Path) -> None:
    """In how many frames depends on the hour, but for the first two."""
    with Proof(tmp_path, interval="3ms") as proof:
        cuts = [cut for way in ("cut", "kill") for cut in proof.cuts("demo", "Why is the sky blue?", way, most=2)]
    assert {cut.way for cut in cuts} == {"cut", "kill"}
    assert [cut.said for cut in cuts if not cut.same] == []
