"""Memory of an idle worker beside its model: interpreter, libraries, engine thread, HTTP, templates."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from inference import demo
from tests.rigs.processes import wait_until
from tests.rigs.worker_rig import WorkerRig, grant_for

MAX_MB = 120.0
"""The promise. About half of it is measured, so that the allocator does not decide the result."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads a process's memory from /proc, which Linux has")


def pss_mb(pid: int) -> float:
    """Proportional set size: shared pages count in part."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("Pss:"))


def test_idle_worker_uses_little_memory_beside_its_model(tmp_path: Path) -> None:
    """After requests with a template, a constraint and log probabilities; the vocabulary was read before."""
    with WorkerRig(tmp_path, grant_for(demo.bundled_path("demo"), parallel=4)) as rig:
        reserved = sum(buffer.bytes for buffer in rig.ready().buffers) / 1e6
        wait_until("the vocabulary is read", lambda: "vocabulary read" in rig.log)
        fields = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 8}
        for more in ({}, {"response_format": {"type": "json_object"}}, {"logprobs": True, "top_logprobs": 5}):
            status, response = rig.post("/v1/chat/completions", {**fields, **more})
            assert status == 200, response
        taken = pss_mb(rig.process.pid) - reserved
        assert taken < MAX_MB, f"{taken:.0f} MB beside {reserved:.0f} MB of weights, cells and buffers"
