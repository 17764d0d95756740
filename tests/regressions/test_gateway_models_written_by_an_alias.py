"""A route that wrote a model by an alias knew nothing of its context, and its breaker was one no probe looks after."""

from __future__ import annotations

import json
from pathlib import Path

from inference.protocol import Code, ModelState, ModelStatus
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import MESSAGES, Gateway

CONFIG = "routes: {nice: {chain: [local/nick]}}\nbreaker: {failures: 1}\n"


async def test_it_is_the_model_itself_that_is_asked_and_judged(tmp_path: Path) -> None:
    async with FakeInference("token") as fake:
        fake.models["demo"] = ModelStatus(
            "demo", ModelState.READY, context_length=4096, capabilities=("chat",), aliases=("nick",)
        )
        async with Gateway(tmp_path, fake.url, CONFIG) as gateway:
            await gateway.look()
            body = {"model": "nice", "max_tokens": 32000, "messages": MESSAGES}
            bounded = await gateway.client.post("/v1/messages", content=json.dumps(body))
            assert (bounded.status_code, bounded.headers["x-headgate-model"]) == (200, "local/demo")
            assert (fake.seen[-1].model, fake.seen[-1].body["max_tokens"]) == ("demo", 4096)
            fake.answers["demo"] = Answer(refuse=Code.MODEL_FAILED)
            assert (await gateway.chat("nice")).status_code == 503
            assert (await gateway.breaker("local/demo"))["state"] == "open"
            assert gateway.runtime.prober.next() is not None
