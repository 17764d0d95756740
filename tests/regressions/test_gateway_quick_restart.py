"""A service that restarted between two polls was not used for the whole open period of its breaker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.breaker.permits import State
from gateway.providers.local import inference_snapshot
from tests.rigs.fake_inference import FakeInference
from tests.rigs.gateway_rig import MESSAGES, Gateway
from tests.rigs.stack import until

CONFIG = """
breaker: {open: 600s, failures: 2}
routes:
  demo: {chain: [local/demo]}
"""


async def test_quick_restart_of_service_ends_open_period(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(inference_snapshot, "POLL_SECONDS", 600.0)
    monkeypatch.setattr(inference_snapshot, "MISSING_POLL_SECONDS", 600.0)
    async with FakeInference("token") as inference, Gateway(tmp_path, inference.url, CONFIG) as gateway:
        body = {"model": "demo", "messages": MESSAGES}
        await until("the service was seen", lambda: gateway.runtime.view.reachable)
        port = int(inference.url.rsplit(":", 1)[1])
        await inference.stop()
        refused = await gateway.client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 503
        await gateway.client.post("/v1/chat/completions", json=body)
        assert gateway.runtime.breakers.breaker("local").state is State.OPEN
        await inference.start(port)

        async def answered() -> bool:
            return (await gateway.client.post("/v1/chat/completions", json=body)).status_code == 200

        await until("requests pass again", answered)
