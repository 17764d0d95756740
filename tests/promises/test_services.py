"""Promises of the contract about endpoints, events and probes of the inference service, and paths of the gateway."""

from __future__ import annotations

import asyncio
import json

import pytest

from inference.api import relay
from inference.authority.views import event_bus as buses
from inference.authority.views.event_bus import Bus
from inference.protocol import PROGRESS_INTERVAL_SECONDS, ModelState
from tests.rigs.asgi import ask
from tests.rigs.authority_rig import Start
from tests.rigs.gateway_rig import Gateway

pytestmark = pytest.mark.timeout(30)

GATEWAY = tuple(
    """
/v1/chat/completions /v1/completions /v1/embeddings /v1/responses /v1/messages /v1/messages/count_tokens /v1/rerank
/v1/models /v1/models/{model} /livez /readyz /health /metrics /admin/breakers /admin/breakers/{name}/reset
/admin/requests/{id} /admin/reload
""".split()  # noqa: SIM905
)
INFERENCE = tuple(
    """
/v1/chat/completions /v1/completions /v1/embeddings /v1/rerank /v1/models /v1/models/{model} /tokenize /detokenize
/livez /readyz /health /metrics /devices /devices/{id}/recover /events /models/{model}/load /models/{model}/unload
/models/{model}/offload /models/{model}/move /models/{model}/restart /models/{model}/crashes /quarantine
/memory/stats /memory/models /memory/evictions /memory/offloaded /memory/fragmentation /memory/health /memory/history
/memory/plan /memory/preload /memory/evict/{model} /memory/defragment /memory/gc /memory/dump /memory/dump/compare
""".split()  # noqa: SIM905
)


async def test_every_endpoint_of_the_gateway_exists(gateway: Gateway) -> None:
    """An unsupported method is a 405, an unknown path a 404."""
    for path in GATEWAY:
        target = path.replace("{model}", "demo").replace("{name}", "local").replace("{id}", "x")
        assert (await gateway.admin("PATCH", target)).status_code == 405, target
    assert (await gateway.admin("PATCH", "/v1/nothing")).status_code == 404


async def test_every_endpoint_of_the_inference_service_exists(start: Start) -> None:
    """No path answers 404."""
    service = await start({"a": {}})
    for path in INFERENCE:
        if path == "/events":
            continue  # endless; it has its own test
        target = path.replace("{model}", "a").replace("{id}", "cpu")
        answer = await ask(service.app, "PATCH", target)
        assert answer.status == 405, target


async def test_events_begin_with_a_snapshot_have_numbers_and_keep_alives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener detects missed events, and that the service is alive."""
    assert buses.BEAT_SECONDS == 5.0
    monkeypatch.setattr(buses, "BEAT_SECONDS", 0.01)
    bus = Bus()
    bus.snapshot = lambda: {"models": []}
    bus.publish("model", {"id": "before"})
    events = bus.listen()
    first = await anext(events)
    bus.publish("model", {"id": "a"})
    second, third = await anext(events), await anext(events)
    events_seen = [
        (frame.split(b"\n")[0], json.loads(frame.split(b"data: ")[1])["number"]) for frame in (first, second, third)
    ]
    assert events_seen == [(b"event: snapshot", 1), (b"event: model", 2), (b"event: beat", 2)]
    await events.aclose()  # type: ignore[attr-defined]


async def test_loading_a_model_never_makes_the_service_unready(start: Start) -> None:
    """`/readyz` is 200 during the load, and another model answers."""
    service = await start({"a": {}, "b": {}}, {"a": {"load_seconds": 1.0}})
    loading = asyncio.create_task(service.authority.load(service.authority.resolve("a")))
    await service.authority.resolve("a").becomes(ModelState.LOADING)
    assert (await ask(service.app, "GET", "/readyz", key=None)).status == 200
    assert (await ask(service.app, "POST", "/v1/completions", {"model": "b", "prompt": "x"})).status == 200
    assert not loading.done()
    await loading


async def test_progress_is_sent_at_least_every_two_seconds(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause between comments is shorter than promised; this test uses a tenth of it."""
    assert PROGRESS_INTERVAL_SECONDS == 2.0
    assert 0 < relay.COMMENT_SECONDS < PROGRESS_INTERVAL_SECONDS
    monkeypatch.setattr(relay, "COMMENT_SECONDS", relay.COMMENT_SECONDS / 10)
    service = await start({"a": {}}, {"a": {"load_seconds": 1.5}})
    body = {"model": "a", "messages": [{"role": "user", "content": "x"}], "stream": True}
    answer = await ask(service.app, "POST", "/v1/chat/completions", body)
    comments = answer.body.decode().count(": headgate loading")
    assert comments >= 1.5 / (PROGRESS_INTERVAL_SECONDS / 10) - 1
