"""The warm-up computed on the main thread, whose OpenMP threads stayed: more than cores, so every barrier slept."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.rigs import tiny_gguf
from tests.rigs.worker_rig import WorkerRig, grant_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts a process's threads in /proc, which Linux has")


def _threads_when_ready(root: Path, computing: int) -> int:
    root.mkdir()
    with WorkerRig(root, grant_for(tiny_gguf.generative(), threads=computing)) as rig:
        rig.ready()
        rig.next_beat()  # every thread of the worker's own runs
        return len(os.listdir(f"/proc/{rig.process.pid}/task"))


def test_no_computing_thread_is_left_before_the_first_request(tmp_path: Path) -> None:
    assert _threads_when_ready(tmp_path / "one", 1) == _threads_when_ready(tmp_path / "three", 3)
