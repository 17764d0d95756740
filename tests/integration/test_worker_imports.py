"""A waiting worker has imported everything that a load needs, because a return must be fast."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from inference import worker_link
from tests.rigs import tiny_gguf
from tests.rigs.worker_rig import WorkerRig, grant_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are held in memory on Linux only")


def test_no_module_is_imported_during_a_load(tmp_path: Path) -> None:
    """As the interpreter logs them. Two optional libraries are only searched for and not found."""
    grant = grant_for(tiny_gguf.generative())
    with WorkerRig(tmp_path, env={"PYTHONPROFILEIMPORTTIME": "1"}) as rig:
        rig.send(worker_link.Hold(grant.path))
        rig.expect(worker_link.Held)
        before = len(rig.log)
        assert re.search(r"^import time:.*\| +inference\.worker", rig.log, re.MULTILINE), "imports are logged"
        rig.send(grant)
        rig.ready()
        rig.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
        imported = re.findall(r"^import time:.*\| +(\S+)$", rig.log[before:], re.MULTILINE)
    assert {name.partition(".")[0] for name in imported} <= {"websockets", "wsproto"}
