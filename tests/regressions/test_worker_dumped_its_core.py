"""A worker that aborted wrote its memory to disk first: it was told as one that hangs, and nobody was run again."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from headgate.shared import coredump, tether
from inference import helper
from inference.devices.simgpu import rpc_server
from inference.worker import service
from inference.workers.worker_link import LINK_FD_ENV, PARENT_ENV, SOCKET_FD_ENV

_ABORTS = "import os; from headgate.shared import coredump; coredump.forbid(); os.abort()"


@pytest.mark.skipif(sys.platform != "linux", reason="what a limit of one byte means is Linux's word")
def test_a_process_that_aborts_leaves_no_core_whatever_it_was_allowed(tmp_path: Path) -> None:
    """The limit that it was started with is one under which others would leave one."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    ended = subprocess.run(
        [sys.executable, "-c", _ABORTS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (hard, hard)),
        check=False,
        timeout=30,
    )
    assert ended.returncode == -signal.SIGABRT
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", [service, helper, rpc_server], ids=["worker", "helper", "server"])
def test_whoever_runs_foreign_code_forbids_it_first(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is done that may abort."""

    class ForbiddenError(Exception):
        """It was forbidden."""

    def forbid() -> None:
        raise ForbiddenError

    monkeypatch.setattr(coredump, "forbid", forbid)
    monkeypatch.setattr(tether, "hold", lambda _environ: None)
    arguments = {service: [dict.fromkeys((PARENT_ENV, LINK_FD_ENV, SOCKET_FD_ENV), "1")], helper: [["devices"]]}
    with pytest.raises(ForbiddenError):
        module.main(*arguments.get(module, []))
