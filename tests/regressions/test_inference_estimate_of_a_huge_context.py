"""A dry run of an absurd context took more and more host memory for a minute: llama.cpp keeps a book of every cell."""

from __future__ import annotations

import resource

from inference.estimate import estimate_job
from tests.rigs import tiny_gguf


def test_a_huge_context_costs_nothing_to_estimate() -> None:
    """The header's formula answers, and says so; the peak of this process does not grow."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    job = {"path": str(tiny_gguf.generative()), "parameters": {"context_length": 2**26, "parallel": 16}}
    answer = estimate_job.run(job)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2**26
    assert answer["source"] == "header"
    assert answer["note"] == "a cache of 1073741824 cells is estimated from the header; the limit is 16777216"
    assert answer["parts"]["cpu"]["kv_bytes"] >= 2**30 * 256


def test_one_cell_more_than_is_measured() -> None:
    job = {
        "path": str(tiny_gguf.generative()),
        "parameters": {"context_length": estimate_job.MOST_CELLS + 1, "parallel": 1},
    }
    assert estimate_job.run(job)["source"] == "header"
