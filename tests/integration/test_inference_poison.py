"""Requests that end their worker are refused from then on; concurrent requests are answered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from inference.app import Service
from inference.authority.state import Timing
from inference.protocol import ModelState
from tests.rigs.asgi import Answer, ask
from tests.rigs.authority_rig import FakeAccelerator, Start

CHAT = "/v1/chat/completions"


def _chat(service: Service, text: str, model: str = "a", **more: Any) -> asyncio.Task[Answer]:
    body = {"model": model, "messages": [{"role": "user", "content": text}], **more}
    return asyncio.create_task(ask(service.app, "POST", CHAT, body))


async def _held(service: Service) -> list[Any]:
    return list((await ask(service.app, "GET", "/quarantine")).body["requests"])


async def test_only_the_poison_request_is_refused_and_concurrent_ones_are_answered(start: Start) -> None:
    how = {"poison": "BAD", "answer_seconds": 0.15, "last_words": "/src/ggml.c:12: GGML_ASSERT(n > 0) failed"}
    service = await start({"a": {}, "b": {}}, {"a": how, "b": {"answer_seconds": 0.5}})
    model = service.authority.resolve("a")
    await asyncio.gather(_chat(service, "warm up"), _chat(service, "warm up", "b"))
    other = _chat(service, "untouched", "b")
    neighbors = [_chat(service, f"fine {number}", stream=number % 2 == 0) for number in range(4)]
    await service.authority.reached(lambda: model.in_flight == 4)
    culprit = _chat(service, "BAD")
    await model.becomes(ModelState.FAILED)
    late = _chat(service, "came while it rested")
    answers = await asyncio.gather(*neighbors, late, other)
    assert [answer.status for answer in answers] == [200] * 6
    assert all(b"[DONE]" in answer.body for answer in answers[:4:2]), "streams are complete"
    refused = await culprit
    assert (refused.status, refused.body["error"]["code"]) == (422, "poison_request")
    assert refused.headers["x-should-retry"] == "false"
    assert "GGML_ASSERT(n > 0)" in refused.body["error"]["message"]
    (case,) = await _held(service)
    assert (case["suspicion"], case["model"], case["crashes"]) == ("confirmed", "a", 2)
    assert refused.body["error"]["headgate"]["key"] == case["key"]

    crashes = (await ask(service.app, "GET", "/models/a/crashes")).body["crashes"]
    assert [crash["cause"] for crash in crashes] == ["assert", "assert"]
    shape = {"path": CHAT, "messages": 1, "stream": False, "alone": True}
    assert [{**one, **shape} == one for one in crashes[0]["requests"]] == [True]
    assert len(crashes[1]["requests"]) == 5
    assert crashes[0]["message"].endswith("/src/ggml.c:12: GGML_ASSERT(n > 0) failed")
    reruns = service.metrics.registry.get_sample_value("inference_recovery_total", {"kind": "rerun"})
    assert reruns == 4, "its neighbors"
    loads = model.loads
    again = await _chat(service, "BAD", stream=True, user="another client")
    assert (again.status, again.body["error"]["code"]) == (422, "poison_request")
    assert model.loads == loads, "nothing was run for it"
    assert model.backoff.failures == 0

    missing = await ask(service.app, "DELETE", "/quarantine/0123")
    assert (missing.status, missing.body["error"]["code"]) == (404, "not_found")
    cleared = await ask(service.app, "DELETE", f"/quarantine/{case['key']}")
    assert [one["key"] for one in cleared.body["cleared"]] == [case["key"]]
    assert await _held(service) == []


@pytest.mark.parametrize(("first", "others"), [("a", ("a", "a@1", "a@2")), ("a@2", ("a@2", "a", "a@1"))])
async def test_request_that_ends_the_worker_of_one_replica_is_refused_by_all_of_them(
    start: Start, first: str, others: tuple[str, ...]
) -> None:
    """Also when its client names a replica."""
    how = {"poison": "BAD", "last_words": "/src/ggml.c:12: GGML_ASSERT(n > 0) failed"}
    service = await start({"a": {"replicas": 2}}, {"a": how, "a@2": how}, accelerator=FakeAccelerator(2))
    assert (await ask(service.app, "POST", "/models/a/load")).status == 200
    assert (await _chat(service, "BAD", first)).body["error"]["code"] == "poison_request"
    crashes = (await ask(service.app, "GET", "/models/a/crashes")).body["crashes"]
    assert len(crashes) == 2
    for name in others:
        refused = await _chat(service, "BAD", name)
        assert (refused.status, refused.body["error"]["code"]) == (422, "poison_request")
    assert (await ask(service.app, "GET", "/models/a/crashes")).body["crashes"] == crashes, "no worker ran it again"
    assert [(case["model"], case["crashes"]) for case in await _held(service)] == [("a", 2)]
    for name in ("a", "a@2"):
        assert (await _chat(service, "fine", name)).status == 200
    await ask(service.app, "DELETE", "/quarantine")
    assert await _held(service) == []


async def test_request_with_a_partial_answer_fails_and_its_retry_runs_alone(start: Start) -> None:
    how = {"poison": "BAD", "after_chunks": 2, "chunks": 3, "chunk_seconds": 0.05}
    service = await start({"a": {}}, {"a": how})
    model = service.authority.resolve("a")
    broken = await _chat(service, "BAD", stream=True)
    assert broken.status == 200
    assert b'"code":"model_failed"' in broken.body
    assert b"[DONE]" not in broken.body
    (case,) = await _held(service)
    assert case["suspicion"] == "suspect"
    runs: list[tuple[int | None, int]] = []
    again = _chat(service, "BAD", stream=True)
    await service.authority.reached(lambda: model.running is not None and model.running.alone is not None)
    beside = _chat(service, "fine", stream=True)
    await service.authority.reached(lambda: len(model.queue) == 1)
    runs.append((model.running.alone if model.running else None, model.in_flight))
    assert runs[0][1] == 1
    assert b'"code":"model_failed"' in (await again).body, "it had a part of the answer again"
    assert (await _held(service))[0]["suspicion"] == "confirmed"
    assert b"[DONE]" in (await beside).body
    assert (await _chat(service, "BAD")).status == 422


async def test_suspected_request_waits_a_limited_time_to_run_alone_and_does_not_block_others(start: Start) -> None:
    service = await start({"a": {}}, {"a": {"answer_seconds": 0.4}}, parts={"timing": Timing(alone_seconds=0.1)})
    authority, model = service.authority, service.authority.resolve("a")
    await authority.load(model)
    slow = [_chat(service, "slow") for _ in range(2)]
    await authority.reached(lambda: model.in_flight == 2)
    suspect = authority.ask(model, alone=True)
    behind = authority.ask(model)
    assert [waiter.alone for waiter in model.queue.waiters] == [True, False]
    lease = await suspect.wait(5)
    assert lease is not None
    assert not lease.alone, "it waited long enough for others to end"
    assert await behind.wait(5) is not None
    behind.close()
    suspect.close()
    assert [answer.status for answer in await asyncio.gather(*slow)] == [200, 200]
    with authority.ask(model, alone=True) as first:
        lease = await first.wait(5)
        assert lease is not None
        assert lease.alone
        others = [authority.ask(model, alone=True), authority.ask(model)]
        others[0].close()
        assert len(model.queue) == 1
        assert await others[1].wait(5) is not None
        assert not lease.alone
        others[1].close()
    assert (model.state, model.in_flight) == (ModelState.READY, 0)
