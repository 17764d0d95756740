"""Limits of a key: refusals, headers, and how answers are charged."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import openai
import pytest

from inference.protocol import H_PRIORITY, ModelState, ModelStatus
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import CONFIG, MESSAGES, Gateway
from tests.rigs.stack import until

TEAM = "key-of-a-team"
HASH = hashlib.sha256(TEAM.encode()).hexdigest()
AS_TEAM = {"authorization": f"Bearer {TEAM}"}


def _config(limits: str) -> str:
    return f"{CONFIG}\nkeys:\n  - {{name: team, hash: 'sha256:{HASH}', limits: {{{limits}}}}}\n"


def _used(gateway: Gateway) -> float:
    return gateway.runtime.limiter._accounts["team"].tokens


async def test_requests_beyond_the_limit_are_refused_with_the_remaining_time(
    tmp_path: Path, fake: FakeInference
) -> None:
    async with Gateway(tmp_path, fake.url, _config("requests_per_minute: 2")) as gateway:
        first = await gateway.chat(headers=AS_TEAM)
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"] == "30s"
        assert "x-ratelimit-limit-tokens" not in first.headers
        assert (await gateway.chat(stream=True, headers=AS_TEAM)).headers["x-ratelimit-remaining-requests"] == "0"
        refused = await gateway.chat(headers=AS_TEAM)
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert "(requests a minute: 2)" in error["message"]
        assert 29 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-headgate-reason"] == "rate_limit_exceeded"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert "x-should-retry" not in refused.headers
        other = await gateway.chat()
        assert other.status_code == 200, "another key has its own limit"
        assert not any(name.startswith("x-ratelimit") for name in other.headers)
        metrics = (await gateway.client.get("/metrics")).text
        assert 'gateway_rate_limited_total{limit="requests"} 1.0' in metrics
        assert "team" not in metrics
        assert len(fake.seen) == 3


async def test_default_limits_apply_to_keys_without_their_own(tmp_path: Path, fake: FakeInference) -> None:
    config = _config("") + "limits: {requests_per_minute: 1}\n"
    async with Gateway(tmp_path, fake.url, config) as gateway:
        assert [(await gateway.chat()).status_code for _ in range(2)] == [200, 429]
        assert [(await gateway.chat(headers=AS_TEAM)).status_code for _ in range(2)] == [200, 200]


async def test_reload_keeps_usage_and_revokes_removed_keys_at_once(tmp_path: Path, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(hold=asyncio.Event())
    async with Gateway(tmp_path, fake.url, _config("requests_per_minute: 2")) as gateway:
        running = asyncio.create_task(gateway.chat(headers=AS_TEAM))
        await until("the request runs", lambda: fake.seen)
        gateway.write(_config("requests_per_minute: 3, concurrent: 1"))
        assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
        refused = await gateway.chat(headers=AS_TEAM)
        assert (refused.status_code, refused.headers["x-ratelimit-remaining-requests"]) == (429, "2")
        assert "(requests at a time: 1)" in refused.json()["error"]["message"]
        gateway.write(CONFIG)
        await gateway.admin("POST", "/admin/reload")
        assert (await gateway.chat(headers=AS_TEAM)).status_code == 401
        assert gateway.runtime.limiter._accounts["team"].running, "running requests are kept"
        fake.answers["demo"].hold.set()
        assert (await running).status_code == 200, "a running request of a revoked key finishes"
        gateway.write(_config("requests_per_minute: 2"))
        await gateway.admin("POST", "/admin/reload")
        assert (await gateway.chat(headers=AS_TEAM)).headers["x-ratelimit-limit-requests"] == "2"


@pytest.mark.parametrize("stream", [True, False])
async def test_answer_is_charged_by_its_usage(tmp_path: Path, fake: FakeInference, stream: bool) -> None:
    async with Gateway(tmp_path, fake.url, _config("tokens_per_minute: 60")) as gateway:
        answer = await gateway.chat(stream=stream, max_tokens=1000, headers=AS_TEAM)
        assert answer.status_code == 200
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) == 0, "the estimate is held meanwhile"
        await until("the answer is charged", lambda: _used(gateway) <= 6)
        assert _used(gateway) > 0, "3 of the prompt and 3 of the answer, less the tokens that were refilled"


async def test_embeddings_are_charged_by_their_usage(tmp_path: Path, fake: FakeInference) -> None:
    async with Gateway(tmp_path, fake.url, _config("tokens_per_minute: 60")) as gateway:
        fake.models["vectors"] = ModelStatus(id="vectors", state=ModelState.READY, capabilities=("embeddings",))
        await gateway.look()
        body = {"model": "vectors", "input": "x" * 4000}
        assert (await gateway.client.post("/v1/embeddings", json=body, headers=AS_TEAM)).status_code == 200
        assert 0 < _used(gateway) <= 1


async def test_cut_and_cancelled_answers_are_charged_for_the_received_tokens(
    tmp_path: Path, fake: FakeInference
) -> None:
    config = _config("tokens_per_minute: 200").replace("local/demo-mini]", "local/demo-mini], resume: 'off'")
    async with Gateway(tmp_path, fake.url, config) as gateway:
        fake.answers["demo"] = Answer(words=("a",) * 60, cut=True)
        await gateway.chat(stream=True, headers=AS_TEAM)
        await until("the answer is charged", lambda: _used(gateway) < 100)
        assert _used(gateway) > 20, "60 pieces and the prompt, less the tokens that were refilled"
        before = _used(gateway)
        fake.answers["demo"] = Answer(words=("a",) * 60, stall=True)
        body = {"model": "demo", "messages": MESSAGES, "stream": True, "max_tokens": 1}
        async with gateway.client.stream("POST", "/v1/chat/completions", json=body, headers=AS_TEAM) as response:
            lines = response.aiter_lines()
            while "content" not in await anext(lines):
                continue
        await until("the answer is charged", lambda: not gateway.runtime.limiter._accounts["team"].running)
        assert _used(gateway) > before, "the prompt and the received pieces, more than the tokens that were refilled"


async def test_failed_request_costs_no_tokens(tmp_path: Path, fake: FakeInference) -> None:
    config = _config("tokens_per_minute: 600") + "attempts: {max: 1}\n"
    async with Gateway(tmp_path, fake.url, config) as gateway:
        fake.answers["demo"] = Answer(status=500)
        assert (await gateway.chat(headers=AS_TEAM)).status_code == 503
        assert _used(gateway) == 0
        assert (await gateway.chat("unheard-of", headers=AS_TEAM)).status_code == 404
        assert (await gateway.chat(headers=AS_TEAM, temperature=9)).status_code == 400
        assert _used(gateway) == 0


async def test_request_beyond_the_token_limit_is_refused_with_the_remaining_time(
    tmp_path: Path, fake: FakeInference
) -> None:
    """The official client raises its exception for rate limits."""
    async with Gateway(tmp_path, fake.url, _config("tokens_per_minute: 60")) as gateway:
        fake.answers["demo"] = Answer(words=("x",) * 58)
        assert (await gateway.chat(headers=AS_TEAM, max_tokens=1)).status_code == 200
        refused = await gateway.chat(headers=AS_TEAM, max_tokens=1)
        assert refused.status_code == 429
        wait = int(refused.headers["retry-after"])
        assert 1 < wait <= 30
        assert "(tokens a minute: 60)" in refused.json()["error"]["message"]
        client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=TEAM, max_retries=0)
        async with client:
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=1)  # type: ignore[arg-type]
        assert caught.value.code == "rate_limit_exceeded"
        assert caught.value.response.headers["x-ratelimit-limit-tokens"] == "60"


async def test_priority_of_a_request_is_limited_by_its_key(tmp_path: Path, fake: FakeInference) -> None:
    config = _config("").replace("limits: {}", "priority: normal")
    async with Gateway(tmp_path, fake.url, config) as gateway:
        for requested, effective in (("high", "normal"), ("normal", "normal"), ("low", "low"), (None, "normal")):
            headers = AS_TEAM if requested is None else {**AS_TEAM, H_PRIORITY: requested}
            answer = await gateway.chat(headers=headers)
            assert (answer.status_code, fake.seen[-1].headers[H_PRIORITY]) == (200, effective), requested
            record = (await gateway.admin("GET", f"/admin/requests/{answer.headers['x-request-id']}")).json()
            assert record["priority"] == effective
        assert (await gateway.chat(headers={H_PRIORITY: "high"})).status_code == 200
        assert fake.seen[-1].headers[H_PRIORITY] == "high", "the maximum priority of one key does not affect another"


async def test_new_secret_of_a_key_keeps_its_usage(tmp_path: Path, fake: FakeInference) -> None:
    async with Gateway(tmp_path, fake.url, _config("requests_per_minute: 1")) as gateway:
        assert (await gateway.chat(headers=AS_TEAM)).status_code == 200
        gateway.write(_config("requests_per_minute: 1").replace(HASH, hashlib.sha256(b"second").hexdigest()))
        await gateway.admin("POST", "/admin/reload")
        assert (await gateway.chat(headers=AS_TEAM)).status_code == 401
        assert (await gateway.chat(headers={"authorization": "Bearer second"})).status_code == 429


async def test_key_removed_from_the_environment_is_revoked_at_once(tmp_path: Path, fake: FakeInference) -> None:
    async with Gateway(tmp_path, fake.url) as gateway:
        assert (await gateway.chat()).status_code == 200
        gateway.environ["GATEWAY_API_KEY"] = "another"
        await gateway.admin("POST", "/admin/reload")
        assert (await gateway.chat()).status_code == 401
        assert (await gateway.chat(headers={"authorization": "Bearer another"})).status_code == 200
        assert json.loads((await gateway.admin("GET", "/admin/breakers")).content)


async def test_token_count_is_charged_as_a_request_without_tokens(tmp_path: Path, fake: FakeInference) -> None:
    async with Gateway(tmp_path, fake.url, _config("requests_per_minute: 1, tokens_per_minute: 60")) as gateway:
        body = {"model": "demo", "messages": MESSAGES}
        for is_refused in (False, True):
            answer = await gateway.client.post("/v1/messages/count_tokens", json=body, headers=AS_TEAM)
            assert (answer.status_code == 429) is is_refused
            assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert _used(gateway) == 0


async def test_request_from_before_a_reload_does_not_remove_later_charges(tmp_path: Path, fake: FakeInference) -> None:
    """The first request began without a token limit; its end does not remove the charge of the second."""
    hold = asyncio.Event()
    fake.queue["demo"] = [Answer(hold=hold), Answer(words=("a",) * 50)]
    async with Gateway(tmp_path, fake.url, _config("concurrent: 9")) as gateway:
        first = asyncio.create_task(gateway.chat(headers=AS_TEAM))
        await until("the request runs", lambda: fake.seen)
        gateway.write(_config("tokens_per_minute: 60"))
        await gateway.admin("POST", "/admin/reload")
        assert (await gateway.chat(headers=AS_TEAM)).status_code == 200
        await until("the answer is charged", lambda: len(gateway.runtime.limiter._accounts["team"].running) == 1)
        used = _used(gateway)
        hold.set()
        assert (await first).status_code == 200
        await until("the first ended", lambda: not gateway.runtime.limiter._accounts["team"].running)
        assert _used(gateway) > used / 2
