"""A real model's process that aborts on one prompt: its neighbors get their whole answers, and it is refused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from headgate.shared.state import StateDir
from inference import settings
from inference.app import Service
from tests.rigs.asgi import Answer, ask
from tests.rigs.authority_rig import until
from tests.rigs.poisoned_worker import MARK

COMMAND = (sys.executable, "-m", "tests.rigs.poisoned_worker")


def _chat(service: Service, text: str, **more: Any) -> asyncio.Task[Answer]:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 40, **more}
    return asyncio.create_task(ask(service.app, "POST", "/v1/chat/completions", body))


async def test_the_neighbors_of_a_prompt_that_aborts_are_answered_as_if_alone(tmp_path: Path) -> None:
    model = {"path": "bundled:demo-mini", "context_length": 256, "parallel": 4}
    (tmp_path / "models.yaml").write_text(json.dumps({"models": {"m": model}}))
    config = settings.load(tmp_path, {"INFERENCE_FORCE_CPU_MODE": "true"}, {})
    state = StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")})
    service = Service(config, state, "token", command=COMMAND)
    await service.authority.start()
    try:
        texts = ("Tell me of a mill.", "Tell me of a river.")
        alone = [(await _chat(service, text)).body["choices"][0]["message"]["content"] for text in texts]
        running = service.authority.resolve("m")
        assert running.running is not None
        pid = running.running.worker.pid
        os.kill(pid, signal.SIGSTOP)
        neighbors = [_chat(service, text) for text in texts]
        culprit = _chat(service, f"This {MARK}.", stream=True)
        await until("all are in flight", lambda: running.in_flight == 3)
        os.kill(pid, signal.SIGCONT)
        told, *answers = await asyncio.gather(culprit, *neighbors)
        said = told.body if told.status == 200 else json.dumps(told.body).encode()  # before or after a first comment
        assert b'"code":"poison_request"' in said.replace(b": ", b":")
        assert [answer.status for answer in answers] == [200, 200]
        assert [answer.body["choices"][0]["message"]["content"] for answer in answers] == alone
        newest = service.crashes.of("m")[0]
        assert newest["message"].endswith("/src/ggml.c:4711: GGML_ASSERT(n_tokens > 0) failed")
        assert newest["requests"][0]["alone"]
        assert (await _chat(service, f"This {MARK}.")).status == 422
        assert (await _chat(service, texts[0])).body["choices"][0]["message"]["content"] == alone[0]
        assert running.backoff.failures == 0
    finally:
        await service.authority.close()
