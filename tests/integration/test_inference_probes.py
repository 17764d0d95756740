"""A probe is a dry run: it loads nothing, evicts nothing, takes no turn and does not count as use."""

from __future__ import annotations

import asyncio
from typing import Any

from inference.protocol import ModelState
from tests.rigs.asgi import Answer, ask
from tests.rigs.authority_rig import Start


async def probe(service: Any, model: str) -> Answer:
    """What a health check sends."""
    body = {"model": model, "messages": [], "max_tokens": 1}
    return await ask(service.app, "POST", "/v1/chat/completions", body, more={"x-headgate-probe": "1"})


async def test_probe_of_a_cold_model_is_answered_without_a_load(start: Start) -> None:
    service = await start({"a": {}, "b": {}, "large": {}}, MEMORY_LIMIT_GB="0.15")
    authority = service.authority
    service.estimator.sizes.update(large=900)
    await authority.reached(lambda: all(model.estimates for model in authority.models.values()))
    assert (await probe(service, "a")).body == {"headgate": {"probe": "cold"}}
    refused = await probe(service, "large")
    assert (refused.status, refused.body["error"]["code"]) == (503, "memory_limit_exceeded")
    (device,) = refused.body["error"]["headgate"]["devices"]
    assert device["short_bytes"] > 0
    lease = await authority.ask(authority.resolve("a")).wait(10)
    assert lease is not None
    waits = await probe(service, "b")
    assert (waits.status, waits.body) == (200, {"headgate": {"probe": "cold"}}), "it would have its turn"
    assert authority.resolve("a").state is ModelState.BUSY
    lease.release()
    assert (await probe(service, "b")).body == {"headgate": {"probe": "cold"}}
    assert authority.resolve("a").state is ModelState.READY, "nothing is evicted for a probe"
    assert [model.loads for model in authority.models.values()] == [1, 0, 0]


async def test_probe_of_a_ready_model_does_not_count_as_use(start: Start) -> None:
    service = await start({"a": {}}, {})
    authority, model = service.authority, service.authority.resolve("a")
    await authority.load(model)
    before = (model.last_used_at, model.uses, model.pace)
    answered = await probe(service, "a")
    assert (answered.status, answered.body["text"]) == (200, "a answers")
    assert (model.last_used_at, model.uses, model.pace) == before


async def test_probe_whose_worker_ended_does_not_load_the_model(start: Start) -> None:
    service = await start({"a": {}}, {"a": {"answer_seconds": 30}})
    authority, model = service.authority, service.authority.resolve("a")
    await authority.load(model)

    async def leave() -> None:
        await authority.reached(lambda: model.in_flight == 1)
        await authority.unload(model, now=True)

    leaving = asyncio.create_task(leave())
    answered = await probe(service, "a")
    await leaving
    assert answered.body == {"headgate": {"probe": "cold"}}
    assert (model.loads, model.running) == (1, None)
