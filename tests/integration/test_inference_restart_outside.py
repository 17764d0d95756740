"""What no process of the service can heal ends it with status 70, and the next one does not turn GPUs into CPU."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headgate.shared.errors import Exit
from headgate.shared.state import StateDir
from inference.unreached import NAME, OutOfReachError, Unreached
from tests.rigs.processes import Service, inference_service

REPOSITORY = Path(__file__).resolve().parents[2]


def service(root: Path, gpus: int) -> Service:
    """On the bundled models, with a GPU that cannot be reached if it is shown at all."""
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / "models.yaml").write_text('models: {demo: {path: "bundled:demo"}}')
    env = {"UNREACHABLE_GPUS": str(gpus), "PYTHONPATH": str(REPOSITORY)}
    made = inference_service(root, root / "config", env)
    return replace(made, argv=[sys.executable, "-m", "tests.rigs.unreachable_gpu", *made.argv[3:]])


def test_the_service_asks_to_be_restarted_and_never_comes_back_on_the_cpu(tmp_path: Path) -> None:
    first = service(tmp_path, 1)
    try:
        first.start()
        assert first.wait() == Exit.RESTART_OUTSIDE
        assert "only a restart of this service can help: no new process reaches gpu-0" in first.log
        second = service(tmp_path, 0)
        with contextlib.suppress(AssertionError):  # it may end before it was heard to answer
            second.start()
        assert second.wait() == Exit.RESTART_OUTSIDE
        assert "1 accelerators were in use and 0 can be reached" in second.log
    finally:
        first.kill()


def test_the_note_ends_when_they_are_back_or_the_cpu_is_asked_for(tmp_path: Path) -> None:
    note = Unreached(StateDir(tmp_path))
    note.check(0, cpu_asked=False)
    note.note(2)
    with pytest.raises(OutOfReachError, match="2 accelerators were in use and 1 can be reached") as caught:
        note.check(1, cpu_asked=False)
    assert caught.value.exit_code == Exit.RESTART_OUTSIDE
    note.check(0, cpu_asked=True)
    note.check(0, cpu_asked=False)
    note.note(2)
    note.check(3, cpu_asked=False)
    note.check(0, cpu_asked=False)
    (tmp_path / NAME).mkdir()
    note.note(1)
    note.check(0, cpu_asked=False)
