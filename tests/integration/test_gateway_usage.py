"""Stored usage, budgets, allowed models, and keys that are created while the gateway runs."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.inference_nodes import Prepared
from gateway.settings import NodeSettings
from gateway.usage.usage_file import NAME, UsageFile
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.fake_provider import KEY as CLOUD_KEY
from tests.rigs.fake_provider import FakeProvider
from tests.rigs.gateway_rig import ADMIN, CONFIG, Gateway
from tests.rigs.page_rig import Page
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(60)

TEAM = "key-of-a-team"
HASH = f"sha256:{hashlib.sha256(TEAM.encode()).hexdigest()}"
AS_TEAM = {"authorization": f"Bearer {TEAM}"}
CLOUDS = """
providers:
  openai: {{kind: openai, api_key: "${{env:CLOUD}}", base_url: {url}/v1, flavor: openai}}
  anthropic: {{kind: anthropic, api_key: "${{env:CLOUD}}", base_url: {url}}}
routes:
  gpt: {{chain: [openai/gpt]}}
  claude: {{chain: [anthropic/claude]}}
  vectors: {{chain: [openai/embed]}}
  "*": {{chain: ["local/*"]}}
prices:
  openai/gpt: {{input: 1000000, output: 2000000}}
"""


def _team(settings: str) -> str:
    return f"{CONFIG}\nkeys:\n  - {{name: team, hash: '{HASH}', {settings}}}\n"


async def _rows(gateway: Gateway, by: str, count: int) -> list[dict[str, Any]]:
    """The groups of `by`, once `count` requests are stored."""

    async def stored() -> Any:
        found = (await gateway.admin("GET", f"/admin/usage?by={by}")).json()["rows"]
        return found if sum(row["requests"] for row in found) >= count else None

    return list(await until(f"{count} requests are stored", stored, seconds=10))


async def test_every_request_is_stored_with_its_tokens_and_cost(
    tmp_path: Path, fake: FakeInference, cloud: FakeProvider
) -> None:
    async with Gateway(tmp_path, fake.url, CLOUDS.format(url=cloud.url), {"CLOUD": CLOUD_KEY}) as gateway:
        usage = (await gateway.chat("gpt")).json()["usage"]
        assert (await gateway.chat("gpt", stream=True)).status_code == 200
        assert (await gateway.chat("claude", stream=True)).status_code == 200
        assert (await gateway.chat()).status_code == 200
        body = {"model": "vectors", "input": "text"}
        assert (await gateway.client.post("/v1/embeddings", json=body)).status_code == 200
        assert (await gateway.chat("demo", temperature=99)).status_code == 400
        rows = {row["model"]: row for row in await _rows(gateway, "model,tier", 6)}
        spent = 2 * (usage["prompt_tokens"] + 2 * usage["completion_tokens"])
        assert rows["openai/gpt"]["tier"] == "cloud"
        assert rows["openai/gpt"]["requests"] == 2
        assert rows["openai/gpt"]["prompt_tokens"] == 2 * usage["prompt_tokens"]
        assert rows["openai/gpt"]["completion_tokens"] == 2 * usage["completion_tokens"]
        assert rows["openai/gpt"]["dollars"] == pytest.approx(spent)
        assert rows["openai/gpt"]["ttft_seconds"] > 0
        assert (rows["anthropic/claude"]["unpriced"], rows["anthropic/claude"]["completion_tokens"] > 0) == (1, True)
        assert rows["openai/embed"]["prompt_tokens"] > 0
        assert (rows["local/demo"]["dollars"], rows["local/demo"]["unpriced"]) == (0, 0)
        assert (rows[""]["errors"], rows[""]["prompt_tokens"]) == (1, 0)
        bad = await gateway.admin("GET", "/admin/usage?by=color")
        assert (bad.status_code, "choose from" in bad.json()["error"]["message"]) == (400, True)
        assert (await gateway.client.get("/admin/usage")).status_code == 403


async def test_interrupted_stream_is_charged_its_pieces(tmp_path: Path, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(words=("a", "b", "c"), cut=True)
    config = 'routes: {demo: {chain: [local/demo], resume: "off"}}\n'
    async with Gateway(tmp_path, fake.url, config) as gateway:
        await gateway.chat(stream=True)
        (row,) = await _rows(gateway, "outcome", 1)
        assert (row["outcome"], row["completion_tokens"]) == ("broken", 3)
        assert row["prompt_tokens"] > 0


async def test_usage_and_budgets_survive_a_restart_and_a_used_up_budget_is_429(
    tmp_path: Path, fake: FakeInference
) -> None:
    config = _team("budget: {tokens_per_month: 5}")
    async with Gateway(tmp_path, fake.url, config) as gateway:
        assert (await gateway.chat(headers=AS_TEAM)).status_code == 200
        await _rows(gateway, "key", 1)
    async with Gateway(tmp_path, fake.url, config) as gateway:
        refused = await gateway.chat(headers=AS_TEAM)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["type"]) == (429, "budget_exceeded", "insufficient_quota")
        assert "of 5 tokens in" in error["message"]
        assert 0 < int(refused.headers["retry-after"]) <= 31 * 86400
        assert refused.headers["x-should-retry"] == "false"
        assert (await gateway.chat()).status_code == 200, "another key"
        rows = {row["key"]: row for row in await _rows(gateway, "key", 3)}
        assert (rows["team"]["requests"], rows["team"]["errors"]) == (2, 1)
        async with Page.signed_in(gateway.url, ADMIN) as page:
            keys = {key["name"]: key for key in (await page.get("/ui/api/keys")).json()["keys"]}
        assert keys["team"]["budget_per_month"] == {"dollars": None, "tokens": 5}
        assert (keys["team"]["models"], keys["team"]["used_this_month"]["tokens"] > 5) == (["all"], True)
        assert keys["GATEWAY_API_KEY"]["used_this_month"] is None, "it has no budget"


async def test_key_may_use_its_models_only(tmp_path: Path, fake: FakeInference) -> None:
    async with Gateway(tmp_path, fake.url, _team("models: [demo-*]")) as gateway:
        assert (await gateway.chat("demo-mini", headers=AS_TEAM)).status_code == 200
        refused = await gateway.chat("demo", headers=AS_TEAM)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
        assert "it may use: demo-*" in refused.json()["error"]["message"]
        listed = (await gateway.client.get("/v1/models", headers=AS_TEAM)).json()["data"]
        assert [entry["id"] for entry in listed] == ["demo-mini"]
        assert (await gateway.client.get("/v1/models/demo", headers=AS_TEAM)).status_code == 404
        tags = (await gateway.client.get("/api/tags", headers=AS_TEAM)).json()["models"]
        assert [entry["name"] for entry in tags] == ["demo-mini"]
        shown = await gateway.client.post("/api/show", json={"model": "demo"}, headers=AS_TEAM)
        assert shown.status_code == 404
        count = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
        refused = await gateway.client.post("/v1/messages/count_tokens", json=count, headers=AS_TEAM)
        assert refused.status_code == 403


async def test_created_key_is_accepted_and_a_revoked_one_refused_without_a_restart(
    tmp_path: Path, fake: FakeInference
) -> None:
    async with Gateway(tmp_path, fake.url) as gateway:
        assert (await gateway.chat(headers=AS_TEAM)).status_code == 401
        file = await asyncio.to_thread(UsageFile, tmp_path / "state")
        file.put_key("team", {"name": "team", "hash": HASH, "models": ["demo"]}, time.time())
        file.put_key("broken", {"name": "broken", "color": "red"}, time.time())

        async def answers(status: int) -> bool:
            return (await gateway.chat(headers=AS_TEAM)).status_code == status

        await until("the key is accepted", lambda: answers(200))
        assert (await gateway.chat("demo-mini", headers=AS_TEAM)).status_code == 403
        assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
        assert await answers(200), "a reload keeps it"
        file.revoke_key("team", time.time())
        await until("the key is refused", lambda: answers(401))
        file.close()
        assert (await gateway.chat()).status_code == 200


async def test_key_that_is_revoked_during_a_reload_is_refused_after_it(
    tmp_path: Path, fake: FakeInference, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with Gateway(tmp_path, fake.url) as gateway:
        file = await asyncio.to_thread(UsageFile, tmp_path / "state")
        file.put_key("team", {"name": "team", "hash": HASH}, time.time())
        await until("the key is accepted", lambda: "key team is now accepted" in caplog.text)
        inference = gateway.runtime.inference
        prepare = inference.prepare

        async def slow(settings: NodeSettings) -> Prepared:
            prepared = await prepare(settings)
            file.revoke_key("team", time.time())
            await until("the key is revoked", lambda: "key team is now revoked" in caplog.text)
            return prepared

        monkeypatch.setattr(inference, "prepare", slow)
        assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
        file.close()
        assert (await gateway.chat(headers=AS_TEAM)).status_code == 401


async def test_requests_are_answered_while_usage_cannot_be_stored(tmp_path: Path, fake: FakeInference) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / NAME).mkdir()
    async with Gateway(tmp_path, fake.url) as gateway:
        assert (await gateway.chat()).status_code == 200
        assert (await gateway.admin("GET", "/admin/usage")).status_code == 500
        (tmp_path / "state" / NAME).rmdir()
        await _rows(gateway, "key", 1)


async def test_nothing_is_stored_where_usage_is_off(tmp_path: Path, fake: FakeInference) -> None:
    async with Gateway(tmp_path, fake.url, CONFIG + "usage: {store: false}\n") as gateway:
        assert (await gateway.chat()).status_code == 200
        assert (await gateway.admin("GET", "/admin/usage")).status_code == 404
    assert not (tmp_path / "state" / NAME).exists()


async def test_bodies_are_stored_where_the_route_says_so(tmp_path: Path, fake: FakeInference) -> None:
    config = 'routes: {demo: {chain: [local/demo], capture: true}, "*": {chain: ["local/*"]}}\n'
    async with Gateway(tmp_path, fake.url, config + "usage: {redact: ['[0-9]{4}']}\n") as gateway:
        messages = [{"role": "user", "content": "my pin is 1234, my key sk-abcdefghijklmnopqrst"}]
        whole = await gateway.chat(messages=messages)
        streamed = await gateway.chat(stream=True)
        other = await gateway.chat("demo-mini")

        async def captured(answer: Any) -> Any:
            found = await gateway.admin("GET", f"/admin/captures/{answer.headers['x-request-id']}")
            return found.json() if found.status_code == 200 else None

        found = await until("the bodies are stored", lambda: captured(whole))
        assert "my pin is [redacted], my key [redacted]" in found["request"]
        assert json.loads(found["answer"]) == whole.json()
        assert (found["route"], found["key"]) == ("demo", "GATEWAY_API_KEY")
        found = await until("the bodies are stored", lambda: captured(streamed))
        assert json.loads(found["answer"])["choices"][0]["message"]["content"] == "Hello there!"
        assert await captured(other) is None
