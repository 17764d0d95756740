"""A real worker that aborts on one prompt: other requests get their answers, and the prompt is refused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from headgate.shared.state_directory import StateDir
from inference import settings
from inference.app import Service
from tests.rigs.asgi import Answer, ask
from tests.rigs.live_authority import LiveAuthority
from tests.rigs.poisoned_worker import MARK

COMMAND = (sys.executable, "-m", "tests.rigs.poisoned_worker")
TOKEN = "canary-token-90c2"
TEXTS = ("Tell me of a canary mill.", "Tell me of a canary river.")
CULPRIT = f"This canary {MARK}."
REPORTS = (("POST", "/memory/dump"), ("GET", "/models/m/crashes"), ("GET", "/quarantine"), ("GET", "/v1/models/m"))
"""Where operators read about failures."""


def _chat(service: Service, text: str, **more: Any) -> asyncio.Task[Answer]:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 40, **more}
    return asyncio.create_task(ask(service.app, "POST", "/v1/chat/completions", body, key=TOKEN))


async def _reports(service: Service) -> str:
    """All reports as text."""
    answers = [await ask(service.app, method, path, key=TOKEN) for method, path in REPORTS]
    assert [answer.status for answer in answers] == [200] * len(REPORTS)
    return json.dumps([answer.body for answer in answers])


async def test_other_requests_are_answered_when_a_prompt_aborts_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No report, log or file contains a prompt or the token."""
    caplog.set_level("DEBUG")
    monkeypatch.setenv("HEADGATE_LOG_LEVEL", "debug")
    model = {"path": "bundled:demo-mini", "context_length": 256, "parallel": 4}
    (tmp_path / "models.yaml").write_text(json.dumps({"models": {"m": model}}))
    config = settings.load(tmp_path, {"INFERENCE_FORCE_CPU_MODE": "true"}, {})
    state = StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")})
    service = Service(config, state, TOKEN, command=COMMAND)
    authority = LiveAuthority(service.authority)
    await service.authority.start()
    try:
        alone = [(await _chat(service, text)).body["choices"][0]["message"]["content"] for text in TEXTS]
        running = authority.resolve("m")
        assert running.running is not None
        pid = running.running.pid
        os.kill(pid, signal.SIGSTOP)
        neighbors = [_chat(service, text) for text in TEXTS]
        culprit = _chat(service, CULPRIT, stream=True)
        await authority.reached(lambda: running.in_flight == 3)
        reports = [await _reports(service)]
        os.kill(pid, signal.SIGCONT)
        refused, *answers = await asyncio.gather(culprit, *neighbors)
        # An error frame if a comment was sent before, else the body of an error status.
        body = refused.body if refused.status == 200 else json.dumps(refused.body).encode()
        assert b'"code":"poison_request"' in body.replace(b": ", b":")
        assert [answer.status for answer in answers] == [200, 200]
        assert [answer.body["choices"][0]["message"]["content"] for answer in answers] == alone
        newest = service.crashes.of("m")[0]
        assert newest["message"].endswith("/src/ggml.c:4711: GGML_ASSERT(n_tokens > 0) failed")
        assert newest["requests"][0]["alone"]
        assert (await _chat(service, CULPRIT)).status == 422
        assert (await _chat(service, TEXTS[0])).body["choices"][0]["message"]["content"] == alone[0]
        assert running.backoff.failures == 0
        reports.append(await _reports(service))
        assert "GGML_ASSERT(n_tokens > 0)" in reports[1]
        assert newest["last_lines"]
    finally:
        await service.authority.close()
    files = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    outputs = (*reports, caplog.text, *capfd.readouterr(), *(path.read_text(errors="replace") for path in files))
    found = [text[max(0, at - 80) : at + 80] for text in outputs for at in [text.lower().find("canary")] if at >= 0]
    assert found == []
