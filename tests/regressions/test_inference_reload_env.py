"""A reload of the inference service went by the environment of its start: what changed in `.env` was not seen."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.rigs.processes import inference_service, wait_until


def test_a_reload_reads_dot_env_anew(tmp_path: Path) -> None:
    """And at the start one line names what is set and changes nothing."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "models.yaml").write_text("models: {}")
    (tmp_path / ".env").write_text("INFERENCE_KV_POLICY=priority\n")
    service = inference_service(tmp_path, tmp_path / "config").start(wait_for="/readyz")
    try:
        wait_until("the line", lambda: "set, and without effect in this version: INFERENCE_KV_POLICY" in service.log)
        (tmp_path / ".env").write_text("INFERENCE_MAX_MODELS=1\nINFERENCE_MAX_BODY_MB=1\n")
        service.signal(signal.SIGHUP)
        wait_until("it is read", lambda: "INFERENCE_MAX_MODELS changed" in service.log)
        assert "INFERENCE_MAX_BODY_MB changed (applied at the next start)" in service.log
        (tmp_path / ".env").write_text("INFERENCE_MAX_MODLES=1\n")
        service.signal(signal.SIGHUP)
        wait_until("the mistake is told", lambda: "did you mean INFERENCE_MAX_MODELS?" in service.log)
    finally:
        service.kill()
