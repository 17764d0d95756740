"""A file whose tokenizer is not the one of its vocabulary was loaded, and blamed every request for its abort."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from inference import worker_link
from tests.fuzz.test_damaged_headers import CORPUS
from tests.rigs.worker_rig import WorkerRig, grant_for


def test_it_ends_its_worker_while_it_is_loaded(tmp_path: Path) -> None:
    """The first text would abort llama.cpp; the worker tokenizes one before it says that it is ready."""
    path = tmp_path / "other.gguf"
    path.write_bytes(next(item.content for item in CORPUS if item.name == "tokenizer-other"))
    with WorkerRig(tmp_path, grant_for(path)) as rig:
        with pytest.raises(AssertionError, match="ended without Ready"):
            rig.expect(worker_link.Ready)
        assert rig.process.wait(10) == -signal.SIGABRT
