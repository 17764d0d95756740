"""A part of `make resume-proof`: with a cut connection and a killed worker, the answer is the same to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.resume_proof import Proof

pytestmark = pytest.mark.timeout(120)


def test_resumed_answer_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    """Text, finish reason and counts."""
    with Proof(tmp_path) as proof:
        cuts = [
            *proof.cuts("demo", "What is the capital of France?", "cut"),
            *proof.cuts("demo", "What is 3 + 4?", "kill", every=6),
        ]
    assert {cut.way for cut in cuts} == {"cut", "kill"}
    assert len(cuts) > 6
    assert [cut.difference for cut in cuts if not cut.same] == []


def test_resumed_answer_with_joined_tokens_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    """Cuts after the first and the second frame; how many frames follow differs from answer to answer."""
    with Proof(tmp_path, interval="3ms") as proof:
        cuts = [cut for way in ("cut", "kill") for cut in proof.cuts("demo", "Why is the sky blue?", way, most=2)]
    assert {cut.way for cut in cuts} == {"cut", "kill"}
    assert [cut.difference for cut in cuts if not cut.same] == []
