"""Two inference services with real models behind one gateway; one is killed in the middle of an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.rigs.gateway_rig import Gateway
from tests.rigs.processes import Service, inference_service
from tests.rigs.stack import MODELS, until

CONFIG = """
inference: {{nodes: [a={a}, b={b}]}}
routes: {{"*": {{chain: ["local/*"]}}}}
"""
STORY = {
    "model": "demo-mini",
    "messages": [{"role": "user", "content": "Tell me a long story about a water mill."}],
    "temperature": 0,
    "ignore_eos": True,
    "max_tokens": 250,
}


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[dict[str, Service]]:
    (tmp_path / "models.yaml").write_text(MODELS)
    found = {name: inference_service(tmp_path / name, tmp_path, {"INFERENCE_TOKEN": "token"}) for name in ("a", "b")}
    try:
        await asyncio.gather(*(asyncio.to_thread(service.start, wait_for="/readyz") for service in found.values()))
        yield found
    finally:
        for service in found.values():
            service.kill()


async def test_answer_of_a_killed_service_goes_on_at_another_and_the_service_is_used_again(
    tmp_path: Path, nodes: dict[str, Service]
) -> None:
    config = CONFIG.format(**{name: service.url for name, service in nodes.items()})
    async with Gateway(tmp_path, "http://unused", config) as gateway:
        runtime = gateway.runtime
        await until("both answer", lambda: runtime.view.is_complete)
        for node in runtime.fleet.nodes.values():
            await node.provider.post_json("/models/demo-mini/load", b"", 60.0)
        whole = await gateway.client.post("/v1/chat/completions", json=STORY)
        expected = whole.json()["choices"][0]["message"]["content"]
        assert len(expected) > 200

        text = broken = ""
        async with gateway.client.stream("POST", "/v1/chat/completions", json={**STORY, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                text += "".join(choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"])
                if len(text) > 20 and not broken:
                    broken = answer.headers["x-headgate-node"]
                    nodes[broken].kill()
        assert text == expected
        record = list(runtime.records)[-1]
        other = "b" if broken == "a" else "a"
        assert [attempt.node for attempt in record.attempts] == [broken, other]
        assert {(await gateway.chat("demo-mini")).headers["x-headgate-node"] for _ in range(3)} == {other}

        await asyncio.to_thread(nodes[broken].start, wait_for="/readyz")

        node = runtime.fleet.nodes[broken]
        await until("it is known to answer", lambda: node.view.reachable)
        await node.provider.post_json("/models/demo-mini/load", b"", 60.0)

        async def is_used() -> bool:
            return (await gateway.chat("demo-mini", max_tokens=4)).headers["x-headgate-node"] == broken

        await until("it is used again", is_used)
        assert runtime.breakers.states()[f"local@{broken}"].label == "closed"
