"""Processes that run llama.cpp leave no core dump: a worker that wrote one was taken for a hanging worker."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from headgate.shared import child_process
from inference import helper
from inference.devices.simgpu import rpc_server
from inference.worker import service
from inference.worker_link import LINK_FD_ENV, PARENT_ENV, SOCKET_FD_ENV

_ABORTS = "import os; from headgate.shared import child_process; child_process.disable_core_dumps(); os.abort()"


@pytest.mark.skipif(sys.platform != "linux", reason="the meaning of a limit of one byte is specific to Linux")
def test_aborting_process_leaves_no_core_dump(tmp_path: Path) -> None:
    """The process starts with a limit that allows a core dump."""
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
def test_core_dumps_are_disabled_before_native_code_runs(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:

    class DisabledError(Exception):
        """Core dumps were disabled."""

    def disable() -> None:
        raise DisabledError

    monkeypatch.setattr(child_process, "disable_core_dumps", disable)
    monkeypatch.setattr(child_process, "die_with_parent", lambda _environ: None)
    arguments = {service: [dict.fromkeys((PARENT_ENV, LINK_FD_ENV, SOCKET_FD_ENV), "1")], helper: [["devices"]]}
    with pytest.raises(DisabledError):
        module.main(*arguments.get(module, []))
